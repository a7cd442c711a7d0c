"""Mounting, and what is asked of the kernel beyond serving requests.

Runs in the daemon. Root mounts by hand (`handmount.py`), which lets us answer the kernel's questions at the beginning;
for others `pyfuse3` does it, with fusermount3. Here are the options of both, and the tuning around them.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from s3prefetchfs.fuse import open_reply  # before pyfuse3: see there

# isort: split

import pyfuse3
import trio

from s3prefetchfs.config import Config
from s3prefetchfs.errors import UserError
from s3prefetchfs.fuse import passthrough
from s3prefetchfs.fuse.handmount import HandMount, InitSettings
from s3prefetchfs.fuse.mounts import FS_TYPE, all_mounts, unmount
from s3prefetchfs.metrics import KernelFigures

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

CONGESTION_THRESHOLD = MAX_BACKGROUND * 3 // 4
"""From where on the kernel sees the mount as busy: its own proportion."""


FORGET_TIMEOUT_S = 1.0
"""How long a reader's error is held back until the kernel has forgotten the name: microseconds, if nothing is odd."""

CLOSE_S = 0.0001
YIELD_S = 0.001
"""While requests come less than 0.1 ms after the daemon is done with the one before, it waits for them awake; but once
in a millisecond it lets others have a turn."""


class Connection:
    """A mount and its connection to the kernel. Requests wait in the kernel until `serve` runs.

    Args:
        operations: what answers them.
        config: of the mount.
        passthrough: turned on if it can be had.
        figures: gets the limits that are in force.

    Raises:
        UserError: the kernel or fusermount3 refused, or passthrough is a condition and cannot be had.
    """

    def __init__(
        self,
        operations: pyfuse3.Operations,
        config: Config,
        passthrough: passthrough.Passthrough,
        figures: KernelFigures,
    ) -> None:
        self._config = config
        self._passthrough = passthrough
        self._figures = figures
        self._hand_mount: HandMount | None = None
        source = f"s3://{config.bucket}/{config.prefix}".replace(",", "_").rstrip("/")
        fuse_options = ["default_permissions", *(["allow_other"] if config.allow_other else [])]
        refusal: OSError | None = None
        if os.geteuid() == 0:
            try:
                self._hand_mount = HandMount(config.mountpoint, source, FS_TYPE, fuse_options)
            except OSError as error:  # such as in a container that lacks the capability: let fusermount3 try
                refusal = error
        self._reason = self._obstacle(refusal)
        try:
            if self._reason and config.passthrough == "on":
                raise _no_passthrough(self._reason)
            if self._hand_mount is not None:
                pyfuse3.init(operations, f"/dev/fd/{self._hand_mount.session_fd}", set())
            else:
                options = {f"fsname={source}", "subtype=s3prefetchfs", "nosuid", "nodev", *fuse_options}
                pyfuse3.init(operations, os.fspath(config.mountpoint), options)
        except BaseException as error:
            if self._hand_mount is not None:
                self._hand_mount.close()
                self._detach()
            if isinstance(error, RuntimeError):
                raise UserError(
                    f"cannot mount on {config.mountpoint}: {error}",
                    "the lines above by fusermount3 or mount name the reason;"
                    " root or fusermount3, and /dev/fuse, are needed",
                ) from None
            raise
        self._fd = _session_fd() if self._hand_mount is None else self._hand_mount.session_fd
        logging.getLogger("pyfuse3").addFilter(_is_news)

    def _obstacle(self, refusal: OSError | None) -> str:
        """Why there will be no passthrough, if that is known before the kernel was asked; empty if it is not."""
        if self._config.passthrough == "off":
            return "--passthrough is off"
        if open_reply.LIBRARY is None:
            return "the C library was not built when s3prefetchfs was installed: it takes a compiler and libfuse3-dev"
        if self._hand_mount is None:
            return f"mount(2) says: {refusal.strerror}" if refusal is not None else "only root may have it"
        if not self._hand_mount.offers_passthrough:
            return "this kernel has none: it takes Linux 6.9 or newer, built with CONFIG_FUSE_PASSTHROUGH"
        return ""

    async def serve(self) -> None:
        """Answer the kernel's requests until the filesystem is unmounted. Ends at once then, whoever waits for S3.

        This is `pyfuse3.main`, with three of its ways mended. It waits for every handler before it returns; those that
        are left at the end serve readers that were killed, and are cancelled here. And when a request is taken back,
        as those of killed readers are, between the moment /dev/fuse becomes readable and the moment it is read, the
        read would wait for the next request, and the whole daemon with it; here it fails with EAGAIN and the loop
        goes on. And it goes to sleep after each request: see `_Patience`.

        Raises:
            UserError: passthrough is a condition and cannot be had.
        """
        os.set_blocking(self._fd, False)
        session_loop = pyfuse3._session_loop  # type: ignore[attr-defined]
        device = select.poll()
        device.register(self._fd, 0)
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
            patience = _Patience(self._fd, pyfuse3._wait_fuse_readable)  # type: ignore[attr-defined]
            pyfuse3._wait_fuse_readable = patience.wait  # type: ignore[attr-defined]
            nursery.start_soon(self._introduce)
            await pyfuse3.main(max_tasks=MAX_TASKS)

    async def _introduce(self) -> None:
        """Have INIT answered, and passthrough decided before anybody gets an answer to anything else."""
        if self._hand_mount is not None:
            depth = 0 if self._reason else 1 + _stacked(self._config.cache_dir)
            await self._hand_mount.introduce(InitSettings(MAX_BACKGROUND, CONGESTION_THRESHOLD, depth))
            self._figures.max_background = MAX_BACKGROUND
            if not self._reason:
                try:
                    with tempfile.NamedTemporaryFile(dir=self._config.cache_dir) as probe:
                        self._passthrough.turn_on(self._fd, probe)
                except (OSError, passthrough.BackingError) as error:
                    self._reason = f"the kernel does not take a file of {self._config.cache_dir}: {error}"
        if self._reason and self._config.passthrough == "on":
            raise _no_passthrough(self._reason)
        if self._config.passthrough == "off":
            self._figures.reason = self._reason
        elif self._reason:
            self._passthrough.turn_off(self._reason)

    def tune(self) -> None:
        """Blocking. Raise the kernel's limits for the mount; needs root, and without it the mount works as it likes."""
        device = os.stat(self._config.mountpoint).st_dev
        read_ahead = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
        try:
            read_ahead.write_text(f"{READ_AHEAD_KIB}\n")
            if self._hand_mount is None:
                with _connections() as connections:
                    connection = connections / str(os.minor(device))
                    (connection / "max_background").write_text(f"{MAX_BACKGROUND}\n")
                    (connection / "congestion_threshold").write_text(f"{CONGESTION_THRESHOLD}\n")
                self._figures.max_background = MAX_BACKGROUND
        except (OSError, subprocess.SubprocessError) as error:
            log.info("kernel limits left as they are: %s", error)
        with suppress(OSError, ValueError):
            self._figures.read_ahead_kb = int(read_ahead.read_text())

    def close(self) -> None:
        """Unmount, lazily, if that has not been done; give the connection back."""
        if self._hand_mount is None:
            pyfuse3.close(unmount=True)
            return
        device = select.poll()
        device.register(self._fd, 0)
        gone = bool(device.poll(0))
        pyfuse3.close(unmount=False)  # closes the device: whoever is still inside gets ENOTCONN and does not wait
        self._hand_mount.close()
        if not gone:
            self._detach()

    def _detach(self) -> None:
        try:
            unmount(self._config.mountpoint, lazy=True)
        except OSError as error:
            log.warning("cannot unmount %s: %s", self._config.mountpoint, error.strerror)


