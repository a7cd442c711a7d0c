"""Reading directories: positions, rewinding, snapshots, and changes meanwhile."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from s3prefetchfs.fuse import open_reply
from tests.mount.conftest import Mount
from tests.mount.mounted import PATIENCE_S, Mounted, eventually
from tests.servers import StandInBucket

COUNTS = (1, 23, 24, 100, 5000)
"""Around what fits into one reply of a FUSE filesystem, and many times that."""

STEMS = {"short": "n-", "long": "n" * 192}
"""Eight digits make them names of 10 and of 200 bytes."""


@pytest.fixture(scope="module")
def mnt(module_bucket: StandInBucket, module_mount: Mount) -> Mounted:
    for count in COUNTS:
        for kind, stem in STEMS.items():
            module_bucket.synthesize(f"{kind}/{count}/{stem}", count, 1)
    return module_mount(module_bucket, "--workers", "1")


@pytest.mark.parametrize("kind", STEMS)
@pytest.mark.parametrize("count", COUNTS)
def test_every_entry_comes_once(mnt: Mounted, count: int, kind: str) -> None:
    """However many replies of the kernel's size it takes; the first time, and from what is cached."""
    expected = [f"{STEMS[kind]}{i:08d}" for i in range(count)]
    for _ in range(2):
        assert sorted(os.listdir(mnt / kind / str(count))) == expected


@pytest.mark.parametrize("count", COUNTS)
def test_ls_finds_the_dots_too(mnt: Mounted, count: int) -> None:
    """`ls -a` shows exactly one `.` and one `..`."""
    command = ["ls", "-f", os.fspath(mnt / "long" / str(count))]
    names = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout.split()
    assert sorted(names)[:2] == [".", ".."]
    assert len(names) == len(set(names)) == count + 2


class _Dirent(ctypes.Structure):
    _fields_ = (
        ("ino", ctypes.c_uint64),
        ("off", ctypes.c_int64),
        ("reclen", ctypes.c_uint16),
        ("type", ctypes.c_uint8),
        ("name", ctypes.c_char * 256),
    )


