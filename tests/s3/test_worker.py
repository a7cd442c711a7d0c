"""A real worker process at the end of a socket: what it puts into cache files, and what it says about it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from s3prefetchfs import wire
from s3prefetchfs.core.extent import CHUNK_BYTES
from s3prefetchfs.errors import FailureKind
from s3prefetchfs.s3.client import ClientSettings
from tests.s3.conftest import CacheFile, WorkerUnderTest
from tests.s3stub import S3Stub, ramp

MIB = 1 << 20

MakeFile = Callable[..., CacheFile]

_ids = count(1)


def ranges(s3: S3Stub) -> list[tuple[int, int] | None]:
    """What the GETs in the server's log asked for."""
    return [record.range for record in s3.log("GET")]


# ----------------------------------------------------------------------------------------- good days


@pytest.mark.parametrize(
    ("size_bytes", "start", "stop"),
    [
        (8 * MIB, 0, 8 * MIB),
        (8 * MIB, 3 * CHUNK_BYTES, 20 * CHUNK_BYTES),
        (MIB + 5, 7 * CHUNK_BYTES, MIB + 5),
        (MIB + 5, MIB, MIB + 5),
        (1, 0, 1),
        (CHUNK_BYTES, 0, CHUNK_BYTES),
        (CHUNK_BYTES + 1, 0, CHUNK_BYTES + 1),
    ],
)
def test_bytes_land_in_the_file(
    s3: S3Stub, worker: WorkerUnderTest, cache_file: MakeFile, size_bytes: int, start: int, stop: int
) -> None:
    """All of them and no others, in one request, reported chunk by chunk with their checksums."""
    etag = s3.put_ramp("landing", size_bytes)
    file = cache_file(size_bytes)
    request = file.get(next(_ids), "landing", etag, start, stop)
    *landed, last = worker.get(request)
    assert last == wire.Got(request.request_id, None, 1)
    file.check(landed, start, stop)
    assert file.read(0, start) == bytes(start)
    assert file.read(stop, size_bytes) == bytes(size_bytes - stop)
    assert ranges(s3) == [(start, stop)]
    assert landed[0].stop == min(start + CHUNK_BYTES, stop)
    assert [message.first_byte_s is None for message in landed] == [False] + [True] * (len(landed) - 1)
    assert all(message.stop - message.start <= request.report_bytes for message in landed)


def test_the_first_chunk_does_not_wait(s3: S3Stub, worker: WorkerUnderTest, cache_file: MakeFile) -> None:
    """It is reported when it is there, although the rest is slow to come."""
    etag = s3.put_ramp("first", 4 * MIB)
    file = cache_file(4 * MIB)
    s3.configure(faults=[{"stall_after": CHUNK_BYTES + 1000, "first": 1}])
    began_s = time.monotonic()
    worker.send(file.get(next(_ids), "first", etag))
    landed = worker.receive()
    (record,) = s3.log("GET")
    assert (landed.start, landed.stop) == (0, CHUNK_BYTES)
    assert record.end_s is None, "the stalled request is not given up yet"
    assert 0 < landed.first_byte_s <= time.monotonic() - began_s
    while isinstance(worker.receive(), wire.Landed):
        pass


def test_a_slow_connection_is_reported_as_it_goes(s3: S3Stub, worker: WorkerUnderTest, cache_file: MakeFile) -> None:
    """Each chunk soon after it came, however large report_bytes is."""
    etag = s3.put_ramp("drip", 6 * CHUNK_BYTES)
    file = cache_file(6 * CHUNK_BYTES)
    s3.configure(faults=[{"drip": 1_000_000}])  # a chunk in 131 ms
    *landed, last = worker.get(replace(file.get(next(_ids), "drip", etag), report_bytes=8 * MIB))
    assert isinstance(last, wire.Got)
    assert len(landed) >= 4
    file.check(landed, 0, 6 * CHUNK_BYTES)


def test_bytes_without_a_file(s3: S3Stub, worker: WorkerUnderTest) -> None:
    """They come back with the answer; any range will do, and a broken body is resumed, too."""
    etag = s3.put_ramp("memory", MIB)
    s3.configure(faults=[{"first": 1, "reset_after": 1000}])
    (answer,) = worker.get(wire.Get(next(_ids), "memory", etag, MIB, 5, 5000, None, 1))
    assert (answer.data, answer.http_requests) == (ramp(5, 5000), 2)
    assert ranges(s3) == [(5, 5000), (1005, 5000)]


