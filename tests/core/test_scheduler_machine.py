"""Random histories against the scheduler: readers, plans, workers, disk and time play at random; `World` checks.

At the end of every history the world answers everything, kindly or with nothing but failures, and every reader
must be answered, every fetch ended, every alarm silent; and the same history must give the same instructions.

Two drivers share one set of moves. Hypothesis draws short histories and shrinks what fails; plain chance plays
long, dense ones, which fill the cache many times over. To play more: `SCHEDULER_HISTORIES=500 pytest ...`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from s3prefetchfs.core import events as ev
from s3prefetchfs.core.eviction import Evictor, Room
from s3prefetchfs.core.extent import CHUNK_BYTES, chunk_count
from s3prefetchfs.core.foresight import Foresight
from s3prefetchfs.core.plan import Order
from s3prefetchfs.core.residency import RESIDENT, CachedObject, Residency
from s3prefetchfs.core.scheduler import Scheduler
from s3prefetchfs.errors import FailureKind
from tests.core.plan_world import plan_of
from tests.core.world import ABSENT, OLD, OLD_BAD, World

MIB = 1024 * 1024
LONG_HISTORIES = int(os.environ.get("SCHEDULER_HISTORIES", "60"))
LONG_STEPS = 400

sizes = st.one_of(
    st.sampled_from([0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1]),
    st.integers(1, 4 * CHUNK_BYTES),
    st.integers(1, 4 * MIB),
    st.integers(4 * MIB, 8 * MIB),
)
lengths = st.one_of(st.sampled_from([1, 4096, CHUNK_BYTES, MIB]), st.integers(1, MIB))
states = st.sampled_from([ABSENT, OLD, OLD, OLD_BAD])
capacities = st.sampled_from([1, 3, 12, 24, 40, 80, 256])
kinds = st.sampled_from([None, *FailureKind])
picks = st.integers(0, 255)
"""Which one of those there are, modulo their number."""


def picked(things: Mapping[int, Any], pick: int) -> int:
    return list(things)[pick % len(things)]


class Moves(RuleBasedStateMachine):
    """Everything that can happen to a scheduler, in any order the engine allows."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(capacity_bytes=MIB)
        self.ended: list[int] = []
        self.positions: dict[int, int] = {}
        self.last_failure: FailureKind | None = None
        self.path: list[int] = []  # numbers of files, as the last plan has them
        self.step = 0

    @initialize(
        capacity_chunks=capacities,
        connections=st.integers(1, 9),
        throughput=st.sampled_from([None, None, None, MIB, 64 * MIB]),
        last_failure=kinds,
        left=st.lists(st.tuples(st.integers(1, 6 * CHUNK_BYTES), st.lists(states, min_size=1)), max_size=3),
        opened=st.lists(sizes, min_size=1, max_size=4),
        files=st.lists(sizes, max_size=6),
    )
    def begin(
        self,
        capacity_chunks: int,
        connections: int,
        throughput: int | None,
        last_failure: FailureKind | None,
        left: list[tuple[int, list[int]]],
        opened: list[int],
        files: list[int],
    ) -> None:
        self.world = World(
            capacity_bytes=capacity_chunks * CHUNK_BYTES,
            max_connections=connections,
            max_throughput_bytes_per_s=throughput,
        )
        self.last_failure = last_failure
        room_chunks = capacity_chunks
        for size_bytes, disk in left:
            chunks = chunk_count(size_bytes)
            room_chunks -= chunks
            if any(disk[:chunks]) and room_chunks >= 0:
                self.world.recover(size_bytes, (disk + [ABSENT] * chunks)[:chunks])
        for size_bytes in files:
            self.world.add_file(size_bytes)
        for size_bytes in opened:
            self.world.open_new(size_bytes)

    # ------------------------------------------------------------------------------------- readers

    def can_open(self) -> bool:
        return len(self.world.handles) < 12

    def openable(self) -> list[int]:
        return [object_id for object_id, found in self.world.objects.items() if not found.evicting]

    def can_open_again(self) -> bool:
        return self.can_open() and bool(self.openable())

    def can_read(self) -> bool:
        return bool(self.world.handles) and len(self.world.reads) < 24

    def has_reads(self) -> bool:
        return bool(self.world.reads)

    @precondition(can_open)
    @rule(size_bytes=sizes, bypass=st.sampled_from([False] * 9 + [True]))
    def open_new(self, size_bytes: int, bypass: bool) -> None:
        self.world.open(self.world.add(size_bytes, bypass=bypass))

    @precondition(can_open_again)
    @rule(pick=picks)
    def open_again(self, pick: int) -> None:
        openable = self.openable()
        self.world.open(openable[pick % len(openable)])

    @precondition(can_read)
    @rule(pick=picks)
    def close(self, pick: int) -> None:
        self.world.close(picked(self.world.handles, pick))

    @precondition(can_read)
    @rule(pick=picks)
    def want_whole(self, pick: int) -> None:
        self.world.want_whole(picked(self.world.handles, pick))

    @precondition(can_read)
    @rule(pick=picks)
    def pass_through(self, pick: int) -> None:
        self.world.pass_through(picked(self.world.handles, pick))

    @precondition(can_read)
    @rule(pick=picks, share=st.floats(0, 1), length_bytes=lengths)
    def read_anywhere(self, pick: int, share: float, length_bytes: int) -> None:
        handle_id = picked(self.world.handles, pick)
        self._read(handle_id, int(share * self.world.handles[handle_id].size_bytes), length_bytes)

    @precondition(can_read)
    @rule(pick=picks, length_bytes=lengths, times=st.integers(1, 4))
    def read_on(self, pick: int, length_bytes: int, times: int) -> None:
        """The next bytes in order, several requests at once as the kernel does it."""
        handle_id = picked(self.world.handles, pick)
        for _ in range(times):
            self._read(handle_id, self.positions.get(handle_id, 0), length_bytes)

    @precondition(can_read)
    @rule(pick=picks, length_bytes=lengths, times=st.integers(1, 20))
    def read_through(self, pick: int, length_bytes: int, times: int) -> None:
        """A stretch in which all goes well."""
        handle_id = picked(self.world.handles, pick)
        for _ in range(times):
            self._read(handle_id, self.positions.get(handle_id, 0), length_bytes)
            self.world.rest()
            self.finish_answered()

    def _read(self, handle_id: int, start: int, length_bytes: int) -> None:
        stop = min(start + length_bytes, self.world.handles[handle_id].size_bytes)
        if start < stop:
            self.positions[handle_id] = stop
            self.world.read(handle_id, start, stop)

    @precondition(has_reads)
    @rule(pick=picks)
    def finish_any(self, pick: int) -> None:
        """Also a reader that was not answered: it was killed."""
        self.world.finish(picked(self.world.reads, pick))

    @precondition(has_reads)
    @rule()
    def finish_answered(self) -> None:
        for read_id in [read_id for read_id, read in self.world.reads.items() if read.wake]:
            self.world.finish(read_id)

    # ------------------------------------------------------------------------------------- plans

    def can_declare(self) -> bool:
        return bool(self.world.files) and len(self.world.plans) < 3

    def has_plans(self) -> bool:
        return bool(self.world.plans)

    def can_follow(self) -> bool:
        return self.can_open() and bool(self.path)

    @precondition(can_declare)
    @rule(
        epochs=st.lists(st.lists(picks, min_size=1, max_size=12), min_size=1, max_size=3),
        ranges=st.one_of(st.none(), st.tuples(st.floats(0, 1.1), lengths)),
        order=st.sampled_from([Order.STRICT, Order.STRICT, Order.ANY]),
        interleave=st.integers(1, 4),
        missing=st.sets(st.integers(0, 5), max_size=2),
        start=st.tuples(st.integers(0, 3), st.integers(0, 12)),
    )
    def declare(
        self,
        epochs: list[list[int]],
        ranges: tuple[float, int] | None,
        order: Order,
        interleave: int,
        missing: set[int],
        start: tuple[int, int],
    ) -> None:
        """Files in any order, some of them again and again, whole or a range of each."""
        sizes = [version.size_bytes for version in self.world.files]
        orders = [[pick % len(sizes) for pick in entries] for entries in epochs]
        orders[-1].append(len(sizes) - 1)  # plans made by `plan_of` have the files up to the last that is read
        flat = None
        if ranges is not None:
            share, length_bytes = ranges
            flat = [[n for file in entries for n in (int(share * sizes[file]), length_bytes)] for entries in orders]
        plan = plan_of(orders, interleave=interleave, order=order, ranges=flat)
        self.world.declare(plan, missing, start)
        self.path = [file for entries in orders for file in entries]
        self.step = 0

    @precondition(can_follow)
    @rule(skip=st.sampled_from([0, 0, 0, 0, 1, 40]))
    def open_next(self, skip: int) -> None:
        """What the plan declared last says, or something further on."""
        self.step += skip
        self.world.open_file(self.path[self.step % len(self.path)])
        self.step += 1

    @precondition(has_plans)
    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        self.world.remove_plan(pick % len(self.world.plans))

    @precondition(has_plans)
    @rule()
    def look_at_plans(self) -> None:
        for progress in map(self.world.scheduler.progress, self.world.plans):
            assert 0 <= progress.position <= progress.entries
            assert 0 < progress.confidence <= 1

    # ------------------------------------------------------------------------------------- workers

    def has_fetches(self) -> bool:
        return bool(self.world.fetches)

    def landing(self) -> dict[int, Any]:
        return {
            fetch_id: fetch for fetch_id, fetch in self.world.fetches.items() if fetch.missing and not fetch.to_memory
        }

    def can_land(self) -> bool:
        return bool(self.landing())

    def has_ended(self) -> bool:
        return bool(self.ended)

    @precondition(can_land)
    @rule(pick=picks, chunks=st.integers(1, 8))
    def land(self, pick: int, chunks: int) -> None:
        self.world.land(picked(self.landing(), pick), chunks)

    @precondition(has_fetches)
    @rule(pick=picks)
    def complete(self, pick: int) -> None:
        self.ended.append(picked(self.world.fetches, pick))
        self.world.complete(self.ended[-1])

    @precondition(has_fetches)
    @rule(
        pick=picks,
        kind=kinds,
        retry_after_s=st.sampled_from([None, None, 0.0, 2.0, 1000.0]),
        jitter=st.sampled_from([0.0, 0.5, 0.99]),
    )
    def fail(self, pick: int, kind: FailureKind | None, retry_after_s: float | None, jitter: float) -> None:
        """Without a kind the fetch ends early as if all were well."""
        self.ended.append(picked(self.world.fetches, pick))
        if kind is None:
            self.world.done(self.ended[-1])
        else:
            self.world.fail(self.ended[-1], kind, retry_after_s, jitter)

    @precondition(has_fetches)
    @rule(kind=st.sampled_from([FailureKind.WORKER_LOST, FailureKind.NO_SPACE, FailureKind.CHANGED]))
    def fail_all(self, kind: FailureKind) -> None:
        for fetch_id in list(self.world.fetches):
            self.ended.append(fetch_id)
            self.world.fail(fetch_id, kind)

    @precondition(has_ended)
    @rule(pick=picks, kind=kinds)
    def late_message(self, pick: int, kind: FailureKind | None) -> None:
        """From a worker whose fetch is no longer known: nothing may come of it."""
        fetch_id = self.ended[pick % len(self.ended)]
        self.world.send(ev.Landed(fetch_id, 0, CHUNK_BYTES))
        self.world.send(ev.FetchFailed(fetch_id, kind, None, 0.5) if kind else ev.FetchDone(fetch_id))

    # ------------------------------------------------------------------------------------- disk and time

    def disk_is_busy(self) -> bool:
        return bool(self.world.verifies or self.world.releases or self.world.evictions)

    def alarm_is_set(self) -> bool:
        return self.world.alarm_s is not None

    @precondition(disk_is_busy)
    @rule(pick=picks)
    def disk_answers(self, pick: int) -> None:
        world = self.world
        possible: list[tuple[Callable[[int], object], int]] = [
            *((world.answer_verify, index) for index in range(len(world.verifies))),
            *((world.answer_release, index) for index in range(len(world.releases))),
            *((world.answer_eviction, index) for index in range(len(world.evictions))),
        ]
        answer, index = possible[pick % len(possible)]
        answer(index)

    @precondition(can_read)
    @rule(pick=picks, share=st.floats(0, 1), bypass=st.booleans())
    def damage(self, pick: int, share: float, bypass: bool) -> None:
        """A reader finds that the disk lost some of what it read."""
        found = self.world.handles[picked(self.world.handles, pick)]
        if found.disk:
            first = int(share * (len(found.disk) - 1))
            self.world.damage(found.object_id, first, min(first + 8, len(found.disk)), bypass)

    @rule(full=st.booleans())
    def disk_has_room(self, full: bool) -> None:
        """Whether the store can make new cache files."""
        self.world.disk_full = full

    @rule(seconds=st.sampled_from([0.0, 0.001, 0.05, 0.3, 1.0, 7.0]))
    def time_passes(self, seconds: float) -> None:
        """Without a Tick: the alarm is late, as in a busy daemon."""
        self.world.now += seconds

    @precondition(alarm_is_set)
    @rule(late_s=st.sampled_from([0.0, 0.0, 0.01, 100.0]))
    def tick(self, late_s: float) -> None:
        self.world.tick(late_s)

    # ------------------------------------------------------------------------------------- the end

    def teardown(self) -> None:
        if self.world.broken:
            return
        self.world.rest(self.last_failure)
        self.world.shut()
        self.world.replay()


