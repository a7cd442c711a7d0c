"""Random histories against the scheduler: hypothesis plays readers, workers, disk and time; `World` checks.

At the end of every history the world answers everything, kindly or with nothing but failures, and every reader
must be answered, every fetch ended, every alarm silent.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from s3prefetchfs.core import events as ev
from s3prefetchfs.core.extent import CHUNK_BYTES, chunk_count
from s3prefetchfs.errors import FailureKind
from tests.core.world import ABSENT, OLD, OLD_BAD, World

MIB = 1024 * 1024

RETRYABLE = [kind for kind in FailureKind if kind.retryable]
FINAL = [kind for kind in FailureKind if not kind.retryable]

sizes = st.one_of(
    st.sampled_from([0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1]),
    st.integers(1, 4 * CHUNK_BYTES),
    st.integers(1, 4 * MIB),
    st.integers(4 * MIB, 8 * MIB),
)
lengths = st.one_of(st.sampled_from([1, 4096, CHUNK_BYTES, MIB]), st.integers(1, MIB))
states = st.sampled_from([ABSENT, OLD, OLD, OLD_BAD])
picks = st.integers(0, 255)
"""Which one of those there are, modulo their number."""


class SchedulerMachine(RuleBasedStateMachine):
    """Everything that can happen to a scheduler, in any order the engine allows."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(capacity_bytes=MIB)
        self.ended: list[int] = []
        self.positions: dict[int, int] = {}
        self.last_failure: FailureKind | None = None

    @initialize(
        capacity_chunks=st.sampled_from([1, 3, 12, 24, 40, 256]),
        connections=st.integers(1, 6),
        throughput=st.sampled_from([None, None, None, MIB, 64 * MIB]),
        last_failure=st.sampled_from([None, None, *FailureKind]),
        left=st.lists(st.tuples(st.integers(1, 6 * CHUNK_BYTES), st.lists(states, min_size=1)), max_size=3),
        opened=st.lists(sizes, min_size=1, max_size=4),
    )
    def begin(
        self,
        capacity_chunks: int,
        connections: int,
        throughput: int | None,
        last_failure: FailureKind | None,
        left: list[tuple[int, list[int]]],
        opened: list[int],
    ) -> None:
        self.world = World(
            capacity_bytes=capacity_chunks * CHUNK_BYTES,
            max_connections=connections,
            max_throughput_bytes_per_s=throughput,
        )
        self.last_failure = last_failure
        room_chunks = capacity_chunks
        for size_bytes, states in left:
            disk = (states + [ABSENT] * chunk_count(size_bytes))[: chunk_count(size_bytes)]
            room_chunks -= len(disk)
            if any(disk) and room_chunks >= 0:
                self.world.recover(size_bytes, disk)
        for size_bytes in opened:
            self.world.open_new(size_bytes)

    def _ids(self, things: dict[int, Any], pick: int) -> int:
        return list(things)[pick % len(things)]

    # ------------------------------------------------------------------------------------- readers

    @precondition(lambda self: len(self.world.handles) < 12)
    @rule(size_bytes=sizes, bypass=st.sampled_from([False] * 9 + [True]))
    def open_new(self, size_bytes: int, bypass: bool) -> None:
        self.world.open(self.world.add(size_bytes, bypass=bypass))

    @precondition(lambda self: len(self.world.handles) < 12 and self._openable())
    @rule(pick=picks)
    def open_again(self, pick: int) -> None:
        openable = self._openable()
        self.world.open(openable[pick % len(openable)])

    def _openable(self) -> list[int]:
        return [object_id for object_id, found in self.world.objects.items() if not found.evicting]

    @precondition(lambda self: self.world.handles)
    @rule(pick=picks)
    def close(self, pick: int) -> None:
        self.world.close(self._ids(self.world.handles, pick))

    @precondition(lambda self: self.world.handles)
    @rule(pick=picks, share=st.floats(0, 1), length_bytes=lengths)
    def read_anywhere(self, pick: int, share: float, length_bytes: int) -> None:
        handle_id = self._ids(self.world.handles, pick)
        self._read(handle_id, int(share * self.world.handles[handle_id].size_bytes), length_bytes)

    @precondition(lambda self: self.world.handles)
    @rule(pick=picks, length_bytes=lengths, times=st.integers(1, 4))
    def read_on(self, pick: int, length_bytes: int, times: int) -> None:
        handle_id = self._ids(self.world.handles, pick)
        for _ in range(times):
            self._read(handle_id, self.positions.get(handle_id, 0), length_bytes)

    def _read(self, handle_id: int, start: int, length_bytes: int) -> None:
        stop = min(start + length_bytes, self.world.handles[handle_id].size_bytes)
        if start < stop:
            self.positions[handle_id] = stop
            self.world.read(handle_id, start, stop)

    @precondition(lambda self: self.world.handles)
    @rule(pick=picks, length_bytes=lengths, times=st.integers(1, 20))
    def read_through(self, pick: int, length_bytes: int, times: int) -> None:
        """A stretch in which all goes well."""
        handle_id = self._ids(self.world.handles, pick)
        for _ in range(times):
            self._read(handle_id, self.positions.get(handle_id, 0), length_bytes)
            self.world.rest()
            self.finish_answered()

    @precondition(lambda self: self.world.reads)
    @rule(pick=picks)
    def finish_any(self, pick: int) -> None:
        """Also a reader that was not answered: it was killed."""
        self.world.finish(self._ids(self.world.reads, pick))

    @precondition(lambda self: any(read.wake for read in self.world.reads.values()))
    @rule()
    def finish_answered(self) -> None:
        for read_id in [read_id for read_id, read in self.world.reads.items() if read.wake]:
            self.world.finish(read_id)

    # ------------------------------------------------------------------------------------- workers

    @precondition(lambda self: any(not fetch.to_memory and fetch.missing for fetch in self.world.fetches.values()))
    @rule(pick=picks, chunks=st.integers(1, 8))
    def land(self, pick: int, chunks: int) -> None:
        unfinished = {
            fetch_id: fetch
            for fetch_id, fetch in self.world.fetches.items()
            if not fetch.to_memory and fetch.missing
        }
        self.world.land(self._ids(unfinished, pick), chunks)

    @precondition(lambda self: self.world.fetches)
    @rule(pick=picks)
    def complete(self, pick: int) -> None:
        fetch_id = self._ids(self.world.fetches, pick)
        self.world.complete(fetch_id)
        self.ended.append(fetch_id)

    @precondition(lambda self: self.world.fetches)
    @rule()
    def complete_all(self) -> None:
        for fetch_id in list(self.world.fetches):
            self.world.complete(fetch_id)
            self.ended.append(fetch_id)

    @precondition(lambda self: self.world.fetches)
    @rule(
        pick=picks,
        kind=st.sampled_from([None, *RETRYABLE, *FINAL]),
        retry_after_s=st.sampled_from([None, None, 0.0, 2.0, 1000.0]),
        jitter=st.sampled_from([0.0, 0.5, 0.99]),
    )
    def fail(self, pick: int, kind: FailureKind | None, retry_after_s: float | None, jitter: float) -> None:
        """Without a kind the fetch ends early as if all were well."""
        fetch_id = self._ids(self.world.fetches, pick)
        if kind is None:
            self.world.done(fetch_id)
        else:
            self.world.fail(fetch_id, kind, retry_after_s, jitter)
        self.ended.append(fetch_id)

    @precondition(lambda self: self.world.fetches)
    @rule(kind=st.sampled_from([FailureKind.WORKER_LOST, FailureKind.NO_SPACE, FailureKind.CHANGED]))
    def fail_all(self, kind: FailureKind) -> None:
        for fetch_id in list(self.world.fetches):
            self.world.fail(fetch_id, kind)
            self.ended.append(fetch_id)

    @precondition(lambda self: self.ended)
    @rule(pick=picks, what=st.sampled_from([ev.Landed, ev.FetchDone, ev.FetchFailed]))
    def late_message(self, pick: int, what: type) -> None:
        """From a worker whose fetch is no longer known: nothing may come of it."""
        fetch_id = self.ended[pick % len(self.ended)]
        match what:
            case ev.Landed:
                event: ev.Event = ev.Landed(fetch_id, 0, CHUNK_BYTES)
            case ev.FetchDone:
                event = ev.FetchDone(fetch_id)
            case _:
                event = ev.FetchFailed(fetch_id, FailureKind.CHANGED, None, 0.5)
        self.world.send(event)

    # ------------------------------------------------------------------------------------- disk and time

    @precondition(lambda self: self.world.verifies or self.world.releases or self.world.evictions)
    @rule(pick=picks)
    def disk_answers(self, pick: int) -> None:
        world = self.world
        answers = [(world.answer_verify, len(world.verifies)), (world.answer_release, len(world.releases))]
        answers.append((world.answer_eviction, len(world.evictions)))
        possible = [(answer, index) for answer, count in answers for index in range(count)]
        answer, index = possible[pick % len(possible)]
        answer(index)

    @rule(seconds=st.sampled_from([0.0, 0.001, 0.05, 0.3, 1.0, 7.0]))
    def time_passes(self, seconds: float) -> None:
        """Without a Tick: the alarm is late, as in a busy daemon."""
        self.world.now += seconds

    @precondition(lambda self: self.world.alarm_s is not None)
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


HISTORIES = settings(
    max_examples=200,
    stateful_step_count=60,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


def test_random_histories() -> None:
    """Whatever happens in whatever order, bytes are right, space is kept, and every reader is answered."""
    run_state_machine_as_test(SchedulerMachine, settings=HISTORIES)
