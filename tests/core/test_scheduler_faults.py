"""The scheduler when things fail: retries, refusals, a full disk, lost workers, deadlines, a capped link.

`World` carries out what the scheduler says and checks every instruction; see there.
"""

from __future__ import annotations

import pytest

from s3prefetchfs.core import events as ev
from s3prefetchfs.core.eviction import SQUEEZE_S
from s3prefetchfs.core.extent import CHUNK_BYTES
from s3prefetchfs.core.pacing import BACKOFF_CAP_S, BURST_S
from s3prefetchfs.core.scheduler import FAILURE_MEMORY_S, READ_GRACE_S
from s3prefetchfs.errors import FailureKind
from tests.core.world import ABSENT, World

MIB = 1024 * 1024
GIB = 1024 * MIB
FAR = 100 * MIB


def a_waiting_read(world: World, start: int = FAR, stop: int = FAR + 8 * CHUNK_BYTES) -> tuple[int, int]:
    """A reader of a new object who waits for one fetch; returns both ids."""
    world.read(world.open_new(GIB), start, stop)
    read_id = list(world.reads)[-1]
    read = world.reads[read_id]
    return read_id, next(fetch_id for fetch_id, fetch in world.fetches.items() if fetch.may_serve(read))


def only_fetch(world: World) -> ev.Fetch:
    (fetch,) = world.fetches.values()
    return ev.Fetch(fetch.fetch_id, fetch.found.object_id, fetch.start, fetch.stop, fetch.to_memory)


# ---------------------------------------------------------------------------------------------- retries


def test_a_fetch_is_resumed_from_the_byte_it_reached() -> None:
    """After a backoff, with what landed kept and its readers already answered."""
    world = World(capacity_bytes=GIB)
    _, fetch_id = a_waiting_read(world)
    world.land(fetch_id, chunks=3)
    world.fail(fetch_id, FailureKind.CONNECTION, jitter=0.5)
    assert not world.fetches
    assert world.alarm_s == world.now + 0.1
    world.tick()
    fetch = only_fetch(world)
    assert (fetch.start, fetch.stop) == (FAR + 3 * CHUNK_BYTES, FAR + 8 * CHUNK_BYTES)
    world.complete(fetch.fetch_id)
    assert world.scheduler.snapshot().retries == 1
    assert not world.waiting


def test_a_get_that_ends_short_is_resumed() -> None:
    """A worker that calls a fetch done with bytes missing is not believed."""
    world = World(capacity_bytes=GIB)
    _, fetch_id = a_waiting_read(world)
    world.land(fetch_id, chunks=1)
    world.done(fetch_id)
    world.tick()
    assert only_fetch(world).start == FAR + CHUNK_BYTES


def test_a_fetch_that_fails_after_its_last_byte_is_done() -> None:
    """The bytes are there: nothing is asked for again."""
    world = World(capacity_bytes=GIB)
    _, fetch_id = a_waiting_read(world)
    world.land(fetch_id)
    world.fail(fetch_id, FailureKind.WORKER_LOST)
    assert not world.fetches
    assert world.scheduler.snapshot().fetches_backing_off == 0


def test_retry_after_is_obeyed_up_to_the_cap() -> None:
    """Two seconds are waited; a thousand are not."""
    for asked_s, waited_s in ((2.0, 2.0), (1000.0, BACKOFF_CAP_S)):
        world = World(capacity_bytes=GIB)
        _, fetch_id = a_waiting_read(world)
        world.fail(fetch_id, FailureKind.THROTTLED, retry_after_s=asked_s)
        assert world.alarm_s == world.now + waited_s


def test_a_reader_gets_the_error_after_the_retry_timeout() -> None:
    """The kind of the last failure, not before the timeout and not much after it."""
    world = World(capacity_bytes=GIB, retry_timeout_s=20.0)
    began_s = world.now
    read_id, _ = a_waiting_read(world)
    while world.waiting:
        if world.fetches:
            world.fail(only_fetch(world).fetch_id, FailureKind.SERVER)
        else:
            world.tick()
    assert world.reads[read_id].wake == ev.Wake(read_id, FailureKind.SERVER)
    assert 20.0 <= world.now - began_s <= 20.0 + BACKOFF_CAP_S
    assert world.scheduler.snapshot().failed_reads == 1


