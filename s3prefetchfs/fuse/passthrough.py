"""Files that the kernel reads by itself: which of the open ones are, and under which backing id.

In *passthrough* the reply to OPEN names a backing file, here an object's cache file, and the kernel then takes every
read, mmap and sendfile of that handle to it. The daemon sees the open and the release, and nothing between.

The kernel's rules (Linux 6.9 and later). A backing id stands for an open file, and is made and freed by ioctls on
/dev/fuse. All passthrough handles of an inode name the same id. An inode that is open through the daemon refuses to
be opened in passthrough, and the reverse, with EIO. So the mode belongs to the inode for as long as any handle of it
is open: whoever opens it meanwhile gets the mode it is in, and only the first open chooses.

A release reaches us after the kernel has let go of the handle, so what we believe to be open always covers what the
kernel believes to be.

The reply says more than pyfuse3 can: see `fuse.open_reply`.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from s3prefetchfs.fuse import open_reply
from s3prefetchfs.metrics import KernelFigures

log = logging.getLogger(__name__)

BACKING_OPEN = 0x4010E501
"""FUSE_DEV_IOC_BACKING_OPEN, _IOW(229, 1, struct fuse_backing_map): a descriptor goes in, a backing id comes out."""

BACKING_CLOSE = 0x4004E502
"""FUSE_DEV_IOC_BACKING_CLOSE, _IOW(229, 2, uint32_t)."""

_BACKING_MAP = struct.Struct("=iIQ")
"""struct fuse_backing_map: fd, flags, padding."""

_PASSING_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOENT, errno.EIO})
"""What one file may meet, and the next one not; after any other error no file is tried again."""

_REASONS = {
    errno.EPERM: "the kernel wants CAP_SYS_ADMIN for it",
    errno.ELOOP: "the cache directory is on a stacked filesystem",
    errno.EOPNOTSUPP: "the filesystem of the cache directory cannot be read by the kernel directly",
}


class BackingError(Exception):
    """A file cannot be handed to the kernel; says why."""

    def __init__(self, error: OSError) -> None:
        super().__init__(_REASONS.get(error.errno or 0, error.strerror or str(error)))
        self.errno = error.errno


class BackingFile(Protocol):
    """An open file, which stays open as long as this object is kept."""

    def fileno(self) -> int:
        """Its descriptor."""


def open_backing(device_fd: int, fd: int) -> int:
    """Hand an open file to the kernel, which holds it from then on; returns its backing id, for `close_backing`.

    Raises:
        BackingError: the kernel does not take it.
    """
    try:
        # A buffer that could be changed makes ioctl return what the call returned.
        backing_id: int = fcntl.ioctl(device_fd, BACKING_OPEN, bytearray(_BACKING_MAP.pack(fd, 0, 0)))
        return backing_id
    except OSError as error:
        raise BackingError(error) from None


def close_backing(device_fd: int, backing_id: int) -> None:
    """Free a backing id. Handles that were opened with it go on."""
    fcntl.ioctl(device_fd, BACKING_CLOSE, struct.pack("=I", backing_id))


@dataclass(slots=True, eq=False)
class _Inode:
    """An inode that is open: by how many handles, and in passthrough (a backing id) or through the daemon (None)."""

    backing_id: int | None
    handles: int = 0


class Passthrough:
    """The mode of every open inode. Touched from the event loop only.

    Args:
        figures: has the verdict whether passthrough is on, and gets the counts.

    Invariants: an inode is in the table exactly while a handle of it is; backing ids are those of its inodes.
    """

    def __init__(self, figures: KernelFigures) -> None:
        self._figures = figures
        self._device_fd = -1
        self._inodes: dict[int, _Inode] = {}
        self._handles: dict[int, int] = {}  # handle -> inode

    def turn_on(self, device_fd: int, probe: BackingFile) -> None:
        """The kernel agreed on passthrough on this connection; turn it on if it takes the file `probe`, too.

        Raises:
            BackingError: it does not.
        """
        close_backing(device_fd, open_backing(device_fd, probe.fileno()))
        self._device_fd = device_fd
        self._figures.passthrough = True
        self._figures.reason = ""

    def turn_off(self, reason: str) -> None:
        """From now on files are opened in normal mode. Those open in passthrough stay so."""
        self._figures.passthrough = False
        self._figures.reason = reason
        log.warning("no passthrough: files are read through the daemon, because %s", reason)

    async def open(self, ino: int, handle_id: int, whole_file: Callable[[], Awaitable[BackingFile | None]]) -> None:
        """Choose the mode of a handle that is being opened; the caller replies to the OPEN without another await.

        Args:
            whole_file: waits for the object to be whole, as long as an open may wait, and returns its cache file,
                which from then on stays as it is for as long as the object is open; None if it is not whole. Only
                called if it matters; nothing happens between its return and ours.
        """
        file = None
        if self._figures.passthrough and ino not in self._inodes:
            file = await whole_file()
        inode = self._inodes.get(ino)
        if inode is None:
            inode = self._inodes[ino] = _Inode(None if file is None else self._back(file))
        inode.handles += 1
        self._handles[handle_id] = ino
        if inode.backing_id is None:
            self._figures.opens_normal += 1
        else:
            self._figures.opens_passthrough += 1
            open_reply.prepare(handle_id, open_reply.PASSTHROUGH | open_reply.NOFLUSH, inode.backing_id)

    def release(self, handle_id: int) -> None:
        """A handle is closed; with the last one of its inode goes the backing id."""
        ino = self._handles.pop(handle_id)
        inode = self._inodes[ino]
        inode.handles -= 1
        if not inode.handles:
            del self._inodes[ino]
            if inode.backing_id is not None:
                close_backing(self._device_fd, inode.backing_id)

    def _back(self, file: BackingFile) -> int | None:
        try:
            return open_backing(self._device_fd, file.fileno())
        except BackingError as error:
            if error.errno in _PASSING_ERRNOS:
                path = os.readlink(f"/proc/self/fd/{file.fileno()}")
                log.warning("%s is read through the daemon: %s", path, error)
            else:
                self.turn_off(str(error))
            return None

    def check(self) -> None:
        """Assert the invariants."""
        assert sum(inode.handles for inode in self._inodes.values()) == len(self._handles)
        assert set(self._handles.values()) == self._inodes.keys()
