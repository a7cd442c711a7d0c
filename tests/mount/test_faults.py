"""Trouble between the mount and S3: right bytes or the right errno, in bounded time, and the mount serves on.

Every test breaks something in the stand-in (see `tests.s3stub.knobs`), reads through the kernel, and compares each
byte. Time-outs are short, so that the bounds are too; none of them decides a test but as the limit of patience.
"""

from __future__ import annotations

import errno
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from s3prefetchfs.core.extent import CHUNK_BYTES
from tests.mount.conftest import Mount
from tests.mount.mounted import Mounted, eventually
from tests.mount.trouble import MIB, errno_of, read
from tests.s3stub import ramp
from tests.servers import StandInBucket

SIZE = 6 * MIB + 12_345
STALL_S = 1.0
RETRY_S = 8.0

_seeds = itertools.count(100)


@pytest.fixture(scope="module")
def mounted(module_bucket: StandInBucket, module_mount: Mount) -> Mounted:
    """A mount with short time-outs; it believes names for ever, so that data faults meet data requests only."""
    timeouts = ["--stall-timeout", f"{STALL_S}s", "--retry-timeout", f"{RETRY_S}s", "--metadata-ttl", "indefinite"]
    return module_mount(module_bucket, "--workers", "2", *timeouts)


@pytest.fixture
def fresh(module_bucket: StandInBucket) -> Callable[..., tuple[str, int]]:
    """Make an object nobody has read: its key and the seed of its bytes."""

    def make(size: int = SIZE) -> tuple[str, int]:
        seed = next(_seeds)
        module_bucket.put_ramp(f"object-{seed}", size, seed)
        return f"object-{seed}", seed

    return make


# ----------------------------------------------------------------------------------------------- faults that pass


@pytest.mark.parametrize(
    "fault",
    [
        {"reset_before": True, "first": 3},
        {"reset_after": 300_000, "first": 4},
        {"short_body": 1000, "first": 4},
        {"chunked_short": 1000, "first": 4},
        {"lie_len": 500, "first": 3},
        {"stall_after": 200_000, "first": 2},
        {"no_first_byte": True, "first": 2},
        {"status": 500, "first": 4},
        {"status": 503, "code": "SlowDown", "first": 6},
        {"status": 503, "code": "SlowDown", "probability": 0.5},
        {"deny": True, "first": 1},
        {"ignore_range": True},
        {"etag": "weak"},
        {"etag": "unquoted"},
    ],
    ids=lambda fault: "-".join(f"{name}" for name in fault),
)
def test_a_fault_that_passes_is_not_seen(
    mounted: Mounted, module_bucket: StandInBucket, fresh: Callable[..., tuple[str, int]], fault: dict[str, Any]
) -> None:
    """Resets, truncation, stalls, lost answers, 5xx, throttling and odd answers give the right bytes all the same."""
    key, seed = fresh()
    module_bucket.configure(faults=[{"verb": "GET", **fault}])
    assert read(mounted / key) == ramp(0, SIZE, seed)


def test_a_broken_body_is_resumed_from_the_byte_reached(
    mounted: Mounted, module_bucket: StandInBucket, fresh: Callable[..., tuple[str, int]]
) -> None:
    """After a reset in mid-body the next GET begins where the bytes ended, not where the broken one began."""
    key, seed = fresh()
    module_bucket.configure(faults=[{"verb": "GET", "key": key, "reset_after": 400_000, "first": 1}])
    assert read(mounted / key) == ramp(0, SIZE, seed)
    gets = module_bucket.log("GET", key)
    broken = next(record for record in gets if record.fault)
    assert broken.range is not None
    resumed = [record.range[0] for record in gets if record.range and record.range[0] > broken.range[0]]
    assert any(0 < start - broken.range[0] <= 400_000 for start in resumed)
    assert sum(record.body_bytes for record in gets) <= SIZE + 2 * CHUNK_BYTES


def test_a_slow_link_is_not_a_dead_one(
    mounted: Mounted, module_bucket: StandInBucket, fresh: Callable[..., tuple[str, int]]
) -> None:
    """A connection of 200 KB/s makes progress and is not given up and started again."""
    key, seed = fresh(300_000)
    module_bucket.configure(faults=[{"verb": "GET", "drip": 200_000}])
    assert read(mounted / key) == ramp(0, 300_000, seed)
    assert len(module_bucket.log("GET", key)) <= 2


