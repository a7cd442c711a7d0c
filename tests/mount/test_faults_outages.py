"""The endpoint is away, overloaded, or says no: for a while, and for good."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
import time

import pytest

from tests.mount.conftest import Mount
from tests.mount.mounted import eventually
from tests.mount.trouble import MIB, Reader, digest_of, errno_of, read, within
from tests.s3stub import most_at_once, ramp
from tests.servers import StandInBucket

SIZE = 3 * MIB
STALL_S, RETRY_S = 0.5, 1.0
TIMES = ("--workers", "1", "--stall-timeout", f"{STALL_S}s", "--retry-timeout", f"{RETRY_S}s")


# ----------------------------------------------------------------------------------------------- nobody there


@pytest.mark.parametrize("outage", [{"refuse": 600}, {"blackhole": True}], ids=["refused", "blackhole"])
def test_an_outage(bucket: StandInBucket, mount: Mount, outage: dict[str, float]) -> None:
    """What is cached is served; all else is EIO in bounded time, never absence; after, all is well."""
    for number in range(4):
        bucket.put_ramp(f"d/{number}", SIZE, number)
    bucket.put_ramp("e/unseen", SIZE, 9)
    mounted = mount(bucket, *TIMES)
    os.listdir(mounted / "d")
    assert read(mounted / "d/0") == ramp(0, SIZE)
    bucket.configure(**outage)
    with within(5):
        assert read(mounted / "d/0") == ramp(0, SIZE)
    # A request may start right before the time is over, and then has its own time-outs.
    bound_s = RETRY_S + 4 * STALL_S + 20
    with within(bound_s):
        assert errno_of(lambda: read(mounted / "d/1")) == errno.EIO
    with within(bound_s):
        assert errno_of(lambda: os.stat(mounted / "e/unseen")) == errno.EIO
    with within(bound_s):
        assert errno_of(lambda: os.listdir(mounted.path)) == errno.EIO
    bucket.configure(refuse=0, blackhole=False)
    assert sorted(os.listdir(mounted.path)) == ["d", "e"]
    assert read(mounted / "e/unseen") == ramp(0, SIZE, 9)
    assert eventually(lambda: errno_of(lambda: read(mounted / "d/1")), lambda number: number == 0) == 0
    for number in range(4):
        assert read(mounted / f"d/{number}") == ramp(0, SIZE, number)


def test_a_reader_sleeps_through_a_short_outage(bucket: StandInBucket, mount: Mount) -> None:
    """Connections cut and refused for a second in the middle of reads, twice: the readers notice nothing."""
    for number in range(8):
        bucket.put_ramp(str(number), 4 * MIB, number)
    mounted = mount(bucket, "--workers", "2", "--stall-timeout", "1s", "--retry-timeout", "30s")
    os.listdir(mounted.path)
    bucket.configure(aggregate_rate=12e6)
    readers = [Reader(mounted / str(number)) for number in range(8)]
    try:
        for _ in range(2):
            fetched = mounted.status()["fetch"]["bytes"]
            eventually(lambda: mounted.status()["fetch"]["bytes"], lambda now, was=fetched: now > was + 4 * MIB)
            bucket.configure(refuse=1)
            eventually(lambda: mounted.status()["fetch"]["backing_off"])
        bucket.configure(aggregate_rate=0)
        assert [reader.result() for reader in readers] == [digest_of(4 * MIB, number) for number in range(8)]
    finally:
        for reader in readers:
            reader.__exit__()


# ----------------------------------------------------------------------------------------------- too much asked


@pytest.mark.slow
def test_a_storm(bucket: StandInBucket, mount: Mount) -> None:
    """503 and 500 for four of five requests, for 30 s: find and readers get all there is, and speed returns after."""
    for_s = 30
    for number in range(60):
        bucket.put_ramp(f"d/{number % 3}/{number}", SIZE, number)
    mounted = mount(bucket, "--workers", "2", "--metadata-ttl", "0", "--cache-size", "64MiB")
    paths = sorted(os.fspath(path) for path in mounted.path.rglob("*") if path.is_file())
    bucket.clear_log()
    bucket.configure(
        faults=[
            {"status": 503, "probability": 0.6, "for_s": for_s},
            {"status": 500, "probability": 0.5, "for_s": for_s},
        ]
    )
    ends_s = time.monotonic() + for_s
    walks: list[tuple[list[str], str]] = []

    def walk() -> None:
        while time.monotonic() < ends_s or not walks:
            found = subprocess.run(["find", mounted.path, "-type", "f"], capture_output=True, text=True, check=False)
            walks.append((sorted(found.stdout.splitlines()), found.stderr))

    walker = threading.Thread(target=walk)
    walker.start()
    number = 0
    while time.monotonic() < ends_s or number < 3:
        assert read(mounted / f"d/{number % 3}/{number}") == ramp(0, SIZE, number)
        number = (number + 1) % 60
    walker.join()
    assert walks == [(paths, "")] * len(walks)
    during = [record for record in bucket.log() if record.start_s < ends_s]
    # One reader, its read-ahead and one find: without any pause it would be thousands.
    assert len(during) < 40 * for_s + 100
    bucket.configure(faults=[], latency_ms=20)
    bucket.put_ramp("big", 100 * MIB)

    def parallel() -> int:
        bucket.clear_log()
        read(mounted / "big")
        return most_at_once(bucket.log("GET", "big"))

    assert eventually(parallel, lambda count: count >= 4)


def test_retries_are_spaced_more_and_more(bucket: StandInBucket, mount: Mount) -> None:
    """An extent that is refused again and again is asked for a few times; were the pauses all alike, it were 80."""
    bucket.put_ramp("x", 100_000)
    mounted = mount(bucket, "--workers", "1", "--retry-timeout", "4s")
    bucket.configure(faults=[{"verb": "GET", "status": 503}])
    assert errno_of(lambda: read(mounted / "x")) == errno.EIO
    assert 3 <= len(bucket.log("GET", "x")) <= 25


# ----------------------------------------------------------------------------------------------- no


def test_a_denied_key(bucket: StandInBucket, mount: Mount) -> None:
    """403 for the GET of one key: EACCES when read, few requests and one line in the log a time; others are fine."""
    for number in range(20):
        bucket.put_ramp(f"d/{number}", SIZE, number)
    mounted = mount(bucket, *TIMES)
    bucket.configure(faults=[{"verb": "GET", "key": "d/7", "deny": True}])
    assert len(os.listdir(mounted / "d")) == 20
    for number in range(20):
        if number == 7:
            for _ in range(5):
                assert errno_of(lambda: read(mounted / "d/7")) == errno.EACCES
        else:
            assert read(mounted / f"d/{number}") == ramp(0, SIZE, number)
    assert len(bucket.log("GET", "d/7")) <= 5 * 4
    assert 1 <= len([line for line in mounted.log().splitlines() if "d/7" in line and "WARN" in line]) <= 5
    bucket.configure(faults=[])
    eventually(lambda: errno_of(lambda: read(mounted / "d/7")), lambda number: number == 0)
    assert read(mounted / "d/7") == ramp(0, SIZE, 7)


def test_sporadic_403(bucket: StandInBucket, mount: Mount) -> None:
    """A store that says forbidden when it means slow down: the odd 403 among successes is not seen."""
    bucket.put_ramp("x", 100 * MIB)
    mounted = mount(bucket, *TIMES)
    (mounted / "x").stat()
    with (mounted / "x").open("rb", buffering=0) as file:
        for at in range(MIB, 100 * MIB, 9 * MIB):
            bucket.configure(faults=[{"verb": "GET", "first": 1, "deny": True}])
            assert os.pread(file.fileno(), 4096, at) == ramp(at, at + 4096)
    assert len([record for record in bucket.log("GET") if record.status == 403]) >= 5


def test_credentials_that_stay_refused(bucket: StandInBucket, mount: Mount) -> None:
    """EACCES in bounded time, not absence; and everything is there when they are accepted again."""
    bucket.put_ramp("d/x", SIZE)
    mounted = mount(bucket, *TIMES, "--metadata-ttl", "0")
    bucket.configure(require_access_key="another")
    for action in (lambda: os.listdir(mounted / "d"), lambda: os.stat(mounted / "d/x"), lambda: os.stat(mounted / "z")):
        with within(RETRY_S + 4 * STALL_S + 20):
            assert errno_of(action) == errno.EACCES
    bucket.configure(require_access_key="")
    assert os.listdir(mounted / "d") == ["x"]
    assert read(mounted / "d/x") == ramp(0, SIZE)


def test_listing_is_denied_somewhere(bucket: StandInBucket, mount: Mount) -> None:
    """403 for a List: EACCES, never an empty directory or none; a file below it is still found, by HEAD."""
    bucket.put_ramp("closed/x", SIZE, 1)
    bucket.put_ramp("open/y", SIZE, 2)
    mounted = mount(bucket, *TIMES)
    bucket.configure(faults=[{"verb": "LIST", "key": "closed/*", "deny": True}])
    assert errno_of(lambda: os.listdir(mounted / "closed")) == errno.EACCES
    assert read(mounted / "closed/x") == ramp(0, SIZE, 1)
    assert os.listdir(mounted / "open") == ["y"]


def test_a_denied_listing_behind_another_name(bucket: StandInBucket, mount: Mount) -> None:
    """Where List is denied below a name, a key that sorts before what may be there hides it: EACCES, not absence."""
    for key in ("closed-off", "closed/x", "file", "file/hidden", "later0"):
        bucket.put_ramp(key, 1000)
    mounted = mount(bucket, *TIMES)
    faults = [{"verb": "LIST", "key": f"{name}/*", "deny": True} for name in ("closed", "file", "later", "none")]
    bucket.configure(faults=faults)
    assert errno_of(lambda: os.stat(mounted / "closed")) == errno.EACCES
    assert errno_of(lambda: os.stat(mounted / "file")) == 0
    assert errno_of(lambda: os.stat(mounted / "later")) == errno.ENOENT
    assert errno_of(lambda: os.stat(mounted / "none")) == errno.ENOENT
    assert len(bucket.log("LIST")) <= 2 * 4 + 2
    os.listdir(mounted.path)
    assert read(mounted / "closed/x") == ramp(0, 1000)
