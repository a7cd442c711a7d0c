"""S3 and the way to it, in simulated time.

A request waits for its first byte, then shares the bandwidth evenly with all others, up to what one connection gives.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

CONNECTION_BYTES_PER_S = 90e6
"""What one connection to S3 yields ("85-90 MB/s", Amazon S3 User Guide, Performance design patterns)."""

FIRST_BYTE_S = 0.03

REPORT_BYTES = 512 * 1024
"""How often a download says how far it is: as the engine has workers do. Larger steps make the pipe look wider."""


@dataclass(order=True, slots=True)
class _Body:
    """The next report of a body is due when every running one has received `service_bytes`."""

    service_bytes: float
    fetch_id: int
    reached: int = field(compare=False)
    goal: int = field(compare=False)
    stop: int = field(compare=False)


class Network:
    """See the module's docstring. Times are simulated seconds.

    Args:
        bytes_per_s: of all requests together.
        first_byte_s: called for each request: how long until its first byte.
        connection_bytes_per_s: of each request, at most.
    """

    def __init__(
        self,
        bytes_per_s: float,
        first_byte_s: Callable[[], float] = lambda: FIRST_BYTE_S,
        connection_bytes_per_s: float = CONNECTION_BYTES_PER_S,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._first_byte_s = first_byte_s
        self._connection_bytes_per_s = connection_bytes_per_s
        self._now = 0.0
        self._service_bytes = 0.0
        self._starting: list[tuple[float, int, int, int]] = []
        self._running: list[_Body] = []

    def get(self, fetch_id: int, start: int, stop: int, now: float) -> None:
        """A request for the bytes `[start, stop)` of some object begins."""
        heapq.heappush(self._starting, (now + self._first_byte_s(), fetch_id, start, stop))

    @property
    def next_s(self) -> float:
        """When something will have come in."""
        starts_s = self._starting[0][0] if self._starting else float("inf")
        if not self._running:
            return starts_s
        return min(starts_s, self._now + (self._running[0].service_bytes - self._service_bytes) / self._rate())

    def advance(self, now: float) -> tuple[int, int, int, bool] | None:
        """Let time pass until `now`, at most `next_s`.

        Returns:
            What came in, if that is a piece long enough to be reported: the request, the bytes, and whether they are
            its last.
        """
        due_s = self.next_s
        if self._running:
            self._service_bytes += (now - self._now) * self._rate()
        self._now = now
        if now < due_s:
            return None
        if self._starting and self._starting[0][0] <= now:
            _, fetch_id, start, stop = heapq.heappop(self._starting)
            self._expect(fetch_id, start, stop)
            return None
        body = heapq.heappop(self._running)
        if body.goal < body.stop:
            self._expect(body.fetch_id, body.goal, body.stop)
        return body.fetch_id, body.reached, body.goal, body.goal == body.stop

    def _rate(self) -> float:
        return min(self._connection_bytes_per_s, self._bytes_per_s / len(self._running))

    def _expect(self, fetch_id: int, reached: int, stop: int) -> None:
        goal = min(reached + REPORT_BYTES, stop)
        heapq.heappush(self._running, _Body(self._service_bytes + goal - reached, fetch_id, reached, goal, stop))
