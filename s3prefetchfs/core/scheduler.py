"""The one place that decides what to fetch, what to keep and whom to wake.

`Scheduler.handle(event, now)` is the only way in; instructions come out. It awaits nothing, reads no clock, opens
no file: it runs in the daemon's event loop, where the engine owns it, and in tests, where thousands of random
histories drive it. The same events at the same times give the same instructions.

Three kinds of wish compete for connections. *Demand*: a reader waits for chunks that are absent. *Read-ahead*: an
open handle's window reaches over absent chunks. *Prefetch*: a declared plan says what will be read (`core.foresight`).
Demand goes first, in the order of arrival, and a part of the connections is given to nothing else; then read-ahead,
the handle with the least ahead of its reader first; then prefetch, by deadline. A fetch reserves its space before it
starts, so what is on disk and in flight never exceeds the capacity.

A fetch that fails keeps its reservation while it waits to be tried again, from the byte it reached. It is given
up when the failure is final, when nobody wants it any more, or when it has failed for `retry_timeout_s`.

Every read ends: it has a path that needs no free space (a fetch to memory), none that needs another reader, and a
deadline. Invariants are asserted by `check`, which the tests call after every event.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from s3prefetchfs.core import events as ev
from s3prefetchfs.core.eviction import Claim, Evictor, Room
from s3prefetchfs.core.extent import CHUNK_BYTES, chunk_count, chunk_extent, chunk_span, disk_bytes
from s3prefetchfs.core.follower import Follower, Piece, Wish
from s3prefetchfs.core.foresight import PIPE_BOUND_SHARE, Foresight
from s3prefetchfs.core.pacing import Pacing, Pipe, backoff_s
from s3prefetchfs.core.plan import PlanProgress
from s3prefetchfs.core.readahead import REORDER_BYTES, ReadAhead
from s3prefetchfs.core.residency import (
    ABSENT,
    IN_FLIGHT,
    RELEASING,
    RESIDENT,
    UNVERIFIED,
    VERIFYING,
    CachedObject,
    Residency,
)
from s3prefetchfs.core.version import Version
from s3prefetchfs.errors import FailureKind

GET_MIN_CHUNKS = 2 * 1024 * 1024 // CHUNK_BYTES
GET_MAX_CHUNKS = 8 * 1024 * 1024 // CHUNK_BYTES
GET_SHARE = 8
"""A GET is 2 to 8 MiB: below, the cost of a request shows; above, one slow connection holds up more of the stream.
S3's own advice is 8-16 MiB. In between it is an eighth of the window and of what lies ahead already: longer further
out, so that GETs which start together do not end together and leave the pipe empty."""

WINDOW_MAX_BYTES = 128 * 1024 * 1024
"""Read-ahead per handle: sixteen of the largest GETs, about twice what keeps a pipe of 400 MB/s full, so that the
end of a GET begins the next one whether the reader has moved or not."""

WINDOW_SHARE = 4
"""The windows of all open files together take at most one part in four of the cache: a small one is not churned."""

VERIFY_MAX_CHUNKS = 32
"""Chunks verified in one go, 4 MiB: the reader of a large file waits a few ms for them, not for all."""

FAILURE_MEMORY_S = 5.0
"""A refused object is not asked for again for this long: one open of an archived file is one GET, not fifty."""

READ_GRACE_S = 60.0
"""A read that has waited this long beyond the retry timeout, for whatever reason, fails."""

PLAN_GET_SHARE = 64
"""A GET for a plan is at most this part of the cache: a small one has room for many in flight."""

GROW_S = 0.005
"""While plans are unrolled: how soon to go on, where no other event comes."""

RECHECK_S = 1.0
"""While something waits for a connection or for space: the limit grows with time, and that is no event."""


@dataclass(slots=True, eq=False)
class _Handle:
    """`frontier`: chunks between the reader and this one are present or on their way, as far as we last looked."""

    found: CachedObject
    pattern: ReadAhead
    frontier: int = 0


@dataclass(slots=True, eq=False)
class _Read:
    """`through_memory`: a fetch to memory is under way for it."""

    read_id: int
    handle: _Handle
    start: int
    stop: int
    first: int
    last: int
    deadline_s: float
    waiting: bool = True
    through_memory: bool = False


@dataclass(slots=True, eq=False)
class _Fetch:
    """`reached`: the first chunk not landed yet. `ahead`: it brings more than what a reader waited for when it was
    issued. `reader`: whom a fetch to memory is for."""

    found: CachedObject
    first: int
    last: int
    reached: int
    ahead: bool = False
    reader: _Read | None = None
    issued_s: float | None = None
    attempts: int = 0
    first_failed_at: float | None = None
    not_before_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The scheduler's figures. Sizes in bytes; `retries` and what follows count since the start."""

    capacity_bytes: int
    used_bytes: int
    objects: int
    complete_objects: int
    open_handles: int
    reads_waiting: int
    fetches_in_flight: int
    fetches_backing_off: int
    retries: int
    failed_reads: int
    evictions: int
    corrupt_chunks: int
    memory_fetches: int


