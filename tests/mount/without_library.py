"""`s3prefetchfs` as it is where its C library could not be built: python -m tests.mount.without_library mount ..."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec

_find_spec = importlib.util.find_spec


def _without_library(name: str, package: str | None = None) -> ModuleSpec | None:
    return None if name == "s3prefetchfs.fuse._open_reply" else _find_spec(name, package)


if __name__ == "__main__":
    importlib.util.find_spec = _without_library
    from s3prefetchfs.cli import main

    main()