Chance = random.Random
ANYTHING: dict[str, Callable[[Chance], Any]] = {
    "pick": lambda chance: chance.randrange(256),
    "size_bytes": lambda chance: int(8 * MIB * chance.random() ** 3),
    "length_bytes": lambda chance: chance.choice([1, 4096, CHUNK_BYTES, CHUNK_BYTES, MIB, chance.randint(1, MIB)]),
    "share": lambda chance: chance.random(),
    "times": lambda chance: chance.randint(1, 4),
    "chunks": lambda chance: chance.randint(1, 8),
    "kind": lambda chance: chance.choice([None, *FailureKind]),
    "lost": lambda chance: FailureKind.WORKER_LOST,
    "bypass": lambda chance: chance.random() < 0.05,
    "retry_after_s": lambda chance: chance.choice([None, None, 0.0, 2.0]),
    "jitter": lambda chance: chance.random(),
    "seconds": lambda chance: chance.expovariate(20),
    "late_s": lambda chance: 0.0,
    "epochs": lambda chance: [
        [chance.randrange(256) for _ in range(chance.randint(1, 48))] for _ in range(chance.randint(1, 4))
    ],
    "ranges": lambda chance: chance.choice([None, None, (chance.random(), chance.randint(1, 2 * MIB))]),
    "order": lambda chance: chance.choice([Order.STRICT, Order.STRICT, Order.ANY]),
    "interleave": lambda chance: chance.randint(1, 4),
    "missing": lambda chance: set() if chance.random() < 0.8 else {chance.randint(1, 6)},
    "start": lambda chance: (chance.randint(0, 3), chance.randint(0, 12)) if chance.random() < 0.2 else (0, 0),
    "skip": lambda chance: chance.choice([0] * 20 + [1, 40]),
    "full": lambda chance: chance.random() < 0.1,
}
"""By the names of the moves' arguments."""

