"""The cache on disk: what survives, what it may occupy, and that nothing in it is ever taken for something else."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

from s3prefetchfs.core.extent import CHUNK_BYTES
from tests.mount.conftest import Mount
from tests.mount.mounted import Mounted, eventually
from tests.s3stub import ramp
from tests.servers import StandIn, StandInBucket

MIB = 1 << 20


def disk_bytes(directory: Path) -> int:
    """What a directory occupies, as du counts it; files may go while it is being counted."""
    total = 0
    for top, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(top, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def read(path: Path) -> bytes:
    """All of a file, past the kernel's page cache of it."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        with open(fd, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(fd)


def remounted(mounted: Mounted, bucket: StandInBucket, mount: Mount, *options: str) -> Mounted:
    """The same bucket with the same cache, after a clean unmount; the log of requests is empty."""
    mounted.close()
    bucket.clear_log()
    return mount(bucket, "--workers", "1", *options, cache_dir=mounted.cache_dir)


def object_files(mounted: Mounted) -> list[Path]:
    """The files in the cache that hold bytes of objects."""
    return sorted(path for path in mounted.cache_dir.rglob("objects/**/*") if path.is_file())


def test_a_second_mount_reads_without_a_get(bucket: StandInBucket, mount: Mount) -> None:
    """What was cached is read after unmount and mount without a single GET."""
    for number in range(5):
        bucket.put_ramp(f"d/{number}", 3 * MIB + number, seed=number)
    mounted = mount(bucket, "--workers", "1")
    for number in range(5):
        assert read(mounted / f"d/{number}") == ramp(0, 3 * MIB + number, seed=number)
    again = remounted(mounted, bucket, mount)
    for number in range(5):
        assert read(again / f"d/{number}") == ramp(0, 3 * MIB + number, seed=number)
    assert bucket.log("GET") == []
    assert again.status()["cache"]["complete_objects"] == 5


def test_a_partly_cached_object_fetches_the_rest(bucket: StandInBucket, mount: Mount) -> None:
    """After a remount only the chunks that are missing are fetched."""
    size = 40 * MIB
    bucket.put_ramp("big", size)
    mounted = mount(bucket, "--workers", "1")
    with (mounted / "big").open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for at in (1 * MIB, 20 * MIB, 30 * MIB):
            assert os.pread(file.fileno(), 4096, at) == ramp(at, at + 4096)
    eventually(lambda: mounted.status()["fetch"]["in_flight"], lambda count: count == 0)
    fetched_bytes = mounted.status()["fetch"]["bytes"]
    again = remounted(mounted, bucket, mount)
    assert read(again / "big") == ramp(0, size)
    assert sum(record.body_bytes for record in bucket.log("GET")) == size - fetched_bytes


def test_never_above_its_size(bucket: StandInBucket, mount: Mount) -> None:
    """While three times its size is read, the cache directory never occupies more than --cache-size."""
    limit = 64 * MIB
    count, size = 24, 8 * MIB
    for number in range(count):
        bucket.put_ramp(f"{number}", size, seed=number)
    mounted = mount(bucket, "--workers", "1", "--cache-size", str(limit))
    peaks: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            peaks.append(disk_bytes(mounted.cache_dir))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for number in range(count):
            assert read(mounted / f"{number}") == ramp(0, size, seed=number)
    finally:
        done.set()
        watcher.join()
    assert max(peaks) <= limit
    assert mounted.status()["cache"]["evictions"] > 0


def test_the_least_recently_used_goes_first(bucket: StandInBucket, mount: Mount) -> None:
    """What was read again lately is still cached when something older had to go."""
    size = 8 * MIB
    for name in ("old", "loved", "new1", "new2", "new3", "new4"):
        bucket.put_ramp(name, size)
    mounted = mount(bucket, "--workers", "1", "--cache-size", str(48 * MIB))
    for name in ("old", "loved", "new1", "loved", "new2", "loved", "new3", "loved", "new4"):
        read(mounted / name)
    bucket.clear_log()
    assert read(mounted / "loved") == ramp(0, size)
    assert bucket.log("GET") == []
    assert read(mounted / "old") == ramp(0, size)
    assert bucket.log("GET") != []


