"""What the stand-in holds: buckets, keys in order, objects, and where their bytes come from.

An object never changes; putting a key again puts another object there, so a GET under way goes on with the old bytes.
Bytes are never copied through Python when they are read: each kind of `Data` names a place in a file descriptor, for
sendfile. What clients PUT is appended to one unlinked file in the root directory; space is not reused before the
process ends. Zeros and ramps of any size come from two small memory files and take no space.

A *ramp* is data whose bytes betray their offset: RAMP_PERIOD random bytes, repeated; every MiB starts at another,
pseudo-random place in them. A read that is shifted, or of the wrong MiB or the wrong seed, differs at once.

Key order is S3's, UTF-8 bytes, which for `str` is the order of code points. Keys that are not UTF-8 are kept with
surrogateescape.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from heapq import merge
from pathlib import Path
from random import Random

BLOCK_BYTES = 1 << 20
"""Ramps change their phase, and zeros wrap around, after this many bytes; so the longest sendfile of them."""

RAMP_PERIOD = 1048583
"""Bytes, the smallest prime above BLOCK_BYTES: within a block no offset repeats."""


class Data:
    """Bytes `[0, n)` of something, n known to its owner."""

    def locate(self, at: int) -> tuple[int, int]:
        """Where byte `at` is: file descriptor, and offset in that file."""
        raise NotImplementedError

    def clip(self, at: int, count: int) -> int:
        """How many of the `count` bytes from `at` are in one piece."""
        return count

    def send(self, socket_fd: int, at: int, count: int) -> int:
        """Hand `count` bytes in one piece on to a non-blocking socket; returns how many of them it took."""
        fd, offset = self.locate(at)
        return os.sendfile(socket_fd, fd, offset, count)

    def read(self, at: int) -> bytes:
        """The byte at `at`."""
        return os.pread(self.locate(at)[0], 1, self.locate(at)[1])


@dataclass(frozen=True, slots=True)
class FileData(Data):
    """A file from some offset on. It must not change."""

    fd: int
    offset: int = 0

    def locate(self, at: int) -> tuple[int, int]:
        return self.fd, self.offset + at


class Zeros(Data):
    def locate(self, at: int) -> tuple[int, int]:
        return _zero_fd(), at % BLOCK_BYTES

    def clip(self, at: int, count: int) -> int:
        return min(count, BLOCK_BYTES - at % BLOCK_BYTES)


@dataclass(frozen=True, slots=True)
class Ramp(Zeros):
    seed: int

    def locate(self, at: int) -> tuple[int, int]:
        block, inside = divmod(at, BLOCK_BYTES)
        return _ramp_fd(), _phase(block, self.seed) + inside


@dataclass(frozen=True, slots=True)
class BytesData(Data):
    """Bytes in memory: XML."""

    content: bytes

    def send(self, socket_fd: int, at: int, count: int) -> int:
        return os.write(socket_fd, self.content[at : at + count])

    def read(self, at: int) -> bytes:
        return self.content[at : at + 1]


@dataclass(frozen=True, slots=True)
class Corrupted(Data):
    """The data, with the lowest bit of one byte flipped."""

    data: Data
    flipped: int

    def clip(self, at: int, count: int) -> int:
        count = self.data.clip(at, count)
        return min(count, self.flipped - at) if at < self.flipped else 1 if at == self.flipped else count

    def send(self, socket_fd: int, at: int, count: int) -> int:
        if at == self.flipped:
            return os.write(socket_fd, bytes([self.data.read(at)[0] ^ 1]))
        return self.data.send(socket_fd, at, count)


def ramp(start: int, stop: int, seed: int = 0) -> bytes:
    """The bytes `[start, stop)` of every ramp with this seed."""
    pieces = []
    while start < stop:
        block, inside = divmod(start, BLOCK_BYTES)
        count = min(stop - start, BLOCK_BYTES - inside)
        at = _phase(block, seed) + inside
        pieces.append(_ramp_base()[at : at + count])
        start += count
    return b"".join(pieces)


def _phase(block: int, seed: int) -> int:
    """Where in the period a block starts. Multiplicative hashing: neighbours and seeds land far apart."""
    mixed = (block * 0x9E3779B97F4A7C15 + seed * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & (2**64 - 1)
    return ((mixed ^ mixed >> 31) * 0x94D049BB133111EB & (2**64 - 1)) % RAMP_PERIOD


@cache
def _ramp_base() -> bytes:
    """One period and a block more, so that a block can start anywhere in the period."""
    period = Random(0).randbytes(RAMP_PERIOD)
    return period + period[:BLOCK_BYTES]


@cache
def _ramp_fd() -> int:
    fd = os.memfd_create("ramp")
    os.pwrite(fd, _ramp_base(), 0)
    return fd


@cache
def _zero_fd() -> int:
    fd = os.memfd_create("zeros")
    os.ftruncate(fd, BLOCK_BYTES)
    return fd


@dataclass(frozen=True, slots=True)
class Object:
    """One version of an object. `etag` is without quotes; `headers` are given back as they came with the PUT."""

    data: Data
    size: int
    etag: str
    mtime_s: float
    storage_class: str = "STANDARD"
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Synthetic:
    """`count` keys `{prefix}{i:08d}` that are computed when asked for; object i is the ramp with seed i."""

    prefix: str
    count: int
    size: int
    mtime_s: float

    def key(self, i: int) -> str:
        return f"{self.prefix}{i:08d}"

    def keys_from(self, start: str) -> Iterator[str]:
        if start <= self.prefix:
            return map(self.key, range(self.count))
        if start > self.key(self.count - 1):
            return iter(())
        return map(self.key, range(bisect_left(range(self.count), start, key=self.key), self.count))

    def get(self, key: str) -> Object | None:
        digits = key[len(self.prefix) :]
        if not digits.isdecimal() or int(digits) >= self.count or self.key(int(digits)) != key:
            return None
        return ramp_object(self.size, int(digits), self.mtime_s)


def ramp_object(size: int, seed: int, mtime_s: float) -> Object:
    return Object(Ramp(seed), size, f"{seed:016x}{size:016x}", mtime_s)


def zero_object(size: int, mtime_s: float) -> Object:
    return Object(Zeros(), size, f"{'f' * 16}{size:016x}", mtime_s)


def file_object(path: Path, mtime_s: float) -> Object:
    """The file at `path`, served in place."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    stat = os.fstat(fd)
    etag = _hexdigest(f"file:{path}:{stat.st_size}:{stat.st_mtime_ns}".encode())
    return Object(FileData(fd), stat.st_size, etag, mtime_s)