def test_many_at_once(s3: S3Stub, worker: WorkerUnderTest, cache_file: MakeFile) -> None:
    """More Gets than threads: each is answered, with its own bytes, in any order."""
    files: dict[int, CacheFile] = {}
    for seed in range(12):
        etag = s3.put_ramp(f"many-{seed}", 2 * MIB, seed)
        request_id = next(_ids)
        files[request_id] = cache_file(2 * MIB, seed)
        worker.send(files[request_id].get(request_id, f"many-{seed}", etag))
    landed: dict[int, list[wire.Landed]] = {request_id: [] for request_id in files}
    answers: set[int] = set()
    while len(answers) < len(files):
        message = worker.receive()
        if isinstance(message, wire.Landed):
            assert message.request_id not in answers
            landed[message.request_id].append(message)
        else:
            assert message == wire.Got(message.request_id, None, 1)
            answers.add(message.request_id)
    for request_id, file in files.items():
        file.check(landed[request_id], 0, 2 * MIB)


def test_list_and_head(s3: S3Stub, worker: WorkerUnderTest) -> None:
    """Metadata comes back as the client gives it."""
    etag = s3.put("meta/a b", b"123")
    worker.send(wire.List(-1, "meta/", "/", None, 10))
    listed = worker.receive()
    assert isinstance(listed, wire.Listed)
    ((key, size_bytes, _, listed_etag, _),) = listed.objects
    assert (listed.request_id, key, size_bytes, listed_etag) == (-1, b"meta/a b", 3, etag)
    worker.send(wire.Head(-2, "meta/a b"))
    headed = worker.receive()
    assert (headed.request_id, headed.object.key, headed.object.etag) == (-2, key, etag)
    worker.send(wire.Head(-3, "meta/none"))
    failed = worker.receive()
    assert (failed.request_id, failed.kind) == (-3, FailureKind.NOT_FOUND)


def test_metadata_and_pings_do_not_wait_for_data(s3: S3Stub, worker: WorkerUnderTest, cache_file: MakeFile) -> None:
    """With all data threads held up, listings and pings are answered first."""
    etag = s3.put_ramp("held", MIB)
    s3.configure(faults=[{"verb": "GET", "no_first_byte": True}])
    request_ids = {next(_ids) for _ in range(6)}
    for request_id in request_ids:
        worker.send(cache_file(MIB).get(request_id, "held", etag))
    worker.send(wire.List(-1, "held", None, None, 1))
    worker.send(wire.Ping(7))
    first, second = sorted((worker.receive(), worker.receive()), key=lambda message: type(message).__name__)
    assert (type(first), second) == (wire.Listed, wire.Pong(7))
    failed = [worker.receive() for _ in request_ids]
    assert {message.request_id for message in failed} == request_ids
    assert {message.kind for message in failed} == {FailureKind.TIMEOUT}


# ----------------------------------------------------------------------------------------- bodies that break


@pytest.mark.parametrize(
    ("fault", "reached"),
    [
        ({"reset_after": 300_000}, 300_000),
        ({"short_body": 100_000}, 2 * MIB - 100_000),
        ({"lie_len": 100_000}, 2 * MIB - 100_000),
        ({"stall_after": 300_000}, 300_000),
        ({"stall_after": 1}, 1),
    ],
    ids=str,
)
def test_a_broken_body_is_resumed(
    s3: S3Stub, worker: WorkerUnderTest, cache_file: MakeFile, fault: dict[str, Any], reached: int
) -> None:
    """At the very next byte, at once; nothing is reported twice or left out."""
    etag = s3.put_ramp("broken", 2 * MIB)
    file = cache_file(2 * MIB)
    s3.configure(faults=[{"first": 1, **fault}])
    *landed, last = worker.get(file.get(next(_ids), "broken", etag))
    assert isinstance(last, wire.Got)
    assert last.http_requests == 2
    assert ranges(s3) == [(0, 2 * MIB), (reached, 2 * MIB)]
    file.check(landed, 0, 2 * MIB)


def test_a_broken_chunked_body_is_resumed(s3: S3Stub, worker: WorkerUnderTest, cache_file: MakeFile) -> None:
    """Somewhere before the break, with the right bytes."""
    etag = s3.put_ramp("chunked", 2 * MIB)
    file = cache_file(2 * MIB)
    s3.configure(faults=[{"first": 1, "chunked_short": 100_000}])
    *landed, last = worker.get(file.get(next(_ids), "chunked", etag))
    assert isinstance(last, wire.Got)
    file.check(landed, 0, 2 * MIB)


