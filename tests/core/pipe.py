"""A network in simulated time: what the scheduler makes of a pipe, without a pipe.

Every request waits for its first byte, then shares the aggregate rate evenly with the others, up to a rate of its
own. Landed bytes are reported as a worker does it: the first chunk at once, then every half MiB. Readers take no
time: each reads on at the moment it is woken.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from s3prefetchfs.core import events as ev
from s3prefetchfs.core.extent import CHUNK_BYTES
from s3prefetchfs.core.version import Version

FIRST_BYTE_S = 0.030
CONNECTION_BYTES_PER_S = 90e6
AGGREGATE_BYTES_PER_S = 400e6
REPORT_BYTES = 512 * 1024


class Decides(Protocol):
    """The scheduler, or what it is compared with."""

    def handle(self, event: ev.Event, now: float) -> list[ev.Instruction]: ...


@dataclass(frozen=True, slots=True)
class Read:
    """A step of a reader. `handle` is any name: its first use opens it, `last` closes it."""

    handle: object
    size_bytes: int
    start: int
    stop: int
    last: bool = False


@dataclass(order=True, slots=True)
class _Report:
    """The next report of a request is due when each running request has received `service_bytes` in all."""

    service_bytes: float
    fetch: ev.Fetch = field(compare=False)
    reached: int = field(compare=False)
    stop: int = field(compare=False)


class Pipe:
    """Runs readers against a scheduler.

    Attributes:
        now: simulated seconds. fetches: all that were issued. fetched_bytes: their sum.
    """

    def __init__(self, scheduler: Decides) -> None:
        self.scheduler = scheduler
        self.now = 0.0
        self.fetches: list[ev.Fetch] = []
        self._service_bytes = 0.0
        self._starting: list[tuple[float, int, ev.Fetch]] = []
        self._running: list[_Report] = []
        self._alarm_s = float("inf")
        self._woken: list[int] = []
        self._open: dict[object, int] = {}
        self._last_id = 0

    @property
    def fetched_bytes(self) -> int:
        return sum(fetch.stop - fetch.start for fetch in self.fetches)

    def run(self, readers: list[Iterator[Read]]) -> float:
        """Let the readers read to their ends, side by side; returns the seconds it took."""
        began_s = self.now
        waiting: dict[int, tuple[Iterator[Read], Read]] = {}
        for reader in readers:
            self._read_next(reader, waiting)
        while waiting:
            if self._woken:
                read_id = self._woken.pop(0)
                reader, read = waiting.pop(read_id)
                self._send(ev.ReadFinished(read_id))
                if read.last:
                    self._send(ev.Closed(self._open.pop(read.handle)))
                self._read_next(reader, waiting)
            else:
                self._advance()
        return self.now - began_s

    def _read_next(self, reader: Iterator[Read], waiting: dict[int, tuple[Iterator[Read], Read]]) -> None:
        read = next(reader, None)
        if read is None:
            return
        if read.handle not in self._open:
            object_id = self._id()
            self._open[read.handle] = self._id()
            self._send(ev.ObjectAdded(object_id, Version(str(object_id), "", read.size_bytes)))
            self._send(ev.Opened(self._open[read.handle], object_id))
        read_id = self._id()
        waiting[read_id] = reader, read
        self._send(ev.ReadStarted(read_id, self._open[read.handle], read.start, read.stop))

    def _send(self, event: ev.Event) -> None:
        for instruction in self.scheduler.handle(event, self.now):
            match instruction:
                case ev.Fetch():
                    assert not instruction.to_memory
                    self.fetches.append(instruction)
                    heapq.heappush(self._starting, (self.now + FIRST_BYTE_S, instruction.fetch_id, instruction))
                case ev.Wake():
                    assert instruction.failure is None
                    self._woken.append(instruction.read_id)
                case ev.WakeAt():
                    self._alarm_s = instruction.at_s
                case ev.Evict():
                    self._send(ev.Evicted(instruction.object_id))
                case ev.Release():
                    self._send(ev.Released(instruction.object_id, instruction.first, instruction.last))

    def _advance(self) -> None:
        """Let time pass until the next thing happens."""
        rate = min(CONNECTION_BYTES_PER_S, AGGREGATE_BYTES_PER_S / max(1, len(self._running)))
        starts_s = self._starting[0][0] if self._starting else float("inf")
        reports_s = float("inf")
        if self._running:
            reports_s = self.now + (self._running[0].service_bytes - self._service_bytes) / rate
        until_s = min(starts_s, reports_s, self._alarm_s)
        assert until_s < float("inf"), "readers wait and nothing is on its way"
        if self._running:
            self._service_bytes += (until_s - self.now) * rate
        self.now = until_s
        if until_s == reports_s:
            report = heapq.heappop(self._running)
            self._send(ev.Landed(report.fetch.fetch_id, report.reached, report.stop))
            if report.stop == report.fetch.stop:
                self._send(ev.FetchDone(report.fetch.fetch_id))
            else:
                self._expect(report.fetch, report.stop, REPORT_BYTES)
        elif until_s == starts_s:
            _, _, fetch = heapq.heappop(self._starting)
            self._expect(fetch, fetch.start, CHUNK_BYTES)
        else:
            self._alarm_s = float("inf")
            self._send(ev.Tick())

    def _expect(self, fetch: ev.Fetch, reached: int, size_bytes: int) -> None:
        stop = min(reached + size_bytes, fetch.stop)
        heapq.heappush(self._running, _Report(self._service_bytes + stop - reached, fetch, reached, stop))

    def _id(self) -> int:
        self._last_id += 1
        return self._last_id
