"""The scheduler when all goes well: events in, instructions out.

`World` carries out what the scheduler says and checks every instruction; see there.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from s3prefetchfs.core import events as ev
from s3prefetchfs.core.extent import CHUNK_BYTES
from s3prefetchfs.core.scheduler import GET_MIN_CHUNKS, VERIFY_MAX_CHUNKS
from tests.core.world import ABSENT, LANDED, OLD, OLD_BAD, World

MIB = 1024 * 1024
GIB = 1024 * MIB
FAR = 100 * MIB
"""A first read here is a seek: nothing is read ahead of it."""


def fetched(out: Iterable[ev.Instruction]) -> list[tuple[int, int]]:
    """The extents asked for, in order."""
    return [(fetch.start, fetch.stop) for fetch in out if isinstance(fetch, ev.Fetch)]


def woken(out: Iterable[ev.Instruction]) -> list[int]:
    """The reads answered with bytes from the disk, in order."""
    return [wake.read_id for wake in out if wake == ev.Wake(getattr(wake, "read_id", 0))]


def but_alarms(out: Iterable[ev.Instruction]) -> list[ev.Instruction]:
    """All but the deadline's alarm, which comes with the first reader who must wait."""
    return [instruction for instruction in out if not isinstance(instruction, ev.WakeAt)]


def read_and_finish(world: World, handle_id: int, start: int, stop: int) -> None:
    """A read in a world where everything is answered at once."""
    world.read(handle_id, start, stop)
    (read_id,) = world.reads
    while world.fetches:
        world.complete(next(iter(world.fetches)))
    assert world.reads[read_id].wake == ev.Wake(read_id)
    world.finish(read_id)


# ---------------------------------------------------------------------------------------------- demand


def test_a_missing_chunk_is_asked_for_at_once() -> None:
    """A read in the middle of an object fetches exactly the chunks it touches."""
    world = World(capacity_bytes=GIB)
    handle_id = world.open_new(GIB)
    assert fetched(world.read(handle_id, FAR + 10, FAR + 20)) == [(FAR, FAR + CHUNK_BYTES)]
    out = world.read(handle_id, 2 * FAR - 1, 2 * FAR + 1)
    assert fetched(out) == [(2 * FAR - CHUNK_BYTES, 2 * FAR + CHUNK_BYTES)]


def test_a_reader_is_woken_when_its_chunk_lands() -> None:
    """Not when the GET that brings it is done."""
    world = World(capacity_bytes=GIB)
    handle_id = world.open_new(64 * MIB)
    world.read(handle_id, 0, 4096)
    (read_id,) = world.reads
    fetch_id = next(iter(world.fetches))
    assert world.fetches[fetch_id].stop > CHUNK_BYTES
    assert woken(world.land(fetch_id, chunks=1)) == [read_id]


def test_one_get_serves_all_who_wait_for_it() -> None:
    """Concurrent readers of a chunk share its GET and are woken in the order they came."""
    world = World(capacity_bytes=GIB)
    first = world.open_new(GIB)
    others = [world.open(world.handles[first].object_id) for _ in range(3)]
    assert len(fetched(world.read(first, FAR, FAR + 1))) == 1
    for handle_id in others:
        assert fetched(world.read(handle_id, FAR + 5, FAR + 6)) == []
    (fetch_id,) = world.fetches
    assert woken(world.land(fetch_id)) == list(world.reads)


def test_resident_bytes_are_answered_at_once() -> None:
    """The Wake is in the answer to the read, and nothing is fetched."""
    world = World(capacity_bytes=GIB)
    handle_id = world.open_new(3 * CHUNK_BYTES)
    read_and_finish(world, handle_id, 0, 3 * CHUNK_BYTES)
    out = world.read(handle_id, CHUNK_BYTES - 1, 2 * CHUNK_BYTES)
    assert out == [ev.Wake(read_id) for read_id in world.reads]
    assert world.scheduler.is_complete(handle_id)


