"""What is mounted where, whether it still answers, and how to unmount it.

Facts come from /proc/self/mountinfo, which the kernel answers by itself, so reading it never hangs. Touching a path
below a mount may: a daemon that took a request and never answers keeps the asking thread in an uninterruptible
wait, and a process with such a thread cannot exit. `read_file` therefore asks through a process of its own, that can
be left behind. Used by the commands and by the daemon; imports nothing of FUSE.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

FS_TYPE = "fuse.s3prefetchfs"
"""The filesystem type of our mounts in mountinfo."""

STATUS_FILE = ".s3prefetchfs/status.json"
"""Inside every mount of ours, reachable by name."""

PROBE_TIMEOUT_S = 5.0
"""A live daemon answers in milliseconds, on a loaded host too; after this it counts as hung."""

DEAD_ERRNOS = frozenset({errno.ENOTCONN, errno.ECONNABORTED})
"""What the root of a mount answers when its daemon is gone, or its connection was aborted."""

_FUSERMOUNT_TIMEOUT_S = 30.0

_REAP_TIMEOUT_S = 1.0
"""A killed process ends in milliseconds unless a filesystem keeps it, and then it may stay for ever."""

_MNT_DETACH = 2
_UMOUNT_NOFOLLOW = 8


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo: what is mounted, where, and as what."""

    mountpoint: Path
    fs_type: str
    source: str

    @property
    def is_ours(self) -> bool:
        return self.fs_type == FS_TYPE


def parse_mountinfo(text: bytes) -> list[Mount]:
    """The mounts of a mountinfo file, in its order: of two at one path, the later hides the earlier."""
    mounts = []
    for line in text.splitlines():
        before, _, after = line.partition(b" - ")
        fs_type, source = after.split(b" ")[:2]
        place = _unescaped(before.split(b" ")[4])
        mounts.append(Mount(Path(os.fsdecode(place)), os.fsdecode(fs_type), os.fsdecode(_unescaped(source))))
    return mounts


def _unescaped(field: bytes) -> bytes:
    """The kernel writes blank, tab, newline and backslash as three octal digits."""
    return re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), field)


def all_mounts() -> list[Mount]:
    """What this process's mount namespace holds."""
    return parse_mountinfo(Path("/proc/self/mountinfo").read_bytes())


def mount_at(path: Path) -> Mount | None:
    """The topmost mount at `path`, an absolute path, or at what it is a symbolic link to."""
    mounts = {mount.mountpoint: mount for mount in all_mounts()}
    # As written first: resolving asks the filesystem, and a mount that is found need not be asked.
    return mounts.get(path) or mounts.get(Path(os.path.realpath(path)))


_READ_FILE = """
import os, sys
try:
    with open(sys.argv[1], "rb") as file:
        os.write(1, b"+" + file.read())
except OSError as error:
    os.write(1, b"-%d" % error.errno)
"""


def read_file(path: Path, timeout_s: float = PROBE_TIMEOUT_S) -> bytes:
    """The content of a small file on a filesystem that may never answer.

    Raises:
        TimeoutError: no answer in time; the asking process is left to the kernel.
        OSError: as open() and read() do.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC)
    command = [sys.executable, "-I", "-S", "-c", _READ_FILE, str(path)]
    pid = os.posix_spawn(sys.executable, command, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, writing, 1)])
    os.close(writing)
    answer = b""
    deadline = time.monotonic() + timeout_s
    try:
        while piece := _read_before(deadline, reading):
            answer += piece
    except TimeoutError:
        raise TimeoutError(errno.ETIMEDOUT, f"no answer within {timeout_s:g} s", str(path)) from None
    finally:
        os.close(reading)
        os.kill(pid, signal.SIGKILL)
        wait_for_exit(os.pidfd_open(pid), _REAP_TIMEOUT_S)
        os.waitpid(pid, os.WNOHANG)
    if not answer.startswith(b"+"):
        number = int(answer[1:] or errno.EIO)
        raise OSError(number, os.strerror(number), str(path))
    return answer[1:]


def _read_before(deadline: float, descriptor: int) -> bytes:
    ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
    if not ready:
        raise TimeoutError
    return os.read(descriptor, 65536)


def wait_for_exit(pidfd: int, timeout_s: float) -> bool:
    """Whether the process of `pidfd`, which is closed, ends in time."""
    try:
        ready, _, _ = select.select([pidfd], [], [], timeout_s)
    finally:
        os.close(pidfd)
    return bool(ready)


def unmount(path: Path, *, lazy: bool) -> None:
    """Unmount what is at `path`; `lazy` detaches it now, and lets it end when its last user does.

    Raises:
        OSError: EBUSY while it is in use; otherwise what the kernel or fusermount3 says.
    """
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.umount2(os.fsencode(path), _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0)) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
        return
    program = shutil.which("fusermount3")
    if program is None:
        raise FileNotFoundError(errno.ENOENT, "fusermount3 is not installed (package fuse3)", str(path))
    try:
        done = subprocess.run(
            [program, "-uz" if lazy else "-u", "--", str(path)],
            env={**os.environ, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_FUSERMOUNT_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(errno.ETIMEDOUT, "fusermount3 does not finish", str(path)) from None
    if done.returncode != 0:
        number = errno.EBUSY if "busy" in done.stderr else errno.EPERM
        raise OSError(number, done.stderr.strip().removeprefix("fusermount3: "), str(path))
