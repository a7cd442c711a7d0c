"""The scheduler at work in simulated time: with a cache disk, a network and readers that are models.

What decides is the real scheduler: it hears the events that a daemon would tell it and cannot know the difference.
Files are numbered from 0, which is their key. A file that is complete when it is opened is read past the scheduler, as
the kernel does it in passthrough.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from s3prefetchfs.core import events as ev
from s3prefetchfs.core.plan import Plan
from s3prefetchfs.core.plan_order import Entry
from s3prefetchfs.core.scheduler import Scheduler
from s3prefetchfs.core.version import PlanVersions, Version
from s3prefetchfs.simulation.network import Network

DISK_S = 0.001
"""What an unlink or a hole takes."""

READ_BYTES = 1024 * 1024

PATIENCE_S = 1e9
"""No simulated reader gives up, however slow the network is."""


class World:
    """See the module's docstring.

    Args:
        capacity_bytes: of the cache. sizes: of the files, in bytes.
        passthrough: whether the kernel reads complete files by itself.

    Attributes:
        now: simulated seconds. fetched_bytes: asked for in all. waited_s: what readers have waited.
    """

    def __init__(
        self,
        capacity_bytes: int,
        sizes: Sequence[int],
        network: Network,
        *,
        connections: int,
        passthrough: bool = True,
    ) -> None:
        self.scheduler = Scheduler(
            capacity_bytes=capacity_bytes, max_connections=connections, retry_timeout_s=PATIENCE_S
        )
        self.sizes = sizes
        self.now = 0.0
        self.fetched_bytes = 0
        self.waited_s = 0.0
        self._network = network
        self._passthrough = passthrough
        self._passed_through: set[int] = set()
        self._to_memory: set[int] = set()
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._objects: dict[int, int] = {}  # file number -> object id
        self._numbers: dict[int, int] = {}  # and back
        self._woken: set[int] = set()
        self._alarm_s = float("inf")
        self._events: deque[ev.Event] = deque()
        self._telling = False
        self._last_id = 0

    def declare(self, plan: Plan, missing: Sequence[int] = ()) -> int:
        """Declare a plan of files 0, 1, ..., of which some may be missing; returns its id."""
        plan_id = self._id()
        versions = [None if number in missing else self._version(number) for number in range(len(plan.files))]
        self.send(ev.PlanAdded(plan_id, plan, PlanVersions(versions)))
        return plan_id

    def open(self, number: int) -> int:
        """Open a file; returns the handle."""
        if number not in self._objects:
            self._add(number)
        handle_id = self._id()
        self.send(ev.Opened(handle_id, self._objects[number]))
        if self._passthrough and self.sizes[number] and self.scheduler.is_complete(handle_id):
            self._passed_through.add(handle_id)
            self.send(ev.PassedThrough(handle_id))
        return handle_id

    def read(self, handle_id: int, start: int, stop: int) -> None:
        """Read, and let time pass until the bytes are there."""
        if handle_id in self._passed_through:
            return
        read_id = self._id()
        began_s = self.now
        self.send(ev.ReadStarted(read_id, handle_id, start, stop))
        while read_id not in self._woken:
            self._step(float("inf"))
        self._woken.remove(read_id)
        self.waited_s += self.now - began_s
        self.send(ev.ReadFinished(read_id))

    def close(self, handle_id: int) -> None:
        """Close a handle."""
        self._passed_through.discard(handle_id)
        self.send(ev.Closed(handle_id))

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        until_s = self.now + seconds
        while self.now < until_s:
            self._step(until_s)

    def train(
        self,
        entries: Iterable[Entry],
        *,
        interleave: int,
        bytes_per_s: float,
        progress: Callable[[int], object] = lambda _: None,
    ) -> None:
        """Read as an interleaving reader does: a piece of each open file in turn.

        Args:
            entries: in the order of their opens.
            bytes_per_s: what the readers consume while they do not wait.
            progress: called with the bytes of each piece.
        """
        coming = iter(entries)
        streams = [self._start(*entry) for entry in islice(coming, interleave)]
        turn = 0
        while streams:
            turn %= len(streams)
            handle_id, start, stop = streams[turn]
            reached = min(stop, start + READ_BYTES)
            if start < reached:
                self.read(handle_id, start, reached)
                self.sleep((reached - start) / bytes_per_s)
                progress(reached - start)
            streams[turn] = handle_id, reached, stop
            if reached == stop:
                self.close(handle_id)
                following = next(coming, None)
                if following is None:
                    del streams[turn]
                    continue
                streams[turn] = self._start(*following)
            turn += 1

    def _start(self, number: int, offset: int, length: int) -> tuple[int, int, int]:
        size_bytes = self.sizes[number]
        return self.open(number), min(offset, size_bytes), min(offset + length, size_bytes) if length else size_bytes

    def send(self, event: ev.Event) -> None:
        """Tell the scheduler, and do as it says."""
        self._events.append(event)
        if self._telling:
            return
        self._telling = True
        while self._events:
            for instruction in self.scheduler.handle(self._events.popleft(), self.now):
                self._obey(instruction)
            self.told()
        self._telling = False

    def told(self) -> None:
        """Called after each event; the tests check more here."""

    def _obey(self, instruction: ev.Instruction) -> None:
        match instruction:
            case ev.Fetch(fetch_id, _, start, stop, to_memory):
                self.fetched_bytes += stop - start
                self._network.get(fetch_id, start, stop, self.now)
                if to_memory:
                    self._to_memory.add(fetch_id)
            case ev.Admit(version):
                self._add(int(version.key))
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
            case _:
                raise AssertionError(f"no model of {instruction}")

    def _add(self, number: int) -> None:
        object_id = self._objects[number] = self._id()
        self._numbers[object_id] = number
        self.send(ev.ObjectAdded(object_id, self._version(number)))

    def _version(self, number: int) -> Version:
        return Version(str(number), "", self.sizes[number])

    def _later(self, seconds: float, work: Callable[[], object]) -> None:
        heapq.heappush(self._due, (self.now + seconds, self._id(), work))

    def _step(self, until_s: float) -> None:
        """Let time pass until the next thing happens, or until then."""
        due_s = self._due[0][0] if self._due else float("inf")
        network_s = self._network.next_s
        self.now = max(self.now, min(until_s, due_s, network_s, self._alarm_s))
        assert self.now < float("inf"), "readers wait and nothing is on its way"
        arrived = self._network.advance(min(self.now, network_s))
        if arrived is not None:
            fetch_id, start, stop, last = arrived
            if fetch_id not in self._to_memory:
                self.send(ev.Landed(fetch_id, start, stop))
            if last:
                self._to_memory.discard(fetch_id)
                self.send(ev.FetchDone(fetch_id))
        if due_s <= self.now:
            heapq.heappop(self._due)[2]()
        elif self._alarm_s <= self.now:
            self._alarm_s = float("inf")
            self.send(ev.Tick())

    def _id(self) -> int:
        self._last_id += 1
        return self._last_id