def test_connections_refused_for_a_while(
    mounted: Mounted, module_bucket: StandInBucket, fresh: Callable[..., tuple[str, int]]
) -> None:
    """While the endpoint is down, cached bytes are served; what is not cached comes when it is back."""
    cached, cached_seed = fresh()
    assert read(mounted / cached) == ramp(0, SIZE, cached_seed)
    key, seed = fresh()
    (mounted / key).stat()
    module_bucket.configure(refuse=3)
    fd = os.open(mounted / cached, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    assert os.pread(fd, SIZE, 0) == ramp(0, SIZE, cached_seed)
    os.close(fd)
    assert read(mounted / key) == ramp(0, SIZE, seed)


# ----------------------------------------------------------------------------------------------- faults that stay


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ({"deny": True}, errno.EACCES),
        ({"archived": True}, errno.EIO),
        ({"status": 500}, errno.EIO),
        ({"no_first_byte": True}, errno.EIO),
        ({"stall_after": 0}, errno.EIO),
        ({"reset_before": True}, errno.EIO),
        ({"range_200": True, "range_start": CHUNK_BYTES * 8}, errno.EIO),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_fault_that_stays_is_an_error_in_time(
    mounted: Mounted,
    module_bucket: StandInBucket,
    fresh: Callable[..., tuple[str, int]],
    fault: dict[str, Any],
    expected: int,
) -> None:
    """What cannot be cured gives its errno within the retry timeout, spares other files, and is not for ever."""
    key, seed = fresh()
    other, other_seed = fresh()
    module_bucket.configure(faults=[{"verb": "GET", "key": key, **fault}])
    fd = os.open(mounted / key, os.O_RDONLY)
    at = 8 * CHUNK_BYTES
    began_s = time.monotonic()
    assert errno_of(lambda: os.pread(fd, 4096, at)) == expected
    assert time.monotonic() - began_s < RETRY_S + 30
    assert read(mounted / other) == ramp(0, SIZE, other_seed)
    module_bucket.configure(faults=[])
    eventually(lambda: errno_of(lambda: os.pread(fd, 4096, at)), lambda number: number == 0)
    assert os.pread(fd, 4096, at) == ramp(at, at + 4096, seed)
    os.close(fd)


def test_an_archived_object_is_asked_for_once(mounted: Mounted, module_bucket: StandInBucket) -> None:
    """Reading an archived object is EIO after a single GET, and the log names key and storage class."""
    module_bucket.put_object("frozen", b"x" * 100_000, storage_class="GLACIER")
    assert errno_of(lambda: read(mounted / "frozen")) == errno.EIO
    assert len(module_bucket.log("GET", "frozen")) == 1
    assert "frozen" in mounted.log()
    assert "GLACIER" in mounted.log()


@pytest.mark.parametrize("knob", ["list_repeat_token", "list_truncated_no_token"])
def test_a_listing_that_goes_in_circles_is_an_error(bucket: StandInBucket, mount: Mount, knob: str) -> None:
    """A repeated or missing continuation token is EIO, never a loop and never half a directory taken for all."""
    for number in range(25):
        bucket.put_ramp(f"d/{number}", 10)
    mounted = mount(bucket, "--workers", "1")
    bucket.configure(page_size=10, **{knob: True})
    assert errno_of(lambda: os.listdir(mounted / "d")) == errno.EIO
    assert len(bucket.directory_lists("d/")) <= 5
    bucket.configure(page_size=10, **{knob: False})
    assert len(os.listdir(mounted / "d")) == 25


def test_stalled_readers_do_not_block_others(mount: Mount, bucket: StandInBucket) -> None:
    """With a hundred files stalled in mid-read, listing, stat and another file still answer."""
    for number in range(100):
        bucket.put_ramp(f"stalled/{number:03d}", MIB, seed=number)
    bucket.put_ramp("free/file", 50_000, seed=7)
    mounted = mount(bucket, "--workers", "1", "--stall-timeout", "3s", "--retry-timeout", "6s")
    os.listdir(mounted / "stalled")
    bucket.configure(faults=[{"verb": "GET", "key": "stalled/*", "stall_after": 1000}])
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", "import sys\nopen(sys.argv[1], 'rb').read()", mounted / f"stalled/{number:03d}"],
            stderr=subprocess.DEVNULL,
        )
        for number in range(20)
    ]
    threads = [
        threading.Thread(target=errno_of, args=(lambda number=number: read(mounted / f"stalled/{number:03d}"),))
        for number in range(20, 100)
    ]
    for thread in threads:
        thread.start()
    try:
        eventually(lambda: mounted.status()["reads"]["waiting"], lambda waiting: waiting >= 50)
        assert os.listdir(mounted / "free") == ["file"]
        assert (mounted / "free/file").stat().st_size == 50_000
    finally:
        bucket.configure(faults=[])
        for reader in readers:
            reader.kill()
            reader.wait()
        for thread in threads:
            thread.join()
    assert read(mounted / "free/file") == ramp(0, 50_000, seed=7)


