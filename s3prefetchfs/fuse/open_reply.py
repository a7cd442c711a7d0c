"""What the reply to an OPEN or OPENDIR says beyond what pyfuse3 can.

The reply itself is made by a small C library (`_open_reply.c`), which must be in the process before pyfuse3 is: whoever
imports pyfuse3 imports this module first. Without the library replies say less, and the mount works all the same.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging

log = logging.getLogger(__name__)

KEEP_CACHE = 1 << 1
"""FOPEN_KEEP_CACHE: what the kernel has of the file or directory is still good."""

CACHE_DIR = 1 << 3
"""FOPEN_CACHE_DIR, Linux 4.20: what the kernel reads of the directory it may keep."""

NOFLUSH = 1 << 5
"""FOPEN_NOFLUSH, Linux 5.16: close() does not ask, there is nothing to write."""

PASSTHROUGH = 1 << 7
"""FOPEN_PASSTHROUGH, Linux 6.9: the kernel reads the backing file by itself."""


def load_library() -> ctypes.CDLL | None:
    """The C library, put where pyfuse3's calls find it; None if it was not built, or does not load."""
    spec = importlib.util.find_spec("s3prefetchfs.fuse._open_reply")
    if spec is None or spec.origin is None:
        return None
    try:
        library = ctypes.CDLL(spec.origin, mode=ctypes.RTLD_GLOBAL)
        library.s3prefetchfs_next_open.argtypes = (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int32)
        library.s3prefetchfs_next_open.restype = None
    except (OSError, AttributeError) as error:
        log.warning("%s does not load: %s", spec.origin, error)
        return None
    return library


LIBRARY = load_library()


def prepare(handle_id: int, flags: int, backing_id: int = 0) -> None:
    """The reply about this handle, which the caller makes without another await, is this one, if there is the library.

    Args:
        flags: of those above, at least one. backing_id: with PASSTHROUGH, of which file.
    """
    if LIBRARY is not None:
        LIBRARY.s3prefetchfs_next_open(handle_id, flags, backing_id)
