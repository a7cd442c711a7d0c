"""How fast bodies go: a cap for each, and one for all.

A link of r bytes/s delivers byte b of a body b/r after its start, so a piece is sent when its *last* byte is due:
never early, late by one piece at most. `Pace` says when, for one body. `Link` is the shared cap: bodies queue
for their next piece, first come first served, which with pieces of one size is fair, and work-conserving because
only those that have something to send are in the queue.

Pieces are PIECE_S long, so that timers cost little CPU, and start small, so that the first bytes are not late by that
much. The event loop's timers are whole milliseconds, rounded up; `sleep_until` rounds to the nearest.
"""

from __future__ import annotations

import asyncio
from collections import deque

PIECE_S = 0.015
"""Seconds of a throttled body in one sendfile. Shorter is smoother and costs more CPU."""

MAX_PIECE_BYTES = 1 << 20
"""Of one sendfile. Larger saves nothing measurable: the socket's buffer takes about as much at a time."""

FIRST_PIECE_BYTES = 64 << 10
"""The first piece of a throttled body; then no piece is larger than what was sent before it."""

FAIR_PIECE_BYTES = 32 << 10
"""The least that is sent at a time because of the shared cap, however many share it."""

BURST_S = 0.020
"""How much lateness (timers, a busy CPU) a body may make up for. Without it the caps would be missed by as much."""

IDLE_BURST_S = 0.005
"""What the link may save up while nobody waits for it; while somebody waits, all its time counts up to BACKLOG_S."""
BACKLOG_S = 0.1

TICK_S = 0.002
"""The queue of the link is served at most this often."""

TIMER_SLACK_S = 0.0005
"""Half of a timer's resolution."""


async def sleep_until(when: float) -> None:
    """Wait until the loop's clock is within TIMER_SLACK_S of `when`."""
    delay_s = when - asyncio.get_running_loop().time() - TIMER_SLACK_S
    if delay_s > 0:
        await asyncio.sleep(delay_s)


class TokenBucket:
    """Tokens that accrue with time. A new bucket is full, whatever its limit."""

    def __init__(self) -> None:
        self.tokens = 0.0
        self._seen_at = float("-inf")

    def spend(self, count: float, rate: float, limit: float, now: float) -> bool:
        """Add what accrued at `rate` per second since the last call, up to `limit`; take `count` if there are."""
        self.tokens = min(self.tokens + (now - self._seen_at) * rate, limit)
        self._seen_at = now
        enough = self.tokens >= count
        self.tokens -= count if enough else 0
        return enough


class Pace:
    """The schedule of one body.

    Args:
        now: when its byte 0 is due.
    """

    def __init__(self, now: float) -> None:
        self._free_at = now

    def reserve(self, count: int, rate: float, now: float) -> float:
        """When the next `count` bytes may be sent, at `rate` bytes/s."""
        self._free_at = max(self._free_at, now - BURST_S) + count / rate
        return self._free_at

    def give_back(self, count: int, rate: float) -> None:
        """So many of the reserved bytes were not sent."""
        if rate:
            self._free_at -= count / rate


class Link:
    """The cap shared by all bodies."""

    def __init__(self) -> None:
        self.rate = 0.0
        self.active = 0
        """Bodies being sent; kept by their senders."""
        self._bucket = TokenBucket()
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def set_rate(self, rate: float) -> None:
        """Change the cap, bytes/s, also for those who wait now; 0 is none."""
        self.rate = rate
        self._serve()

    def piece_bytes(self, rate: float, sent: int, left: int) -> int:
        """How much a body should send next, given its own rate (0: none), what it sent and has left."""
        piece = min(left, MAX_PIECE_BYTES)
        if rate:
            piece = min(piece, max(int(rate * PIECE_S), 1))
        if self.rate:
            piece = min(piece, max(int(self.rate * PIECE_S / self.active), FAIR_PIECE_BYTES))
        if rate or self.rate:
            piece = min(piece, max(sent, FIRST_PIECE_BYTES))
        return piece

    async def take(self, count: int) -> None:
        """Wait for `count` bytes of the shared cap."""
        if not self.rate:
            return
        loop = asyncio.get_running_loop()
        limit = max(self.rate * IDLE_BURST_S, count)
        if not self._waiting and self._bucket.spend(count, self.rate, limit, loop.time()):
            return
        turn = loop.create_future()
        self._waiting.append((count, turn))
        self._arm()
        await turn

    def give_back(self, count: int) -> None:
        """So many of the taken bytes were not sent."""
        if self.rate:
            self._bucket.tokens += count

    def _serve(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            count, turn = self._waiting[0]
            if not turn.cancelled():
                limit = max(self.rate * BACKLOG_S, count)
                if self.rate and not self._bucket.spend(count, self.rate, limit, asyncio.get_running_loop().time()):
                    self._arm()
                    return
                turn.set_result(None)
            self._waiting.popleft()

    def _arm(self) -> None:
        if self._timer is None:
            wait_s = (self._waiting[0][0] - self._bucket.tokens) / self.rate
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(wait_s - TIMER_SLACK_S, TICK_S), self._serve)
