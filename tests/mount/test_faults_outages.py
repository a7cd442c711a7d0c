"""The endpoint is away, overloaded, or says no: for a while, and for good."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mount.conftest import Mount
from tests.mount.mounted import Mounted, eventually
from tests.mount.trouble import MIB, READER_S, Reader, digest_of, errno_of, read, within
from tests.s3stub import Record, ramp
from tests.servers import ACCESS_KEY, SECRET_KEY, StandInBucket

SIZE = 3 * MIB
STALL_S, RETRY_S = 1.0, 4.0
TIMES = ("--workers", "1", "--stall-timeout", f"{STALL_S}s", "--retry-timeout", f"{RETRY_S}s")


def most_at_once(records: list[Record]) -> int:
    """How many requests were under way at the same time, at most."""
    moments = [(record.start_s, 1) for record in records] + [(record.end_s or 0.0, -1) for record in records]
    running = most = 0
    for _, change in sorted(moments):
        running += change
        most = max(most, running)
    return most


# ----------------------------------------------------------------------------------------------- nobody there


def test_mounting_waits_for_the_endpoint(bucket: StandInBucket, mount: Mount) -> None:
    """An endpoint that refuses connections at the start is tried again until --mount-timeout."""
    bucket.put_ramp("x", SIZE)
    bucket.configure(refuse=3)
    mounted = mount(bucket, *TIMES, "--mount-timeout", "60s")
    assert read(mounted / "x") == ramp(0, SIZE)


@pytest.mark.parametrize("outage", [{"refuse": 600}, {"blackhole": True}], ids=["refused", "blackhole"])
def test_an_outage(bucket: StandInBucket, mount: Mount, outage: dict[str, float]) -> None:
    """What is cached is served; all else is EIO in bounded time, never absence; all is well after, without a remount."""
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
    """Connections cut and refused for two seconds in the middle of reads, three times: the readers notice nothing."""
    for number in range(8):
        bucket.put_ramp(str(number), 8 * MIB, number)
    mounted = mount(bucket, "--workers", "2", "--stall-timeout", "1s", "--retry-timeout", "30s")
    os.listdir(mounted.path)
    bucket.configure(aggregate_rate=12e6)
    readers = [Reader(mounted / str(number)) for number in range(8)]
    try:
        for _ in range(3):
            fetched = mounted.status()["fetch"]["bytes"]
            eventually(lambda: mounted.status()["fetch"]["bytes"], lambda now, was=fetched: now > was + 4 * MIB)
            bucket.configure(refuse=2)
            eventually(lambda: mounted.status()["fetch"]["backing_off"])
        bucket.configure(aggregate_rate=0)
        assert [reader.result() for reader in readers] == [digest_of(8 * MIB, number) for number in range(8)]
    finally:
        for reader in readers:
            reader.__exit__()


# ----------------------------------------------------------------------------------------------- too much asked


@pytest.mark.parametrize(
    ("status", "share", "for_s"), [(503, 0.8, 30), (500, 0.6, 3), (503, 1.0, 3)], ids=["503-30s", "500-60%", "503-100%"]
)
def test_a_storm(bucket: StandInBucket, mount: Mount, status: int, share: float, for_s: int) -> None:
    """find and readers get all there is, no ENOENT, no error; retries are spaced, more and more; speed returns."""
    for number in range(60):
        bucket.put_ramp(f"d/{number % 3}/{number}", SIZE, number)
    mounted = mount(bucket, "--workers", "2", "--metadata-ttl", "0", "--cache-size", "64MiB")
    paths = sorted(os.fspath(path) for path in mounted.path.rglob("*") if path.is_file())
    bucket.clear_log()
    bucket.configure(faults=[{"status": status, "probability": share, "for_s": for_s}])
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
    """Of one extent that is refused again and again, the pauses grow, and no one of them is longer than 5 s."""
    bucket.put_ramp("x", 100_000)
    mounted = mount(bucket, "--workers", "1", "--retry-timeout", "12s")
    bucket.configure(faults=[{"verb": "GET", "status": 503}])
    assert errno_of(lambda: read(mounted / "x")) == errno.EIO
    starts = [record.start_s for record in bucket.log("GET", "x")]
    pauses = [after - before for before, after in zip(starts, starts[1:], strict=False)]
    assert 4 <= len(pauses) <= 20
    assert sum(pauses[:3]) < sum(pauses[-3:])
    assert max(pauses) < 5 + 2


# ----------------------------------------------------------------------------------------------- no


def test_a_denied_key(bucket: StandInBucket, mount: Mount) -> None:
    """403 for the GET of one key: listed, EACCES when read, few requests, one line in the log; others are fine."""
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
    assert len(bucket.log("GET", "d/7")) <= 4
    assert len([line for line in mounted.log().splitlines() if "cannot read" in line and "AccessDenied" in line]) == 1
    bucket.configure(faults=[])
    eventually(lambda: errno_of(lambda: read(mounted / "d/7")), lambda number: number == 0)
    assert read(mounted / "d/7") == ramp(0, SIZE, 7)


def test_sporadic_403(bucket: StandInBucket, mount: Mount) -> None:
    """A store that says forbidden when it means slow down: the odd 403 among successes is not seen."""
    bucket.put_ramp("x", 40 * MIB)
    mounted = mount(bucket, *TIMES)
    assert errno_of(lambda: (mounted / "x").stat()) == 0
    bucket.configure(faults=[{"verb": "GET", "every": 4, "deny": True}])
    with (mounted / "x").open("rb", buffering=0) as file:
        for at in range(0, 40 * MIB, MIB):
            assert os.pread(file.fileno(), MIB, at) == ramp(at, at + MIB)


def test_listing_is_denied_somewhere(bucket: StandInBucket, mount: Mount) -> None:
    """403 for a List: EACCES, never ENOENT or an empty directory; a file below it is still found, by HEAD."""
    bucket.put_ramp("closed/x", SIZE, 1)
    bucket.put_ramp("open/y", SIZE, 2)
    mounted = mount(bucket, *TIMES)
    bucket.configure(faults=[{"verb": "LIST", "key": "closed/*", "deny": True}])
    assert errno_of(lambda: os.listdir(mounted / "closed")) == errno.EACCES
    assert read(mounted / "closed/x") == ramp(0, SIZE, 1)
    assert os.listdir(mounted / "open") == ["y"]


# ----------------------------------------------------------------------------------------------- credentials, region


@pytest.mark.parametrize("expired_status", [0, 400, 403])
def test_rotated_credentials(bucket: StandInBucket, mount: Mount, tmp_path: Path, expired_status: int) -> None:
    """New keys in the shared file: when S3 refuses the old ones they are read, and no reader, nor ls, sees an error."""
    for number in range(3):
        bucket.put_ramp(f"d/{number}", SIZE, number)
    shared = tmp_path / "credentials"

    def write(key_id: str) -> None:
        text = f"[default]\naws_access_key_id = {key_id}\naws_secret_access_key = {SECRET_KEY}\n"
        (tmp_path / "new").write_text(text)
        os.replace(tmp_path / "new", shared)

    write(ACCESS_KEY)
    bucket.configure(require_access_key=ACCESS_KEY, expired_status=expired_status)
    unset = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_SHARED_CREDENTIALS_FILE": os.fspath(shared)}
    mounted = mount(bucket, *TIMES, "--metadata-ttl", "0", environment=unset)
    for round_, act in enumerate((lambda: read(mounted / "d/0"), lambda: os.listdir(mounted / "d"))):
        write(f"AKID-{round_}")
        bucket.configure(require_access_key=f"AKID-{round_}")
        bucket.clear_log()
        act()
    # Refused keys that are replaced only later: retried meanwhile.
    bucket.configure(require_access_key="AKID-late")
    with Reader(mounted / "d/2") as reader:
        eventually(lambda: [record for record in bucket.log() if record.status in (400, 403)])
        write("AKID-late")
        assert reader.result() == digest_of(SIZE, 2)


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


@pytest.mark.parametrize("status", [None, 400], ids=["301", "400"])
def test_the_wrong_region(bucket: StandInBucket, mount: Mount, status: int | None) -> None:
    """A redirect to the bucket's region is followed, from the first request on, and costs it once or twice."""
    for number in range(10):
        bucket.put_ramp(f"d/{number}", SIZE, number)
    bucket.configure(faults=[{"redirect_region": "eu-west-1", "status": status}])
    mounted = mount(bucket, *TIMES)
    for number in range(10):
        assert read(mounted / f"d/{number}") == ramp(0, SIZE, number)
    refused = [record for record in bucket.log() if record.status in (301, 400)]
    assert len(refused) <= 4