# ----------------------------------------------------------------------------------------------- processes


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_worker_costs_time_only(
    mounted: Mounted, module_bucket: StandInBucket, fresh: Callable[..., tuple[str, int]], number: signal.Signals
) -> None:
    """A worker killed or hung in mid-read is replaced, and the reader gets all of its bytes."""
    size = 30 * MIB
    key, seed = fresh(size)
    restarts = mounted.status()["workers"]["restarts"]
    module_bucket.configure(aggregate_rate=20e6)
    with (mounted / key).open("rb", buffering=0) as file:
        first = file.read(MIB)
        for pid in mounted.workers():
            os.kill(pid, number)
        module_bucket.configure(aggregate_rate=0)
        rest = b"".join(iter(lambda: file.read(MIB), b""))
    assert first + rest == ramp(0, size, seed)
    assert mounted.status()["workers"]["restarts"] >= restarts + 2


def test_killed_readers_leave_the_mount_serving(
    mounted: Mounted, module_bucket: StandInBucket, fresh: Callable[..., tuple[str, int]]
) -> None:
    """Readers killed with -9 while they wait end, and neither the session nor other readers notice."""
    key, seed = fresh(20 * MIB)
    other, other_seed = fresh()
    module_bucket.configure(faults=[{"verb": "GET", "key": key, "drip": 500_000}])
    script = "import os, sys\nfd = os.open(sys.argv[1], os.O_RDONLY)\nwhile os.read(fd, 1 << 20): pass"
    for _ in range(10):
        reader = subprocess.Popen([sys.executable, "-c", script, mounted / key])
        eventually(lambda: mounted.status()["reads"]["waiting"])
        reader.kill()
        reader.wait(RETRY_S + 30)
    module_bucket.configure(faults=[])
    assert read(mounted / other) == ramp(0, SIZE, other_seed)
    assert read(mounted / key) == ramp(0, 20 * MIB, seed)


def test_twenty_random_kills_lose_nothing(bucket: StandInBucket, mount: Mount) -> None:
    """The daemon killed with -9 at random moments, 20 times: each new mount over the dead one reads right bytes."""
    objects = {f"o{number}": (3 * MIB + number * 1111, number) for number in range(6)}
    for key, (size, seed) in objects.items():
        bucket.put_ramp(key, size, seed)
    bucket.configure(rate_per_connection=8e6)
    mounted = mount(bucket, "--workers", "1", "--cache-size", "16MiB")
    keys = list(objects)
    for attempt in range(20):
        failure: list[str] = []

        def reads(mounted: Mounted = mounted, attempt: int = attempt, failure: list[str] = failure) -> None:
            for key in keys[attempt % 6 :] + keys[: attempt % 6]:
                size, seed = objects[key]
                try:
                    found = read(mounted / key)
                except OSError as error:
                    if error.errno not in (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO):
                        failure.append(str(error))
                    return
                if found != ramp(0, size, seed):
                    failure.append(f"wrong bytes in {key}")

        reader = threading.Thread(target=reads)
        reader.start()
        time.sleep(0.05 + 0.04 * attempt)  # the moment is the test's subject, not a wait for something
        mounted.process.kill()
        mounted.process.wait()
        mounted.closed = True
        reader.join(60)
        assert not reader.is_alive(), "a reader hangs on a dead mount"
        assert failure == []
        mounted = mount(
            bucket, "--workers", "1", "--cache-size", "16MiB", mountpoint=mounted.path, cache_dir=mounted.cache_dir
        )
    bucket.configure(rate_per_connection=0)
    for key, (size, seed) in objects.items():
        assert read(mounted / key) == ramp(0, size, seed)


# ----------------------------------------------------------------------------------------------- the cache disk


def test_a_full_cache_disk_is_not_the_readers_trouble(bucket: StandInBucket, mount: Mount, tmp_path: Path) -> None:
    """With --cache-size larger than its disk, and a disk that fills up meanwhile, readers get right bytes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", disk], check=True)
    try:
        for number in range(10):
            bucket.put_ramp(f"{number}", 4 * MIB, seed=number)
        mounted = mount(bucket, "--workers", "1", cache_dir=disk / "cache")
        mounted.expected.append("cache index")
        for number in range(10):
            assert read(mounted / f"{number}") == ramp(0, 4 * MIB, seed=number)
            if number == 5:
                with suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
                    filler.write(bytes(24 * MIB))  # as much of it as there is room for
        mounted.close()
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