def test_progress_restarts_the_patience() -> None:
    """A fetch that gets a chunk further each time never times out: the object arrives."""
    world = World(capacity_bytes=GIB, retry_timeout_s=1.0)
    read_id, _ = a_waiting_read(world)
    for _ in range(7):
        world.now += 0.9
        fetch_id = only_fetch(world).fetch_id
        world.land(fetch_id, chunks=1)
        world.fail(fetch_id, FailureKind.BODY)
        world.tick()
    world.complete(only_fetch(world).fetch_id)
    assert world.reads[read_id].wake == ev.Wake(read_id)


def test_a_failed_prefetch_waits_for_demand() -> None:
    """When a connection comes free, the reader who waits for it has it, not the retry that is due."""
    world = World(capacity_bytes=4 * GIB, max_connections=1)
    _, fetch_id = a_waiting_read(world, 0, CHUNK_BYTES)
    world.complete(fetch_id)
    world.fail(only_fetch(world).fetch_id, FailureKind.CONNECTION, jitter=0.5)
    _, fetch_id = a_waiting_read(world)
    world.read(world.open_new(GIB), 3 * FAR, 3 * FAR + 1)
    world.now += 1.0
    world.complete(fetch_id)
    assert only_fetch(world).start == 3 * FAR


def test_a_retry_that_nobody_wants_is_given_up() -> None:
    """Its reader was killed and the file closed: the space is free and the object forgotten."""
    world = World(capacity_bytes=GIB)
    read_id, fetch_id = a_waiting_read(world)
    world.fail(fetch_id, FailureKind.CONNECTION)
    world.finish(read_id)
    world.close(next(iter(world.handles)))
    assert world.scheduler.snapshot().fetches_backing_off == 0
    assert len(world.evictions) == 1


def test_failing_prefetch_is_not_asked_for_more_and_more() -> None:
    """While fetches back off, they keep their places: a dead server sees no more of them than connections."""
    world = World(capacity_bytes=4 * GIB, max_connections=8)
    for _ in range(10):
        _, fetch_id = a_waiting_read(world, 0, CHUNK_BYTES)
        world.complete(fetch_id)
        world.finish(next(iter(world.reads)))
    assert len(world.fetches) == 7
    for _ in range(20):
        for fetch_id in list(world.fetches):
            world.fail(fetch_id, FailureKind.CONNECTION, jitter=0.99)
    assert world.scheduler.snapshot().fetches_backing_off <= 8


def test_retries_wait_for_a_connection_without_spinning() -> None:
    """A retry that is due while all connections are busy asks for a Tick a second, not a thousand."""
    world = World(capacity_bytes=GIB, max_connections=1)
    _, fetch_id = a_waiting_read(world)
    world.fail(fetch_id, FailureKind.CONNECTION, jitter=0.5)
    a_waiting_read(world)
    began_s = world.now
    for _ in range(5):
        world.tick()
    assert world.now - began_s >= 3.0


def test_retries_wait_for_the_bandwidth_cap() -> None:
    """A retry that is due before the cap allows it comes when the cap does."""
    world = World(capacity_bytes=GIB, max_throughput_bytes_per_s=MIB)
    _, fetch_id = a_waiting_read(world)
    world.fail(fetch_id, FailureKind.CONNECTION, jitter=0.0)
    began_s = world.now
    while not world.fetches:
        world.tick()
    assert 0.5 <= world.now - began_s <= 1.0


def test_losing_every_worker_costs_one_retry_each() -> None:
    """All fetches fail at once; all come again, and every reader is answered."""
    world = World(capacity_bytes=GIB, max_connections=8)
    for _ in range(8):
        a_waiting_read(world)
    for fetch_id in list(world.fetches):
        world.fail(fetch_id, FailureKind.WORKER_LOST)
    world.tick()
    assert len(world.fetches) == 8
    world.rest()
    assert {read.wake for read in world.reads.values()} == {ev.Wake(read_id) for read_id in world.reads}


