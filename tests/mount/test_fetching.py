"""What reads fetch: whom a GET serves, how far ahead, and how often; by the stand-in's log."""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest

from s3prefetchfs.core.extent import CHUNK_BYTES
from tests.mount.conftest import Mount
from tests.mount.mounted import PATIENCE_S, Mounted, eventually
from tests.s3stub import Record, most_at_once, ramp
from tests.servers import StandInBucket

MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture(scope="module")
def mnt(module_bucket: StandInBucket, module_mount: Mount) -> Mounted:
    module_bucket.put("there", b"x")
    return module_mount(module_bucket, "--metadata-ttl", "0")


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    """A key of the test's own."""
    return str(request.node.name)


def gets(bucket: StandInBucket, key: str) -> list[Record]:
    """The GETs of a key, once all have ended."""
    return eventually(lambda: bucket.log("GET", key), lambda found: all(get.end_s is not None for get in found))


def fetched_chunks(bucket: StandInBucket, key: str) -> Counter[int]:
    """How often each chunk of a key was asked for."""
    ranges = [get.range for get in gets(bucket, key)]
    return Counter(
        n for start, stop in filter(None, ranges) for n in range(start // CHUNK_BYTES, -(-stop // CHUNK_BYTES))
    )


def test_every_get_names_its_version(mnt: Mounted, module_bucket: StandInBucket, key: str) -> None:
    """If-Match with the ETag is on every ranged GET: a server that demands it serves the whole file."""
    etag = module_bucket.put_ramp(key, 20 * MIB)
    (mnt / key).stat()
    module_bucket.configure(faults=[{"verb": "GET", "require_header": f'if-match:"{etag}"'}])
    assert (mnt / key).read_bytes() == ramp(0, 20 * MIB)
    assert all(get.range is not None and get.status == 206 for get in gets(module_bucket, key))


def test_an_empty_file_is_not_fetched(mnt: Mounted, module_bucket: StandInBucket, key: str) -> None:
    """Nor is opening a file a request for its bytes."""
    module_bucket.put(key, b"")
    assert (mnt / key).read_bytes() == b""
    module_bucket.put_ramp(f"{key}-full", MIB)
    os.close(os.open(mnt / f"{key}-full", os.O_RDONLY))
    assert not module_bucket.log("GET")


def test_readers_of_a_chunk_share_one_get(mnt: Mounted, module_bucket: StandInBucket, key: str) -> None:
    """Sixteen at once that miss the same chunk, through handles of their own, are served by one GET."""
    module_bucket.put_ramp(key, GIB)
    module_bucket.configure(latency_ms=200)
    at = 500 * MIB + 1000

    def read(_: int) -> bytes:
        fd = os.open(mnt / key, os.O_RDONLY | os.O_DIRECT)  # past the page cache, which would share by itself
        try:
            with mmap.mmap(-1, 4096) as buffer:
                os.preadv(fd, [buffer], at // 4096 * 4096)
                return buffer[:]
        finally:
            os.close(fd)

    with ThreadPoolExecutor(16) as threads:
        assert set(threads.map(read, range(16))) == {ramp(at // 4096 * 4096, at // 4096 * 4096 + 4096)}
    assert len(gets(module_bucket, key)) == 1


def test_a_reader_does_not_wait_for_the_end_of_a_get(mnt: Mounted, module_bucket: StandInBucket, key: str) -> None:
    """It is answered when its chunk has landed, though the GET that brings it stalls further on."""
    module_bucket.put_ramp(key, GIB)
    module_bucket.configure(faults=[{"verb": "GET", "key": key, "first": 1, "stall_after": CHUNK_BYTES + 1000}])
    with open(mnt / key, "rb", buffering=0) as file:
        assert file.read(4096) == ramp(0, 4096)
        (get,) = module_bucket.log("GET", key)
        assert get.range is not None
        assert get.range[1] > CHUNK_BYTES + 1000
        assert get.end_s is None


def test_small_random_reads(mnt: Mounted, module_bucket: StandInBucket, key: str) -> None:
    """A read of 4 KiB fetches the chunk it is in, and nothing ahead."""
    module_bucket.put_ramp(key, GIB)
    chunks = Random(1).sample(range(2, GIB // CHUNK_BYTES - 1, 2), 100)
    with open(mnt / key, "rb", buffering=0) as file:
        for chunk in chunks:
            at = chunk * CHUNK_BYTES + 4096
            assert os.pread(file.fileno(), 4096, at) == ramp(at, at + 4096)
    assert sum(get.body_bytes for get in gets(module_bucket, key)) <= 1.1 * 100 * CHUNK_BYTES


@pytest.mark.parametrize(("piece_bytes", "excess"), [(256 << 10, 1.0), (MIB, 1.0), (2 * MIB, 1.5), (8 * MIB, 1.2)])
def test_large_random_reads(
    mnt: Mounted, module_bucket: StandInBucket, key: str, piece_bytes: int, excess: float
) -> None:
    """Pieces at random places, as of a record file with an index: once known, fetched as what they are.

    The excess over that is the kernel's own: beside a reader of more than a MiB it reads a MiB ahead.
    """
    module_bucket.put_ramp(key, GIB)
    with open(mnt / key, "rb", buffering=0) as file:
        for count, place in enumerate(Random(2).sample(range(1, 50), 12)):
            if count == 2:
                gets(module_bucket, key)
                module_bucket.clear_log()
            at = place * 20 * MIB
            assert os.pread(file.fileno(), piece_bytes, at) == ramp(at, at + piece_bytes)
    assert sum(get.body_bytes for get in gets(module_bucket, key)) <= excess * 10 * piece_bytes


def test_a_sequential_reader_is_read_ahead_of(mnt: Mounted, module_bucket: StandInBucket, key: str) -> None:
    """Within its first 8 MiB many GETs are under way at once, and at the end each chunk was fetched once."""
    module_bucket.put_ramp(key, 64 * MIB)
    module_bucket.configure(latency_ms=100)
    with open(mnt / key, "rb", buffering=0) as file:
        for start in range(0, 8 * MIB, MIB):
            assert file.read(MIB) == ramp(start, start + MIB)
        begun = module_bucket.log("GET", key)
        assert max(get.range[1] for get in begun if get.range) >= 24 * MIB
        for start in range(8 * MIB, 64 * MIB, MIB):
            assert file.read(MIB) == ramp(start, start + MIB)
    assert most_at_once(gets(module_bucket, key)) >= 4
    assert fetched_chunks(module_bucket, key) == Counter(range(64 * MIB // CHUNK_BYTES))


def test_a_reader_of_headers_costs_little(mnt: Mounted, module_bucket: StandInBucket, key: str) -> None:
    """The first 4 KiB of each of 20 large files: little more than a MiB each."""
    for number in range(20):
        module_bucket.put_ramp(f"{key}/{number}", GIB, number)
    for number in range(20):
        with open(mnt / f"{key}/{number}", "rb", buffering=0) as file:
            assert file.read(4096) == ramp(0, 4096, number)
    done = [get for number in range(20) for get in gets(module_bucket, f"{key}/{number}")]
    assert sum(get.body_bytes for get in done) <= 1.2 * 20 * MIB


def test_interleaved_sequential_readers(mnt: Mounted, module_bucket: StandInBucket, key: str) -> None:
    """Sixteen files read in turns, 256 KiB at a time: each is a stream of its own, and each chunk fetched once."""
    size = 12 * MIB
    for number in range(16):
        module_bucket.put_ramp(f"{key}/{number}", size, number)
    module_bucket.configure(latency_ms=20)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(mnt / f"{key}/{number}", "rb", buffering=0)) for number in range(16)]
        for start in range(0, size, MIB // 4):
            for number, file in enumerate(files):
                assert file.read(MIB // 4) == ramp(start, start + MIB // 4, number)
    for number in range(16):
        assert fetched_chunks(module_bucket, f"{key}/{number}") == Counter(range(size // CHUNK_BYTES))
        assert len(gets(module_bucket, f"{key}/{number}")) <= 16


def test_interleaved_streams_of_one_file(mnt: Mounted, module_bucket: StandInBucket, key: str) -> None:
    """Eight handles that read eight parts of one file in turns: each chunk fetched once."""
    size = 64 * MIB
    module_bucket.put_ramp(key, size)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(mnt / key, "rb", buffering=0)) for _ in range(8)]
        for part, file in enumerate(files):
            file.seek(part * size // 8)
        for at in range(0, size // 8, MIB // 2):
            for part, file in enumerate(files):
                start = part * size // 8 + at
                assert file.read(MIB // 2) == ramp(start, start + MIB // 2)
    assert max(fetched_chunks(module_bucket, key).values()) == 1


def test_processes_that_read_one_file(mnt: Mounted, module_bucket: StandInBucket, key: str) -> None:
    """Eight processes, each from start to end and none in step: 1.05 times the size at most is fetched."""
    size = 64 * MIB
    module_bucket.put_ramp(key, size)
    module_bucket.configure(latency_ms=20)
    script = """if True:
        import sys, time
        time.sleep(float(sys.argv[2]))
        with open(sys.argv[1], "rb", buffering=0) as file:
            while file.read(1 << 18):
                pass
    """
    readers = [subprocess.Popen([sys.executable, "-c", script, mnt / key, str(n / 10)]) for n in range(8)]
    assert [reader.wait(PATIENCE_S) for reader in readers] == [0] * 8
    assert sum(get.body_bytes for get in gets(module_bucket, key)) <= 1.05 * size


def test_shuffled_reads_of_a_stream(mnt: Mounted, module_bucket: StandInBucket, key: str) -> None:
    """Reads out of order within a MiB, as NFS and thread pools send them, are still one stream."""
    size = 32 * MIB
    module_bucket.put_ramp(key, size)
    module_bucket.configure(latency_ms=20)
    random = Random(3)
    with open(mnt / key, "rb", buffering=0) as file:
        for window in range(0, size, MIB):
            for part in random.sample(range(8), 8):
                at = window + part * MIB // 8
                assert os.pread(file.fileno(), MIB // 8, at) == ramp(at, at + MIB // 8)
    assert max(fetched_chunks(module_bucket, key).values()) == 1
    assert len(gets(module_bucket, key)) <= 40


def test_random_readers_are_served_at_once(mnt: Mounted, module_bucket: StandInBucket, key: str) -> None:
    """Thirty-two scattered reads of one file are as many GETs at the same time, not one after the other."""
    module_bucket.put_ramp(key, GIB)
    fd = os.open(mnt / key, os.O_RDONLY | os.O_DIRECT)
    module_bucket.configure(latency_ms=500)

    def read(number: int) -> None:
        with mmap.mmap(-1, 4096) as buffer:
            os.preadv(fd, [buffer], number * 30 * MIB)
            assert buffer[:] == ramp(number * 30 * MIB, number * 30 * MIB + 4096)

    try:
        with ThreadPoolExecutor(32) as threads:
            list(threads.map(read, range(1, 33)))
    finally:
        os.close(fd)
    assert most_at_once(gets(module_bucket, key)) >= 16


def test_what_was_read_ahead_is_used_later(mnt: Mounted, module_bucket: StandInBucket, key: str) -> None:
    """A file that is closed early and read again goes on from what was fetched."""
    module_bucket.put_ramp(key, 32 * MIB)
    with open(mnt / key, "rb", buffering=0) as file:
        file.read(2 * MIB)
    gets(module_bucket, key)
    assert (mnt / key).read_bytes() == ramp(0, 32 * MIB)
    assert max(fetched_chunks(module_bucket, key).values()) == 1


def test_a_killed_reader(mnt: Mounted, module_bucket: StandInBucket, key: str) -> None:
    """A reader that is killed while it waits is gone at once, and the file can be read when S3 answers."""
    module_bucket.put_ramp(key, MIB)
    module_bucket.configure(faults=[{"verb": "GET", "key": key, "first": 1, "delay_ms": 5000}])
    reader = subprocess.Popen(["cat", mnt / key], stdout=subprocess.DEVNULL)
    eventually(lambda: module_bucket.log("GET", key))
    reader.kill()
    reader.wait(4)
    assert (mnt / key).read_bytes() == ramp(0, MIB)


def test_a_limit_on_connections(bucket: StandInBucket, mount: Mount) -> None:
    """--max-connections bounds the GETs under way, over all workers; few connections serve many GETs."""
    for number in range(8):
        bucket.put_ramp(str(number), 16 * MIB, number)
    mnt = mount(bucket, "--max-connections", "4", "--workers", "2")
    bucket.configure(latency_ms=30)
    before = bucket.server.stub.stats()["connections_accepted"]
    with ThreadPoolExecutor(8) as threads:
        contents = list(threads.map(lambda number: (mnt / str(number)).read_bytes(), range(8)))
    assert contents == [ramp(0, 16 * MIB, number) for number in range(8)]
    done = [get for number in range(8) for get in gets(bucket, str(number))]
    assert 2 <= most_at_once(done) <= 4
    assert bucket.server.stub.stats()["connections_accepted"] - before <= 4 + 2 * 2


def test_a_limit_on_throughput(bucket: StandInBucket, mount: Mount) -> None:
    """--max-throughput is not exceeded."""
    bucket.put_ramp("x", 24 * MIB)
    mnt = mount(bucket, "--max-throughput", "10MiB/s")
    began_s = time.monotonic()
    assert (mnt / "x").read_bytes() == ramp(0, 24 * MIB)
    assert time.monotonic() - began_s > 1.0