def test_only_what_is_missing_is_fetched() -> None:
    """A read over present and absent chunks asks for the gaps."""
    world = World(capacity_bytes=GIB)
    handle_id = world.open_new(GIB)
    for chunk in (0, 2, 4):
        read_and_finish(world, handle_id, FAR + chunk * CHUNK_BYTES, FAR + chunk * CHUNK_BYTES + 1)
    present = world.handles[handle_id].disk
    holes = [chunk for chunk in range(FAR // CHUNK_BYTES, FAR // CHUNK_BYTES + 5) if present[chunk] == ABSENT]
    out = world.read(handle_id, FAR, FAR + 5 * CHUNK_BYTES)
    assert {start // CHUNK_BYTES for start, _ in fetched(out)} >= set(holes)


def test_the_short_last_chunk_ends_with_the_object() -> None:
    """No request goes beyond the end."""
    world = World(capacity_bytes=GIB)
    size_bytes = 3 * CHUNK_BYTES + 1001
    handle_id = world.open_new(size_bytes)
    assert fetched(world.read(handle_id, size_bytes - 1, size_bytes)) == [(3 * CHUNK_BYTES, size_bytes)]


def test_a_killed_reader_changes_nothing_for_the_others() -> None:
    """Its read ends without an answer; the fetch goes on and answers the rest."""
    world = World(capacity_bytes=GIB)
    handle_id = world.open_new(GIB)
    for _ in range(2):
        world.read(handle_id, FAR, FAR + 1)
    killed, other = world.reads
    world.finish(killed)
    (fetch_id,) = world.fetches
    assert woken(world.complete(fetch_id)) == [other]


def test_demand_waits_for_a_connection_in_order() -> None:
    """With all connections busy, who came first is served first."""
    world = World(capacity_bytes=GIB, max_connections=1)
    handles = [world.open_new(GIB) for _ in range(3)]
    for handle_id in handles:
        world.read(handle_id, FAR, FAR + 1)
    served = []
    while world.fetches:
        (fetch_id,) = world.fetches
        served += woken(world.complete(fetch_id))
    assert served == list(world.reads)


# ---------------------------------------------------------------------------------------------- read-ahead


def test_the_first_read_of_a_file_brings_what_follows_in_the_same_get() -> None:
    """A small file is one request; a look at the header of a large one costs 1 MiB."""
    world = World(capacity_bytes=GIB)
    assert fetched(world.read(world.open_new(700_000), 0, 16 * 1024)) == [(0, 700_000)]
    assert fetched(world.read(world.open_new(GIB), 0, 16 * 1024)) == [(0, MIB + CHUNK_BYTES)]


def test_random_small_reads_fetch_little_more_than_they_ask_for() -> None:
    """A thousand reads of 128 KiB at random places touch two chunks each, and no other is fetched."""
    world = World(capacity_bytes=4 * GIB, checked=False)
    handle_id = world.open_new(GIB)
    rng = random.Random(1)
    for _ in range(1000):
        start = rng.randrange(MIB, GIB - MIB)
        read_and_finish(world, handle_id, start, start + 128 * 1024)
    assert world.fetched_bytes <= 2.05 * 1000 * 128 * 1024


def test_random_megabytes_are_fetched_in_one_request_each() -> None:
    """After the first, a run of eight kernel requests is expected whole: one GET, a chunk too many at most."""
    world = World(capacity_bytes=4 * GIB, checked=False)
    handle_id = world.open_new(GIB)
    rng = random.Random(2)
    asked: list[list[tuple[int, int]]] = []
    for start in rng.sample(range(MIB + 77, GIB - 2 * MIB, 3 * MIB), 100):
        before = world.fetched_bytes
        gets = []
        for at in range(start, start + MIB, 128 * 1024):
            gets += fetched(world.read(handle_id, at, at + 128 * 1024))
            while world.fetches:
                gets += fetched(world.complete(next(iter(world.fetches))))
            world.finish(next(iter(world.reads)))
        asked.append(gets)
        assert len(asked) == 1 or world.fetched_bytes - before <= MIB + CHUNK_BYTES
    assert [len(gets) for gets in asked[1:]] == [1] * 99
    assert world.fetched_bytes <= 1.25 * 100 * MIB


def test_a_stream_soon_has_a_large_window() -> None:
    """Reads of 128 KiB in order: after 8 MiB, 64 MiB lie ahead or are on their way."""
    world = World(capacity_bytes=4 * GIB, max_connections=32, checked=False)
    handle_id = world.open_new(GIB)
    for start in range(0, 8 * MIB, 128 * 1024):
        read_and_finish(world, handle_id, start, start + 128 * 1024)
    assert world.fetched_bytes >= (8 + 64 - 8) * MIB
    assert world.fetched_bytes <= (8 + 64 + 8) * MIB


def test_windows_take_a_share_of_a_small_cache() -> None:
    """A quarter of it, divided among the open files."""
    world = World(capacity_bytes=64 * MIB, max_connections=32)
    one, other = world.open_new(GIB), world.open_new(GIB)
    for start in range(0, 4 * MIB, MIB):
        for handle_id in (one, other):
            read_and_finish(world, handle_id, start, start + MIB)
    assert world.fetched_bytes <= 2 * (4 + 8 + 1) * MIB


def test_a_steady_stream_is_fetched_in_large_requests() -> None:
    """Also where the window is small: it is not topped up chunk by chunk."""
    for capacity_bytes, least_bytes in ((4 * GIB, 7 * MIB), (32 * MIB, 2 * MIB), (4 * MIB, MIB // 2)):
        world = World(capacity_bytes=capacity_bytes, max_connections=32, checked=False)
        handle_id = world.open_new(GIB)
        gets = []
        for start in range(0, 256 * MIB, 128 * 1024):
            gets += fetched(world.read(handle_id, start, start + 128 * 1024))
            while world.fetches or world.releases:
                gets += fetched(world.answer_release() if world.releases else world.complete(min(world.fetches)))
            world.finish(next(iter(world.reads)))
        later = [stop - start for start, stop in gets if start > 100 * MIB]
        assert sum(later) / len(later) >= least_bytes, capacity_bytes


def test_the_stream_with_the_least_ahead_goes_first() -> None:
    """Sixteen streams on four connections are fetched in turns: none gets far ahead while another has nothing."""
    world = World(capacity_bytes=4 * GIB, max_connections=4, checked=False)
    streams = [world.handles[world.open_new(64 * MIB)] for _ in range(16)]
    for handle_id in world.handles:
        world.read(handle_id, 0, 128 * 1024)
    for _ in range(64):
        world.complete(min(world.fetches))
    ahead_chunks = [found.disk.count(LANDED) for found in streams]
    assert min(ahead_chunks) >= 3 * GET_MIN_CHUNKS
    assert max(ahead_chunks) <= min(ahead_chunks) + GET_MIN_CHUNKS


def test_prefetch_leaves_connections_to_demand() -> None:
    """However far a stream may read ahead, another file's reader need not wait for it."""
    world = World(capacity_bytes=4 * GIB, max_connections=16)
    handle_id = world.open_new(GIB)
    for start in range(0, 16 * MIB, MIB):
        world.read(handle_id, start, start + MIB)
        while world.waiting:
            world.complete(min(world.fetches))
        world.finish(next(iter(world.reads)))
    assert len(world.fetches) == 14
    assert fetched(world.read(world.open_new(GIB), FAR, FAR + 1)) == [(FAR, FAR + CHUNK_BYTES)]


def test_demand_on_a_kept_connection_reads_nothing_ahead() -> None:
    """A GET that goes on after its reader has its bytes is prefetch: it gets no connection that is kept for demand."""
    world = World(capacity_bytes=4 * GIB, max_connections=16)
    while len(world.fetches) < 14:
        start, stop = fetched(world.read(world.open_new(GIB), 0, CHUNK_BYTES))[0]
        assert stop - start > CHUNK_BYTES
    for _ in range(2):
        assert fetched(world.read(world.open_new(GIB), 0, CHUNK_BYTES)) == [(0, CHUNK_BYTES)]


def test_read_ahead_that_stalls_does_not_hold_up_demand() -> None:
    """A hundred files of which the first block arrives and then nothing more: each reader has his at once."""
    world = World(capacity_bytes=4 * GIB, max_connections=16)
    for _ in range(100):
        world.read(world.open_new(16 * MIB), 0, 4096)
        (read,) = world.waiting
        fetch_id = next(fetch_id for fetch_id, fetch in world.fetches.items() if fetch.may_serve(read))
        world.land(fetch_id, chunks=1)
        if not world.fetches[fetch_id].missing:
            world.done(fetch_id)
        assert not world.waiting


def test_nothing_is_read_ahead_for_a_closed_file() -> None:
    """What is on its way still lands; nothing new is asked for."""
    world = World(capacity_bytes=GIB, max_connections=2)
    handle_id = world.open_new(GIB)
    world.read(handle_id, 0, MIB)
    world.finish(next(iter(world.reads)))
    world.close(handle_id)
    while world.fetches:
        assert fetched(world.complete(min(world.fetches))) == []


# ---------------------------------------------------------------------------------------------- space


def stream(world: World, handle_id: int, start: int, stop: int, step: int = MIB) -> list[ev.Instruction]:
    """Read a stretch in order, everything answered at once; returns all instructions."""
    out: list[ev.Instruction] = []
    for at in range(start, stop, step):
        out += world.read(handle_id, at, min(at + step, stop))
        while world.fetches or world.releases or world.evictions:
            if world.releases:
                out += world.answer_release()
            elif world.evictions:
                out += world.answer_eviction()
            else:
                out += world.complete(min(world.fetches))
        out += world.finish(next(iter(world.reads)))
    return out


def test_an_object_larger_than_the_cache_is_read_to_its_end() -> None:
    """Chunks behind the reader are released; nothing goes through memory, nothing is fetched twice."""
    world = World(capacity_bytes=32 * MIB)
    handle_id = world.open_new(200 * MIB)
    for at in range(0, 200 * MIB, MIB):
        for instruction in stream(world, handle_id, at, at + MIB):
            if isinstance(instruction, ev.Release):
                assert instruction.last * CHUNK_BYTES <= at, "released ahead of the reader"
    assert world.fetched_bytes == 200 * MIB
    assert world.scheduler.snapshot().memory_fetches == 0


def test_what_was_read_ahead_of_a_stream_is_not_released() -> None:
    """Another reader's need for space is met from what was consumed, his own chunks included."""
    world = World(capacity_bytes=32 * MIB)
    slow, random_reader = world.open_new(GIB), world.open_new(GIB)
    stream(world, slow, 0, CHUNK_BYTES, CHUNK_BYTES)
    assert world.handles[slow].disk.count(LANDED) >= 4 * MIB // CHUNK_BYTES
    released = set()
    for place in range(1, 100):
        for instruction in stream(world, random_reader, place * 5 * MIB, place * 5 * MIB + MIB):
            if isinstance(instruction, ev.Release):
                released.add(instruction.object_id)
    assert released == {world.handles[random_reader].object_id}


def test_the_least_recently_closed_object_is_evicted_first() -> None:
    """Opening an object again makes it recent."""
    world = World(capacity_bytes=16 * MIB)
    ids = [world.add(4 * MIB) for _ in range(3)]
    for object_id in [*ids, ids[0]]:
        handle_id = world.open(object_id)
        stream(world, handle_id, 0, 4 * MIB)
        world.close(handle_id)
    out = stream(world, world.open_new(8 * MIB), 0, 8 * MIB)
    assert [evict.object_id for evict in out if isinstance(evict, ev.Evict)] == [ids[1], ids[2]]


def test_without_any_room_a_read_goes_through_memory() -> None:
    """The cache is full of chunks that readers hold: the next reader gets its bytes, exactly, and nothing else."""
    world = World(capacity_bytes=2 * CHUNK_BYTES)
    handle_id = world.open_new(GIB)
    for place in (FAR, 2 * FAR):
        world.read(handle_id, place, place + 1)
        world.complete(min(world.fetches))
    out = world.read(handle_id, 3 * FAR + 5, 3 * FAR + 1000)
    (fetch_id,) = world.fetches
    read_id = list(world.reads)[-1]
    assert but_alarms(out) == [ev.Fetch(fetch_id, 1, 3 * FAR + 5, 3 * FAR + 1000, to_memory=True)]
    assert world.done(fetch_id) == [ev.Wake(read_id, fetch_id=fetch_id)]


def test_an_object_without_a_cache_file_is_read_through_memory() -> None:
    """Each reader for itself, byte for byte."""
    world = World(capacity_bytes=GIB)
    handle_id = world.open(world.add(MIB, bypass=True))
    assert fetched(world.read(handle_id, 7, 4103)) == [(7, 4103)]
    assert all(fetch.to_memory for fetch in world.fetches.values())


def test_an_object_without_bytes_is_forgotten_on_close() -> None:
    """Opened and never read, or empty: nothing is left of it."""
    world = World(capacity_bytes=GIB)
    for size_bytes in (0, GIB):
        handle_id = world.open_new(size_bytes)
        object_id = world.handles[handle_id].object_id
        assert world.close(handle_id) == [ev.Evict(object_id)]
        world.answer_eviction()
    assert world.scheduler.snapshot().objects == 0


def test_a_new_object_is_not_evicted_before_it_is_opened() -> None:
    """However full the cache is when it comes."""
    world = World(capacity_bytes=4 * CHUNK_BYTES)
    handle_id = world.open_new(GIB)
    for place in range(4):
        world.read(handle_id, place * FAR, place * FAR + 1)
        world.complete(min(world.fetches))
    object_id = world.add(MIB)
    world.read(handle_id, 5 * FAR, 5 * FAR + 1)
    world.open(object_id)


def test_a_cache_that_was_larger_is_trimmed() -> None:
    """What a previous session left beyond today's capacity goes, oldest first, before anything is fetched."""
    world = World(capacity_bytes=8 * CHUNK_BYTES, checked=False)
    oldest, newest = (world.recover(6 * CHUNK_BYTES, [OLD] * 6) for _ in range(2))
    assert [evict.object_id for evict in world.evictions] == [oldest]
    assert newest in world.objects


# ---------------------------------------------------------------------------------------------- verification


def test_what_a_previous_session_left_is_verified_before_use() -> None:
    """Good chunks answer the reader without a request; damaged ones are fetched again, and only those."""
    world = World(capacity_bytes=GIB)
    object_id = world.recover(4 * CHUNK_BYTES, [OLD, OLD, OLD_BAD, OLD])
    handle_id = world.open(object_id)
    assert but_alarms(world.read(handle_id, 0, 2 * CHUNK_BYTES)) == [ev.Verify(object_id, 0, 4)]
    world.read(handle_id, 2 * CHUNK_BYTES, 4 * CHUNK_BYTES)
    good, damaged = world.reads
    out = world.answer_verify()
    assert woken(out) == [good]
    assert fetched(out) == [(2 * CHUNK_BYTES, 3 * CHUNK_BYTES)]
    assert woken(world.complete(min(world.fetches))) == [damaged]
    assert world.scheduler.snapshot().corrupt_chunks == 1


def test_bytes_that_the_disk_lost_are_fetched_again() -> None:
    """What is resident and cannot be read back is absent from then on; if it happens again, memory is trusted more."""
    world = World(capacity_bytes=GIB)
    handle_id = world.open_new(GIB)
    object_id = world.handles[handle_id].object_id
    first = FAR // CHUNK_BYTES
    for bypass in (False, True):
        read_and_finish(world, handle_id, FAR, FAR + 2 * CHUNK_BYTES)
        world.damage(object_id, first, first + 1, bypass)
        assert not world.scheduler.is_complete(handle_id)
    world.read(handle_id, FAR, FAR + 2 * CHUNK_BYTES)
    assert [fetch.to_memory for fetch in world.fetches.values()] == [True]
    assert world.scheduler.snapshot().corrupt_chunks == 2


def test_a_large_file_is_verified_piece_by_piece() -> None:
    """The reader waits for the piece it needs."""
    world = World(capacity_bytes=GIB)
    chunks = 3 * VERIFY_MAX_CHUNKS
    object_id = world.recover(chunks * CHUNK_BYTES, [OLD] * chunks)
    handle_id = world.open(object_id)
    assert but_alarms(world.read(handle_id, 0, 1)) == [ev.Verify(object_id, 0, VERIFY_MAX_CHUNKS)]
    assert woken(world.answer_verify()) == list(world.reads)


# ---------------------------------------------------------------------------------------------- whole files


def test_a_file_that_is_wanted_whole_is_verified_to_its_end() -> None:
    """One piece after the other, without a reader; then it is complete, and nothing was fetched."""
    world = World(capacity_bytes=GIB)
    chunks = 2 * VERIFY_MAX_CHUNKS + 1
    object_id = world.recover(chunks * CHUNK_BYTES, [OLD] * chunks)
    handle_id = world.open(object_id)
    out = world.want_whole(handle_id)
    pieces = []
    while out:
        assert world.scheduler.is_coming(handle_id)
        (piece,) = out
        assert isinstance(piece, ev.Verify)
        pieces.append((piece.first, piece.last))
        out = world.answer_verify()
    assert pieces == [(0, 32), (32, 64), (64, 65)]
    assert world.scheduler.is_complete(handle_id)
    assert not world.scheduler.is_coming(handle_id)


def test_a_file_with_a_hole_is_not_coming() -> None:
    """Nobody fetches what nobody reads, so nobody need wait for it; what is on its way is waited for."""
    world = World(capacity_bytes=GIB)
    handle_id = world.open(world.recover(2 * CHUNK_BYTES, [OLD, ABSENT]))
    world.want_whole(handle_id)
    assert not world.scheduler.is_coming(handle_id)
    world.read(handle_id, CHUNK_BYTES, 2 * CHUNK_BYTES)
    assert world.scheduler.is_coming(handle_id)
    world.answer_verify()
    world.complete(min(world.fetches))
    assert world.scheduler.is_complete(handle_id)


def test_what_the_kernel_reads_is_not_released() -> None:
    """Chunks of another open object go instead; once the last handle is closed, it is as any other object."""
    world = World(capacity_bytes=40 * CHUNK_BYTES)
    handle_id = world.open_new(20 * CHUNK_BYTES)
    stream(world, handle_id, 0, 20 * CHUNK_BYTES)
    second = world.open(world.handles[handle_id].object_id)
    world.pass_through(handle_id)
    stream(world, world.open_new(80 * CHUNK_BYTES), 0, 80 * CHUNK_BYTES)
    world.close(handle_id)
    stream(world, world.open_new(80 * CHUNK_BYTES), 0, 80 * CHUNK_BYTES)
    assert world.scheduler.is_complete(second)
    object_id = world.handles[second].object_id
    world.close(second)
    stream(world, world.open_new(80 * CHUNK_BYTES), 0, 80 * CHUNK_BYTES)
    assert object_id not in world.objects


# ---------------------------------------------------------------------------------------------- figures, misuse


def test_the_figures_of_a_moment() -> None:
    """What status shows."""
    world = World(capacity_bytes=GIB, max_connections=2)
    stream(world, world.open_new(MIB), 0, MIB)
    world.read(world.open_new(GIB), FAR, FAR + 1)
    snapshot = world.scheduler.snapshot()
    assert (snapshot.capacity_bytes, snapshot.used_bytes) == (GIB, MIB + CHUNK_BYTES)
    assert (snapshot.objects, snapshot.complete_objects) == (2, 1)
    assert (snapshot.reads_waiting, snapshot.fetches_in_flight, snapshot.fetches_backing_off) == (1, 1, 0)
    assert (snapshot.retries, snapshot.failed_reads, snapshot.evictions, snapshot.memory_fetches) == (0, 0, 0, 0)
    assert world.scheduler.occupied_bytes(world.handles[min(world.handles)].object_id) == MIB


def test_chunks_out_of_order_are_refused() -> None:
    """A worker that skips a chunk is broken, and is not believed."""
    world = World(capacity_bytes=GIB)
    world.read(world.open_new(GIB), 0, 1)
    with pytest.raises(ValueError, match="landed"):
        world.scheduler.handle(ev.Landed(min(world.fetches), CHUNK_BYTES, 2 * CHUNK_BYTES), world.now)
