"""One plan, and how far its readers have come in it.

A plan is unrolled into a *window* of entries: from the low-water mark, before which everything was read, to the end of
the next epoch. The entries of an epoch are never all in memory as objects for longer than that, and they are appended
a few at a time, so that no single event is kept waiting. Each entry reads a *piece*: a whole file, or one range of it.
Every piece knows where in the window it is read, and how much of it is kept from one reading to the next
(`core.retention`).

*Fetching* goes through the window by virtual deadline. The axis is bytes read: an entry starts where all entries
before it end, K entries are read at once, so an offset in a file is K times as far away, and tf.data opens 2K
files ahead of the K that it reads and reads their first bytes, so heads are due earlier. `scan` is the first entry
not looked at yet; pieces between the low-water mark and `scan` are *staged*: fetched, or about to be, and staying.

*Following*: an entry is opened when its file is, and finished when that is closed or its range was read to the end
(an open alone is no consumption, for tf.data opens ahead). Readers may leave out some 3K entries and come back. What
is left behind by more than that was skipped. An open further off counts as a deviation; when three in a row agree
on a place in the plan, the readers were restarted and the window moves there. Trust follows: each deviation halves the
confidence, and with it how far ahead the plan is fetched; if a fifth of the last hundred opens were elsewhere, the
plan is not followed at all until fewer than a twentieth are.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from s3prefetchfs.core.extent import CHUNK_BYTES, chunk_extent, chunk_span, disk_bytes
from s3prefetchfs.core.plan import Epoch, Order, Plan, PlanProgress
from s3prefetchfs.core.residency import ABSENT, CachedObject
from s3prefetchfs.core.retention import Retention, reserve_bytes
from s3prefetchfs.core.version import PlanVersions, Version

SAMPLED_ENTRIES = 1000
"""Of an epoch, to estimate what all of it reads."""

APPEND_ENTRIES = 32
"""Entries appended to the window in one go, about half a millisecond."""

SLACK_ENTRIES = 16
"""Out of order beyond what the interleave explains, for readers that shuffle a little or read by several threads."""

PAGE_BYTES = 4096
"""In which the kernel asks for bytes."""

LONG_OPEN = 8
"""A file that stays open this many times longer than readers get ahead is not being read any more: it was forgotten."""

OPENED_AHEAD = 3
"""Live entries per interleaved reader: K being read and 2K opened ahead (tf.data's kCyclePrefetchFactor is 2.0)."""

RECENT_OPENS = 8
RESYNC_MATCHES = 3
"""The readers are found again by their last eight opens, when at least three of them agree on a place."""

HISTORY_OPENS = 100
DISTRUST_SHARE = 0.20
TRUST_SHARE = 0.05
JUDGED_OPENS = 20
"""Distrusted above a fifth of mismatches among the last hundred opens (or the first twenty), trusted again below a
twentieth."""

CONFIDENCE_MIN = 0.05
CONFIDENCE_STEP = 0.05
"""A deviation halves the confidence, an open in place adds a twentieth: twenty good ones restore it."""

IDLE_S = 600.0
"""A plan that nobody has read from for so long keeps nothing from others any more, and takes nothing from them: longer
than most evaluations between two epochs. Before it is first read, what it fetches counts as reading."""

RATE_INTERVAL_S = 0.5
RATE_WEIGHT = 0.3
PAUSE_S = 0.5
"""The rate is averaged over intervals of half a second in which nobody waits for us. In a longer time in which nothing
happens at all, such as an evaluation, the readers do not consume."""

FUTURE, OPEN, DONE = range(3)


@dataclass(slots=True, eq=False)
class PlannedObject:
    """A file that is in the window of a plan, whether it is in the cache or not.

    Attributes:
        found: its object in the cache; None if there is none. admitting: one was asked for.
        wholes, ranges: the pieces of all plans whose windows have it; ranges by their start.
        longest_bytes: no range is longer.
    """

    version: Version
    found: CachedObject | None = None
    admitting: bool = False
    wholes: list[Piece] = field(default_factory=list)
    ranges: list[Piece] = field(default_factory=list)
    longest_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        return self.version.size_bytes

    @property
    def planned(self) -> bool:
        """Whether the window of a plan has it."""
        return bool(self.wholes or self.ranges)

    def pieces(self) -> Iterator[Piece]:
        """All of them."""
        yield from self.wholes
        yield from self.ranges

    def overlapping(self, start: int, stop: int) -> list[Piece]:
        """The ranges that have bytes of `[start, stop)`."""
        first = bisect_right(self.ranges, start - self.longest_bytes, key=_start)
        last = bisect_left(self.ranges, stop, first, key=_start)
        return [piece for piece in self.ranges[first:last] if piece.stop > start]

    def add(self, piece: Piece) -> None:
        """A window has a new piece of the file."""
        if piece.whole:
            self.wholes.append(piece)
        else:
            insort(self.ranges, piece, key=_start)
            self.longest_bytes = max(self.longest_bytes, piece.stop - piece.start)

    def remove(self, piece: Piece) -> None:
        """A window no longer has this piece of the file."""
        (self.wholes if piece.whole else self.ranges).remove(piece)


@dataclass(slots=True, eq=False)
class Piece:
    """Chunks `[first, last)` of a file, as one plan reads them.

    Attributes:
        whole: the whole file. start, stop: the bytes, for ranges.
        uses: positions in the window where it is still to be read, and how many bytes are kept until then since the
            reading before.
        last_position: of its last entry in the window, read or not.
        kept_bytes: from the last reading to the next one. progress_bytes: of the present reading.
        rank: number of the last ranking, see `Follower.rank`.
    """

    follower: Follower
    file: PlannedObject
    whole: bool
    start: int
    stop: int
    first: int
    last: int
    uses: list[tuple[int, int]] = field(default_factory=list)
    last_position: int | None = None
    kept_bytes: int = 0
    progress_bytes: int = 0
    rank: int = 0

    @property
    def size_bytes(self) -> int:
        return disk_bytes(*chunk_extent(self.first, self.last, self.file.size_bytes))

    @property
    def staged(self) -> bool:
        """Whether its next reading is near enough to have been looked at; in any order, every one is."""
        return bool(self.uses) and (self.follower.any_order or self.uses[0][0] < self.follower.scan)

    @property
    def opened(self) -> bool:
        """Whether it is being read now."""
        return bool(self.uses) and self.follower.is_open(self.uses[0][0])

    def kept_last(self) -> int:
        """Where the chunks end that stay until its next reading."""
        if not self.uses:
            return self.first
        return self.last if self.staged else self.first + self._chunks_of(self.kept_bytes)

    def kept_after_last(self) -> int:
        """Where the chunks end that stay after the present reading."""
        return self.first + (self._chunks_of(self.uses[1][1]) if len(self.uses) > 1 else 0)

    def _chunks_of(self, kept_bytes: int) -> int:
        return self.last - self.first if kept_bytes >= self.size_bytes else kept_bytes // CHUNK_BYTES


def _start(piece: Piece) -> int:
    return piece.start


@dataclass(slots=True, eq=False)
class Wish:
    """What a plan wants fetched next: absent chunks of `piece` from `chunk` on.

    Args:
        key: its deadline, in bytes on the plan's axis. position: of the entry.
    """

    key: float
    position: int
    piece: Piece
    chunk: int


class Follower:
    """See the module's docstring.

    Args:
        plan: what is followed. versions: of its files.
        file_of: what all plans whose windows have a version share.
        capacity_bytes: its part of the cache.
        start: epoch and position to begin at.

    Attributes:
        low: position of the first entry that is not finished. scan: of the first that was not looked at for fetching.
        deviations, confidence, trusted: see the module's docstring.
        rate: bytes per second that the readers consume while they do not wait for us; None if not known.
        astray: opens in a row that were out of place.
        stall_s: how long readers will wait for what was last wished for, as the scheduler sees it.
    """

    def __init__(
        self,
        plan_id: int,
        plan: Plan,
        versions: PlanVersions,
        file_of: Callable[[Version], PlannedObject],
        capacity_bytes: int,
        start: tuple[int, int],
        now: float,
    ) -> None:
        self.plan_id = plan_id
        self.plan = plan
        self._versions = versions
        self._file_of = file_of
        self._epoch_bytes = self._bytes_of(plan.epochs[min(start[0], len(plan.epochs) - 1)])
        self._starts = list(accumulate((len(epoch.files) for epoch in plan.epochs), initial=0))
        self._keep_bytes = self._keepable(capacity_bytes)
        self._pieces: dict[tuple[int, int, int], Piece] = {}
        self.deviations = 0
        self.confidence = 1.0
        self.trusted = True
        self.last_read_s: float | None = None
        self._prepared_s = now  # declared, or last fetched for before it was read
        self.stall_s = 0.0
        self._recent: deque[tuple[int, int]] = deque(maxlen=RECENT_OPENS)
        self._history: deque[bool] = deque(maxlen=HISTORY_OPENS)
        self.astray = 0
        self.rate: float | None = None
        self._rate_bytes = 0
        self._rate_s = 0.0
        epoch = min(start[0], len(plan.epochs) - 1)
        self._begin(min(self._starts[epoch] + start[1], self._starts[epoch + 1]))

    def _begin(self, position: int) -> None:
        """Start the window at `position`."""
        self._base = position
        self.low = self.scan = self._end = position
        self._beyond = 0  # entries from `low` on that were begun
        self._window: list[Piece | None] = []
        self._states = bytearray()
        self._sums = array("q", [0])  # bytes of all entries before this one, from the window's start on
        self._read_bytes = 0  # of them, consumed
        self._active: list[tuple[float, int, int]] = []  # key, position, chunk: what to fetch, by deadline
        self.surplus: list[tuple[int, int, Piece]] = []  # (-next position, rank, piece): not kept
        self.retained: list[tuple[int, int, Piece]] = []  # the same of what is kept, or staged
        self._ranks = 0
        epoch_entries = max(len(epoch.files) for epoch in self.plan.epochs)
        self._retention = Retention(self._keep_bytes, epoch_entries)
        self._missed_shares: dict[int, float] = {}

    # ------------------------------------------------------------------------------------- the window

    @property
    def any_order(self) -> bool:
        return self.plan.order is Order.ANY

    @property
    def epoch(self) -> int:
        """The epoch of the low-water mark; the last one at the end."""
        return min(bisect_right(self._starts, self.low), len(self.plan.epochs)) - 1

    @property
    def finished(self) -> bool:
        return self.low >= self._starts[-1]

    def _goal(self) -> int:
        """The position up to which the window should reach: the end of the next epoch, or of this one in any order."""
        epochs = 1 if self.any_order else 2
        return self._starts[min(self.epoch + epochs, len(self.plan.epochs))]

    def grow(self) -> list[Piece]:
        """Append some entries to the window if it is too short; returns new pieces."""
        made: list[Piece] = []
        stop = min(self._goal(), self._end + APPEND_ENTRIES)
        while self._end < stop:
            epoch = bisect_right(self._starts, self._end) - 1
            made += self._append(epoch, self._end - self._starts[epoch])
            self._end += 1
            if self._end == self._starts[epoch + 1]:
                self._missed_shares[epoch] = self._retention.end_epoch(max(self._base, self._starts[epoch]))
        return made

    @property
    def growing(self) -> bool:
        return self._end < self._goal()

    def _append(self, epoch: int, index: int) -> list[Piece]:
        entries = self.plan.epochs[epoch]
        number = entries.files[index]
        offset, length = entries.ranges[2 * index : 2 * index + 2] if entries.ranges is not None else (0, 0)
        made: list[Piece] = []
        version = self._versions.of_files[number]
        piece = None
        if version is not None and offset < version.size_bytes:
            piece = self._pieces.get((number, offset, length))
            if piece is None:
                file = self._file_of(version)
                stop = min(offset + length, file.size_bytes) if length else file.size_bytes
                whole = offset == 0 and stop == file.size_bytes
                piece = Piece(self, file, whole, offset, stop, *chunk_span(offset, stop))
                self._pieces[number, offset, length] = piece
                file.add(piece)
                made.append(piece)
        size_bytes = kept_bytes = 0
        if piece is not None:
            size_bytes = piece.size_bytes
            if self.any_order:
                kept_bytes = 0
            elif piece.last_position is None:
                found = piece.file.found
                present = 0 if found is None else sum(map(bool, found.chunks[piece.first : piece.last])) * CHUNK_BYTES
                present = min(present, size_bytes)
                self._retention.append(self._end, size_bytes, None, present)
                kept_bytes = present
            else:
                kept_bytes = self._retention.append(self._end, size_bytes, piece.last_position)
            if not piece.uses:  # it was read in this window already, or lies in the cache: from now on it has a future
                piece.kept_bytes = kept_bytes
            piece.uses.append((self._end, kept_bytes))
            piece.last_position = self._end
            if len(piece.uses) == 1:
                self.rank(piece)
        self._window.append(piece)
        self._states.append(FUTURE if piece is not None else DONE)
        self._sums.append(self._sums[-1] + size_bytes)
        if piece is None and self._end == self.low:
            self._raise_low()
        return made

    def rank(self, piece: Piece) -> None:
        """Put a piece among those that can be given up, by its next use; that it was there before counts no more."""
        position = self._next_position(piece)
        self._ranks += 1
        piece.rank = self._ranks
        kept = piece.staged or (piece.kept_bytes > 0 and piece.uses)
        if kept:
            heapq.heappush(self.retained, (-position, piece.rank, piece))
        if not kept or (not piece.staged and piece.kept_bytes < piece.size_bytes):
            heapq.heappush(self.surplus, (-position, piece.rank, piece))
        for heap in (self.surplus, self.retained):
            if len(heap) > 4 * len(self._pieces) + 64:
                heap[:] = [item for item in heap if self.is_current(item)]
                heapq.heapify(heap)

    @staticmethod
    def is_current(item: tuple[int, int, Piece]) -> bool:
        """Whether an item of `surplus` or `retained` is of the last ranking of its piece."""
        return item[1] == item[2].rank

    def _next_position(self, piece: Piece) -> int:
        """Where it is read next; beyond the end of the plan if it is not."""
        return piece.uses[0][0] if piece.uses else self._starts[-1] + 1

    def leave(self) -> list[Piece]:
        """Give up the window; returns its pieces, which are read no more and have yet to be taken from their files."""
        pieces = list(self._pieces.values())
        for piece in pieces:
            piece.uses.clear()
        self._pieces = {}
        return pieces

    # ------------------------------------------------------------------------------------- fetching

    def wish(self) -> Wish | None:
        """What to fetch next; None if there is nothing, or nothing yet."""
        if not self.trusted or self.finished:
            return None
        while True:
            while self.scan < self._end and (not self._active or self._start_key(self.scan) <= self._active[0][0]):
                piece = self._piece(self.scan)
                if piece is not None and self._state(self.scan) != DONE:
                    heapq.heappush(self._active, (self._start_key(self.scan), self.scan, piece.first))
                self.scan += 1
                if piece is not None and piece.uses and piece.uses[0][0] == self.scan - 1:
                    self.rank(piece)
            if not self._active:
                return None
            key, position, chunk = self._active[0]
            piece = self._piece(position) if position >= self._base else None
            if piece is None or self._state(position) == DONE or piece.file.size_bytes == 0:
                heapq.heappop(self._active)
                continue
            found = piece.file.found
            if found is not None:
                if found.bypass:
                    heapq.heappop(self._active)
                    continue
                chunk = found.run_of(ABSENT, chunk, piece.last)[0]
                if chunk >= piece.last:
                    heapq.heappop(self._active)
                    continue
                due = self._key(position, chunk)
                if due > key:
                    heapq.heapreplace(self._active, (due, position, chunk))
                    continue
            return Wish(key, position, piece, chunk)

    def drop(self, wish: Wish) -> None:
        """The piece cannot be had: do not ask for it again."""
        if self._active and self._active[0][1] == wish.position:
            heapq.heappop(self._active)

    def _start_key(self, position: int) -> float:
        """When the first bytes of an entry are due."""
        ahead = OPENED_AHEAD * self.plan.interleave
        return float(self._sums[max(0, position - ahead - self._base)])

    def _key(self, position: int, chunk: int) -> float:
        """When a chunk of an entry is due."""
        piece = self._piece(position)
        assert piece is not None
        if chunk <= piece.first:
            return self._start_key(position)
        interleave = self.plan.interleave
        begins = self._sums[max(0, position - interleave + 1 - self._base)]
        return float(begins + (chunk - piece.first) * CHUNK_BYTES * min(interleave, self._end - self._base))

    def ahead_bytes(self, key: float) -> float:
        """How far a key is ahead of the readers, in bytes they will have read by then."""
        return key - self._read_bytes

    def distance_bytes(self, position: int) -> int:
        """How many bytes the readers will have read before they come to an entry; beyond the window, its length."""
        return self._sums[min(max(0, position - self._base), len(self._sums) - 1)] - self._read_bytes

    def _piece(self, position: int) -> Piece | None:
        return self._window[position - self._base]

    def _state(self, position: int) -> int:
        return self._states[position - self._base]

    # ------------------------------------------------------------------------------------- following

    def knows(self, version: Version) -> bool:
        return version in self._versions.numbers

    def opened(self, piece: Piece, now: float | None) -> bool:
        """A reader has begun with a piece; returns whether the plan has that here."""
        self.last_read_s = now
        if not piece.uses:
            return False
        position = piece.uses[0][0]
        if self._state(position) == OPEN:
            return True
        if not self.any_order and self._distance(position) >= self._reach:
            return False
        self._states[position - self._base] = OPEN
        self._beyond += position >= self.low
        return True

    def begun(self, pieces: list[Piece], start: int, new_run: bool, now: float) -> Piece | None:
        """Bytes of some pieces, from `start` on, are being read: the piece that a reader begins so, if there is one.

        The kernel asks for whole pages, around a fault of mmap for more, and not for what it has in memory: a range may
        be begun before its start, or in its middle. It reads on behind the end, too: a run that goes on begins a range
        only where the plan has that next.
        """
        coming = [piece for piece in pieces if piece.uses and not piece.opened]
        begins = [piece for piece in coming if start <= piece.start]
        if not new_run:
            begins = [piece for piece in begins if self._distance(piece.uses[0][0]) < self.plan.interleave]
        elif not begins and not any(piece.opened and piece.start <= start for piece in pieces):
            begins = coming
        first = min(begins, key=lambda piece: piece.uses[0][0], default=None)
        return first if first is not None and self.opened(first, now) else None

    def _distance(self, position: int) -> int:
        """How many entries before this one no reader has begun with."""
        return self._states.count(FUTURE, self.low - self._base, max(self.low, position) - self._base)

    @property
    def _reach(self) -> int:
        """How far from the first entry that is left readers may begin, in entries."""
        return OPENED_AHEAD * self.plan.interleave + SLACK_ENTRIES

    def judge(self, matched: bool, version: Version, offset: int) -> int | None:
        """Take in the beginning of a piece, in place or not; returns where the readers are instead, if known."""
        self._history.append(matched)
        self._recent.append((self._versions.numbers[version], offset))
        if matched:
            self.astray = 0
            self.confidence = min(1.0, self.confidence + CONFIDENCE_STEP)
        else:
            self.astray += 1
            self._deviate()
        if len(self._history) >= JUDGED_OPENS:
            share = self._history.count(False) / len(self._history)
            if self.trusted and share > DISTRUST_SHARE:
                self.trusted = False
            elif not self.trusted and share < TRUST_SHARE:
                self.trusted = True
        if self.astray >= RESYNC_MATCHES:
            return self._find_readers()
        return None

    def _deviate(self) -> None:
        self.deviations += 1
        self.confidence = max(CONFIDENCE_MIN, self.confidence / 2)

    def _find_readers(self) -> int | None:
        """The position of the last open, if others of the last opens agree on it and it is not where we are."""
        epochs = self.plan.epochs
        current = self.epoch
        others = {0, max(current - 1, 0), current, min(current + 1, len(epochs) - 1)}
        for epoch in sorted(others, key=lambda epoch: abs(epoch - current)):
            entries = epochs[epoch]
            places = sorted(self._places(entries.files, entries.ranges, set(self._recent)))
            best = 0, 0
            for place in self._places(entries.files, entries.ranges, {self._recent[-1]}):
                matches = bisect_right(places, place) - bisect_right(places, place - self._reach)
                best = max(best, (matches, self._starts[epoch] + place))
            if best[0] >= RESYNC_MATCHES:
                return None if self.low <= best[1] < self.low + self._reach else best[1]
        return None

    @staticmethod
    def _places(files: memoryview, ranges: memoryview | None, wanted: set[tuple[int, int]]) -> list[int]:
        """Where in an epoch the wanted (file number, offset) are read, to a page."""
        content = files.tobytes()
        places = []
        for number, offset in wanted:
            pattern = number.to_bytes(4, "little")
            at = content.find(pattern)
            while at >= 0:
                if at % 4 == 0 and (ranges is None or ranges[at // 2] // PAGE_BYTES == offset // PAGE_BYTES):
                    places.append(at // 4)
                at = content.find(pattern, at + 1)
        return places

    def jump(self, position: int) -> list[Piece]:
        """The readers are at `position` now; returns as `leave`."""
        pieces = self.leave()
        self._begin(position)
        self.astray = 0
        self._history.clear()
        self.trusted = True
        return pieces

    def read(self, piece: Piece, progress_bytes: int) -> None:
        """The reader of an open piece has come so far in it."""
        gained_bytes = min(progress_bytes, piece.size_bytes) - piece.progress_bytes
        if gained_bytes > 0 and piece.opened:
            piece.progress_bytes += gained_bytes
            self._read_bytes += gained_bytes
            self._rate_bytes += gained_bytes

    def is_open(self, position: int) -> bool:
        """Whether the entry is being read."""
        return self._state(position) == OPEN

    def passed(self, seconds: float, waiting: bool) -> None:
        """Time went by, in which readers waited for us or did not."""
        if waiting or self.last_read_s is None:
            return
        self._rate_s += min(seconds, PAUSE_S)
        if self._rate_s >= RATE_INTERVAL_S and self._rate_bytes:
            rate = self._rate_bytes / self._rate_s
            self.rate = rate if self.rate is None else (1 - RATE_WEIGHT) * self.rate + RATE_WEIGHT * rate
            self._rate_bytes, self._rate_s = 0, 0.0

    def finish(self, piece: Piece) -> bool:
        """The entry of the piece that is open was read; returns whether there was one."""
        if not piece.opened:
            return False
        self.read(piece, piece.size_bytes)
        self._end_use(piece)
        self._raise_low()
        return True

    def _end_use(self, piece: Piece) -> None:
        """The piece's next use is over, read or skipped."""
        position, _ = piece.uses.pop(0)
        self._beyond += self._state(position) == FUTURE and position >= self.low
        self._states[position - self._base] = DONE
        self._read_bytes += piece.size_bytes - piece.progress_bytes
        piece.progress_bytes = 0
        piece.kept_bytes = piece.uses[0][1] if piece.uses else 0
        self.rank(piece)

    def _raise_low(self) -> None:
        """Move the low-water mark over what is finished, and over what was left behind."""
        while self.low < self._end:
            index = self.low - self._base
            piece = self._window[index]
            if self._states[index] != DONE:
                assert piece is not None
                patience = LONG_OPEN if self._states[index] == OPEN and piece.whole else 1
                if self.any_order or self._beyond <= patience * self._reach:
                    break
                if self._states[index] == FUTURE:
                    self._deviate()
                self._end_use(piece)
            if piece is not None:
                self._beyond -= 1
            self.low += 1
        self.scan = max(self.scan, self.low)
        gone = self.low - self._base
        if gone > 64 and 2 * gone > len(self._window):
            self._retention.forget_before(self.low)
            kept_sums = self._sums[gone]
            del self._window[:gone], self._states[:gone], self._sums[:gone]
            # The axis starts anew with the window: everything on it moves by the same amount.
            self._sums = array("q", (total - kept_sums for total in self._sums))
            self._active = [(key - kept_sums, position, chunk) for key, position, chunk in self._active]
            self._read_bytes -= kept_sums
            self._base = self.low

    def begin_next_epoch(self) -> None:
        """In any order: files of this epoch are read again, so it is over; what is left was skipped."""
        stop = self._starts[self.epoch + 1]
        for position in range(self.low, min(stop, self._end)):
            piece = self._piece(position)
            if piece is not None and self._state(position) != DONE:
                self._deviate()
                self._end_use(piece)
        self._raise_low()

    def idle(self, now: float) -> bool:
        """Whether nobody has read from the plan for long."""
        return now - (self._prepared_s if self.last_read_s is None else self.last_read_s) > IDLE_S

    def fetched(self, now: float) -> None:
        """Something was fetched for the plan: it is being made ready for its readers."""
        if not self.idle(now):
            self._prepared_s = now

    def progress(self) -> PlanProgress:
        """The figures of this moment."""
        epoch = self.epoch
        if self.finished:
            state = "finished"
        elif not self.trusted:
            state = "distrusted"
        else:
            state = "waiting" if self.last_read_s is None else "running"
        return PlanProgress(
            name=self.plan.name,
            state=state,
            order=self.plan.order.value,
            interleave=self.plan.interleave,
            epochs=len(self.plan.epochs),
            epoch=epoch,
            entries=self._starts[epoch + 1] - self._starts[epoch],
            position=self.low - self._starts[epoch],
            missing_files=self._versions.missing_files,
            bytes_ahead=self._bytes_ahead(),
            consumed_bytes_per_s=None if self.rate is None else round(self.rate),
            deviations=self.deviations,
            confidence=round(self.confidence, 3),
            predicted_stall_s=round(self.stall_s, 3),
        )

    def _bytes_ahead(self) -> int:
        """What is there or on its way beyond the readers, up to the first gap."""
        gaps = (item[1:] for item in self._active if item[1] >= self.low and self._state(item[1]) != DONE)
        gap, chunk = min(gaps, default=(self.scan, 0))
        ahead_bytes = self._sums[gap - self._base] - self._read_bytes
        # What readers have had of the entry with the gap, and of those after it, was not before it.
        for position in range(gap, min(self._end, self.low + LONG_OPEN * self._reach)):
            piece, state = self._piece(position), self._state(position)
            if piece is not None and state != FUTURE:
                ahead_bytes += piece.size_bytes if state == DONE else piece.progress_bytes
        piece = self._piece(gap) if gap < self._end else None
        if piece is not None:
            found = piece.file.found
            reached = chunk if found is None else found.run_of(ABSENT, chunk, piece.last)[0]
            progress_bytes = piece.progress_bytes if self._state(gap) == OPEN else 0
            ahead_bytes += max(0, (reached - piece.first) * CHUNK_BYTES - progress_bytes)
        return max(0, ahead_bytes)

    def give_up(self, piece: Piece, chunk: int) -> None:
        """The bytes of the piece from `chunk` on are needed elsewhere: fetch them again for its next reading."""
        piece.kept_bytes = min(piece.kept_bytes, (chunk - piece.first) * CHUNK_BYTES)
        if piece.staged:
            position = piece.uses[0][0]
            heapq.heappush(self._active, (self._key(position, chunk), position, chunk))
        self.rank(piece)

    def share(self, capacity_bytes: int) -> None:
        """From now on the plan's part of the cache is this."""
        self._keep_bytes = self._retention.capacity_bytes = self._keepable(capacity_bytes)

    def _keepable(self, capacity_bytes: int) -> int:
        return capacity_bytes - reserve_bytes(capacity_bytes, self._epoch_bytes)

    def _bytes_of(self, epoch: Epoch) -> int:
        """About what an epoch reads."""
        entries = len(epoch.files)
        step = max(1, entries // SAMPLED_ENTRIES)
        sampled = range(0, entries, step)
        total_bytes = 0
        for entry in sampled:
            version = self._versions.of_files[epoch.files[entry]]
            length = epoch.ranges[2 * entry + 1] if epoch.ranges is not None else 0
            if version is not None:
                total_bytes += min(length or version.size_bytes, version.size_bytes)
        return total_bytes * entries // max(1, len(sampled))

    def missed_share(self) -> float:
        """What of the present epoch's bytes has to be fetched, as far as is known."""
        return self._missed_shares.get(self.epoch, 1.0)

    def check(self) -> None:
        """Assert the invariants."""
        assert self._base <= self.low <= self.scan <= self._end
        assert len(self._window) == len(self._states) == len(self._sums) - 1 == self._end - self._base
        assert self._beyond == sum(
            piece is not None and self._state(position) != FUTURE
            for position, piece in enumerate(self._window, self._base)
            if position >= self.low
        )
        for piece in self._pieces.values():
            positions = [position for position, _ in piece.uses]
            assert positions == sorted(positions)
            assert all(self._state(position) != DONE and self._piece(position) is piece for position in positions)
            assert piece in piece.file.pieces()