class _Patience:
    """Looks for the next request for a moment before it goes to sleep, where they follow one another closely.

    To sleep and be woken takes longer than to open a file: a process that opens one after another, each with two
    requests, gets half as many done. The kernel does so for virtual machines ("halt polling").

    Args:
        fd: of /dev/fuse. sleep: waits for it to be readable; False if the loop should end.
    """

    def __init__(self, fd: int, sleep: Callable[[], Awaitable[bool]]) -> None:
        self._device = select.poll()
        self._device.register(fd, select.POLLIN)
        self._sleep = sleep
        self._idle_since_s = self._slept_s = float("-inf")
        self._is_close = False

    async def wait(self) -> bool:
        """In place of `sleep`. Other tasks get their turn once in YIELD_S at least."""
        now = self._idle_since_s = time.perf_counter()
        if self._is_close and now - self._slept_s < YIELD_S:
            until_s = now + CLOSE_S
            while now < until_s:
                if self._device.poll(0):
                    return True
                now = time.perf_counter()
        readable = await self._sleep()
        self._slept_s = time.perf_counter()
        self._is_close = self._slept_s - self._idle_since_s < CLOSE_S
        return readable


def _no_passthrough(reason: str) -> UserError:
    return UserError(
        f"no passthrough: {reason}", "--passthrough auto mounts without it: files are then read through the daemon"
    )


_STACKING = frozenset({"overlay", "ecryptfs"})


def _stacked(directory: Path) -> bool:
    """Whether the directory is on a filesystem that lies on another, as in a container without a volume for it."""
    path = directory.resolve()
    below = [mount for mount in all_mounts() if path.is_relative_to(mount.mountpoint)]
    below.sort(key=lambda mount: len(mount.mountpoint.parts))  # stable: of two at one path, the later hides the earlier
    return bool(below) and below[-1].fs_type in _STACKING


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
    await _forgotten(partial(pyfuse3.invalidate_entry, pyfuse3.InodeT(parent_ino), pyfuse3.FileNameT(name)))


async def content_forgotten(ino: int) -> None:
    """Return once the kernel will read the directory again, or after a second at the latest."""
    await _forgotten(partial(pyfuse3.invalidate_inode, pyfuse3.InodeT(ino)))


async def _forgotten(forget: Callable[[], None]) -> None:
    def try_to_forget() -> None:
        with suppress(OSError):  # it does not know what to forget
            forget()

    with trio.move_on_after(FORGET_TIMEOUT_S):
        await trio.to_thread.run_sync(try_to_forget, abandon_on_cancel=True)


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