def test_many_breaks(s3: S3Stub, worker: WorkerUnderTest, cache_file: MakeFile) -> None:
    """As long as each request brings something, the Get goes on."""
    etag = s3.put_ramp("breaks", 2 * MIB)
    file = cache_file(2 * MIB)
    s3.configure(faults=[{"reset_after": 50_000}])
    *landed, last = worker.get(file.get(next(_ids), "breaks", etag))
    assert last == wire.Got(last.request_id, None, -(-2 * MIB // 50_000))
    assert ranges(s3) == [(at, 2 * MIB) for at in range(0, 2 * MIB, 50_000)]
    file.check(landed, 0, 2 * MIB)


def test_breaks_without_end(s3: S3Stub, worker: WorkerUnderTest, cache_file: MakeFile) -> None:
    """A hundred requests for one Get are enough."""
    etag = s3.put_ramp("endless", 2 * MIB)
    file = cache_file(2 * MIB)
    s3.configure(faults=[{"reset_after": 5000}])
    *landed, last = worker.get(file.get(next(_ids), "endless", etag))
    assert (last.kind, last.http_requests) == (FailureKind.CONNECTION, 100)
    assert last.reached == 500_000 // CHUNK_BYTES * CHUNK_BYTES
    file.check(landed, 0, last.reached)


@pytest.mark.parametrize(
    ("then", "kind"),
    [
        ({"reset_before": True}, FailureKind.CONNECTION),
        ({"no_first_byte": True}, FailureKind.TIMEOUT),
        ({"status": 503, "retry_after_s": 2}, FailureKind.THROTTLED),
        ({"status": 412}, FailureKind.CHANGED),
    ],
    ids=str,
)
def test_a_break_and_no_way_on(
    s3: S3Stub, worker: WorkerUnderTest, cache_file: MakeFile, then: dict[str, Any], kind: FailureKind
) -> None:
    """A request that brings nothing ends the Get: what was reached in whole chunks is in the file and reported."""
    etag = s3.put_ramp("no-way", 2 * MIB)
    file = cache_file(2 * MIB)
    s3.configure(faults=[{"first": 1, "stall_after": 3 * CHUNK_BYTES + 5}, then])
    *landed, last = worker.get(file.get(next(_ids), "no-way", etag))
    assert isinstance(last, wire.Failed)
    assert (last.kind, last.reached, last.http_requests) == (kind, 3 * CHUNK_BYTES, 2)
    assert last.retry_after_s == then.get("retry_after_s")
    assert "no-way" in last.detail
    file.check(landed, 0, 3 * CHUNK_BYTES)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ({"status": 404}, FailureKind.NOT_FOUND),
        ({"archived": True}, FailureKind.ARCHIVED),
        ({"status": 500}, FailureKind.SERVER),
        ({"no_first_byte": True}, FailureKind.TIMEOUT),
        ({"reset_after": 0}, FailureKind.CONNECTION),
        ({"stall_after": 0}, FailureKind.TIMEOUT),
    ],
    ids=str,
)
def test_nothing_came(
    s3: S3Stub, worker: WorkerUnderTest, cache_file: MakeFile, fault: dict[str, Any], kind: FailureKind
) -> None:
    """One request, one Failed, an untouched file."""
    etag = s3.put_ramp("nothing", MIB)
    file = cache_file(MIB)
    s3.configure(faults=[fault])
    request = file.get(next(_ids), "nothing", etag, CHUNK_BYTES, MIB)
    (failed,) = worker.get(request)
    assert (failed.request_id, failed.kind, failed.reached) == (request.request_id, kind, CHUNK_BYTES)
    assert len(s3.log("GET")) == failed.http_requests == 1
    assert file.read(0, MIB) == bytes(MIB)


def test_an_object_replaced_on_the_way(s3: S3Stub, worker: WorkerUnderTest, cache_file: MakeFile) -> None:
    """The rest of another version is not appended to the beginning of this one."""
    etag = s3.put_ramp("swapped", 2 * MIB, 1)
    file = cache_file(2 * MIB, 1)
    s3.configure(faults=[{"stall_after": CHUNK_BYTES}])
    worker.send(file.get(next(_ids), "swapped", etag))
    landed = worker.receive()
    s3.put_ramp("swapped", 2 * MIB, 2)
    failed = worker.receive()
    assert (failed.kind, failed.reached) == (FailureKind.CHANGED, CHUNK_BYTES)
    file.check([landed], 0, CHUNK_BYTES)
    assert file.read(CHUNK_BYTES, 2 * MIB) == bytes(2 * MIB - CHUNK_BYTES)


def test_a_trickle_is_as_good_as_a_stall(s3: S3Stub, settings: ClientSettings, cache_file: MakeFile) -> None:
    """Bytes that come, but no chunk in a minute (here: half a second): another connection may do better."""
    etag = s3.put_ramp("trickle", MIB)
    s3.configure(faults=[{"first": 1, "drip": 20_000}])
    file = cache_file(MIB)
    hasty = "import sys; from s3prefetchfs.s3 import worker as w; w.SLOWEST_CHUNK_S = 0.5; w.main(int(sys.argv[1]))"
    worker = WorkerUnderTest(settings, ["-c", hasty])
    assert isinstance(worker.receive(), wire.Ready)
    *landed, last = worker.get(file.get(1, "trickle", etag))
    assert worker.close() == 0
    assert last == wire.Got(1, None, 2)
    file.check(landed, 0, MIB)
    (_, resumed) = ranges(s3)
    assert resumed is not None
    assert 0 < resumed[0] < CHUNK_BYTES


