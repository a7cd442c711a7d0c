"""Mounting without libfuse, and having a word in the INIT that opens a FUSE connection.

libfuse can neither be told to allow passthrough (before 3.17; pyfuse3 with no version) nor how many background requests
the kernel may keep. Both are fields of the reply to INIT, the first message of a connection. So root mounts with
mount(2), and libfuse is given one end of a socketpair for its /dev/fuse:

    kernel ---- INIT ----> us ---- INIT ----> libfuse
    kernel <--- reply ---- us <--- reply ---- libfuse           (with our fields in it)

Then the device takes the place of the socket, under the descriptor that libfuse knows, and from there on nothing is
between libfuse and the kernel. The messages are those of <linux/fuse.h>; `rewritten_init` knows the one we change.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

import trio

FUSE_INIT = 26
"""Opcode."""

INIT_EXT = 1 << 30
PASSTHROUGH = 1 << 37
"""Flags of INIT: that there are flags from bit 32 on; and that there is passthrough, from Linux 6.9 on."""

INIT_TIMEOUT_S = 10.0
"""The kernel sends INIT while it mounts; libfuse answers it in microseconds once it runs."""

_MESSAGE_MAX_BYTES = 8192
"""INIT is 104 bytes and its reply 80; the kernel refuses to be read with a buffer of less than 8 KiB."""

_IN_HEADER = struct.Struct("=IIQQIIIHH")  # len, opcode, unique, nodeid, uid, gid, pid, total_extlen, padding
_OUT_HEADER = struct.Struct("=IiQ")  # len, error, unique
_INIT_IN = struct.Struct("=IIIII")  # major, minor, max_readahead, flags, flags2; then reserve
_INIT_OUT = struct.Struct("=IIIIHHIIHHII")
# major, minor, max_readahead, flags, max_background, congestion_threshold, max_write, time_gran, max_pages,
# map_alignment, flags2, max_stack_depth; then reserve

_MS_NOSUID, _MS_NODEV = 2, 4

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class InitSettings:
    """What the kernel is told in the reply to INIT.

    Args:
        max_background: requests that nobody waits for, at once. congestion_threshold: of them, from where on it slows.
        max_stack_depth: how many filesystems may lie on each other below a backing file, plus one; 0: no passthrough.
    """

    max_background: int
    congestion_threshold: int
    max_stack_depth: int


def offers_passthrough(request: bytes) -> bool:
    """Whether the kernel that sent this INIT can do passthrough.

    Raises:
        ValueError: it is not an INIT.
    """
    _, opcode, *_ = _IN_HEADER.unpack_from(request)
    if opcode != FUSE_INIT:
        raise ValueError(f"the connection begins with opcode {opcode}, not INIT")
    if len(request) < _IN_HEADER.size + _INIT_IN.size:  # before Linux 5.17 there was no flags2
        return False
    _, _, _, flags, flags2 = _INIT_IN.unpack_from(request, _IN_HEADER.size)
    return bool(flags & INIT_EXT) and bool(flags2 << 32 & PASSTHROUGH)


def rewritten_init(reply: bytes, settings: InitSettings) -> bytes:
    """libfuse's reply to INIT with our settings in it; all else is libfuse's. An error passes as it is.

    Raises:
        ValueError: it is no reply to INIT that has all these fields.
    """
    length, error, _ = _OUT_HEADER.unpack_from(reply)
    if error:
        return reply
    if length != len(reply) or length < _OUT_HEADER.size + _INIT_OUT.size:
        raise ValueError(f"a reply to INIT of {len(reply)} bytes, {length} by its own account")
    fields = list(_INIT_OUT.unpack_from(reply, _OUT_HEADER.size))
    fields[4:6] = settings.max_background, settings.congestion_threshold
    if settings.max_stack_depth:
        fields[3] |= INIT_EXT
        fields[10] |= PASSTHROUGH >> 32
        fields[11] = settings.max_stack_depth
    changed = bytearray(reply)
    _INIT_OUT.pack_into(changed, _OUT_HEADER.size, *fields)
    return bytes(changed)


class HandMount:
    """A mount whose INIT has not been answered yet.

    Args:
        mountpoint: a directory. source, fs_type: as they shall be in /proc/mounts.
        options: of FUSE, without those that every mount has.

    Attributes:
        offers_passthrough: the kernel can do it.
        session_fd: the descriptor that libfuse shall use; `/dev/fd/N` is its mountpoint then.

    Raises:
        OSError: mount(2) refused, or /dev/fuse cannot be opened.
    """

    def __init__(self, mountpoint: Path, source: str, fs_type: str, options: list[str]) -> None:
        self._device_fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        try:
            rootmode = os.stat(mountpoint).st_mode & 0o170000
            base = [
                f"fd={self._device_fd}",
                f"rootmode={rootmode:o}",
                f"user_id={os.getuid()}",
                f"group_id={os.getgid()}",
            ]
            done = _libc.mount(
                os.fsencode(source),
                os.fsencode(mountpoint),
                fs_type.encode(),
                ctypes.c_ulong(_MS_NOSUID | _MS_NODEV),
                ",".join(base + options).encode(),
            )
            if done != 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), str(mountpoint))
        except BaseException:
            os.close(self._device_fd)
            raise
        self._request = self._read_init()
        self.offers_passthrough = offers_passthrough(self._request)
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        theirs.setblocking(False)
        self.session_fd = theirs.detach()

    def _read_init(self) -> bytes:
        os.set_blocking(self._device_fd, False)
        waiting = select.poll()
        waiting.register(self._device_fd, select.POLLIN)
        waiting.poll(INIT_TIMEOUT_S * 1000)
        return os.read(self._device_fd, _MESSAGE_MAX_BYTES)

    async def introduce(self, settings: InitSettings) -> None:
        """Relay INIT, while the session loop runs; after it, `session_fd` is the device itself.

        Whoever waits for `session_fd` is woken with ClosedResourceError, and waits again.

        Raises:
            trio.TooSlowError: libfuse does not answer.
            OSError, ValueError: the connection is gone, or this is no INIT that we know.
        """
        self._ours.send(self._request)
        with trio.fail_after(INIT_TIMEOUT_S):
            await trio.lowlevel.wait_readable(self._ours)
        reply = self._ours.recv(_MESSAGE_MAX_BYTES)
        os.write(self._device_fd, rewritten_init(reply, settings))
        trio.lowlevel.notify_closing(self.session_fd)
        os.dup2(self._device_fd, self.session_fd, inheritable=False)
        self.close()

    def close(self) -> None:
        """Give up what libfuse does not know of; again: nothing. It closes `session_fd` itself, once it has it."""
        if self._device_fd >= 0:
            os.close(self._device_fd)
            self._device_fd = -1
        self._ours.close()