MOVES: list[tuple[float, Callable[..., Any], Callable[..., Any], list[str]]] = [
    (2, Moves.can_open, Moves.open_new, ["size_bytes", "bypass"]),
    (2, Moves.can_open_again, Moves.open_again, ["pick"]),
    (4, Moves.can_read, Moves.close, ["pick"]),
    (1, Moves.can_read, Moves.want_whole, ["pick"]),
    (2, Moves.can_read, Moves.pass_through, ["pick"]),
    (4, Moves.can_read, Moves.read_anywhere, ["pick", "share", "length_bytes"]),
    (8, Moves.can_read, Moves.read_on, ["pick", "length_bytes", "times"]),
    (1, Moves.can_read, Moves.read_through, ["pick", "length_bytes", "times"]),
    (2, Moves.has_reads, Moves.finish_any, ["pick"]),
    (8, Moves.has_reads, Moves.finish_answered, []),
    (8, Moves.can_land, Moves.land, ["pick", "chunks"]),
    (8, Moves.has_fetches, Moves.complete, ["pick"]),
    (2, Moves.has_fetches, Moves.fail, ["pick", "kind", "retry_after_s", "jitter"]),
    (1, Moves.has_ended, Moves.late_message, ["pick", "kind"]),
    (8, Moves.disk_is_busy, Moves.disk_answers, ["pick"]),
    (1, Moves.can_read, Moves.damage, ["pick", "share", "bypass"]),
    (1, Moves.can_declare, Moves.declare, ["epochs", "ranges", "order", "interleave", "missing", "start"]),
    (8, Moves.can_follow, Moves.open_next, ["skip"]),
    (0.3, Moves.has_plans, Moves.cancel, ["pick"]),
    (1, Moves.has_plans, Moves.look_at_plans, []),
    (1, lambda moves: True, Moves.disk_has_room, ["full"]),
    (8, lambda moves: True, Moves.time_passes, ["seconds"]),
    (4, Moves.alarm_is_set, Moves.tick, ["late_s"]),
]
"""Weight, when it is possible, the move, its arguments."""