# ----------------------------------------------------------------------------------------- abandoning


def test_abandoned_in_the_middle(s3: S3Stub, worker: WorkerUnderTest, cache_file: MakeFile) -> None:
    """It stops soon, says so, and the connection is not used for another answer's bytes."""
    etag = s3.put_ramp("abandoned", 8 * MIB)
    file = cache_file(8 * MIB)
    s3.configure(faults=[{"drip": 1_000_000, "first": 1}])
    request = file.get(next(_ids), "abandoned", etag)
    worker.send(request)
    landed = [worker.receive()]
    worker.send(wire.Abandon(request.request_id))
    while isinstance(landed[-1], wire.Landed):
        landed.append(worker.receive())
    failed = landed.pop()
    assert (failed.request_id, failed.detail) == (request.request_id, "abandoned")
    file.check(landed, 0, failed.reached)
    (record,) = s3.log("GET")
    assert record.body_bytes < 8 * MIB


def test_abandoned_before_its_turn(s3: S3Stub, worker: WorkerUnderTest, cache_file: MakeFile) -> None:
    """A Get that waits for a thread is answered without a request to S3."""
    etag = s3.put_ramp("queued", MIB)
    s3.configure(faults=[{"no_first_byte": True}])
    request_ids = [next(_ids) for _ in range(5)]
    for request_id in request_ids:
        worker.send(cache_file(MIB).get(request_id, "queued", etag))
    worker.send(wire.Abandon(request_ids[-1]))
    answers = {message.request_id: message for message in (worker.receive() for _ in request_ids)}
    assert answers[request_ids[-1]].detail == "abandoned"
    assert len(s3.log("GET")) == 4


def test_abandoning_what_is_not_there(worker: WorkerUnderTest) -> None:
    """An Abandon that crosses the answer changes nothing."""
    worker.send(wire.Abandon(123_456_789))
    worker.send(wire.Ping(1))
    assert worker.receive() == wire.Pong(1)


# ----------------------------------------------------------------------------------------- the cache disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk(s3: S3Stub, worker: WorkerUnderTest, small_disk: Path) -> None:
    """NO_SPACE, and what was reported before is in the file."""
    etag = s3.put_ramp("full", 4 * MIB)
    file = CacheFile(small_disk / "file", 4 * MIB)
    *landed, last = worker.get(file.get(next(_ids), "full", etag))
    assert isinstance(last, wire.Failed)
    assert last.kind is FailureKind.NO_SPACE
    assert 0 < last.reached <= MIB
    file.check(landed, 0, last.reached)


def test_no_cache_file(s3: S3Stub, worker: WorkerUnderTest, tmp_path: Path) -> None:
    """CACHE_IO; the file is not made, and S3 not asked."""
    etag = s3.put_ramp("no-file", MIB)
    (failed,) = worker.get(wire.Get(next(_ids), "no-file", etag, MIB, 0, MIB, str(tmp_path / "none"), MIB))
    assert (failed.kind, failed.http_requests) == (FailureKind.CACHE_IO, 0)
    assert not (tmp_path / "none").exists()
    assert s3.log("GET") == []


# ----------------------------------------------------------------------------------------- the process


def test_a_request_that_makes_no_sense(worker: WorkerUnderTest) -> None:
    """It fails like any other; the thread lives on."""
    for _ in range(6):
        (failed,) = worker.get(wire.Get(next(_ids), "", "", 10, 0, 10, None, 1))
        assert failed.kind is FailureKind.PROTOCOL


def test_a_client_that_cannot_be_built(settings: ClientSettings) -> None:
    """The reason is the first and only message."""
    worker = WorkerUnderTest(replace(settings, profile="no-such-profile"))
    failed = worker.receive()
    assert (failed.request_id, failed.kind) == (0, FailureKind.CREDENTIALS)
    assert "no-such-profile" in failed.detail
    assert worker.close() == 0


def test_end_of_file_ends_the_process(s3: S3Stub, settings: ClientSettings, cache_file: MakeFile) -> None:
    """At once, although a GET hangs; ^C before did not."""
    etag = s3.put_ramp("orphan", MIB)
    worker = WorkerUnderTest(replace(settings, stall_timeout_s=60.0))
    assert isinstance(worker.receive(), wire.Ready)
    s3.configure(faults=[{"no_first_byte": True}])
    worker.send(cache_file(MIB).get(1, "orphan", etag))
    worker.process.send_signal(signal.SIGINT)
    worker.send(wire.Ping(1))
    assert worker.receive() == wire.Pong(1)
    began_s = time.monotonic()
    assert worker.close() == 0
    assert time.monotonic() - began_s < 10