def _hexdigest(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


class Bucket:
    """Objects by key, and keys in order."""

    def __init__(self) -> None:
        self._objects: dict[str, Object] = {}
        self._keys: list[str] = []
        self._synthetic: list[Synthetic] = []

    def get(self, key: str) -> Object | None:
        if found := self._objects.get(key):
            return found
        for synthetic in self._synthetic:
            if key.startswith(synthetic.prefix) and (found := synthetic.get(key)):
                return found
        return None

    def put(self, key: str, item: Object) -> None:
        if key not in self._objects:
            insort(self._keys, key)
        self._objects[key] = item

    def synthesize(self, synthetic: Synthetic) -> None:
        self._synthetic.append(synthetic)

    def delete(self, key: str) -> None:
        """Remove a stored key; nothing happens if there is none."""
        if self._objects.pop(key, None):
            del self._keys[bisect_left(self._keys, key)]

    def keys_from(self, start: str, injected: list[str]) -> Iterator[str]:
        """Keys >= start in order, with `injected` ones among them; the bucket must not change meanwhile."""
        keys = self._keys
        stored = map(keys.__getitem__, range(bisect_left(keys, start), len(keys)))
        others = [synthetic.keys_from(start) for synthetic in self._synthetic]
        if not injected and not others:
            return stored
        return merge(stored, *others, sorted(key for key in injected if key >= start))


class Store:
    """All buckets, and the file that holds what clients PUT.

    Args:
        root: an existing directory, on the disk that has to have the space.
    """

    def __init__(self, root: Path) -> None:
        self.buckets: dict[str, Bucket] = {}
        self._file = tempfile.TemporaryFile(dir=root)  # noqa: SIM115 - open as long as the process
        self._used_bytes = 0

    def bucket(self, name: str) -> Bucket:
        """The bucket, made if there is none."""
        return self.buckets.setdefault(name, Bucket())

    def add(self, content: bytes, headers: dict[str, str], storage_class: str = "STANDARD") -> Object:
        """Write the bytes to disk and return the object, which is not in any bucket yet."""
        offset = self._used_bytes
        self._used_bytes += len(content)
        view = memoryview(content)
        while view:
            view = view[os.pwrite(self._file.fileno(), view, self._used_bytes - len(view)) :]
        data = FileData(self._file.fileno(), offset)
        return Object(data, len(content), _hexdigest(content), time.time(), storage_class, headers)