def play(seed: int, steps: int = LONG_STEPS) -> None:
    """One long history by plain chance."""
    chance = Chance(seed)
    moves = Moves()
    moves.begin(
        capacity_chunks=chance.choice([1, 3, 12, 24, 40, 80, 256]),
        connections=chance.randint(1, 9),
        throughput=chance.choice([None, None, None, MIB, 64 * MIB]),
        last_failure=chance.choice([None, *FailureKind]),
        left=[(chance.randint(1, 6 * CHUNK_BYTES), chance.choices([ABSENT, OLD, OLD, OLD_BAD], k=6)) for _ in range(3)],
        opened=[ANYTHING["size_bytes"](chance) for _ in range(3)],
        files=[ANYTHING["size_bytes"](chance) for _ in range(chance.choice([0, 1, 6, 20]))],
    )
    weights = [weight for weight, _, _, _ in MOVES]
    for _, possible, move, arguments in chance.choices(MOVES, weights, k=steps):
        if possible(moves):
            move(moves, **{name: ANYTHING[name](chance) for name in arguments})
    moves.teardown()


DRAWN_HISTORIES = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


def test_drawn_histories() -> None:
    """Whatever happens in whatever order, bytes are right, space is kept, and every reader is answered."""
    run_state_machine_as_test(Moves, settings=DRAWN_HISTORIES)


