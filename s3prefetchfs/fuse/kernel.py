"""Mounting, and what is asked of the kernel beyond serving requests.

Runs in the daemon. `pyfuse3` does the mount and the INIT; here are the options it gets and the tuning around it.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyfuse3
import trio

from s3prefetchfs.config import Config
from s3prefetchfs.errors import UserError

log = logging.getLogger(__name__)

MAX_TASKS = 1024
"""FUSE requests served at once. A waiting read holds one, so this bounds the readers that can wait without
stopping `ls`; a task costs a few KiB."""

READ_AHEAD_KIB = 1024
"""The kernel's read-ahead per file. Its default of 128 KiB makes a request of each 128 KiB; 1 MiB is the largest
request, and a sequential reader is then served by an eighth of the calls."""


MAX_BACKGROUND = 512
"""Requests of the kernel's read-ahead under way at once, half of MAX_TASKS. Its default is 12, for the whole mount:
sixteen cold streams then wait for each other, and a dozen stalled ones stop all others."""


FORGET_TIMEOUT_S = 1.0
"""How long a reader's error is held back until the kernel has forgotten the name: microseconds, if nothing is odd."""


def mount(operations: pyfuse3.Operations, config: Config) -> None:
    """Mount; requests wait in the kernel until `serve` runs.

    Raises:
        UserError: the kernel or fusermount3 refused.
    """
    options = {
        f"fsname=s3://{config.bucket}/{config.prefix}".replace(",", "_").rstrip("/"),
        "subtype=s3prefetchfs",
        "nosuid",
        "nodev",
        "default_permissions",
    }
    if config.allow_other:
        options.add("allow_other")
    try:
        pyfuse3.init(operations, os.fspath(config.mountpoint), options)
    except RuntimeError as error:
        raise UserError(
            f"cannot mount on {config.mountpoint}: {error}",
            "the lines above by fusermount3 or mount name the reason; root or fusermount3, and /dev/fuse, are needed",
        ) from None
    logging.getLogger("pyfuse3").addFilter(_is_news)


async def serve() -> None:
    """Answer the kernel's requests until the filesystem is unmounted. Ends at once then, whoever still waits for S3.

    This is `pyfuse3.main`, with two of its ways mended. It waits for every handler before it returns; those that
    are left at the end serve readers that were killed, and are cancelled here. And when a request is taken back, as
    those of killed readers are, between the moment /dev/fuse becomes readable and the moment it is read, the read
    would wait for the next request, and the whole daemon with it; here it fails with EAGAIN and the loop goes on.
    """
    fd = _session_fd()
    os.set_blocking(fd, False)
    session_loop = pyfuse3._session_loop  # type: ignore[attr-defined]
    device = select.poll()
    device.register(fd, 0)
    async with trio.open_nursery() as nursery:

        async def persistent_loop(*args: object) -> None:
            while True:
                try:
                    await session_loop(*args)
                except BlockingIOError:
                    continue
                if device.poll(0):  # POLLERR: the connection is gone
                    nursery.cancel_scope.cancel()
                return

        pyfuse3._session_loop = persistent_loop  # type: ignore[attr-defined]
        await pyfuse3.main(max_tasks=MAX_TASKS)


def tune(mountpoint: Path) -> None:
    """Raise the kernel's limits for the mount; needs root, and without it the mount works as the kernel likes."""
    device = os.stat(mountpoint).st_dev
    settings = {Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb"): READ_AHEAD_KIB}
    try:
        with _connections() as connections:
            connection = connections / str(os.minor(device))
            settings[connection / "max_background"] = MAX_BACKGROUND
            settings[connection / "congestion_threshold"] = MAX_BACKGROUND * 3 // 4  # the kernel's own proportion
            for setting, value in settings.items():
                setting.write_text(f"{value}\n")
    except (OSError, subprocess.SubprocessError) as error:
        log.info("kernel limits left as they are: %s", error)


@contextmanager
def _connections() -> Iterator[Path]:
    """The directory of FUSE connections (fusectl); where nobody has mounted it, as in containers, for now only."""
    directory = Path("/sys/fs/fuse/connections")
    if any(directory.iterdir()):
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="s3prefetchfs-") as place:
        subprocess.run(["mount", "-t", "fusectl", "fusectl", place], check=True, capture_output=True, timeout=10)
        try:
            yield Path(place)
        finally:
            subprocess.run(["umount", "-l", place], check=True, capture_output=True, timeout=10)


def forget_name(parent_ino: int, name: bytes) -> None:
    """Make the kernel look the name up again. pyfuse3 sends this from a thread: a handler that did would deadlock."""
    pyfuse3.invalidate_entry_async(parent_ino, name, ignore_enoent=True)


async def name_forgotten(parent_ino: int, name: bytes) -> None:
    """Return once the kernel will look the name up again, or after a second at the latest."""

    def forget() -> None:
        with suppress(OSError):  # it does not know the name
            pyfuse3.invalidate_entry(pyfuse3.InodeT(parent_ino), pyfuse3.FileNameT(name))

    with trio.move_on_after(FORGET_TIMEOUT_S):
        await trio.to_thread.run_sync(forget, abandon_on_cancel=True)


def _is_news(record: logging.LogRecord) -> bool:
    """Not that a reply is not wanted any more: its reader was killed, and the kernel has taken the request back."""
    late = (os.strerror(errno.ENOENT),), (os.strerror(errno.ENODEV),)
    return not ("fuse_reply" in str(record.msg) and record.args in late)


def _session_fd() -> int:
    """The descriptor of /dev/fuse that pyfuse3 reads; it does not tell, so it is looked up."""
    for entry in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{entry}") == "/dev/fuse":
                return int(entry)
        except OSError:
            continue
    raise UserError("no open /dev/fuse after mounting", "this is a bug: report it")
