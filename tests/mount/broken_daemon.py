"""`s3prefetchfs`, but with bugs that can be switched on: python -m tests.mount.broken_daemon mount ...

The file named by BROKEN_BY says which, in two words or more: an exception, and the calls that raise it, such as
`MemoryError Engine.read Catalog.lookup`. All that the handlers call of catalog and engine can be named. As long as
the file is missing, nothing is broken.
"""

from __future__ import annotations

import errno
import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trio

from s3prefetchfs.catalog import Catalog
from s3prefetchfs.cli import main
from s3prefetchfs.engine import Engine

EXCEPTIONS: dict[str, Exception] = {
    "ValueError": ValueError("broken on purpose"),
    "EMFILE": OSError(errno.EMFILE, "broken on purpose"),
    "MemoryError": MemoryError("broken on purpose"),
    "TooSlowError": trio.TooSlowError("broken on purpose"),
    "Group": ExceptionGroup("broken on purpose", [KeyError("broken on purpose")]),
}

CALLS = {
    Catalog: ("lookup", "forget", "entry", "remember", "open_directory", "entries"),
    Engine: ("open", "read", "close"),
}


def _breakable(name: str, original: Callable[..., Any], order: Path) -> Callable[..., Any]:
    def check() -> None:
        if order.exists():
            exception, *calls = order.read_text().split()
            if name in calls:
                raise EXCEPTIONS[exception]

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        check()
        return original(*args, **kwargs)

    @functools.wraps(original)
    async def call_async(*args: Any, **kwargs: Any) -> Any:
        check()
        return await original(*args, **kwargs)

    return call_async if inspect.iscoroutinefunction(original) else call


if __name__ == "__main__":
    order = Path(os.environ["BROKEN_BY"])
    for owner, names in CALLS.items():
        for name in names:
            setattr(owner, name, _breakable(f"{owner.__name__}.{name}", getattr(owner, name), order))
    main()
