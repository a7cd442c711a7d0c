"""Bytes: the right ones, by every way that a program can ask for them, from every server."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from s3prefetchfs.core.extent import CHUNK_BYTES
from tests.mount.conftest import Mount
from tests.mount.mounted import PATIENCE_S, Mounted
from tests.s3stub import ramp
from tests.servers import Bucket, StandInBucket

MIB = 1 << 20
GIB = 1 << 30

SIZES = (
    *(0, 1, 4095, 4096, 4097),
    *(CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1),
    *(8 * MIB - 1, 8 * MIB, 8 * MIB + 1),
    20_972_496,  # 976 bytes beyond a MiB: where another filesystem lost them
)
"""Around pages, chunks and the largest GETs."""

BIG = SIZES[-1]


@pytest.fixture(scope="module")
def any_mnt(any_bucket: Bucket, module_mount: Mount) -> Mounted:
    """A file of each size in a bucket of each server; the seed is the size."""
    for size in SIZES:
        any_bucket.put(f"sizes/{size}", ramp(0, size, size))
        any_bucket.put(f"again/{size}", ramp(0, size, size))
    return module_mount(any_bucket)


@pytest.fixture(scope="module")
def mnt(module_bucket: StandInBucket, module_mount: Mount) -> Mounted:
    """Files in the stand-in: one for each way of reading, cold."""
    for name in WAYS:
        module_bucket.put_ramp(f"ways/{name}", BIG, 7)
    module_bucket.put_ramp("huge", 6 * GIB + 12345, 1)
    module_bucket.put_ramp("giant", 5 << 40, 2)
    return module_mount(module_bucket)


# ------------------------------------------------------------------------------------------- every server


@pytest.mark.parametrize("size", SIZES)
def test_sequential(any_mnt: Mounted, size: int) -> None:
    """From the first to the last byte, and not one more; then once again, from the cache."""
    for _ in range(2):
        with open(any_mnt / f"sizes/{size}", "rb") as file:
            content = file.read()
            assert file.read(1) == b""
        assert len(content) == os.stat(any_mnt / f"sizes/{size}").st_size == size
        assert content == ramp(0, size, size)


@pytest.mark.parametrize("size", [size for size in SIZES if size])
def test_ends(any_mnt: Mounted, size: int) -> None:
    """Around the end of a file: its last byte, a read over the end, and reads beyond it."""
    with open(any_mnt / f"again/{size}", "rb", buffering=0) as file:
        assert os.pread(file.fileno(), 1, size - 1) == ramp(size - 1, size, size)
        start = max(0, size - 5000)
        assert os.pread(file.fileno(), 10_000, start) == ramp(start, size, size)
        assert os.pread(file.fileno(), 10_000, size) == b""
        assert os.pread(file.fileno(), 10_000, size + MIB) == b""


def test_random_reads(any_mnt: Mounted) -> None:
    """Anywhere, of any length, by eight threads."""
    with open(any_mnt / f"again/{BIG}", "rb") as file, ThreadPoolExecutor(8) as threads:

        def read(number: int) -> None:
            random = Random(number)
            for _ in range(20):
                start = random.randrange(BIG)
                stop = min(BIG, start + random.randrange(1, 2 * MIB))
                assert os.pread(file.fileno(), stop - start, start) == ramp(start, stop, BIG)

        list(threads.map(read, range(8)))


def test_the_tree(any_mnt: Mounted) -> None:
    """Every server's listing says the same: names and sizes."""
    found = {
        Path(path, name): os.stat(Path(path, name)).st_size
        for path, _, names in os.walk(any_mnt.path)
        for name in names
    }
    assert found == {any_mnt / f"{directory}/{size}": size for directory in ("again", "sizes") for size in SIZES}


def test_a_replaced_object(any_bucket: Bucket, any_mnt: Mounted, mount: Mount) -> None:
    """Every server's ETag tells versions apart: a new mount on the same cache has the new bytes, and only those."""
    any_bucket.put("version", ramp(0, MIB, 1))
    place = any_mnt.path.parent / "other-cache"
    first = mount(any_bucket, cache_dir=place)
    assert (first / "version").read_bytes() == ramp(0, MIB, 1)
    first.close()
    any_bucket.put("version", ramp(0, MIB, 2))
    assert (mount(any_bucket, cache_dir=place) / "version").read_bytes() == ramp(0, MIB, 2)


