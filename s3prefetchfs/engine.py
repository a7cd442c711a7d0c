"""Owns the scheduler and does what it says: the way of a byte from S3 to a reader.

Runs in the daemon's event loop. Everything that happens (a read, a worker's message, a finished unlink, a timer)
becomes an event in `_feed`, whose instructions are carried out at once and without an await: so the scheduler's
state is touched by one task at a time although nobody holds a lock. Work that can block (unlink, hole punching,
checksums, reads that miss the page cache, the index) goes to threads and comes back as an event.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio

from s3prefetchfs import wire
from s3prefetchfs.core import events as ev
from s3prefetchfs.core.extent import chunk_extent, chunk_span
from s3prefetchfs.core.plan import Plan, PlanProgress
from s3prefetchfs.core.scheduler import Scheduler, Snapshot
from s3prefetchfs.core.version import PlanVersions, Version
from s3prefetchfs.errors import FailureKind, RequestError
from s3prefetchfs.metrics import Metrics
from s3prefetchfs.store.files import OpenFile
from s3prefetchfs.store.store import Store

log = logging.getLogger(__name__)

REPORT_BYTES = 512 * 1024
"""A worker reports landed chunks this often: at 400 MB/s 800 messages a second, and a reader in the middle of a
GET waits for at most 6 ms more than it must at 90 MB/s per connection."""

READ_MAX_BYTES = 1024 * 1024
"""The largest read the kernel sends (256 pages)."""

FLUSH_INTERVAL_S = 1.0
"""What was fetched in the last second before a crash is fetched again."""

DISK_THREADS = 16
"""Reads of the cache disk that may block at once; NVMe likes a queue."""


@dataclass(slots=True, eq=False)
class _Waiter:
    woken: trio.Event
    wake: ev.Wake | None = None
    data: bytes | None = None


class Engine:
    """See the module's docstring.

    Args:
        store: the cache directory, recovered.
        scheduler: fresh; the engine tells it what the store recovered.
        get: sends a request to a worker; its answers come to `receive`.
        version_gone: told the key when S3 no longer has the version that was asked for.
        metrics: counted into.
    """

    def __init__(
        self,
        store: Store,
        scheduler: Scheduler,
        get: Callable[[wire.Get], None],
        version_gone: Callable[[str], None],
        metrics: Metrics,
    ) -> None:
        self._store = store
        self._scheduler = scheduler
        self._get = get
        self._version_gone = version_gone
        self._metrics = metrics
        self._ids = itertools.count(1)
        self._bypass_ids = itertools.count(-1, -1)  # objects that have no cache file, hence no id from the store
        self._versions: dict[int, Version] = {}
        self._object_ids: dict[Version, int] = {}
        self._handles: dict[int, tuple[int, Version]] = {}
        self._openers: dict[int, trio.Event] = {}  # handle id -> set when its object is whole, or will not be soon
        self._reported: set[int] = set()  # handles whose failure is in the log
        self._waiters: dict[int, _Waiter] = {}
        self._fetches: dict[int, int] = {}  # fetch id -> object id
        self._events: deque[tuple[ev.Event, bytes | None]] = deque()
        self._obeying = False
        self._plan_ids: dict[str, int] = {}
        self._failures: dict[int, str] = {}  # object id -> the latest failure, for people
        self._buffer = memoryview(bytearray(READ_MAX_BYTES))
        self._disk_limiter = trio.CapacityLimiter(DISK_THREADS)
        self._nursery: trio.Nursery | None = None
        self._alarm_s = float("inf")
        self._alarm_moved = trio.Event()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; `started` when reads may come. The index is flushed by whoever closes the store."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for found in sorted(self._store.recovered(), key=lambda found: found.used_at):
                version = Version(found.key, found.etag, found.size_bytes)
                self._versions[found.object_id] = version
                self._object_ids[version] = found.object_id
                self._feed(ev.ObjectAdded(found.object_id, version, found.resident))
            nursery.start_soon(self._ring_alarms)
            nursery.start_soon(self._flush_index)
            task_status.started()

    # ------------------------------------------------------------------------------------- for the adapter

    def open(self, version: Version) -> int:
        """Open one version of an object; returns a handle id."""
        object_id = self._object_ids.get(version)
        if object_id is None:
            object_id = self._add_object(version)
        handle_id = next(self._ids)
        self._handles[handle_id] = object_id, version
        self._metrics.opens += 1
        self._feed(ev.Opened(handle_id, object_id))
        return handle_id

    async def whole_file(self, handle_id: int, wait_s: float) -> OpenFile | None:
        """The cache file of an open object for the kernel to read, if the object is whole, or within `wait_s`.

        This is where it is decided what the kernel may read: a file all of which is on the disk and has passed its
        checksums. From its return on it stays as it is, until the last handle of the object is closed.
        A file that somebody cut short or deleted is not one: the reads through the daemon find that out, and heal it.
        """
        object_id, version = self._handles[handle_id]
        if object_id < 0 or self.read_by_plan(version):
            return None
        if not self._scheduler.is_complete(handle_id):
            self._feed(ev.WholeWanted(handle_id))
            if wait_s > 0 and self._scheduler.is_coming(handle_id):
                settled = self._openers[handle_id] = trio.Event()
                try:
                    with trio.move_on_after(wait_s):
                        await settled.wait()
                finally:
                    del self._openers[handle_id]
            if not self._scheduler.is_complete(handle_id):
                return None
        file = self._store.file(object_id)
        if file is not None:
            self._feed(ev.PassedThrough(handle_id))
        return file

    def close(self, handle_id: int) -> None:
        """Close a handle; what it read ahead stays in the cache."""
        object_id, _ = self._handles.pop(handle_id)
        self._reported.discard(handle_id)
        if object_id > 0:
            self._store.used([object_id])
        self._feed(ev.Closed(handle_id))

    async def read(self, handle_id: int, start: int, stop: int) -> bytes | memoryview:
        """The bytes `[start, stop)` of an open object, cut at its end.

        A memoryview is of a buffer that the next call uses again: it is valid until the caller's next await.

        Raises:
            RequestError: the bytes cannot be had.
        """
        object_id, version = self._handles[handle_id]
        stop = min(stop, version.size_bytes, start + READ_MAX_BYTES)
        if start >= stop:
            return b""
        unseen = self._scheduler.is_complete(handle_id) and not self.read_by_plan(version)
        if unseen and self._store.read_now(object_id, start, stop, self._buffer):
            self._metrics.bytes_served += stop - start
            return self._buffer[: stop - start]
        for bypass in (False, True):
            try:
                data = await self._read_when_resident(handle_id, start, stop)
                break
            except RequestError as error:
                if error.kind is not FailureKind.CACHE_IO:
                    self._report(handle_id, error)
                    raise
                # What was on the disk is not any more: fetch it again, the second time past the disk.
                log.error("the cache lost bytes of %s, fetching them again: %s", version.key, error)
                first, last = chunk_span(start, stop)
                self._store.forget_chunks(object_id, first, last)
                self._feed(ev.Damaged(object_id, first, last, bypass))
        else:
            data = await self._read_when_resident(handle_id, start, stop)
        self._metrics.bytes_served += stop - start
        return data

    async def _read_when_resident(self, handle_id: int, start: int, stop: int) -> bytes | memoryview:
        """As `read`, from the cache file once the bytes are there.

        Raises:
            RequestError: of kind CACHE_IO if they were there and are not any more.
        """
        object_id, version = self._handles[handle_id]
        metrics = self._metrics
        read_id = next(self._ids)
        waiter = _Waiter(trio.Event())
        self._waiters[read_id] = waiter
        try:
            self._feed(ev.ReadStarted(read_id, handle_id, start, stop))
            if waiter.wake is None:
                metrics.bytes_waited_for += stop - start
                began_s = trio.current_time()
                try:
                    await waiter.woken.wait()
                finally:
                    metrics.wait_s += trio.current_time() - began_s
            assert waiter.wake is not None
            if (failure := waiter.wake.failure) is not None:
                raise RequestError(failure, self._failures.get(object_id, version.key))
            if waiter.data is not None:
                return waiter.data
            if self._store.read_now(object_id, start, stop, self._buffer):
                return self._buffer[: stop - start]
            return await trio.to_thread.run_sync(self._store.read, object_id, start, stop, limiter=self._disk_limiter)
        finally:
            del self._waiters[read_id]
            self._feed(ev.ReadFinished(read_id))

    def _report(self, handle_id: int, error: RequestError) -> None:
        """Say in the log that a reader got an error, once for each open file."""
        if handle_id not in self._reported:
            self._reported.add(handle_id)
            log.warning("read of %s failed: %s", self._handles[handle_id][1].key, error)

    def key_of(self, handle_id: int) -> str:
        """The key of an open object."""
        return self._handles[handle_id][1].key

    def cached_bytes(self, version: Version) -> int:
        """How much of this version is in the cache, or on its way there."""
        object_id = self._object_ids.get(version)
        return 0 if object_id is None else self._scheduler.occupied_bytes(object_id)

    def snapshot(self) -> Snapshot:
        """The scheduler's figures."""
        return self._scheduler.snapshot()

    # ------------------------------------------------------------------------------------- plans

    def add_plan(self, plan: Plan, versions: PlanVersions, start: tuple[int, int] = (0, 0)) -> None:
        """Follow a plan from now on, instead of the one of the same name if there is one.

        Args:
            versions: of the files of the plan.
            start: epoch and position in it to begin at.
        """
        if plan.name in self._plan_ids:
            self.remove_plan(plan.name)
        plan_id = self._plan_ids[plan.name] = next(self._ids)
        self._feed(ev.PlanAdded(plan_id, plan, versions, start))

    def remove_plan(self, name: str) -> None:
        """Forget a plan; what it brought stays in the cache as anything else does.

        Raises:
            KeyError: there is none of this name.
        """
        self._feed(ev.PlanRemoved(self._plan_ids.pop(name)))

    def plans(self) -> list[PlanProgress]:
        """How far each plan is, in the order in which they were added."""
        return [self._scheduler.progress(plan_id) for plan_id in self._plan_ids.values()]

    def progress(self, name: str) -> PlanProgress:
        """How far a plan is; KeyError if there is none of this name."""
        return self._scheduler.progress(self._plan_ids[name])

    def read_by_plan(self, version: Version) -> bool:
        """Whether ranges of this version, not the whole of it, are planned: their reads must be seen here."""
        return self._scheduler.by_ranges(version)

    # ------------------------------------------------------------------------------------- from the workers

    def receive(self, message: wire.Landed | wire.Got | wire.Failed) -> None:
        """A worker answered a Get. What goes wrong here is a bug, and must not end the daemon."""
        try:
            self._receive(message)
        except Exception:
            self._metrics.handler_errors += 1
            log.exception("cannot take in %s", message)

    def _receive(self, message: wire.Landed | wire.Got | wire.Failed) -> None:
        fetch_id = message.request_id
        object_id = self._fetches.get(fetch_id)
        if object_id is None:
            return
        metrics = self._metrics
        match message:
            case wire.Landed():
                if message.first_byte_s is not None:
                    metrics.first_byte_s.append(message.first_byte_s)
                metrics.fetched_bytes += message.stop - message.start
                self._store.landed(object_id, message.start, message.stop, message.crc32c)
                self._feed(ev.Landed(fetch_id, message.start, message.stop))
            case wire.Got():
                del self._fetches[fetch_id]
                metrics.requests += message.http_requests
                if message.data is not None:
                    metrics.fetched_bytes += len(message.data)
                self._feed(ev.FetchDone(fetch_id), message.data)
            case wire.Failed():
                del self._fetches[fetch_id]
                metrics.requests += message.http_requests
                metrics.errors += 1
                self._note_failure(object_id, message)
                self._feed(ev.FetchFailed(fetch_id, message.kind, message.retry_after_s, random.random()))

    def _note_failure(self, object_id: int, message: wire.Failed) -> None:
        if self._failures.get(object_id) != message.detail:
            log.info("fetch failed: %s", f"{message.kind.text}: {message.detail}")
            self._failures[object_id] = message.detail

    # ------------------------------------------------------------------------------------- events, instructions

    def _feed(self, event: ev.Event, data: bytes | None = None) -> None:
        """Tell the scheduler, and do what it says; events that come of that are told after it, not amidst."""
        self._events.append((event, data))
        if self._obeying:
            return
        self._obeying = True
        try:
            while self._events:
                self._obey(*self._events.popleft())
        finally:
            self._obeying = False

    def _obey(self, event: ev.Event, data: bytes | None) -> None:
        for instruction in self._scheduler.handle(event, trio.current_time()):
            match instruction:
                case ev.Wake():
                    waiter = self._waiters[instruction.read_id]
                    waiter.wake = instruction
                    if instruction.fetch_id is not None:
                        waiter.data = data
                    waiter.woken.set()
                case ev.Fetch():
                    self._fetch(instruction)
                case ev.Admit():
                    self._admit(instruction.version)
                case ev.Evict():
                    self._forget_object(instruction.object_id)
                    self._spawn(self._evict, instruction)
                case ev.Release():
                    self._spawn(self._release, instruction)
                case ev.Verify():
                    self._spawn(self._verify, instruction)
                case ev.VersionGone():
                    self._version_gone(self._versions[instruction.object_id].key)
                case ev.WakeAt():
                    self._alarm_s = instruction.at_s
                    self._alarm_moved.set()
        for handle_id, settled in self._openers.items():
            if not self._scheduler.is_coming(handle_id):
                settled.set()

    def _fetch(self, fetch: ev.Fetch) -> None:
        version = self._versions[fetch.object_id]
        self._fetches[fetch.fetch_id] = fetch.object_id
        path = None if fetch.to_memory else self._store.path(fetch.object_id)
        self._get(
            wire.Get(
                request_id=fetch.fetch_id,
                key=version.key,
                etag=version.etag,
                size_bytes=version.size_bytes,
                start=fetch.start,
                stop=fetch.stop,
                path=path,
                report_bytes=REPORT_BYTES,
            )
        )

    def _admit(self, version: Version) -> None:
        """Make an object of a planned file, unless somebody has opened it meanwhile."""
        if version not in self._object_ids:
            self._add_object(version)

    def _add_object(self, version: Version) -> int:
        object_id = next(self._bypass_ids)
        if version.size_bytes:
            try:
                object_id = self._store.create(version.key, version.etag, version.size_bytes)
            except RequestError as error:
                log.warning("no cache file, reading through memory: %s", error)
        self._versions[object_id] = version
        self._object_ids[version] = object_id
        self._feed(ev.ObjectAdded(object_id, version, bypass=object_id < 0))
        return object_id

    def _forget_object(self, object_id: int) -> None:
        """From now on the version has no object: opening it makes a new one."""
        del self._object_ids[self._versions[object_id]]
        self._failures.pop(object_id, None)

    # ------------------------------------------------------------------------------------- what may block

    def _spawn(self, work: Callable[[ev.Instruction], Awaitable[None]], instruction: ev.Instruction) -> None:
        assert self._nursery is not None
        self._nursery.start_soon(self._do, work, instruction)

    async def _do(self, work: Callable[[ev.Instruction], Awaitable[None]], instruction: ev.Instruction) -> None:
        try:
            await work(instruction)
        except Exception:  # a bug, as in `receive`
            self._metrics.handler_errors += 1
            log.exception("cannot do %s", instruction)

    async def _in_thread(self, what: str, work: Callable[..., object], *args: object) -> object:
        """The result of blocking work on the cache disk; None, and a line in the log, if it fails."""
        try:
            return await trio.to_thread.run_sync(work, *args, limiter=self._disk_limiter)
        except (OSError, RequestError) as error:
            log.error("cannot %s: %s", what, error)
            return None

    async def _evict(self, instruction: ev.Instruction) -> None:
        assert isinstance(instruction, ev.Evict)
        if instruction.object_id > 0:
            await self._in_thread("evict", self._store.delete, instruction.object_id)
        del self._versions[instruction.object_id]
        self._feed(ev.Evicted(instruction.object_id))

    async def _release(self, instruction: ev.Instruction) -> None:
        assert isinstance(instruction, ev.Release)
        object_id, first, last = instruction.object_id, instruction.first, instruction.last
        start, stop = chunk_extent(first, last, self._versions[object_id].size_bytes)
        await self._in_thread("release", self._store.punch, object_id, start, stop)
        self._feed(ev.Released(object_id, first, last))

    async def _verify(self, instruction: ev.Instruction) -> None:
        assert isinstance(instruction, ev.Verify)
        object_id, first, last = instruction.object_id, instruction.first, instruction.last
        bad = await self._in_thread("verify", self._store.verify, object_id, first, last)
        if not isinstance(bad, list):
            bad = list(range(first, last))
            self._store.forget_chunks(object_id, first, last)
        if bad:
            log.warning("%d damaged chunks of %s are fetched again", len(bad), self._versions[object_id].key)
        self._feed(ev.Verified(object_id, first, last, tuple(bad)))

    async def _flush_index(self) -> None:
        while True:
            await trio.sleep(FLUSH_INTERVAL_S)
            await self._in_thread("write the cache index", self._store.flush)

    async def _ring_alarms(self) -> None:
        while True:
            with trio.CancelScope(deadline=self._alarm_s):
                await self._alarm_moved.wait()
            self._alarm_moved = trio.Event()
            if trio.current_time() >= self._alarm_s:
                self._alarm_s = float("inf")
                self._feed(ev.Tick())
