"""How far ahead of one open file to read when nobody has said what comes next.

Every handle remembers its current *run*: the stretch of bytes it has been reading in order. The longer a run,
the further ahead it is fetched, so a stream fills the pipe within a few MiB of its start, while a reader of
headers costs little. Most streams begin at the start of a file, so there the window grows faster, up to what a
pipe carries in the time to a first byte: a job that opens its files one after another finds the pipe full. After
a seek, the next run is expected to be as long as the last one was: someone who reads 1 MiB pieces at random places
gets exactly 1 MiB pieces, in one request each, and someone who reads 4 KiB pieces gets no read-ahead at all. Only
when a run outgrows that expectation does the window grow again.

"In order" is generous: the kernel splits, merges and reorders the requests of one stream (its read-ahead runs
beside the reader), so anything near the end of the run belongs to it.
"""

from __future__ import annotations

GROWTH = 8
"""Bytes fetched ahead per byte read in the current run. A pipe of 400 MB/s with 30 ms to the first byte holds
12 MB: at 8 the window covers it after 1.5 MiB, and a reader that stops early wastes at most 8 times what it read."""

START_GROWTH = 64
START_MAX_BYTES = 16 * 1024 * 1024
"""The same in a run from the start of a file, and up to where. Sixteen files read in turns by one reader are
opened 30 ms apart: with 8 the pipe idles three quarters of that time. The 16 KiB that the kernel asks for when
somebody looks at a header cost 1 MiB."""

REORDER_BYTES = 1024 * 1024
"""The kernel's largest read-ahead: requests of one stream may arrive this far out of order."""

EXPECTED_MAX_BYTES = 32 * 1024 * 1024
"""After a seek never expect more than this at once: the run before may have been a whole file. Samples cut from
raw data are 5 to 30 MB."""


class ReadAhead:
    """The reading pattern of one open file.

    Attributes:
        position: end of the current run, in bytes from the start of the object.
        window_bytes: how far beyond `position` is worth fetching now, before any cap.
        moving: whether the window's end moves on with the reader; else it is where the run is expected to end.
    """

    __slots__ = ("_expected_bytes", "_run_start", "moving", "position", "window_bytes")

    def __init__(self) -> None:
        self._run_start = -1
        self._expected_bytes = 0
        self.position = 0
        self.window_bytes = 0
        self.moving = True

    @property
    def started(self) -> bool:
        """Whether anything was read yet."""
        return self._run_start >= 0

    def observe(self, start: int, stop: int) -> bool:
        """Note a read of the bytes `[start, stop)` and adjust the window; says whether it began a new run."""
        new_run = not (self.started and self.position - REORDER_BYTES <= start <= self.position + REORDER_BYTES)
        if not self.started:
            # A first read at the very start is the beginning of a stream more often than not; one in the
            # middle is a seek, and must be followed by its neighbour before we believe in it.
            self._expected_bytes = 0 if start == 0 else stop - start
        elif new_run:
            self._expected_bytes = min(self.position - self._run_start, EXPECTED_MAX_BYTES)
        if new_run:
            self._run_start, self.position = start, stop
        else:
            self._run_start = min(self._run_start, start)
            self.position = max(self.position, stop)
        beyond_bytes = self.position - self._run_start - self._expected_bytes
        self.moving = beyond_bytes >= 0
        if not self.moving:
            self.window_bytes = -beyond_bytes
        elif self._run_start == 0:
            self.window_bytes = max(GROWTH * beyond_bytes, min(START_GROWTH * beyond_bytes, START_MAX_BYTES))
        else:
            self.window_bytes = GROWTH * beyond_bytes
        return new_run
