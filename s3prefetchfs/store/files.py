"""The object files of a cache directory: one sparse file per object version, named by its id.

Not the knowledge of what is in them: that is `store.py`. Called from it only, on any thread.

Names come from ids and never from keys, so no key is too long or too strange. The low byte of the id is the
directory: `objects/3f/000655f3a1b2c03f`. Workers open these paths on their own and write with `pwrite`; nothing is
ever fsynced here, because a chunk is checked against its CRC before it is trusted after a restart.

Descriptors are cached. The lease on one is a Python reference to its `OpenFile`: the descriptor is closed when
the last reference goes. So an eviction or a deletion in one thread never closes a descriptor under a `pread` in
another, which could otherwise read from whatever file got the same number next.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import resource
import stat
import threading
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path

from awscrt.checksums import crc32c
from cachetools import LRUCache

from s3prefetchfs.core.extent import CHUNK_BYTES
from s3prefetchfs.errors import FailureKind, RequestError

log = logging.getLogger(__name__)

_FALLOC_FL_KEEP_SIZE = 1  # <linux/falloc.h>
_FALLOC_FL_PUNCH_HOLE = 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

_FD_SHARE = 4
"""The cache takes a quarter of RLIMIT_NOFILE: the rest is for FUSE, workers' sockets and the index."""

_MAX_OPEN = 65536
"""Upper bound of the descriptor cache, for an unlimited RLIMIT_NOFILE."""


class OpenFile:
    """A read-only descriptor, closed with the last reference to this object.

    Whoever asks for `fileno` keeps the object: in `os.pread(files.open(id).fileno(), ...)` the reference would be gone,
    and the descriptor closed, before `pread` is called.
    """

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __del__(self) -> None:
        os.close(self._fd)

    def fileno(self) -> int:
        """The descriptor."""
        return self._fd

    def pread(self, length: int, start: int) -> bytes:
        """As os.pread."""
        return os.pread(self._fd, length, start)

    def preadv(self, buffer: memoryview, start: int, flags: int = 0) -> int:
        """As os.preadv, with one buffer."""
        return os.preadv(self._fd, (buffer,), start, flags)


