"""A trainer, an engine and a pipe around a scheduler that has a plan, in simulated time.

The pipe gives one rate to all requests in turn, after a first-byte latency. `check` is called after every event.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from s3prefetchfs.core import events as ev
from s3prefetchfs.core.plan import Epoch, Order, Plan, PlannedFile
from s3prefetchfs.core.scheduler import Scheduler

MIB = 1024 * 1024
FIRST_BYTE_S = 0.03
DISK_S = 0.001


def plan_of(
    orders: Sequence[Sequence[int]],
    *,
    interleave: int = 4,
    order: Order = Order.STRICT,
    ranges: Sequence[Sequence[int]] | None = None,
) -> Plan:
    """A plan over files 0, 1, ...; `ranges` gives offset and length of each entry, flat, for each epoch."""
    epochs = tuple(
        Epoch(memoryview(array("I", entries)), None if ranges is None else memoryview(array("Q", ranges[number])))
        for number, entries in enumerate(orders)
    )
    files = [PlannedFile(str(number)) for number in range(1 + max(max(entries) for entries in orders))]
    return Plan("plan", order, interleave, files, epochs)


class PlanWorld:
    """See the module's docstring.

    Args:
        sizes: of the files, in bytes; file number n has the id n + 1.

    Attributes:
        fetched_bytes: asked for in all. waited_s: what readers have waited. now: simulated seconds.
    """

    def __init__(
        self, capacity_bytes: int, sizes: Sequence[int], *, bytes_per_s: float = 1e9, connections: int = 16
    ) -> None:
        self.scheduler = Scheduler(capacity_bytes=capacity_bytes, max_connections=connections, retry_timeout_s=60.0)
        self.sizes = sizes
        self.now = 0.0
        self.fetched_bytes = 0
        self.waited_s = 0.0
        self._bytes_per_s = bytes_per_s
        self._pipe_free_s = 0.0
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._objects: dict[int, int] = {}  # file number -> object id
        self._numbers: dict[int, int] = {}  # and back
        self._woken: set[int] = set()
        self._alarm_s = float("inf")
        self._events: deque[Any] = deque()
        self._busy = False
        self._last_id = 0

    def declare(self, plan: Plan, missing: Sequence[int] = ()) -> int:
        """Declare a plan; returns its id."""
        plan_id = self._id()
        files = [0 if number in missing else number + 1 for number in range(len(plan.files))]
        objects = [0 if number in missing else self._objects.get(number, 0) for number in range(len(files))]
        self.send(ev.PlanAdded(plan_id, plan, files, self.sizes[: len(files)], objects))
        return plan_id

    def open(self, number: int) -> int:
        """Open a file; returns the handle."""
        if number not in self._objects:
            self._add(number)
        handle_id = self._id()
        self.send(ev.Opened(handle_id, self._objects[number]))
        return handle_id

    def read(self, handle_id: int, start: int, stop: int) -> None:
        """Read, and let time pass until the bytes are there."""
        read_id = self._id()
        began_s = self.now
        self.send(ev.ReadStarted(read_id, handle_id, start, stop))
        while read_id not in self._woken:
            self._step()
        self.waited_s += self.now - began_s
        self.send(ev.ReadFinished(read_id))

    def close(self, handle_id: int) -> None:
        self.send(ev.Closed(handle_id))

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        until_s = self.now + seconds
        while self._due and self._due[0][0] <= until_s:
            self._step()
        self.now = until_s

    def train(self, order: Sequence[int], *, interleave: int, bytes_per_s: float) -> float:
        """Read an epoch as an interleaving reader does; returns the share of the time in which it did not wait."""
        began_s, waited_s = self.now, self.waited_s
        entries = iter(order)
        first = list(islice(entries, interleave))
        streams = [[number, self.open(number), 0] for number in first]
        turn = 0
        while streams:
            stream = streams[turn % len(streams)]
            number, handle_id, start = stream
            stop = min(self.sizes[number], start + MIB)
            self.read(handle_id, start, stop)
            self.sleep((stop - start) / bytes_per_s)
            stream[2] = stop
            if stop == self.sizes[number]:
                self.close(handle_id)
                following = next(entries, None)
                if following is None:
                    streams.remove(stream)
                else:
                    stream[:] = [following, self.open(following), 0]
            turn += 1
        return 1 - (self.waited_s - waited_s) / (self.now - began_s)

    def send(self, event: ev.Event) -> None:
        """Tell the scheduler, do as it says, check."""
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        while self._events:
            for instruction in self.scheduler.handle(self._events.popleft(), self.now):
                self._obey(instruction)
            self.scheduler.check()
        self._busy = False

    def _obey(self, instruction: ev.Instruction) -> None:
        match instruction:
            case ev.Fetch():
                self._fetch(instruction)
            case ev.Admit():
                self._add(instruction.file_id - 1)
            case ev.Evict(object_id):
                number = self._numbers.pop(object_id)
                if self._objects.get(number) == object_id:
                    del self._objects[number]
                self._later(DISK_S, lambda: self.send(ev.Evicted(object_id)))
            case ev.Release(object_id, first, last):
                self._later(DISK_S, lambda: self.send(ev.Released(object_id, first, last)))
            case ev.Wake(read_id, failure):
                assert failure is None
                self._woken.add(read_id)
            case ev.WakeAt(at_s):
                self._alarm_s = at_s
                self._later(at_s - self.now, lambda: self._alarm_s == at_s and self.send(ev.Tick()))

    def _fetch(self, fetch: ev.Fetch) -> None:
        self.fetched_bytes += fetch.stop - fetch.start
        at_s = max(self.now + FIRST_BYTE_S, self._pipe_free_s)
        for start in range(fetch.start, fetch.stop, MIB):
            stop = min(start + MIB, fetch.stop)
            at_s += (stop - start) / self._bytes_per_s
            self._later(at_s - self.now, lambda start=start, stop=stop: self._land(fetch, start, stop))
        self._pipe_free_s = at_s

    def _land(self, fetch: ev.Fetch, start: int, stop: int) -> None:
        if not fetch.to_memory:
            self.send(ev.Landed(fetch.fetch_id, start, stop))
        if stop == fetch.stop:
            self.send(ev.FetchDone(fetch.fetch_id))

    def _add(self, number: int) -> None:
        object_id = self._objects[number] = self._id()
        self._numbers[object_id] = number
        self.send(ev.ObjectAdded(object_id, self.sizes[number], file_id=number + 1))

    def _later(self, seconds: float, work: Callable[[], object]) -> None:
        heapq.heappush(self._due, (self.now + seconds, self._id(), work))

    def _step(self) -> None:
        at_s, _, work = heapq.heappop(self._due)
        self.now = max(self.now, at_s)
        work()

    def _id(self) -> int:
        self._last_id += 1
        return self._last_id