class Scheduler:
    """See the module's docstring.

    Args:
        capacity_bytes: of the cache.
        max_connections: requests in flight, at most.
        max_throughput_bytes_per_s: None for no cap.
        retry_timeout_s: how long a fetch may go on failing before its readers get the error.
    """

    def __init__(
        self,
        *,
        capacity_bytes: int,
        max_connections: int,
        retry_timeout_s: float,
        max_throughput_bytes_per_s: int | None = None,
    ) -> None:
        self._retry_timeout_s = retry_timeout_s
        self._pacing = Pacing(max_connections, max_throughput_bytes_per_s)
        self._disk = Residency()
        self._pipe = Pipe()
        self._foresight = Foresight(self._disk, capacity_bytes)
        self._evictor = Evictor(self._disk, capacity_bytes, self._foresight, self._opened_objects, self._protected)
        self._handles: dict[int, _Handle] = {}
        self._reads: dict[int, _Read] = {}
        self._waiting: OrderedDict[int, _Read] = OrderedDict()  # by arrival, hence by deadline
        self._hungry: OrderedDict[int, _Read] = OrderedDict()  # waiting for chunks that nobody fetches yet
        self._ahead: dict[int, _Handle] = {}  # handles whose window may reach over absent chunks
        self._crowded: dict[int, _Handle] = {}  # handles whose prefetch found no room
        self._plans_held_up = False  # for want of room
        self._in_flight: dict[int, _Fetch] = {}
        self._backing_off: list[_Fetch] = []
        self._next_fetch_id = 1
        self._alarm_s = float("inf")
        self._out: list[ev.Instruction] = []
        self._retries = self._failed_reads = self._corrupt_chunks = self._memory_fetches = 0

    # ------------------------------------------------------------------------------------- in and out

    def handle(self, event: ev.Event, now: float) -> list[ev.Instruction]:
        """Take in what happened and return what to do.

        Args:
            event: one of `core.events`. A fetch or read that is no longer known is ignored: its message was late.
            now: seconds on a monotonic clock.

        Raises:
            KeyError, ValueError: an event that cannot be (an unknown object, chunks landing out of order).
        """
        out: list[ev.Instruction] = []
        self._out = out
        admitted: CachedObject | None = None
        if self._foresight:
            self._foresight.passed(now, bool(self._waiting))
        match event:
            case ev.ReadStarted():
                self._read_started(event, now)
            case ev.ReadFinished():
                self._read_finished(event)
            case ev.Landed():
                self._landed(event, now)
            case ev.FetchDone():
                self._fetch_done(event, now)
            case ev.FetchFailed():
                self._fetch_failed(event, now)
            case ev.ObjectAdded():
                found = self._disk.add(event.object_id, event.version, event.resident, event.bypass)
                if self._foresight.object_added(found):
                    admitted = found
                # The cache may be smaller now than when it was filled.
                self._evictor.room_for(0, now, Claim.AHEAD, False, out)
            case ev.Opened():
                found = self._disk.objects[event.object_id]
                self._handles[event.handle_id] = _Handle(found, ReadAhead())
                found.handles.add(event.handle_id)
                self._disk.settle(found)
                if self._foresight:
                    self._foresight.opened(found, now)
            case ev.WholeWanted():
                found = self._handles[event.handle_id].found
                found.whole_wanted = True
                self._verify_whole(found)
            case ev.PassedThrough():
                self._handles[event.handle_id].found.passed_through = True
            case ev.Closed():
                self._closed(event)
            case ev.Verified():
                self._verified(event)
            case ev.Damaged():
                self._damaged(event)
            case ev.Released():
                found = self._disk.objects[event.object_id]
                self._disk.end_release(found, event.first, event.last)
                self._feel_hunger(found)
                self._settle(found)
                self._room_made()
            case ev.Evicted():
                self._disk.end_evict(self._disk.objects[event.object_id])
                self._room_made()
            case ev.PlanAdded():
                self._foresight.add(event, now)
            case ev.PlanRemoved():
                self._foresight.remove(event.plan_id)
            case ev.Tick():
                self._alarm_s = float("inf")
                self._plans_held_up = False
        self._expire(now)
        if self._foresight:
            self._foresight.grow()
        self._dispatch(now)
        if admitted is not None:
            self._settle(admitted)  # if nothing is fetched into it after all
        self._set_alarm(now)
        return out

    def is_complete(self, handle_id: int) -> bool:
        """Whether the whole object is resident: a read of it that does not wait then needs no event."""
        return self._handles[handle_id].found.complete

    def is_coming(self, handle_id: int) -> bool:
        """Whether the object is not complete, but all that is missing is on its way or being verified."""
        found = self._handles[handle_id].found
        return not found.complete and ABSENT not in found.chunks and RELEASING not in found.chunks

    def occupied_bytes(self, object_id: int) -> int:
        """What of the object is on disk, or on its way there."""
        return self._disk.objects[object_id].occupied_bytes

    def progress(self, plan_id: int) -> PlanProgress:
        """How far a plan is."""
        return self._foresight.progress(plan_id)

    def by_ranges(self, version: Version) -> bool:
        """As Foresight.by_ranges."""
        return self._foresight.by_ranges(version)

    def snapshot(self) -> Snapshot:
        """The figures of this moment."""
        objects = self._disk.objects.values()
        return Snapshot(
            capacity_bytes=self._evictor.capacity_bytes,
            used_bytes=self._disk.used_bytes,
            objects=sum(found.occupied_bytes > 0 for found in objects),
            complete_objects=sum(
                found.occupied_bytes == found.disk_bytes(0, len(found.chunks)) and IN_FLIGHT not in found.chunks
                for found in objects
                if found.occupied_bytes
            ),
            open_handles=len(self._handles),
            reads_waiting=len(self._waiting),
            fetches_in_flight=len(self._in_flight),
            fetches_backing_off=len(self._backing_off),
            retries=self._retries,
            failed_reads=self._failed_reads,
            evictions=self._evictor.evictions,
            corrupt_chunks=self._corrupt_chunks,
            memory_fetches=self._memory_fetches,
        )

    # ------------------------------------------------------------------------------------- reads and handles

    def _read_started(self, event: ev.ReadStarted, now: float) -> None:
        handle = self._handles[event.handle_id]
        deadline_s = now + self._retry_timeout_s + READ_GRACE_S
        first, last = chunk_span(event.start, event.stop)
        read = _Read(event.read_id, handle, event.start, event.stop, first, last, deadline_s)
        self._reads[read.read_id] = read
        self._waiting[read.read_id] = read
        handle.found.reads.add(read.read_id)
        new_run = handle.pattern.observe(event.start, event.stop)
        handle.frontier = first if new_run else max(handle.frontier, first)
        if self._foresight:
            self._foresight.read(handle.found, event.handle_id, event.start, event.stop, new_run, now)
            self._plans_held_up = False
        if not handle.found.complete:
            self._ahead[event.handle_id] = handle
        self._try_wake(read)
        if read.waiting:
            self._hungry[read.read_id] = read

    def _read_finished(self, event: ev.ReadFinished) -> None:
        read = self._reads.pop(event.read_id, None)
        if read is None:
            return
        read.waiting = False
        self._waiting.pop(read.read_id, None)
        self._hungry.pop(read.read_id, None)
        read.handle.found.reads.discard(read.read_id)
        self._settle(read.handle.found)

    def _closed(self, event: ev.Closed) -> None:
        handle = self._handles.pop(event.handle_id)
        self._ahead.pop(event.handle_id, None)
        self._crowded.pop(event.handle_id, None)
        found = handle.found
        found.handles.discard(event.handle_id)
        found.passed_through = found.passed_through and bool(found.handles)
        if self._foresight:
            self._foresight.closed(found, event.handle_id)
            self._plans_held_up = False
        self._settle(found)

    def _settle(self, found: CachedObject) -> None:
        """The object may have become idle; without a byte on disk it is then forgotten."""
        self._disk.settle(found)
        if found.idle and not found.occupied_bytes:
            self._evictor.evict(found, self._out)

    def _try_wake(self, read: _Read) -> None:
        """Wake the reader if all of its chunks are resident; ask for verification where that is missing."""
        found = read.handle.found
        if found.chunks.count(RESIDENT, read.first, read.last) == read.last - read.first:
            self._wake(read)
            return
        while (first := found.chunks.find(UNVERIFIED, read.first, read.last)) >= 0:
            last = min(first + VERIFY_MAX_CHUNKS, len(found.chunks))
            first, last = found.run_of(UNVERIFIED, first, last)
            self._disk.begin_verify(found, first, last)
            self._out.append(ev.Verify(found.object_id, first, last))

    def _verify_whole(self, found: CachedObject) -> None:
        """Have the next piece verified where the whole object is wanted; one at a time, so that readers get through."""
        first, last = found.run_of(UNVERIFIED, 0, len(found.chunks))
        if first == last:
            found.whole_wanted = False
        elif VERIFYING not in found.chunks:
            last = min(last, first + VERIFY_MAX_CHUNKS)
            self._disk.begin_verify(found, first, last)
            self._disk.settle(found)
            self._out.append(ev.Verify(found.object_id, first, last))

    def _wake(self, read: _Read, failure: FailureKind | None = None, fetch_id: int | None = None) -> None:
        read.waiting = False
        self._waiting.pop(read.read_id, None)
        self._hungry.pop(read.read_id, None)
        self._failed_reads += failure is not None
        self._out.append(ev.Wake(read.read_id, failure, fetch_id))

    def _waiting_on(self, found: CachedObject, first: int, last: int) -> list[_Read]:
        """The waiting reads that touch the chunks `[first, last)` of the object, in order of arrival."""
        reads = (self._reads[read_id] for read_id in sorted(found.reads))
        return [read for read in reads if read.waiting and read.first < last and first < read.last]

    def _feel_hunger(self, found: CachedObject) -> None:
        """Chunks became absent: reads that need them and handles that look ahead must ask again."""
        for read in self._waiting_on(found, 0, len(found.chunks)):
            if not read.through_memory:
                self._hungry[read.read_id] = read
        for handle_id in sorted(found.handles):
            handle = self._handles[handle_id]
            if handle.pattern.started:
                handle.frontier = min(handle.frontier, handle.pattern.position // CHUNK_BYTES)
                self._ahead[handle_id] = handle

    def _room_made(self) -> None:
        self._ahead.update(self._crowded)
        self._crowded.clear()
        self._plans_held_up = False

    def _expire(self, now: float) -> None:
        while self._waiting:
            read = next(iter(self._waiting.values()))
            if read.deadline_s > now:
                break
            self._wake(read, FailureKind.TIMEOUT)

    # ------------------------------------------------------------------------------------- answers

    def _landed(self, event: ev.Landed, now: float) -> None:
        fetch = self._in_flight.get(event.fetch_id)
        if fetch is None or fetch.reader is not None:
            return
        first, last = chunk_span(event.start, event.stop)
        if first != fetch.reached or last > fetch.last:
            raise ValueError(f"fetch of chunks {fetch.reached}-{fetch.last} landed {first}-{last}")
        self._disk.land(fetch.found, first, last)
        if fetch.issued_s is not None:
            self._pipe.answered(now - fetch.issued_s)
            fetch.issued_s = None
        fetch.reached = last
        self._pipe.landed(event.stop - event.start, self._coming_bytes(), now)
        fetch.attempts = 0
        fetch.first_failed_at = None
        for read in self._waiting_on(fetch.found, first, last):
            self._try_wake(read)

    def _fetch_done(self, event: ev.FetchDone, now: float) -> None:
        fetch = self._in_flight.get(event.fetch_id)
        if fetch is None:
            return
        if fetch.reader is None and fetch.reached < fetch.last:
            self._fetch_failed(ev.FetchFailed(event.fetch_id, FailureKind.BODY, None, 0.5), now)
            return
        del self._in_flight[event.fetch_id]
        if fetch.reader is not None and fetch.reader.waiting:
            self._wake(fetch.reader, fetch_id=event.fetch_id)
        fetch.found.fetches -= 1
        if fetch.found.planned:
            self._foresight.landed(fetch.found, fetch.first, fetch.last)
        self._settle(fetch.found)

    def _fetch_failed(self, event: ev.FetchFailed, now: float) -> None:
        fetch = self._in_flight.pop(event.fetch_id, None)
        if fetch is None:
            return
        found, kind = fetch.found, event.kind
        if kind is FailureKind.THROTTLED:
            self._pacing.throttled(now)
        if fetch.reader is None and fetch.reached == fetch.last:  # it failed after its last byte
            self._give_up(fetch)
            return
        if kind in (FailureKind.NO_SPACE, FailureKind.CACHE_IO) and fetch.reader is None:
            rest_bytes = found.disk_bytes(fetch.reached, fetch.last)
            self._evictor.disk_is_full(self._disk.used_bytes - rest_bytes, now)
            found.bypass = found.bypass or kind is FailureKind.CACHE_IO
            self._give_up(fetch)
            return
        if not kind.retryable:
            if kind in (FailureKind.CHANGED, FailureKind.NOT_FOUND):
                self._out.append(ev.VersionGone(found.object_id))
            found.failure = kind, now + FAILURE_MEMORY_S
            self._give_up(fetch, kind)
            return
        fetch.attempts += 1
        if fetch.first_failed_at is None:
            fetch.first_failed_at = now
        if now - fetch.first_failed_at >= self._retry_timeout_s:
            # The kernel asks once more for what its read-ahead did not get: that need not take as long again.
            found.failure = kind, now + FAILURE_MEMORY_S
            self._give_up(fetch, kind)
        else:
            fetch.not_before_s = now + backoff_s(fetch.attempts, event.jitter, event.retry_after_s)
            self._backing_off.append(fetch)

    def _give_up(self, fetch: _Fetch, failure: FailureKind | None = None) -> None:
        """End a fetch that is not in flight. Its readers get the failure, or are fetched for again."""
        found = fetch.found
        found.fetches -= 1
        if fetch.reader is not None:
            readers = [fetch.reader] if fetch.reader.waiting else []
        else:
            self._disk.give_up(found, fetch.reached, fetch.last)
            readers = self._waiting_on(found, fetch.reached, fetch.last)
        if failure is not None:
            for read in readers:
                self._wake(read, failure)
        self._feel_hunger(found)
        self._settle(found)

    def _verified(self, event: ev.Verified) -> None:
        found = self._disk.objects[event.object_id]
        self._disk.end_verify(found, event.first, event.last, event.bad)
        self._corrupt_chunks += len(event.bad)
        for read in self._waiting_on(found, event.first, event.last):
            self._try_wake(read)
        if event.bad:
            self._feel_hunger(found)
        if found.whole_wanted:
            self._verify_whole(found)
        self._settle(found)

    def _damaged(self, event: ev.Damaged) -> None:
        found = self._disk.objects[event.object_id]
        found.bypass = found.bypass or event.bypass
        first, last = found.run_of(RESIDENT, event.first, event.last)
        while first < last:
            self._disk.give_up(found, first, last)
            self._corrupt_chunks += last - first
            first, last = found.run_of(RESIDENT, last, event.last)
        self._feel_hunger(found)
        self._settle(found)

    # ------------------------------------------------------------------------------------- dispatch

    def _dispatch(self, now: float) -> None:
        """Issue what may be issued: retries that are due, then demand, then prefetch."""
        if self._backing_off:
            self._drop_unwanted()
        elif not (self._hungry or self._ahead or self._foresight):
            return
        limit = self._pacing.limit(now)
        self._retry(limit, now, awaited=True)
        for read in list(self._hungry.values()):
            while read.read_id in self._hungry:
                if not self._may_issue(limit, now):
                    return
                if not self._demand(read, now):
                    break
        if self._hungry:
            return  # the space that is being made is theirs
        limit = self._pacing.prefetch_limit(now)
        self._retry(limit, now, awaited=False)
        limit -= len(self._backing_off)  # each keeps its place: what fails is not asked for more and more
        while self._ahead and self._may_issue(limit, now):
            handle_id, handle = min(self._ahead.items(), key=_lead)
            if not self._prefetch(handle_id, handle, now):
                del self._ahead[handle_id]
        if self._foresight:
            while not self._plans_held_up and self._may_issue(limit, now) and not self._is_ample():
                if not self._prefetch_planned(now):
                    return

    def _may_issue(self, limit: int, now: float) -> bool:
        return len(self._in_flight) < limit and self._pacing.wait_s(now) == 0

    def _drop_unwanted(self) -> None:
        """Give up what backs off and is no longer wanted by a reader or an open handle."""
        for fetch in list(self._backing_off):
            found = fetch.found
            wanted = bool(found.handles) or (found.planned and self._foresight.wants(found))
            if not self._is_awaited(fetch) and (fetch.reader is not None or not wanted):
                self._backing_off.remove(fetch)
                self._give_up(fetch)

    def _retry(self, limit: int, now: float, *, awaited: bool) -> None:
        """Issue again what is due, and is awaited by a reader or is not."""
        for fetch in list(self._backing_off):
            if not self._may_issue(limit, now):
                break
            if fetch.not_before_s <= now and self._is_awaited(fetch) == awaited:
                self._backing_off.remove(fetch)
                self._retries += 1
                self._issue(fetch, now)

    def _is_awaited(self, fetch: _Fetch) -> bool:
        if fetch.reader is not None:
            return fetch.reader.waiting
        return bool(self._waiting_on(fetch.found, fetch.reached, fetch.last))

    def _demand(self, read: _Read, now: float) -> bool:
        """Fetch what a reader waits for, and what its stream will want next in the same request.

        Returns False if it must wait for space that is being made.
        """
        found = read.handle.found
        first, last = found.run_of(ABSENT, read.first, read.last)
        if first == last:  # all that is missing is on its way
            self._hungry.pop(read.read_id, None)
            return True
        if (refusal := self._refusal(found, now)) is not None:
            self._wake(read, refusal)
            return True
        stops = [last]
        if last == read.last and self._may_reach_ahead(now):
            ahead = min(self._window_stop(read.handle), first + self._get_chunks(read.handle, first))
            stops.insert(0, found.run_of(ABSENT, first, max(ahead, last))[1])
        room = Room.NONE
        for stop in stops if not found.bypass else ():
            need_bytes = found.disk_bytes(first, stop)
            room = self._evictor.room_for(need_bytes, now, Claim.READER, found.planned, self._out)
            if room is Room.NOW:
                self._fetch(found, first, stop, now, ahead=stop > last)
                return True
        if room is Room.SOON:
            return False
        self._memory_fetches += 1
        read.through_memory = True
        self._hungry.pop(read.read_id, None)
        found.fetches += 1
        self._issue(_Fetch(found, read.first, read.last, read.first, reader=read), now)
        return True

    def _may_reach_ahead(self, now: float) -> bool:
        """Whether one more GET may bring bytes that nobody waits for: it could stall and hold its connection."""
        reaching = sum(fetch.ahead for fetch in self._in_flight.values())
        return reaching < self._pacing.prefetch_limit(now)

    def _refusal(self, found: CachedObject, now: float) -> FailureKind | None:
        """Why absent chunks of the object need not be asked for now."""
        return found.failure[0] if found.failure is not None and found.failure[1] > now else None

    def _prefetch(self, handle_id: int, handle: _Handle, now: float) -> bool:
        """Issue the next request of a handle's read-ahead; False if there is none to issue for now."""
        found = handle.found
        if found.bypass or self._refusal(found, now) is not None:
            return False
        stop = self._window_stop(handle)
        first, last = found.run_of(ABSENT, handle.frontier, stop)
        handle.frontier = first
        if first == last:
            return False
        get_chunks = self._get_chunks(handle, first)
        if handle.pattern.moving and first + get_chunks > last == stop < len(found.chunks):
            position = handle.pattern.position // CHUNK_BYTES
            if first - position >= (stop - position) / 2:
                return False  # a small piece at the far end of the window: wait until it is worth a request
        last = min(last, first + get_chunks)
        need_bytes = found.disk_bytes(first, last)
        if self._evictor.room_for(need_bytes, now, Claim.AHEAD, found.planned, self._out) is not Room.NOW:
            self._crowded[handle_id] = handle
            return False
        self._fetch(found, first, last, now, ahead=True)
        return True

    def _prefetch_planned(self, now: float) -> bool:
        """Issue the next request for a plan; False if there is none to issue for now."""
        wanted = self._foresight.wish()
        if wanted is None:
            return False
        follower, wish = wanted
        file, first = wish.piece.file, wish.chunk
        found, last = file.found, wish.piece.last
        if found is not None:
            if self._refusal(found, now) is not None:
                follower.drop(wish)
                return True
            first, last = found.run_of(ABSENT, first, last)
        get_chunks = self._evictor.capacity_bytes // PLAN_GET_SHARE // CHUNK_BYTES
        last = min(last, first + self._affordable_chunks(min(max(get_chunks, GET_MIN_CHUNKS), GET_MAX_CHUNKS)))
        need_bytes = disk_bytes(*chunk_extent(first, last, file.size_bytes))
        claim = Claim.LATE if self._is_late(follower, wish, need_bytes) else Claim.AHEAD
        if follower.idle(now):
            claim = Claim.SPARE
        if self._evictor.room_for(need_bytes, now, claim, True, self._out) is not Room.NOW:
            self._plans_held_up = True
            return False
        if file.found is not found:
            return True  # its last chunks were what had to go: it becomes a new object
        if found is None:
            if not file.admitting:
                file.admitting = True
                self._out.append(ev.Admit(file.version))
            return False  # its object comes at once
        self._fetch(found, first, last, now, ahead=True)
        follower.fetched(now)
        return True

    def _coming_bytes(self) -> int:
        return sum((fetch.last - fetch.reached) * CHUNK_BYTES for fetch in self._in_flight.values())

    def _is_ample(self) -> bool:
        """Whether enough is on its way to keep the pipe full for a while."""
        return self._coming_bytes() >= self._pipe.ample_bytes

    def _is_late(self, follower: Follower, wish: Wish, need_bytes: int) -> bool:
        """Whether readers would have to wait for the wish even if it were issued now, and evicting can help.

        The test of Forestall (Kimbrel et al., OSDI 1996), for the next request only: that the pipe can keep up with the
        misses of an epoch, wherever they lie, retention has seen to.
        """
        latency_s, bytes_per_s, rate = self._pipe.latency_s, self._pipe.bytes_per_s, follower.rate
        if latency_s is None or bytes_per_s is None or rate is None:
            return False
        coming_bytes = need_bytes + self._coming_bytes()
        ready_s = latency_s + coming_bytes / bytes_per_s
        follower.stall_s = max(0.0, ready_s - follower.ahead_bytes(wish.key) / rate)
        return follower.stall_s > 0 and follower.missed_share() * rate < PIPE_BOUND_SHARE * bytes_per_s

    def _window_stop(self, handle: _Handle) -> int:
        """The chunk up to which the handle's read-ahead reaches."""
        stop = min(handle.pattern.position + self._window_bytes(handle), handle.found.size_bytes)
        if handle.found.planned:
            stop = min(stop, self._foresight.reach(handle.found, handle.pattern.position))
        return chunk_count(stop)

    def _window_bytes(self, handle: _Handle) -> int:
        share_bytes = self._evictor.capacity_bytes // WINDOW_SHARE // max(1, len(self._handles))
        return min(handle.pattern.window_bytes, WINDOW_MAX_BYTES, share_bytes)

    def _get_chunks(self, handle: _Handle, first: int) -> int:
        """How many chunks to ask for at once in the handle's window, from the chunk `first` on."""
        ahead_bytes = first * CHUNK_BYTES - handle.pattern.position
        wished_chunks = (self._window_bytes(handle) + ahead_bytes) // GET_SHARE // CHUNK_BYTES
        return self._affordable_chunks(min(max(wished_chunks, GET_MIN_CHUNKS), GET_MAX_CHUNKS))

    def _affordable_chunks(self, get_chunks: int) -> int:
        """No more than the bandwidth cap lets one request ask for."""
        return max(1, int(min(get_chunks, self._pacing.burst_bytes // CHUNK_BYTES)))

    def _fetch(self, found: CachedObject, first: int, last: int, now: float, *, ahead: bool) -> None:
        self._disk.reserve(found, first, last)
        found.fetches += 1
        self._issue(_Fetch(found, first, last, first, ahead), now)
        self._disk.settle(found)

    def _issue(self, fetch: _Fetch, now: float) -> None:
        fetch_id = self._next_fetch_id
        self._next_fetch_id += 1
        self._in_flight[fetch_id] = fetch
        if fetch.reader is not None:
            start, stop = fetch.reader.start, fetch.reader.stop
        else:
            start, stop = chunk_extent(fetch.reached, fetch.last, fetch.found.size_bytes)
        fetch.issued_s = now
        self._pacing.spend(stop - start, now)
        self._out.append(ev.Fetch(fetch_id, fetch.found.object_id, start, stop, fetch.reader is not None))

    def _opened_objects(self) -> Iterable[CachedObject]:
        return {handle.found.object_id: handle.found for handle in self._handles.values()}.values()

    def _protected(
        self, found: CachedObject, chunks: tuple[int, int], giving_up: Piece | None
    ) -> Iterator[tuple[int, int]]:
        """The chunk ranges of an object that must stay: around its readers, under its reads, and for plans."""
        if found.planned:
            patterns = [self._handles[handle_id].pattern for handle_id in found.handles]
            hindmost = min((max(0, pattern.position - REORDER_BYTES) for pattern in patterns), default=0)
            yield from self._foresight.stays(found, chunks, hindmost // CHUNK_BYTES, giving_up)
        for handle_id in found.handles:
            handle = self._handles[handle_id]
            if handle.pattern.started:
                behind = handle.pattern.position - REORDER_BYTES
                yield max(0, behind // CHUNK_BYTES), self._window_stop(handle) + 1
        for read_id in found.reads:
            read = self._reads[read_id]
            yield read.first, read.last

    def _set_alarm(self, now: float) -> None:
        """Ask for a Tick when something is due that no other event will bring."""
        due_s = float("inf")
        if self._waiting:
            due_s = next(iter(self._waiting.values())).deadline_s
        held_up = bool(self._hungry or self._ahead or self._plans_held_up)
        if self._foresight and self._foresight.growing:
            due_s = min(due_s, now + GROW_S)
        for fetch in self._backing_off:
            if fetch.not_before_s > now:
                due_s = min(due_s, fetch.not_before_s)
            else:
                held_up = True
        if held_up:
            due_s = min(due_s, now + (self._pacing.wait_s(now) or RECHECK_S))
        if due_s < self._alarm_s:
            self._alarm_s = due_s
            self._out.append(ev.WakeAt(due_s))

    # ------------------------------------------------------------------------------------- invariants

    def check(self) -> None:
        """Assert what must hold between any two events; the tests call it after each."""
        self._disk.check()
        self._foresight.check()
        assert self._disk.used_bytes - self._disk.freeing_bytes <= self._evictor.capacity_bytes
        assert len(self._in_flight) <= self._pacing.max_connections
        fetches = Counter[CachedObject]()
        covered = Counter[CachedObject]()
        for fetch in [*self._in_flight.values(), *self._backing_off]:
            fetches[fetch.found] += 1
            if fetch.reader is None:
                chunks = fetch.last - fetch.reached
                assert fetch.found.chunks.count(IN_FLIGHT, fetch.reached, fetch.last) == chunks
                covered[fetch.found] += chunks
        for found in self._disk.objects.values():
            assert found.chunks.count(IN_FLIGHT) == covered[found], "two fetches of one chunk, or one without a fetch"
            assert found.fetches == fetches[found]
            assert found.handles <= self._handles.keys()
            assert not found.passed_through or (found.handles and RELEASING not in found.chunks)
            assert not found.whole_wanted or VERIFYING in found.chunks, "nobody verifies what is wanted whole"
            assert found.reads <= self._reads.keys()
        for read in self._reads.values():
            assert read.waiting == (read.read_id in self._waiting)
            if read.waiting and not read.through_memory:
                states = read.handle.found.chunks[read.first : read.last]
                assert states.count(RESIDENT) < len(states), "a reader sleeps over its bytes"
                assert UNVERIFIED not in states, "nobody verifies what a reader waits for"
                assert ABSENT not in states or read.read_id in self._hungry, "nobody fetches for a reader"
        if (self._waiting or self._backing_off or self._hungry) and not self._in_flight:
            assert self._alarm_s < float("inf"), "nothing will ever happen again"


def _lead(item: tuple[int, _Handle]) -> tuple[int, int]:
    """How many chunks a handle has ahead of its reader; the handle id settles ties."""
    handle_id, handle = item
    return handle.frontier - handle.pattern.position // CHUNK_BYTES, handle_id