class ObjectFiles:
    """The files under one `objects/` directory. Thread-safe.

    Args:
        root: the directory; created, with mode 0700, if missing.

    Raises:
        OSError: it cannot be created.
    """

    def __init__(self, root: Path) -> None:
        root.mkdir(mode=0o700, exist_ok=True)
        self._root = str(root)
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit == resource.RLIM_INFINITY:
            limit = _MAX_OPEN * _FD_SHARE
        self._cached: MutableMapping[int, OpenFile] = LRUCache(max(1, min(limit // _FD_SHARE, _MAX_OPEN)))
        self._lock = threading.Lock()  # of _cached; never held over a call that can wait for the disk
        self._can_punch = True

    def path(self, object_id: int) -> str:
        """Where the bytes of an object are, whether or not the file exists."""
        return f"{self._root}/{object_id & 0xFF:02x}/{object_id:016x}"

    def scan(self) -> Iterator[tuple[int, int]]:
        """Blocking. Every object file as (id, size in bytes). Files with names of another form are passed over.

        Raises:
            OSError: a directory cannot be read.
        """
        with os.scandir(self._root) as directories:
            names = [entry.name for entry in directories if entry.is_dir(follow_symlinks=False)]
        for name in names:
            with os.scandir(f"{self._root}/{name}") as entries:
                for entry in entries:
                    try:
                        object_id = int(entry.name, 16)
                    except ValueError:
                        continue
                    status = entry.stat(follow_symlinks=False)
                    if entry.path == self.path(object_id) and stat.S_ISREG(status.st_mode):
                        yield object_id, status.st_size

    def create(self, object_id: int, size_bytes: int) -> None:
        """Blocking. Make the file: all hole, with its full size.

        Raises:
            RequestError: NO_SPACE or CACHE_IO; then there is no file.
        """
        path = self.path(object_id)
        try:
            os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
            fd = self._open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                os.ftruncate(fd, size_bytes)
            except OSError:
                os.unlink(path)
                raise
            finally:
                os.close(fd)
        except OSError as error:
            raise _failure(error, f"creating {path}") from error

    def read_now(self, object_id: int, start: int, stop: int, buffer: memoryview) -> bool:
        """Bytes `[start, stop)` into the front of `buffer`, if the file is open and its pages are in memory.

        Returns:
            Whether all of them came. False says nothing about the file: ask `read`.
        """
        with self._lock:
            file = self._cached.get(object_id)
        if file is None:
            return False
        wanted = stop - start
        try:
            return file.preadv(buffer[:wanted], start, os.RWF_NOWAIT) == wanted
        except OSError:  # EAGAIN; EOPNOTSUPP on tmpfs; EIO, which read() will meet and report
            return False

    def read(self, object_id: int, start: int, stop: int) -> bytes:
        """Blocking. The bytes `[start, stop)`.

        Raises:
            RequestError: CACHE_IO: the file is missing, unreadable or too short.
        """
        try:
            data = self.open(object_id).pread(stop - start, start)
        except OSError as error:
            raise _failure(error, f"reading {self.path(object_id)}") from error
        if len(data) != stop - start:
            raise RequestError(
                FailureKind.CACHE_IO, f"{self.path(object_id)} ends at {start + len(data)}, wanted {stop}"
            )
        return data

    def checksums(self, object_id: int, extents: Sequence[tuple[int, int]]) -> list[int | None]:
        """Blocking. The CRC32C of each of the byte ranges (a chunk at most); None for one that cannot be read."""
        try:
            file = self.open(object_id)
        except OSError as error:
            log.warning("cannot open %s: %s", self.path(object_id), error.strerror)
            return [None] * len(extents)
        buffer = memoryview(bytearray(CHUNK_BYTES))
        found: list[int | None] = []
        for start, stop in extents:
            piece = buffer[: stop - start]
            try:
                found.append(crc32c(piece) if file.preadv(piece, start) == len(piece) else None)
            except OSError as error:
                log.warning("cannot read %s at %d: %s", self.path(object_id), start, error.strerror)
                found.append(None)
        return found

    def open(self, object_id: int) -> OpenFile:
        """Blocking, unless cached. A lease on the file's descriptor.

        Raises:
            OSError: as of open(2).
        """
        with self._lock:
            file = self._cached.get(object_id)
        if file is None:
            file = OpenFile(self._open(self.path(object_id), os.O_RDONLY))
            with self._lock:
                self._cached[object_id] = file
        return file

    def intact(self, object_id: int, size_bytes: int) -> OpenFile | None:
        """Blocking, unless cached. A lease on the file, if nobody has deleted it or changed its length."""
        try:
            file = self.open(object_id)
            status = os.fstat(file.fileno())
        except OSError as error:
            log.warning("cannot open %s: %s", self.path(object_id), error.strerror)
            return None
        return file if status.st_size == size_bytes and status.st_nlink else None

    def punch(self, object_id: int, start: int, stop: int) -> None:
        """Blocking. Give the blocks of `[start, stop)` back to the disk; a filesystem without holes keeps them.

        Raises:
            RequestError: CACHE_IO.
        """
        if not self._can_punch:
            return
        path = self.path(object_id)
        try:
            fd = self._open(path, os.O_WRONLY)
            try:
                if _libc.fallocate(fd, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, start, stop - start):
                    code = ctypes.get_errno()
                    raise OSError(code, os.strerror(code))
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise _failure(error, f"punching a hole into {path}") from error
            self._can_punch = False
            log.warning("the disk of %s cannot punch holes: space is freed by whole objects only", self._root)

    def delete(self, object_id: int) -> None:
        """Blocking. Unlink the file; reads that have it open still finish. No error if it is gone already.

        Raises:
            RequestError: CACHE_IO.
        """
        try:
            os.unlink(self.path(object_id))
        except FileNotFoundError:
            pass
        except OSError as error:
            raise _failure(error, f"deleting {self.path(object_id)}") from error
        finally:
            self.release(object_id)

    def release(self, object_id: int) -> None:
        """Drop an object's descriptor from the cache; it is closed once nobody reads from it."""
        with self._lock:
            file = self._cached.pop(object_id, None)
        del file  # outside the lock: the last close of an unlinked file frees its blocks, which takes a while

    def close(self) -> None:
        """Drop all descriptors."""
        with self._lock:
            self._cached.clear()

    def _open(self, path: str, flags: int) -> int:
        """open(2); when descriptors run out, the least recently used half of the cache makes room."""
        while True:
            try:
                return os.open(path, flags, 0o600)
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._cached:
                    raise
            with self._lock:
                oldest = [self._cached.popitem() for _ in range((len(self._cached) + 1) // 2)]
            log.info("out of file descriptors: closed %d of the cache's", len(oldest))
            oldest.clear()


def _failure(error: OSError, doing: str) -> RequestError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return RequestError(FailureKind.NO_SPACE if full else FailureKind.CACHE_IO, f"{doing}: {error.strerror or error}")