def test_a_throttled_server_sees_half_the_requests() -> None:
    """And more of them again as time passes without a complaint."""
    world = World(capacity_bytes=GIB, max_connections=8)
    for _ in range(12):
        world.read(world.open_new(GIB), FAR, FAR + 1)
    assert len(world.fetches) == 8
    for fetch_id in list(world.fetches):
        world.fail(fetch_id, FailureKind.THROTTLED, jitter=0.99)
    world.tick()
    assert len(world.fetches) == 4
    throttled_s = world.now
    while world.now < throttled_s + 2.5:
        world.tick()
    assert 5 <= len(world.fetches) <= 7


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("kind", [kind for kind in FailureKind if not kind.retryable], ids=lambda kind: kind.name)
def test_a_refusal_is_final_and_remembered(kind: FailureKind) -> None:
    """The reader has it at once; the next readers of absent chunks get it without a request, for a while."""
    world = World(capacity_bytes=GIB)
    read_id, fetch_id = a_waiting_read(world)
    world.fail(fetch_id, kind)
    assert world.reads[read_id].wake == ev.Wake(read_id, kind)
    handle_id = next(iter(world.handles))
    out = world.read(handle_id, 2 * FAR, 2 * FAR + 1)
    assert out == [ev.Wake(list(world.reads)[-1], kind)]
    world.now += FAILURE_MEMORY_S
    world.read(handle_id, 3 * FAR, 3 * FAR + 1)
    assert only_fetch(world).start == 3 * FAR


@pytest.mark.parametrize("kind", [FailureKind.CHANGED, FailureKind.NOT_FOUND], ids=lambda kind: kind.name)
def test_a_version_that_is_gone_is_reported(kind: FailureKind) -> None:
    """Its name must be looked up again; what is cached of it is still served through the old handle."""
    world = World(capacity_bytes=GIB)
    read_id, fetch_id = a_waiting_read(world, FAR, FAR + 2 * CHUNK_BYTES)
    world.land(fetch_id, chunks=1)
    world.fail(fetch_id, kind)
    assert world.gone == [1]
    assert world.reads[read_id].wake == ev.Wake(read_id, kind)
    out = world.read(next(iter(world.handles)), FAR, FAR + 1)
    assert out == [ev.Wake(list(world.reads)[-1])]


def test_a_refusal_ends_read_ahead() -> None:
    """One open of an archived file is one GET."""
    world = World(capacity_bytes=GIB, max_connections=8)
    handle_id = world.open_new(GIB)
    world.read(handle_id, 0, 4096)
    for fetch_id in list(world.fetches):
        world.fail(fetch_id, FailureKind.ARCHIVED)
    assert not world.fetches
    for start in range(0, MIB, 4096):
        world.read(handle_id, start, start + 4096)
    assert not world.fetches


def test_read_ahead_returns_to_what_was_given_up() -> None:
    """A hole in the window that a refusal left is fetched when the server is asked again, before its reader comes."""
    world = World(capacity_bytes=GIB, max_connections=8)
    handle_id = world.open_new(GIB)
    world.read(handle_id, 0, CHUNK_BYTES)
    first, hole, *others = list(world.fetches)
    extent = world.fetches[hole].start, world.fetches[hole].stop
    for fetch_id in (first, *others):
        world.complete(fetch_id)
    world.fail(hole, FailureKind.DENIED)
    world.now += FAILURE_MEMORY_S
    world.read(handle_id, CHUNK_BYTES, 2 * CHUNK_BYTES)
    assert extent in [(fetch.start, fetch.stop) for fetch in world.fetches.values()]


# ---------------------------------------------------------------------------------------------- the cache disk


def test_a_full_disk_is_believed_and_the_reader_served_through_memory() -> None:
    """Nothing more is put on the disk for half a minute; then it is tried again."""
    world = World(capacity_bytes=GIB)
    read_id, fetch_id = a_waiting_read(world)
    world.land(fetch_id, chunks=2)
    world.fail(fetch_id, FailureKind.NO_SPACE)
    fetch = only_fetch(world)
    assert (fetch.to_memory, fetch.start, fetch.stop) == (True, FAR, FAR + 8 * CHUNK_BYTES)
    world.done(fetch.fetch_id)
    assert world.reads[read_id].wake == ev.Wake(read_id, fetch_id=fetch.fetch_id)
    handle_id = next(iter(world.handles))
    world.read(handle_id, 3 * FAR, 3 * FAR + 1)
    assert only_fetch(world).to_memory
    world.done(only_fetch(world).fetch_id)
    world.now += SQUEEZE_S
    world.read(handle_id, 5 * FAR, 5 * FAR + 1)
    assert not only_fetch(world).to_memory


def test_a_full_disk_makes_old_objects_go() -> None:
    """What nobody has open gives its space to what is being read."""
    world = World(capacity_bytes=GIB)
    read_id, fetch_id = a_waiting_read(world)
    world.complete(fetch_id)
    world.finish(read_id)
    world.close(next(iter(world.handles)))
    read_id, fetch_id = a_waiting_read(world)
    world.fail(fetch_id, FailureKind.NO_SPACE)
    assert not world.fetches
    world.answer_eviction()
    assert not only_fetch(world).to_memory
    world.complete(only_fetch(world).fetch_id)
    assert world.reads[read_id].wake == ev.Wake(read_id)