def test_what_is_being_read_stays(bucket: StandInBucket, mount: Mount) -> None:
    """An object that is open and read is not evicted by others that stream through a small cache."""
    size = 4 * MIB
    bucket.put_ramp("held", size)
    for number in range(20):
        bucket.put_ramp(f"{number}", 8 * MIB, seed=number)
    mounted = mount(bucket, "--workers", "1", "--cache-size", str(32 * MIB))
    with (mounted / "held").open("rb", buffering=0) as held:
        at = size // 2
        assert os.pread(held.fileno(), MIB // 2, at) == ramp(at, at + MIB // 2)
        for number in range(20):
            read(mounted / f"{number}")
        bucket.clear_log()
        os.posix_fadvise(held.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert os.pread(held.fileno(), CHUNK_BYTES, at) == ramp(at, at + CHUNK_BYTES)
        assert bucket.log("GET", "held") == []


def test_sources_do_not_mix(stand_in: StandIn, bucket: StandInBucket, mount: Mount, tmp_path: Path) -> None:
    """Two buckets and two prefixes with equal names in one cache directory each give their own bytes."""
    other = stand_in.create_bucket(f"{bucket.name}-other")
    bucket.put_object("p/name", b"of the bucket")
    bucket.put_object("q/name", b"of the prefix")
    other.put_object("name", b"of the other!")
    mounts = [
        mount(bucket, "--workers", "1", source=f"{bucket.name}/p", cache_dir=tmp_path / "one"),
        mount(bucket, "--workers", "1", source=f"{bucket.name}/q", cache_dir=tmp_path / "one"),
        mount(other, "--workers", "1", cache_dir=tmp_path / "one"),
    ]
    for _ in range(2):
        assert [read(mounted / "name") for mounted in mounts] == [b"of the bucket", b"of the prefix", b"of the other!"]


def test_a_replaced_object_is_not_read_from_the_cache(bucket: StandInBucket, mount: Mount) -> None:
    """An object that was replaced while nobody had it mounted is fetched anew."""
    bucket.put_ramp("x", 2 * MIB, seed=1)
    mounted = mount(bucket, "--workers", "1")
    assert read(mounted / "x") == ramp(0, 2 * MIB, seed=1)
    mounted.close()
    bucket.put_ramp("x", 2 * MIB, seed=2)
    again = mount(bucket, "--workers", "1", cache_dir=mounted.cache_dir)
    assert read(again / "x") == ramp(0, 2 * MIB, seed=2)


def test_damaged_bytes_are_fetched_again(bucket: StandInBucket, mount: Mount) -> None:
    """Bits that flipped on the disk while it was unmounted never reach a reader, and the cache heals."""
    count, size = 4, 3 * MIB
    for number in range(count):
        bucket.put_ramp(f"{number}", size, seed=number)
    mounted = mount(bucket, "--workers", "1")
    for number in range(count):
        read(mounted / f"{number}")
    mounted.close()
    chance = random.Random(5)
    files = object_files(mounted)
    assert len(files) == count
    for path in files:
        with path.open("r+b") as file:
            at = chance.randrange(size)
            file.seek(at)
            flipped = file.read(1)[0] ^ 0x10
            file.seek(at)
            file.write(bytes((flipped,)))
    again = remounted(mounted, bucket, mount)
    for number in range(count):
        assert read(again / f"{number}") == ramp(0, size, seed=number)
    assert again.status()["cache"]["corrupt_chunks"] == count
    assert sum(record.body_bytes for record in bucket.log("GET")) == count * CHUNK_BYTES
    healed = remounted(again, bucket, mount)
    for number in range(count):
        assert read(healed / f"{number}") == ramp(0, size, seed=number)
    assert bucket.log("GET") == []


def test_a_lost_or_garbled_index_costs_only_the_cache(bucket: StandInBucket, mount: Mount) -> None:
    """Without its index, or with garbage in its place, a mount works and fetches again."""
    bucket.put_ramp("x", 2 * MIB)
    mounted = mount(bucket, "--workers", "1")
    read(mounted / "x")
    mounted.close()
    (index,) = mounted.cache_dir.rglob("index.sqlite")
    index.write_bytes(os.urandom(50_000))
    again = mount(bucket, "--workers", "1", cache_dir=mounted.cache_dir)
    again.expected.append("index")
    assert read(again / "x") == ramp(0, 2 * MIB)
    again.close()
    for path in index.parent.glob("index.sqlite*"):
        path.unlink()
    third = mount(bucket, "--workers", "1", cache_dir=mounted.cache_dir)
    assert read(third / "x") == ramp(0, 2 * MIB)


def test_bytes_lost_under_a_running_mount_are_fetched_again(bucket: StandInBucket, mount: Mount) -> None:
    """A cache file that is cut short, or deleted, while mounted costs a fetch, and no reader sees it."""
    for name in ("cut", "gone"):
        bucket.put_ramp(name, 3 * MIB)
    mounted = mount(bucket, "--workers", "1")
    mounted.expected.append("the cache lost bytes")
    for name in ("cut", "gone"):
        assert read(mounted / name) == ramp(0, 3 * MIB)
    cut, gone = object_files(mounted)
    os.truncate(cut, MIB)
    os.truncate(gone, 0)
    gone.unlink()
    for name in ("cut", "gone"):
        assert read(mounted / name) == ramp(0, 3 * MIB)
