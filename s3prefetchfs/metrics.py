"""What the daemon counts while it works. Read by `control.py`, written by the engine, the catalog and the adapter.

One instance per mount, touched only from the event loop. Names are those of the status document.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

FIRST_BYTE_SAMPLES = 1000
"""The percentiles speak of the last thousand GETs: minutes of slow reading, seconds of fast."""


@dataclass(slots=True)
class KernelFigures:
    """How the kernel serves the mount.

    Attributes:
        passthrough: whether files that are whole are handed to it. reason: why they are not.
        opens_passthrough, opens_normal: files of the bucket that were opened in one mode and in the other.
        read_ahead_kb, max_background: its limits for this mount, None where they cannot be seen.
    """

    passthrough: bool = False
    reason: str = "not mounted yet"
    opens_passthrough: int = 0
    opens_normal: int = 0
    read_ahead_kb: int | None = None
    max_background: int | None = None


@dataclass(slots=True)
class Metrics:
    """Counters since the mount started.

    Attributes:
        requests: GETs sent to S3, resumed ones included.
        fetched_bytes: bytes of objects that arrived.
        errors: requests that failed, those tried again included.
        opens, bytes_served: files opened, and bytes given to readers.
        bytes_waited_for, wait_s: what of it was not there when asked for, and how long readers slept for it.
        lists, heads: metadata requests.
        handler_errors: exceptions that should not have reached the FUSE border.
        kernel: how the kernel serves the mount.
        first_byte_s: from sending a GET to the first byte of its body, latest last.
    """

    requests: int = 0
    fetched_bytes: int = 0
    errors: int = 0
    opens: int = 0
    bytes_served: int = 0
    bytes_waited_for: int = 0
    wait_s: float = 0.0
    lists: int = 0
    heads: int = 0
    handler_errors: int = 0
    kernel: KernelFigures = field(default_factory=KernelFigures)
    first_byte_s: deque[float] = field(default_factory=lambda: deque(maxlen=FIRST_BYTE_SAMPLES))

    def first_byte_ms(self, quantile: float) -> float | None:
        """A quantile of the first-byte latency, in ms; None before the first GET."""
        if not self.first_byte_s:
            return None
        ordered = sorted(self.first_byte_s)
        return round(1000 * ordered[min(len(ordered) - 1, int(quantile * len(ordered)))], 3)