def test_a_broken_cache_file_is_avoided() -> None:
    """After an I/O error the object's absent chunks come through memory; other objects are cached as before."""
    world = World(capacity_bytes=GIB)
    _, fetch_id = a_waiting_read(world)
    world.fail(fetch_id, FailureKind.CACHE_IO)
    assert only_fetch(world).to_memory
    world.done(only_fetch(world).fetch_id)
    world.now += SQUEEZE_S
    world.read(next(iter(world.handles)), 3 * FAR, 3 * FAR + 1)
    assert only_fetch(world).to_memory
    world.done(only_fetch(world).fetch_id)
    a_waiting_read(world)
    assert not only_fetch(world).to_memory


def test_a_fetch_to_memory_is_retried_too() -> None:
    """It backs off and is refused like any other."""
    world = World(capacity_bytes=GIB)
    world.read(world.open(world.add(MIB, bypass=True)), 5, 10)
    for kind in (FailureKind.CONNECTION, FailureKind.NO_SPACE):
        world.fail(only_fetch(world).fetch_id, kind)
        assert not world.fetches
        world.tick()
    assert (only_fetch(world).start, only_fetch(world).stop) == (5, 10)
    world.fail(only_fetch(world).fetch_id, FailureKind.DENIED)
    assert [read.wake for read in world.reads.values()] == [
        ev.Wake(read_id, FailureKind.DENIED) for read_id in world.reads
    ]


# ---------------------------------------------------------------------------------------------- time


def test_every_read_has_a_deadline() -> None:
    """A fetch that is never answered does not hold its reader for ever."""
    world = World(capacity_bytes=GIB, retry_timeout_s=20.0)
    read_id, _ = a_waiting_read(world)
    assert world.alarm_s == world.now + 20.0 + READ_GRACE_S
    world.tick()
    assert world.reads[read_id].wake == ev.Wake(read_id, FailureKind.TIMEOUT)


def test_the_bandwidth_cap_is_kept_over_time() -> None:
    """A stream on a link that answers at once gets what the cap allows: no more, and not much less."""
    rate = 10 * MIB
    world = World(capacity_bytes=GIB, max_connections=8, max_throughput_bytes_per_s=rate, checked=False)
    handle_id = world.open_new(256 * MIB)
    began_s = world.now
    for start in range(0, 64 * MIB, MIB):
        world.read(handle_id, start, start + MIB)
        while world.waiting:
            if world.fetches:
                world.complete(min(world.fetches))
            else:
                world.tick()
        world.finish(next(iter(world.reads)))
    elapsed_s = world.now - began_s
    assert 0.9 * rate * elapsed_s <= world.fetched_bytes <= rate * (elapsed_s + 2 * BURST_S)


def test_under_a_cap_demand_waits_for_little_prefetch() -> None:
    """Requests are short enough that a reader who comes in the middle is served within the burst."""
    rate = MIB
    world = World(capacity_bytes=GIB, max_connections=8, max_throughput_bytes_per_s=rate)
    world.read(world.open_new(GIB), 0, 4096)
    assert max(fetch.stop - fetch.start for fetch in world.fetches.values()) <= max(CHUNK_BYTES, rate * BURST_S)
    began_s = world.now
    handle_id = world.open_new(GIB)
    world.read(handle_id, FAR, FAR + 1)
    while all(fetch.start != FAR for fetch in world.fetches.values()):
        world.tick()
    assert world.now - began_s <= 2 * BURST_S


def test_late_messages_are_ignored() -> None:
    """A worker that was given up may still talk: nothing comes of it."""
    world = World(capacity_bytes=GIB)
    read_id, fetch_id = a_waiting_read(world)
    world.fail(fetch_id, FailureKind.WORKER_LOST)
    for event in (
        ev.Landed(fetch_id, FAR, FAR + CHUNK_BYTES),
        ev.FetchDone(fetch_id),
        ev.FetchFailed(fetch_id, FailureKind.DENIED, None, 0.5),
        ev.ReadFinished(read_id + 1000),
    ):
        assert world.send(event) == []
    assert world.reads[read_id].wake is None
    assert world.objects[1].disk[FAR // CHUNK_BYTES] == ABSENT
