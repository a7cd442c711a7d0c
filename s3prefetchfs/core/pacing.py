"""How fast to ask: connections, retries and the bandwidth cap.

`Pacing` limits the requests in flight. It starts at the configured number of connections, halves when the server
asks to slow down (once per second at most: one storm is one message), and grows back by one for every second
without complaint: additive increase, multiplicative decrease, as TCP does. `backoff_s` spaces retries with full
jitter (Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog 2015), so that a fleet that failed
together does not return together. Chance comes in as an argument: the core has none of its own.
"""

from __future__ import annotations

import math
from collections import deque

BACKOFF_BASE_S = 0.1
BACKOFF_CAP_S = 5.0
"""A 30 s storm is then probed at least every 5 s, and is over for us at most 5 s after it is over."""

LATENCY_WEIGHT = 0.1
"""How fast the estimate follows: over some ten GETs."""

BANDWIDTH_INTERVAL_S = 0.5
BANDWIDTH_INTERVALS = 6
"""The bandwidth is the best of the last intervals in which nothing but the pipe held up the requests; others only tell
of it if they were better (Cardwell et al., "BBR: Congestion-Based Congestion Control", ACM Queue 2016)."""

AMPLE_S = 0.25
FULL_SHARE = 0.25
"""Requests for more bytes than the pipe carries in this time do not make it any fuller, they only make each other late:
whoever comes last, even if he is due first, waits for all others. With a quarter of that on its way it is full."""

AMPLE_LATENCIES = 2.0
"""Where the first byte takes long, the time is this many latencies instead, and the pipe is full with what it carries
in one of them: by Little's law that much is on its way without a byte of it arriving."""

BURST_S = 0.25
"""The bandwidth cap is kept over any stretch longer than this."""


def backoff_s(attempt: int, jitter: float, retry_after_s: float | None = None) -> float:
    """How long to wait before trying again.

    Args:
        attempt: failures in a row so far, from 1.
        jitter: uniform in [0, 1).
        retry_after_s: what the server asked for; obeyed up to the cap.
    """
    ceiling_s = min(BACKOFF_CAP_S, BACKOFF_BASE_S * (1 << min(attempt, 10)))
    return max(ceiling_s * jitter, min(retry_after_s or 0.0, BACKOFF_CAP_S))


class Pipe:
    """What the connections to S3 give, as far as it was seen.

    Attributes:
        latency_s: mean time to the first chunk of a GET. bytes_per_s: the bandwidth. None before they are known.
    """

    def __init__(self) -> None:
        self.latency_s: float | None = None
        self.bytes_per_s: float | None = None
        self._intervals: deque[float] = deque(maxlen=BANDWIDTH_INTERVALS)
        self._began_s = float("-inf")
        self._bytes = 0
        self._was_full = True

    def answered(self, latency_s: float) -> None:
        """The first chunk of a GET has landed."""
        mean_s = self.latency_s
        self.latency_s = latency_s if mean_s is None else mean_s + LATENCY_WEIGHT * (latency_s - mean_s)

    def landed(self, count_bytes: int, coming_bytes: int, now: float) -> None:
        """Bytes have come in, and so many are still on their way."""
        full = coming_bytes >= self._bytes_in(max(AMPLE_S * FULL_SHARE, self.latency_s or 0.0))
        elapsed_s = now - self._began_s
        if elapsed_s <= 2 * BANDWIDTH_INTERVAL_S:
            self._bytes += count_bytes
            self._was_full &= full
            if elapsed_s < BANDWIDTH_INTERVAL_S:
                return
            rate = self._bytes / elapsed_s
            if self._was_full or rate > (self.bytes_per_s or 0.0):
                self._intervals.append(rate)
                self.bytes_per_s = max(self._intervals)
        self._began_s, self._bytes, self._was_full = now, 0, full

    @property
    def ample_bytes(self) -> float:
        """What may be on its way when something is asked for that nobody waits for."""
        return self._bytes_in(max(AMPLE_S, AMPLE_LATENCIES * (self.latency_s or 0.0)))

    def _bytes_in(self, seconds: float) -> float:
        """What the pipe carries in a time; no end of it before the bandwidth is known."""
        return math.inf if self.bytes_per_s is None else self.bytes_per_s * seconds


class Pacing:
    """The limits that requests for object bytes are issued under.

    Args:
        max_connections: requests in flight, at most.
        max_throughput_bytes_per_s: cap on the bytes asked for; None for no cap.
    """

    def __init__(self, max_connections: int, max_throughput_bytes_per_s: int | None) -> None:
        self.max_connections = max_connections
        self._limit = float(max_connections)
        self._regrow_from = 0.0
        self._throttled_at = float("-inf")
        self._rate = max_throughput_bytes_per_s
        self._tokens_bytes = 0.0
        self._refilled_at = float("-inf")

    def limit(self, now: float) -> int:
        """How many requests may be in flight now."""
        if self._limit < self.max_connections and now > self._regrow_from:
            self._limit = min(float(self.max_connections), self._limit + now - self._regrow_from)
            self._regrow_from = now
        return int(self._limit)

    def prefetch_limit(self, now: float) -> int:
        """How many may be in flight when the next one is a prefetch: the rest is kept for demand."""
        limit = self.limit(now)
        return limit - min(limit - 1, max(1, limit // 8)) if limit > 1 else 1

    def throttled(self, now: float) -> None:
        """The server asked to slow down."""
        current = self.limit(now)
        if now - self._throttled_at >= 1.0:
            self._throttled_at = now
            self._limit = max(1.0, current / 2)
        self._regrow_from = now + 1.0

    def wait_s(self, now: float) -> float:
        """How long until the bandwidth cap allows another request: 0 for now."""
        if self._rate is None:
            return 0.0
        self._refill(now)
        return 0.0 if self._tokens_bytes > 0 else -self._tokens_bytes / self._rate + 0.001

    @property
    def burst_bytes(self) -> float:
        """A request for more than this would hold up others for longer than the cap's stretch."""
        return math.inf if self._rate is None else self._rate * BURST_S

    def spend(self, count_bytes: int, now: float) -> None:
        """Bytes were asked for. The balance may go below zero: a request is not split for the cap."""
        if self._rate is not None:
            self._refill(now)
            self._tokens_bytes -= count_bytes

    def _refill(self, now: float) -> None:
        assert self._rate is not None
        elapsed_s = now - self._refilled_at
        self._tokens_bytes = min(self.burst_bytes, self._tokens_bytes + self._rate * min(elapsed_s, 3600.0))
        self._refilled_at = now
