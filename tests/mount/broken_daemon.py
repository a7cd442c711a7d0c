"""`s3prefetchfs`, but with bugs that can be switched on: python -m tests.mount.broken_daemon mount ...

The file named by BROKEN_BY says which, in two words or more: an exception, and the calls that raise it, such as
`MemoryError Engine.read Catalog.lookup`. All that the handlers call of catalog and engine can be named. As long as
the file is missing, nothing is broken. The single word `EAGAIN` is for once: /dev/fuse is read though it holds no
request, as after a request that was taken back; the file is removed then.
"""

from __future__ import annotations

import errno
import functools
import inspect
import os
import select
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyfuse3
import trio

from s3prefetchfs.catalog import Catalog
from s3prefetchfs.cli import main
from s3prefetchfs.engine import Engine
from s3prefetchfs.fuse import kernel

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


def _ordered(order: Path) -> list[str]:
    try:
        return order.read_text().split() or [""]  # empty while it is being written
    except FileNotFoundError:
        return [""]


def _breakable(name: str, original: Callable[..., Any], order: Path) -> Callable[..., Any]:
    def check() -> None:
        exception, *calls = _ordered(order)
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


def _wake_for_nothing(order: Path) -> None:
    wait_fuse_readable = pyfuse3._wait_fuse_readable  # type: ignore[attr-defined]

    async def wait() -> bool:
        if _ordered(order) == ["EAGAIN"] and not select.select([kernel._session_fd()], [], [], 0)[0]:
            order.unlink()  # noqa: ASYNC240  a file of one word
            return True
        return bool(await wait_fuse_readable())

    pyfuse3._wait_fuse_readable = wait  # type: ignore[attr-defined]


if __name__ == "__main__":
    order = Path(os.environ["BROKEN_BY"])
    for owner, names in CALLS.items():
        for name in names:
            setattr(owner, name, _breakable(f"{owner.__name__}.{name}", getattr(owner, name), order))
    _wake_for_nothing(order)
    main()