class Directory:
    """opendir and its kin, which Python does not have."""

    def __init__(self, path: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.opendir.restype = ctypes.c_void_p
        self._libc.readdir.restype = ctypes.POINTER(_Dirent)
        self._libc.telldir.restype = ctypes.c_long
        self._stream = ctypes.c_void_p(self._libc.opendir(os.fsencode(path)))
        assert self._stream

    def read(self) -> bytes | None:
        found = self._libc.readdir(self._stream)
        return bytes(found.contents.name) if found else None

    def rest(self) -> list[bytes]:
        return list(iter(self.read, None))

    def tell(self) -> int:
        return int(self._libc.telldir(self._stream))

    def seek(self, position: int) -> None:
        self._libc.seekdir(self._stream, ctypes.c_long(position))

    def rewind(self) -> None:
        self._libc.rewinddir(self._stream)

    def close(self) -> None:
        self._libc.closedir(self._stream)


@contextmanager
def opened(path: Path) -> Iterator[Directory]:
    directory = Directory(path)
    try:
        yield directory
    finally:
        directory.close()


@pytest.mark.parametrize("count", COUNTS)
def test_seekdir_goes_back_to_where_telldir_was(mnt: Mounted, count: int) -> None:
    """From every position, the rest is what it was."""
    with opened(mnt / "long" / str(count)) as directory:
        names: list[bytes] = []
        positions = [directory.tell()]
        while (name := directory.read()) is not None:
            names.append(name)
            positions.append(directory.tell())
        assert len(names) == count + 2
        for index in range(0, count + 3, max(1, count // 10)):
            directory.seek(positions[index])
            assert directory.rest() == names[index:]


@pytest.mark.parametrize("read_before", [0, 10, None])
def test_rewinddir_gives_everything_again(mnt: Mounted, read_before: int | None) -> None:
    """After nothing was read, after some, and after all."""
    with opened(mnt / "long/100") as directory:
        first = [directory.read() for _ in range(read_before)] if read_before is not None else directory.rest()
        directory.rewind()
        again = directory.rest()
        assert len(again) == 102
        assert first == again[: len(first)]


def test_an_open_directory_is_a_snapshot(bucket: StandInBucket, mount: Mount) -> None:
    """A handle goes on with what it began with, though nothing is cached; rewound, it shows what is there now."""
    bucket.synthesize("d/k", 3000, 1)
    bucket.put("d/a-goes", b"x")
    bucket.put("d/z-goes", b"x")
    mnt = mount(bucket, "--workers", "1", "--metadata-ttl", "0")
    with opened(mnt / "d") as directory:
        begin = [directory.read() for _ in range(100)]
        bucket.delete("d/a-goes")
        bucket.put("d/a-new", b"x")
        rest = directory.rest()
        assert b"a-goes" in begin
        assert len(begin) + len(rest) == len({*begin, *rest}) == 3004
        directory.rewind()
        now = directory.rest()
        assert b"a-goes" not in now
        assert b"a-new" in now


def test_listing_while_the_bucket_changes(bucket: StandInBucket, mount: Mount) -> None:
    """Entries that nobody touches appear in every listing, and once; no listing fails."""
    bucket.synthesize("d/k", 2100, 1)
    mnt = mount(bucket, "--workers", "1", "--metadata-ttl", "0")
    done = threading.Event()

    def change() -> None:
        number = 0
        while not done.is_set():
            bucket.put(f"d/k{number % 2100:08d}-new", b"x")
            bucket.delete(f"d/k{number % 2100:08d}-new")
            number += 37
            done.wait(0.001)

    changer = threading.Thread(target=change)
    changer.start()
    try:
        for _ in range(3):
            names = os.listdir(mnt / "d")
            assert len(set(names)) == len(names)
            assert {f"k{i:08d}" for i in range(2100)} <= set(names)
    finally:
        done.set()
        changer.join()


def test_two_readers_of_a_directory(mnt: Mounted) -> None:
    """They do not disturb each other: each sees every entry once."""
    with opened(mnt / "long/5000") as one, opened(mnt / "long/5000") as other:
        names: tuple[list[bytes], list[bytes]] = ([], [])
        while (name := one.read()) is not None:
            names[0].append(name)
            if (name := other.read()) is not None:
                names[1].append(name)
        assert names[0] == names[1]
        assert len(names[0]) == 5002


@contextmanager
def stopped(mnt: Mounted) -> Iterator[None]:
    """The daemon stands still meanwhile; not for ever, so that who needs it fails and does not hang."""
    resumed = threading.Event()

    def resume() -> None:
        resumed.set()
        mnt.process.send_signal(signal.SIGCONT)

    rescue = threading.Timer(PATIENCE_S, resume)
    mnt.process.send_signal(signal.SIGSTOP)
    rescue.start()
    try:
        yield
        assert not resumed.is_set(), "somebody waited for the daemon"
    finally:
        rescue.cancel()
        resume()


@pytest.mark.skipif(open_reply.LIBRARY is None, reason="needs the C library")
def test_a_directory_that_is_read_again_comes_from_the_kernel(mnt: Mounted) -> None:
    """The first reading brings the listing, the second one fills the kernel's memory, the third needs nobody."""
    path = mnt / "short/5000"
    os.listdir(path)
    expected = sorted(os.listdir(path))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with stopped(mnt):
            assert sorted(os.listdir(descriptor)) == expected
    finally:
        os.close(descriptor)


def rewound(directory: Directory) -> list[bytes]:
    directory.rewind()
    return directory.rest()


def test_what_the_kernel_keeps_of_a_directory_grows_old(bucket: StandInBucket, mount: Mount) -> None:
    """No longer than the TTL is it shown what a directory was: not to who opens it, nor to who rewinds it."""
    bucket.synthesize("d/k", 1000, 1)
    mnt = mount(bucket, "--workers", "1", "--metadata-ttl", "1s")
    for number in range(3):
        for _ in range(3):
            os.listdir(mnt / "d")
        with opened(mnt / "d") as directory:
            before = directory.rest()
            new = f"new-{number}"
            bucket.put(f"d/{new}", b"x")
            eventually(partial(os.listdir, mnt / "d"), lambda names, new=new: new in names)
            if number == 0:
                eventually(partial(rewound, directory), lambda names, before=before: len(names) > len(before))
    assert len(os.listdir(mnt / "d")) == 1003
