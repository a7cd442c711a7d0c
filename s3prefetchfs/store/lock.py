"""One mount per cache directory: the directory is made, and locked, before anything in it is touched.

The lock is `flock`, so the kernel drops it when the process dies, however it dies. Its descriptor, like all that
Python opens, is closed on exec: a worker process that outlives the daemon does not keep the directory locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from s3prefetchfs.errors import UserError

LOCK_NAME = "lock"


def lock_directory(directory: Path) -> int:
    """Create `directory` (mode 0700) if it is missing, and lock it.

    Returns:
        The descriptor that holds the lock until it is closed.

    Raises:
        UserError: another process holds the lock, or the directory cannot be made or written.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise unusable(directory, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
        os.close(descriptor)
        if not isinstance(error, BlockingIOError):
            raise unusable(directory, error) from error
        raise UserError(
            f"the cache directory {directory} is in use by another mount (pid {holder or 'unknown'})",
            "unmount that one first, or give this mount a --cache-dir of its own",
        ) from error
    with contextlib.suppress(OSError):  # a full disk: the pid is only for the message above
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def unusable(directory: Path, reason: object) -> UserError:
    """The error for a cache directory that cannot be used because of `reason`."""
    text = (reason.strerror if isinstance(reason, OSError) else None) or str(reason)
    return UserError(
        f"cannot use the cache directory {directory}: {text}",
        "give --cache-dir a directory on a local disk that this user may write to; a damaged one may be deleted",
    )
