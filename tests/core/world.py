"""The world around a scheduler: engine, workers, S3, disk and clock, as a model that believes nothing.

`World` carries the scheduler's instructions out on a model disk, at the moment a test chooses, and checks each
one as it comes: a reader is told of bytes only when all of them are on the disk, trusted, and stay there until
it has finished; nothing is released that the kernel reads by itself; space is never overdrawn; nothing in use
is evicted; no chunk is fetched twice; no prefetch goes before a demand. What it checks it derives from the
instructions alone, never from the scheduler's state.

The state machine drives it at random, the unit tests by hand.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from s3prefetchfs.core import events as ev
from s3prefetchfs.core.extent import CHUNK_BYTES, chunk_count, chunk_extent, chunk_span, disk_bytes
from s3prefetchfs.core.plan import Plan
from s3prefetchfs.core.scheduler import READ_GRACE_S, Scheduler
from s3prefetchfs.core.version import PlanVersions, Version
from s3prefetchfs.errors import FailureKind

ABSENT, LANDED, OLD, OLD_BAD, GOING = range(5)
"""What a chunk of the model disk holds: nothing; bytes we saw land or verified; bytes of a previous session, good
or bad, not verified yet; a hole being punched."""

GET_S = 0.03
"""While a world comes to rest, each answer takes this long."""

REST_S = 50.0
"""In a kind world every reader is answered within this time, also on the slowest capped link."""

STEPS_TO_REST = 20_000


@dataclass(slots=True, eq=False)
class ModelObject:
    object_id: int
    size_bytes: int
    disk: bytearray
    bypass: bool = False
    handles: set[int] = field(default_factory=set)
    failures: set[FailureKind] = field(default_factory=set)
    evicting: bool = False
    passed_through: bool = False

    def occupied_bytes(self) -> int:
        absent_bytes = self.disk.count(ABSENT) * CHUNK_BYTES
        short_bytes = CHUNK_BYTES - self.chunk_bytes(len(self.disk) - 1) if self.disk and self.disk[-1] != ABSENT else 0
        return len(self.disk) * CHUNK_BYTES - absent_bytes - short_bytes

    def chunk_bytes(self, chunk: int) -> int:
        return disk_bytes(*chunk_extent(chunk, chunk + 1, self.size_bytes))


@dataclass(slots=True, eq=False)
class ModelRead:
    read_id: int
    found: ModelObject
    start: int
    stop: int
    deadline_s: float
    wake: ev.Wake | None = None

    @property
    def chunks(self) -> range:
        return range(*chunk_span(self.start, self.stop))


@dataclass(slots=True, eq=False)
class ModelFetch:
    """`reached`: bytes before it have landed."""

    fetch_id: int
    found: ModelObject
    start: int
    stop: int
    to_memory: bool
    reached: int

    @property
    def missing(self) -> range:
        return range(*chunk_span(self.reached, self.stop)) if self.reached < self.stop else range(0)

    def overlaps(self, other: ModelFetch) -> bool:
        return self.found is other.found and not self.to_memory and _meet(self.missing, other.missing)

    def may_serve(self, read: ModelRead) -> bool:
        same = (self.start, self.stop) == (read.start, read.stop)
        return self.found is read.found and (same or not self.to_memory)


class World:
    """See the module's docstring. The arguments are the scheduler's.

    Attributes:
        fetches, verifies, releases, evictions: instructions that wait for their answer, in order of arrival.
        reads: those not finished. alarm_s: when a Tick is due, if one is.
        files: what plans may speak of. file_objects: ids of those that are in the cache.
        disk_full: no object that is made from now on gets a cache file.
        broken: an event was not taken in to its end: the history is over.
        checked: whether to check everything after every event, which costs time in proportion to the cache.
    """

    def __init__(
        self,
        *,
        capacity_bytes: int,
        max_connections: int = 4,
        retry_timeout_s: float = 20.0,
        max_throughput_bytes_per_s: int | None = None,
        checked: bool = True,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.max_connections = max_connections
        self.retry_timeout_s = retry_timeout_s
        self.max_throughput_bytes_per_s = max_throughput_bytes_per_s
        self.checked = checked
        self.scheduler = self._new_scheduler()
        self.now = 1000.0
        self.alarm_s: float | None = None
        self.objects: dict[int, ModelObject] = {}
        self.handles: dict[int, ModelObject] = {}
        self.reads: dict[int, ModelRead] = {}
        self.fetches: dict[int, ModelFetch] = {}
        self.verifies: list[ev.Verify] = []
        self.releases: list[ev.Release] = []
        self.evictions: list[ev.Evict] = []
        self.gone: list[int] = []
        self.files: list[Version] = []
        self.file_objects: dict[Version, int] = {}
        self.plans: list[int] = []
        self.disk_full = False
        self.fetched_bytes = 0
        self.broken = False
        self._retrying: list[ModelFetch] = []  # failed, and perhaps still reserved
        self._throttled = False
        self._history: list[tuple[ev.Event, float, list[ev.Instruction]]] = []
        self._last_id = 0

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(
            capacity_bytes=self.capacity_bytes,
            max_connections=self.max_connections,
            retry_timeout_s=self.retry_timeout_s,
            max_throughput_bytes_per_s=self.max_throughput_bytes_per_s,
        )

    @property
    def waiting(self) -> list[ModelRead]:
        return [read for read in self.reads.values() if read.wake is None]

    # ------------------------------------------------------------------------------------- what can happen

    def add(self, size_bytes: int, *, bypass: bool = False) -> int:
        """A new object that no plan speaks of; returns its id."""
        return self._add(Version(f"object {self._last_id}", "", size_bytes), bypass)

    def _add(self, version: Version, bypass: bool = False) -> int:
        bypass = bypass or self.disk_full
        found = ModelObject(self._id(), version.size_bytes, bytearray(chunk_count(version.size_bytes)), bypass)
        self.objects[found.object_id] = found
        if version in self.files:
            self.file_objects[version] = found.object_id
        self.send(ev.ObjectAdded(found.object_id, version, bypass=bypass))
        return found.object_id

    def add_file(self, size_bytes: int) -> None:
        """The bucket has one more file for plans to speak of."""
        self.files.append(Version(f"file {len(self.files)}", "", size_bytes))

    def open_file(self, number: int) -> int:
        """Open a file that plans may speak of; returns the handle's id."""
        version = self.files[number]
        if version not in self.file_objects:
            self._add(version)
        return self.open(self.file_objects[version])

    def declare(self, plan: Plan, missing: Collection[int], start: tuple[int, int]) -> None:
        """A plan of all files, some of which the bucket no longer has."""
        plan_id = self._id()
        self.plans.append(plan_id)
        versions = [None if number in missing else version for number, version in enumerate(self.files)]
        self.send(ev.PlanAdded(plan_id, plan, PlanVersions(versions), start))

    def remove_plan(self, index: int) -> None:
        self.send(ev.PlanRemoved(self.plans.pop(index)))

    def recover(self, size_bytes: int, disk: list[int]) -> int:
        """An object that a previous session left, its chunks ABSENT, OLD or OLD_BAD; returns its id."""
        found = ModelObject(self._id(), size_bytes, bytearray(disk))
        self.objects[found.object_id] = found
        version = Version(f"object {found.object_id}", "", size_bytes)
        self.send(ev.ObjectAdded(found.object_id, version, bytes(state != ABSENT for state in disk)))
        return found.object_id

    def open(self, object_id: int) -> int:
        """Open an object; returns the handle's id."""
        handle_id = self._id()
        self.handles[handle_id] = self.objects[object_id]
        self.objects[object_id].handles.add(handle_id)
        self.send(ev.Opened(handle_id, object_id))
        return handle_id

    def open_new(self, size_bytes: int) -> int:
        """Open a new object; returns the handle's id."""
        return self.open(self.add(size_bytes))

    def close(self, handle_id: int) -> list[ev.Instruction]:
        found = self.handles.pop(handle_id)
        found.handles.remove(handle_id)
        found.passed_through = found.passed_through and bool(found.handles)
        return self.send(ev.Closed(handle_id))

    def want_whole(self, handle_id: int) -> list[ev.Instruction]:
        """Who opened this would have the kernel read the file."""
        return self.send(ev.WholeWanted(handle_id))

    def pass_through(self, handle_id: int) -> list[ev.Instruction]:
        """The kernel reads the file of this handle by itself, if the scheduler calls it complete."""
        found = self.handles[handle_id]
        complete = self.scheduler.is_complete(handle_id)
        assert complete == all(state == LANDED for state in found.disk), "complete or not, the disk says otherwise"
        if not complete:
            return []
        found.passed_through = True
        return self.send(ev.PassedThrough(handle_id))

    def read(self, handle_id: int, start: int, stop: int) -> list[ev.Instruction]:
        """A reader asks for `[start, stop)`; its id is in the Wake, or the last of `reads`."""
        deadline_s = self.now + self.retry_timeout_s + READ_GRACE_S
        read = ModelRead(self._id(), self.handles[handle_id], start, stop, deadline_s)
        self.reads[read.read_id] = read
        return self.send(ev.ReadStarted(read.read_id, handle_id, start, stop))

    def finish(self, read_id: int) -> list[ev.Instruction]:
        del self.reads[read_id]
        return self.send(ev.ReadFinished(read_id))

    def land(self, fetch_id: int, chunks: int | None = None) -> list[ev.Instruction]:
        """The next chunks of a fetch land, all that are left by default."""
        fetch = self.fetches[fetch_id]
        start, stop = fetch.reached, fetch.stop
        if chunks is not None:
            stop = min(stop, start + chunks * CHUNK_BYTES)
        for chunk in range(*chunk_span(start, stop)):
            fetch.found.disk[chunk] = LANDED
        fetch.reached = stop
        return self.send(ev.Landed(fetch_id, start, stop))

    def done(self, fetch_id: int) -> list[ev.Instruction]:
        """A fetch ends; if bytes are missing that is a failure."""
        fetch = self.fetches.pop(fetch_id)
        if fetch.reached < fetch.stop and not fetch.to_memory:
            self._note_failure(fetch, FailureKind.BODY)
        return self.send(ev.FetchDone(fetch_id))

    def fail(
        self, fetch_id: int, kind: FailureKind, retry_after_s: float | None = None, jitter: float = 0.5
    ) -> list[ev.Instruction]:
        fetch = self.fetches.pop(fetch_id)
        self._note_failure(fetch, kind)
        return self.send(ev.FetchFailed(fetch_id, kind, retry_after_s, jitter))

    def complete(self, fetch_id: int) -> list[ev.Instruction]:
        """All the rest of a fetch lands, and it is done."""
        fetch = self.fetches[fetch_id]
        out = [] if fetch.to_memory or fetch.reached == fetch.stop else self.land(fetch_id)
        return out + self.done(fetch_id)

    def answer_verify(self, index: int = 0) -> list[ev.Instruction]:
        verify = self.verifies.pop(index)
        disk = self.objects[verify.object_id].disk
        bad = tuple(chunk for chunk in range(verify.first, verify.last) if disk[chunk] == OLD_BAD)
        for chunk in range(verify.first, verify.last):
            disk[chunk] = ABSENT if chunk in bad else LANDED
        return self.send(ev.Verified(verify.object_id, verify.first, verify.last, bad))

    def damage(self, object_id: int, first: int, last: int, bypass: bool) -> list[ev.Instruction]:
        """What a reader was told is on the disk cannot be read back."""
        disk = self.objects[object_id].disk
        for chunk in range(first, last):
            disk[chunk] = ABSENT if disk[chunk] == LANDED else disk[chunk]
        return self.send(ev.Damaged(object_id, first, last, bypass))

    def answer_release(self, index: int = 0) -> list[ev.Instruction]:
        release = self.releases.pop(index)
        for chunk in range(release.first, release.last):
            self.objects[release.object_id].disk[chunk] = ABSENT
        return self.send(ev.Released(release.object_id, release.first, release.last))

    def answer_eviction(self, index: int = 0) -> list[ev.Instruction]:
        eviction = self.evictions.pop(index)
        del self.objects[eviction.object_id]
        return self.send(ev.Evicted(eviction.object_id))

    def tick(self, late_s: float = 0.0) -> list[ev.Instruction]:
        """The alarm rings, perhaps late."""
        if self.alarm_s is not None:
            self.now = max(self.now, self.alarm_s) + late_s
        self.alarm_s = None
        return self.send(ev.Tick())

    # ------------------------------------------------------------------------------------- the end of a history

    def rest(self, failure: FailureKind | None = None) -> None:
        """Answer everything and let time pass until no reader waits; bounded, or it is a hang.

        Args:
            failure: how every fetch ends from now on; None for success. Then nobody may wait for his deadline.
        """
        patient = [read for read in self.waiting if read.deadline_s > self.now + REST_S]
        for _ in range(STEPS_TO_REST):
            if not self.waiting:
                break
            self._answer_something(failure)
        else:
            raise AssertionError(f"readers still wait: {self.waiting}")
        if failure is None:
            timed_out = [read for read in patient if read.wake == ev.Wake(read.read_id, FailureKind.TIMEOUT)]
            assert all(FailureKind.TIMEOUT in read.found.failures for read in timed_out), "served by its deadline only"

    def shut(self) -> None:
        """Finish, close, cancel everything, answer what is left: nothing must be on its way then, nothing planned."""
        for read_id in list(self.reads):
            self.finish(read_id)
        for handle_id in list(self.handles):
            self.close(handle_id)
        while self.plans:
            self.remove_plan(0)
        for _ in range(STEPS_TO_REST):
            if not (self.fetches or self.verifies or self.releases or self.evictions or self.alarm_s is not None):
                break
            self._answer_something(None)
        else:
            raise AssertionError("never at rest")
        self.now += 3600.0
        assert not self.send(ev.Tick())
        snapshot = self.scheduler.snapshot()
        assert (snapshot.reads_waiting, snapshot.fetches_in_flight, snapshot.fetches_backing_off) == (0, 0, 0)
        assert snapshot.used_bytes == sum(found.occupied_bytes() for found in self.objects.values())
        assert all(found.occupied_bytes() for found in self.objects.values()), "an object of no use is remembered"

    def replay(self) -> None:
        """The same history again must give the same instructions."""
        again = self._new_scheduler()
        for event, now, out in self._history:
            assert again.handle(event, now) == out, event

    def _answer_something(self, failure: FailureKind | None) -> None:
        if self.evictions:
            self.answer_eviction()
        elif self.releases:
            self.answer_release()
        elif self.verifies:
            self.answer_verify()
        elif self.fetches and not (self.alarm_s is not None and self.alarm_s <= self.now):
            self.now += GET_S
            fetch_id = next(iter(self.fetches))
            if failure is None:
                self.complete(fetch_id)
            else:
                self.fail(fetch_id, failure)
        else:
            assert self.alarm_s is not None, "nothing will ever happen again"
            self.tick()

    # ------------------------------------------------------------------------------------- instructions

    def send(self, event: ev.Event) -> list[ev.Instruction]:
        """Tell the scheduler, take its instructions in, check."""
        self.broken = True
        out = self.scheduler.handle(event, self.now)
        prefetches = []
        admitted: list[Version] = []
        for instruction in out:
            match instruction:
                case ev.Fetch():
                    fetch = self._on_fetch(instruction)
                    if not any(
                        read.found is fetch.found and _meet(read.chunks, fetch.missing) for read in self.waiting
                    ):
                        prefetches.append(fetch)
                case ev.Wake():
                    self._on_wake(instruction, event)
                case ev.Verify():
                    self._on_verify(instruction)
                case ev.Release():
                    self._on_release(instruction)
                case ev.Evict():
                    self._on_evict(instruction)
                case ev.VersionGone():
                    self.gone.append(instruction.object_id)
                case ev.Admit():
                    assert instruction.version not in self.file_objects, "its object is there"
                    admitted.append(instruction.version)
                case ev.WakeAt():
                    assert self.alarm_s is None or instruction.at_s < self.alarm_s
                    self.alarm_s = instruction.at_s
        if self.checked:
            self._history.append((event, self.now, out))
            self.scheduler.check()
            self._check(prefetches)
        self.broken = False
        for version in admitted:
            self._add(version)
        return out

    def _on_fetch(self, fetch: ev.Fetch) -> ModelFetch:
        assert fetch.fetch_id not in self.fetches
        found = self.objects[fetch.object_id]
        assert not found.evicting
        assert 0 <= fetch.start < fetch.stop <= found.size_bytes, "an empty fetch, or one beyond the end"
        assert len(self.fetches) < self.max_connections
        mine = ModelFetch(fetch.fetch_id, found, fetch.start, fetch.stop, fetch.to_memory, fetch.start)
        if not fetch.to_memory:
            assert not found.bypass, "there is no cache file to fetch into"
            assert fetch.start % CHUNK_BYTES == 0
            assert fetch.stop % CHUNK_BYTES == 0 or fetch.stop == found.size_bytes
            assert all(found.disk[chunk] == ABSENT for chunk in mine.missing), "fetched over bytes that are there"
            assert not any(other.overlaps(mine) for other in self.fetches.values()), "two fetches of one chunk"
            self._retrying = [other for other in self._retrying if not other.overlaps(mine)]
        self.fetches[fetch.fetch_id] = mine
        self.fetched_bytes += fetch.stop - fetch.start
        return mine

    def _on_wake(self, wake: ev.Wake, event: ev.Event) -> None:
        read = self.reads[wake.read_id]
        assert read.wake is None, "woken twice"
        read.wake = wake
        if wake.failure is not None:
            timed_out = wake.failure is FailureKind.TIMEOUT and self.now >= read.deadline_s
            assert timed_out or wake.failure in read.found.failures, "a failure out of nowhere"
        elif wake.fetch_id is not None:
            assert event == ev.FetchDone(wake.fetch_id)
        else:
            assert all(read.found.disk[chunk] == LANDED for chunk in read.chunks), "woken for bytes that are not there"

    def _on_verify(self, verify: ev.Verify) -> None:
        found = self.objects[verify.object_id]
        chunks = range(verify.first, verify.last)
        assert chunks
        assert not found.evicting
        assert all(found.disk[chunk] in (OLD, OLD_BAD) for chunk in chunks)
        for other in self.verifies:
            assert other.object_id != verify.object_id or not _meet(range(other.first, other.last), chunks)
        self.verifies.append(verify)

    def _on_release(self, release: ev.Release) -> None:
        found = self.objects[release.object_id]
        chunks = range(release.first, release.last)
        assert chunks
        assert not found.evicting
        assert not found.passed_through, "released under the kernel"
        assert all(found.disk[chunk] in (LANDED, OLD, OLD_BAD) for chunk in chunks)
        for verify in self.verifies:
            assert verify.object_id != release.object_id or not _meet(range(verify.first, verify.last), chunks)
        for read in self.reads.values():
            assert read.found is not found or not _meet(read.chunks, chunks), "released under a reader"
        for chunk in chunks:
            found.disk[chunk] = GOING
        self.releases.append(release)

    def _on_evict(self, evict: ev.Evict) -> None:
        found = self.objects[evict.object_id]
        assert not found.evicting
        assert not found.handles, "evicted while open"
        assert all(read.found is not found for read in self.reads.values()), "evicted while read"
        assert all(fetch.found is not found for fetch in self.fetches.values()), "evicted while fetched"
        assert all(verify.object_id != evict.object_id for verify in self.verifies)
        assert GOING not in found.disk
        found.evicting = True
        self.file_objects = {file: known for file, known in self.file_objects.items() if known != found.object_id}
        self.evictions.append(evict)

    def _note_failure(self, fetch: ModelFetch, kind: FailureKind) -> None:
        fetch.found.failures.add(kind)
        self._throttled = self._throttled or kind is FailureKind.THROTTLED
        if kind.retryable:
            self._retrying.append(fetch)

    # ------------------------------------------------------------------------------------- what must hold

    def _check(self, prefetches: list[ModelFetch]) -> None:
        coming_bytes = sum(
            fetch.found.chunk_bytes(chunk)
            for fetch in self.fetches.values()
            if not fetch.to_memory
            for chunk in fetch.missing
        )
        present_bytes = sum(found.occupied_bytes() for found in self.objects.values())
        assert present_bytes + coming_bytes <= self.capacity_bytes, "more on disk and in flight than fits"
        free_to_act = (
            len(self.fetches) < self.max_connections
            and not (self._throttled or self.evictions or self.releases)
            and self.max_throughput_bytes_per_s is None
        )
        for read in self.waiting:
            assert self.now < read.deadline_s, "a reader waits beyond its deadline"
            assert any(read.found.disk[chunk] != LANDED for chunk in read.chunks), "a reader sleeps over its bytes"
            if (prefetches or free_to_act) and not self._is_coming(read):
                raise AssertionError(f"nobody fetches for {read}, but: {prefetches}")

    def _is_coming(self, read: ModelRead) -> bool:
        """Whether all that a reader misses is on its way, or may be waiting to be tried again."""
        coming = {chunk for chunk in read.chunks if read.found.disk[chunk] != ABSENT}
        for fetch in [*self.fetches.values(), *self._retrying]:
            if fetch.may_serve(read):
                coming.update(fetch.missing)
        return coming.issuperset(read.chunks)

    def _id(self) -> int:
        self._last_id += 1
        return self._last_id


def _meet(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop
