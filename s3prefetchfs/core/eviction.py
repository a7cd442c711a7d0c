"""Making room on the cache disk.

What goes, in this order: pieces of plans that nobody has read from for long, furthest first; idle objects that no plan
speaks of, least recently used first; pieces that plans do not keep until they are read again, furthest first; the
*consumed* chunks of open objects, those that no reader is near, which is what lets an object larger than the cache be
read at all. Only who is late may also take what plans keep, furthest first, and that is never read before the bytes it
makes room for ("do no harm", Cao et al., SIGMETRICS 1995). An unlink takes time, so some space is kept free ahead of
need; and space counts as free only when the disk has it back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum, IntEnum

from s3prefetchfs.core.events import Evict, Instruction, Release
from s3prefetchfs.core.extent import CHUNK_BYTES
from s3prefetchfs.core.follower import Piece
from s3prefetchfs.core.foresight import Foresight
from s3prefetchfs.core.residency import RESIDENT, UNVERIFIED, CachedObject, Residency

FREE_RESERVE_MAX_BYTES = 64 * 1024 * 1024
FREE_RESERVE_SHARE = 8
"""Space kept free ahead of need: an eighth of a small cache, 64 MiB (an eighth of a second at 500 MB/s) of a
large one."""

SQUEEZE_S = 30.0
"""After the disk was full, the capacity stays at what fitted for this long; then it is tried again."""

RELEASE_MIN_BYTES = 8 * 1024 * 1024
"""Consumed chunks are released in pieces of at least this, where there are as many: one system call a piece."""

GIVE_UP_MIN_BYTES = 1024 * 1024
"""The same of what is kept: it has to be fetched again."""


class Room(Enum):
    """Whether there is room: now, soon (evictions are under way), or not unless somebody closes a file."""

    NOW = "now"
    SOON = "soon"
    NONE = "none"


class Claim(IntEnum):
    """Who wants room, and so what may go for it.

    SPARE is a plan that nobody reads: it takes what is free. AHEAD is a plan or a read-ahead that has time. LATE is a
    plan whose readers would have to wait. READER is somebody who waits now.
    """

    SPARE = -1
    AHEAD = 0
    LATE = 1
    READER = 2


class Evictor:
    """Decides what goes when something new must come.

    Args:
        disk: what is there.
        capacity_bytes: what may be there, in flight included.
        foresight: what plans say.
        opened: the objects that are open.
        protected: of an object and a range of its chunks, those that are being read or about to be, or that plans want
            to stay, all but one piece of a plan.
    """

    def __init__(
        self,
        disk: Residency,
        capacity_bytes: int,
        foresight: Foresight,
        opened: Callable[[], Iterable[CachedObject]],
        protected: Callable[[CachedObject, tuple[int, int], Piece | None], Iterable[tuple[int, int]]],
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.evictions = 0
        self._disk = disk
        self._foresight = foresight
        self._opened = opened
        self._protected = protected
        self._squeezed_bytes = capacity_bytes
        self._squeezed_until_s = float("-inf")

    def room_for(self, need_bytes: int, now: float, claim: Claim, planned: bool, out: list[Instruction]) -> Room:
        """Is there room for `need_bytes` more? Starts evictions where there is not, or soon will not be.

        Args:
            claim: of whoever asks. planned: whether it is for what a plan speaks of.
        """
        limit_bytes = self.limit_bytes(now)
        reserve_bytes = min(FREE_RESERVE_MAX_BYTES, limit_bytes // FREE_RESERVE_SHARE)

        def excess_bytes() -> int:
            return self._disk.used_bytes - self._disk.freeing_bytes + need_bytes - limit_bytes

        if claim is Claim.SPARE:
            return Room.NOW if excess_bytes() + reserve_bytes <= 0 else Room.NONE
        if excess_bytes() + reserve_bytes > 0:
            self._give_up(self._foresight.of_idle_plans(), excess_bytes() + reserve_bytes, out)
            keep_bytes = self._foresight.unplanned_bytes if planned else 0
            self._evict_idle(excess_bytes() + reserve_bytes, keep_bytes, out)
            self._release_surplus(lambda: excess_bytes() + reserve_bytes, out)
        if self._disk.used_bytes + need_bytes <= limit_bytes:
            return Room.NOW
        if excess_bytes() > 0:
            self._release_consumed(excess_bytes(), out)
        if excess_bytes() > 0 and claim > Claim.AHEAD and (planned or self._has_share(need_bytes)):
            self._give_up(self._foresight.retained(claim is Claim.READER), excess_bytes(), out)
        return Room.SOON if excess_bytes() <= 0 else Room.NONE

    def evict(self, found: CachedObject, out: list[Instruction]) -> None:
        """Give up one idle object."""
        self._foresight.object_gone(found)
        self._disk.begin_evict(found)
        self.evictions += found.occupied_bytes > 0
        out.append(Evict(found.object_id))

    def disk_is_full(self, fits_bytes: int, now: float) -> None:
        """The disk had no room although we thought it had: believe it for a while."""
        self._squeezed_bytes = max(0, min(fits_bytes, self.capacity_bytes))
        self._squeezed_until_s = now + SQUEEZE_S

    def limit_bytes(self, now: float) -> int:
        """The capacity, or what the disk is known to hold while it is full."""
        return self._squeezed_bytes if now < self._squeezed_until_s else self.capacity_bytes

    def _evict_idle(self, goal_bytes: int, keep_bytes: int, out: list[Instruction]) -> None:
        unplanned_bytes = self._disk.unplanned_bytes
        while goal_bytes > 0 and self._disk.idle and unplanned_bytes > keep_bytes:
            found = next(iter(self._disk.idle.values()))
            goal_bytes -= found.occupied_bytes
            unplanned_bytes -= found.occupied_bytes
            self.evict(found, out)

    def _has_share(self, need_bytes: int) -> bool:
        """Whether what no plan speaks of takes less than it is entitled to."""
        return self._disk.unplanned_bytes + need_bytes <= self._foresight.unplanned_bytes

    def _release_surplus(self, goal_bytes: Callable[[], int], out: list[Instruction]) -> None:
        """Release what plans do not keep, until enough will come of it."""
        if goal_bytes() <= 0:
            return
        for piece in self._foresight.surplus():
            found = piece.file.found
            assert found is not None
            runs = self._consumed_runs(found, piece.first, piece.last)
            if runs and found.idle and sum(found.disk_bytes(*run) for run in runs) == found.occupied_bytes:
                self.evict(found, out)
            else:
                for first, last in runs:
                    self._release(found, first, last, out)
            if goal_bytes() <= 0:
                return

    def _give_up(self, kept: Iterable[Piece], goal_bytes: int, out: list[Instruction]) -> None:
        """Release what plans keep, from the end of each piece, until enough will come of it."""
        if goal_bytes <= 0:
            return
        for piece in kept:
            found = piece.file.found
            assert found is not None
            for first, last in reversed(self._consumed_runs(found, piece.first, piece.last, piece)):
                first = max(first, last - max(GIVE_UP_MIN_BYTES, goal_bytes) // CHUNK_BYTES)
                goal_bytes -= found.disk_bytes(first, last)
                self._release(found, first, last, out)
                piece.follower.give_up(piece, first)
                if goal_bytes <= 0:
                    return

    def _release_consumed(self, goal_bytes: int, out: list[Instruction]) -> None:
        """Release consumed chunks of open objects."""
        for found in self._opened():
            if goal_bytes <= 0:
                return
            if not found.occupied_bytes:
                continue
            for first, last in self._consumed_runs(found, 0, len(found.chunks)):
                piece = max(1, max(goal_bytes, RELEASE_MIN_BYTES) // found.disk_bytes(0, 1))
                last = min(last, first + piece)
                self._release(found, first, last, out)
                goal_bytes -= found.disk_bytes(first, last)
                if goal_bytes <= 0:
                    return

    def _release(self, found: CachedObject, first: int, last: int, out: list[Instruction]) -> None:
        self._disk.begin_release(found, first, last)
        self._disk.settle(found)
        out.append(Release(found.object_id, first, last))

    def _consumed_runs(
        self, found: CachedObject, begin: int, end: int, giving_up: Piece | None = None
    ) -> list[tuple[int, int]]:
        """The runs of resident chunks in `[begin, end)` that nobody is near and no plan wants to stay."""
        if found.passed_through:
            return []
        chunks = found.chunks[begin:end].replace(bytes((UNVERIFIED,)), bytes((RESIDENT,)))
        for first, last in self._protected(found, (begin, end), giving_up):
            first, last = max(first, begin) - begin, min(last, end) - begin
            if first < last:
                chunks[first:last] = bytes(last - first)
        runs: list[tuple[int, int]] = []
        at = 0
        while (first := chunks.find(RESIDENT, at)) >= 0:
            at = len(chunks) - len(chunks[first:].lstrip(bytes((RESIDENT,))))
            runs.append((begin + first, begin + at))
        return runs
