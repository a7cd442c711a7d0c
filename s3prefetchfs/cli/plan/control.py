"""The plans of a mount, seen through `.s3prefetchfs/plans/`: all that `submit`, `list` and `cancel` have in common."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

from s3prefetchfs.cli.status import absolute, read_status
from s3prefetchfs.errors import UserError
from s3prefetchfs.fuse import mounts

PLANS_DIRECTORY = ".s3prefetchfs/plans"


def plans_directory(mountpoint: str) -> Path:
    """Where the plans of a mount are.

    Raises:
        UserError: no s3prefetchfs is mounted there, or it does not answer.
    """
    where, _ = read_status(absolute(mountpoint))  # a hung daemon would hold whoever touches its files
    return where / PLANS_DIRECTORY


def read_plan(path: Path) -> dict[str, Any]:
    """What the file of a plan says of it.

    Raises:
        OSError: there is none, or the mount fails.
    """
    document: dict[str, Any] = json.loads(path.read_bytes() or b"{}")
    return {"name": path.name, "state": "empty", "warnings": [], "error": None} | document


def cannot(what: str, error: OSError) -> UserError:
    """The error for a person, of something that the mount did not do."""
    hints = {
        errno.EACCES: "the mount is another user's: ask as that user, or mount with --allow-other",
        errno.EFBIG: "a plan is at most 256 MiB; files with thousands of byte ranges can be split over several plans",
        errno.ENOSPC: "too many plans are being written at once; try again",
    }
    if error.errno in mounts.DEAD_ERRNOS:
        return UserError(
            f"the mount cannot {what}: its daemon is dead", "mount it again: that clears the dead mount first"
        )
    return UserError(
        f"the mount cannot {what}: {error.strerror}", hints.get(error.errno or 0, "the daemon's log may say more")
    )