# ------------------------------------------------------------------------------------------- every way


def by_threads(path: Path) -> None:
    def read(number: int) -> bytes:
        with open(path, "rb") as file:
            start = number * BIG // 16
            file.seek(start)
            return file.read((number + 1) * BIG // 16 - start)

    with ThreadPoolExecutor(16) as threads:
        assert b"".join(threads.map(read, range(16))) == ramp(0, BIG, 7)


def by_processes(path: Path) -> None:
    commands = [subprocess.Popen(["sha256sum", path], stdout=subprocess.PIPE, text=True) for _ in range(8)]
    sums = {command.communicate(timeout=PATIENCE_S)[0].split()[0] for command in commands}
    expected = subprocess.run(["sha256sum"], input=ramp(0, BIG, 7), stdout=subprocess.PIPE, check=True).stdout
    assert sums == {expected.split()[0].decode()}


def by_mmap(path: Path, flags: int) -> None:
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ) as mapped:
        at = Random(1).sample(range(BIG), 200)
        with ThreadPoolExecutor(8) as threads:
            assert bytes(threads.map(mapped.__getitem__, at)) == b"".join(ramp(i, i + 1, 7) for i in at)
        assert mapped[:] == ramp(0, BIG, 7)


def by_sendfile(path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, open(path, "rb") as file:

        def send() -> None:
            at = 0
            while sent := os.sendfile(theirs.fileno(), file.fileno(), at, BIG - at):
                at += sent
            theirs.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        with ours.makefile("rb") as received:
            assert received.read() == ramp(0, BIG, 7)
        sender.join()


def by_splice(path: Path) -> None:
    done = subprocess.run(["sh", "-c", 'cat "$0" | cat', path], stdout=subprocess.PIPE, check=True)
    assert done.stdout == ramp(0, BIG, 7)


def by_cp(path: Path) -> None:
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / "copy"
        subprocess.run(["cp", "--reflink=auto", path, copy], check=True)
        assert copy.read_bytes() == ramp(0, BIG, 7)


def by_copy_file_range(path: Path) -> None:
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / "copy"
        with open(path, "rb") as source, open(copy, "wb") as target:
            try:
                while os.copy_file_range(source.fileno(), target.fileno(), BIG):
                    pass
            except OSError as error:
                assert error.errno in (errno.EXDEV, errno.EOPNOTSUPP)  # from one filesystem to another: some kernels
                return
        assert copy.read_bytes() == ramp(0, BIG, 7)


def by_dd_direct(path: Path) -> None:
    for block in ("4k", "1M"):
        command = ["dd", f"if={path}", "iflag=direct", f"bs={block}", "status=none"]
        assert subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout == ramp(0, BIG, 7)


def by_direct_reads(path: Path, starts: Iterable[int] = (0, 4096, 3 * MIB, BIG - BIG % 4096)) -> None:
    """At places that are aligned as local disks want it, unless told others."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, 2 * MIB) as buffer:
            for start in starts:
                count = os.preadv(fd, [buffer], start)
                assert min(1, BIG - start) <= count <= 2 * MIB
                assert buffer[:count] == ramp(start, min(BIG, start + count), 7)
            assert os.preadv(fd, [buffer], BIG - BIG % 4096 + 4096) == 0
    finally:
        os.close(fd)


def by_readv(path: Path) -> None:
    pieces = [bytearray(size) for size in (1, 4095, 70_000, MIB)]
    with open(path, "rb") as file:
        count = os.preadv(file.fileno(), pieces, 99_999)
    assert b"".join(pieces)[:count] == ramp(99_999, 99_999 + count, 7)
    assert count == sum(map(len, pieces))


def by_interrupted_reads(path: Path) -> None:
    script = """if True:
        import signal, sys
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        pieces = []
        with open(sys.argv[1], "rb", buffering=0) as file:
            while piece := file.read(65536):
                pieces.append(piece)
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(b"".join(pieces))
    """
    done = subprocess.run([sys.executable, "-c", script, path], stdout=subprocess.PIPE, timeout=PATIENCE_S, check=True)
    assert done.stdout == ramp(0, BIG, 7)


WAYS = {
    "threads": by_threads,
    "processes": by_processes,
    "shared mapping": lambda path: by_mmap(path, mmap.MAP_SHARED),
    "private mapping": lambda path: by_mmap(path, mmap.MAP_PRIVATE),
    "sendfile": by_sendfile,
    "pipe": by_splice,
    "cp": by_cp,
    "copy_file_range": by_copy_file_range,
    "dd direct": by_dd_direct,
    "direct reads": by_direct_reads,
    "readv": by_readv,
    "signals": by_interrupted_reads,
}


@pytest.mark.parametrize("way", WAYS)
def test_ways(mnt: Mounted, way: str) -> None:
    """Threads, processes, mappings, sendfile, copies, O_DIRECT, vectors, under signals: cold, then from the cache."""
    for _ in range(2):
        WAYS[way](mnt / f"ways/{way}")


def test_direct_reads_anywhere(bucket: StandInBucket, mount: Mount) -> None:
    """Through the daemon O_DIRECT wants no alignment, cold or from the cache."""
    bucket.put_ramp("x", BIG, 7)
    mounted = mount(bucket, "--passthrough", "off")
    for _ in range(2):
        by_direct_reads(mounted / "x", (12345, 3 * MIB - 1, BIG - 5000, BIG - 976, BIG - 1, BIG))
        assert (mounted / "x").read_bytes() == ramp(0, BIG, 7)


@pytest.mark.parametrize("at", [0, 2 * GIB, 4 * GIB, 5 * GIB, 6 * GIB + 12345])
def test_an_object_beyond_5_gib(mnt: Mounted, at: int) -> None:
    """Around the powers of two where something could overflow, and at its end."""
    size = 6 * GIB + 12345
    assert (mnt / "huge").stat().st_size == size
    with open(mnt / "huge", "rb") as file:
        start, stop = max(0, at - 70_000), min(size, at + 70_000)
        assert os.pread(file.fileno(), stop - start, start) == ramp(start, stop, 1)


def test_the_largest_object(mnt: Mounted) -> None:
    """5 TiB, S3's limit: a byte at its end costs no more than one elsewhere."""
    with open(mnt / "giant", "rb") as file:
        assert os.pread(file.fileno(), 10, (5 << 40) - 4) == ramp((5 << 40) - 4, 5 << 40, 2)


# ------------------------------------------------------------------------------------------- small caches


@pytest.fixture(scope="module")
def small(module_bucket: StandInBucket, module_mount: Mount) -> Mounted:
    module_bucket.put_ramp("large", 200 * MIB, 3)
    return module_mount(module_bucket, "--cache-size", "32MiB")


def test_an_object_larger_than_the_cache(small: Mounted, module_bucket: StandInBucket) -> None:
    """Read from end to end: right, each byte fetched once."""
    with open(small / "large", "rb", buffering=0) as file:
        for start in range(0, 200 * MIB, MIB):
            assert file.read(MIB) == ramp(start, start + MIB, 3)
    assert sum(record.body_bytes for record in module_bucket.log("GET", "large")) <= 1.02 * 200 * MIB


def test_random_reads_of_an_object_larger_than_the_cache(small: Mounted) -> None:
    """By several threads at once, all over it."""
    with open(small / "large", "rb") as file, ThreadPoolExecutor(8) as threads:

        def read(number: int) -> None:
            random = Random(number)
            for _ in range(15):
                start = random.randrange(199 * MIB)
                stop = start + random.randrange(1, MIB)
                assert os.pread(file.fileno(), stop - start, start) == ramp(start, stop, 3)

        list(threads.map(read, range(8)))


def test_more_readers_than_the_cache_has_room_for(small: Mounted, module_bucket: StandInBucket) -> None:
    """Forty open files, read in turns, a MiB each: all of them go on."""
    for number in range(40):
        module_bucket.put_ramp(f"many/{number}", 3 * MIB, number)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(small / f"many/{number}", "rb", buffering=0)) for number in range(40)]
        for start in range(0, 3 * MIB, MIB):
            for number, file in enumerate(files):
                assert file.read(MIB) == ramp(start, start + MIB, number)