@pytest.mark.parametrize("seed", range(LONG_HISTORIES))
def test_long_histories(seed: int) -> None:
    """The same, when the cache has been full many times over."""
    play(seed)


# ------------------------------------------------------------------------------------- the test of the test


def _overdraw(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Evictor, "room_for", lambda self, need_bytes, now, claim, planned, out: Room.NOW)


def _wake_at_the_first_chunk(patch: pytest.MonkeyPatch) -> None:
    def try_wake(self: Scheduler, read: Any) -> None:
        if read.handle.found.chunks[read.first] == RESIDENT:
            self._wake(read)

    patch.setattr(Scheduler, "_try_wake", try_wake)


def _forget_the_hungry(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_feel_hunger", lambda self, found: None)


def _evict_open_objects(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CachedObject, "idle", property(lambda self: not (self.reads or self.fetches or self.evicting)))


def _release_under_the_kernel(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CachedObject, "passed_through", property(lambda self: False, lambda self, value: None))


def _trust_bad_checksums(patch: pytest.MonkeyPatch) -> None:
    honest = Residency.end_verify
    patch.setattr(Residency, "end_verify", lambda self, found, first, last, bad: honest(self, found, first, last, ()))


def _prefetch_first(patch: pytest.MonkeyPatch) -> None:
    def retry(self: Scheduler, limit: int, now: float, *, awaited: bool) -> None:
        honest(self, limit, now, awaited=not awaited)

    honest = Scheduler._retry
    patch.setattr(Scheduler, "_retry", retry)


def _remember_what_was_admitted_in_vain(patch: pytest.MonkeyPatch) -> None:
    honest = Foresight.object_added

    def object_added(self: Foresight, found: CachedObject) -> bool:
        honest(self, found)
        return False

    patch.setattr(Foresight, "object_added", object_added)


@pytest.mark.parametrize(
    "plant",
    [
        _overdraw,
        _wake_at_the_first_chunk,
        _forget_the_hungry,
        _evict_open_objects,
        _release_under_the_kernel,
        _trust_bad_checksums,
        _prefetch_first,
        _remember_what_was_admitted_in_vain,
    ],
    ids=lambda plant: plant.__name__.strip("_"),
)
def test_a_planted_fault_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The world alone, without the scheduler's own `check`, finds each of these within a hundred histories."""
    monkeypatch.setattr(Scheduler, "check", lambda self: None)
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(100):
            play(seed)
