"""Making room on the cache disk.

Two things can be given up: a whole idle object, least recently used first, and the *consumed* chunks of an open
object, those that no reader is near. The second is what lets an object larger than the cache be read at all. An
unlink takes time, so some space is kept free ahead of need; and space counts as free only when the disk has it back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum

from s3prefetchfs.core.events import Evict, Instruction, Release
from s3prefetchfs.core.residency import RESIDENT, UNVERIFIED, CachedObject, Residency

FREE_RESERVE_MAX_BYTES = 64 * 1024 * 1024
FREE_RESERVE_SHARE = 8
"""Space kept free ahead of need: an eighth of a small cache, 64 MiB (an eighth of a second at 500 MB/s) of a
large one."""

SQUEEZE_S = 30.0
"""After the disk was full, the capacity stays at what fitted for this long; then it is tried again."""

RELEASE_MIN_BYTES = 8 * 1024 * 1024
"""Consumed chunks are released in pieces of at least this, where there are as many: one system call a piece."""


class Room(Enum):
    """Whether there is room: now, soon (evictions are under way), or not unless somebody closes a file."""

    NOW = "now"
    SOON = "soon"
    NONE = "none"


class Evictor:
    """Decides what goes when something new must come.

    Args:
        disk: what is there.
        capacity_bytes: what may be there, in flight included.
        protected: the chunk ranges of an open object that are being read or about to be.
    """

    def __init__(
        self,
        disk: Residency,
        capacity_bytes: int,
        protected: Callable[[CachedObject], Iterable[tuple[int, int]]],
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.evictions = 0
        self._disk = disk
        self._protected = protected
        self._squeezed_bytes = capacity_bytes
        self._squeezed_until_s = float("-inf")
        self._reserve_bytes = min(FREE_RESERVE_MAX_BYTES, capacity_bytes // FREE_RESERVE_SHARE)

    def room_for(self, need_bytes: int, now: float, out: list[Instruction]) -> Room:
        """Is there room for `need_bytes` more? Starts evictions where there is not, or soon will not be."""
        limit_bytes = self.limit_bytes(now)
        staying_bytes = self._disk.used_bytes - self._disk.freeing_bytes
        excess_bytes = staying_bytes + need_bytes - limit_bytes
        if excess_bytes + self._reserve_bytes > 0:
            self._evict_idle(excess_bytes + self._reserve_bytes, out)
            staying_bytes = self._disk.used_bytes - self._disk.freeing_bytes
            excess_bytes = staying_bytes + need_bytes - limit_bytes
        if self._disk.used_bytes + need_bytes <= limit_bytes:
            return Room.NOW
        if excess_bytes > 0:
            excess_bytes -= self._release_consumed(excess_bytes, out)
        return Room.SOON if excess_bytes <= 0 else Room.NONE

    def evict(self, found: CachedObject, out: list[Instruction]) -> None:
        """Give up one idle object."""
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

    def _evict_idle(self, goal_bytes: int, out: list[Instruction]) -> None:
        while goal_bytes > 0 and self._disk.idle:
            found = next(iter(self._disk.idle.values()))
            goal_bytes -= found.occupied_bytes
            self.evict(found, out)

    def _release_consumed(self, goal_bytes: int, out: list[Instruction]) -> int:
        """Release consumed chunks of open objects; returns the bytes that will come of it."""
        released_bytes = 0
        for found in self._disk.objects.values():
            if released_bytes >= goal_bytes:
                break
            if not found.handles or not found.occupied_bytes or found.passed_through:
                continue
            for first, last in self._consumed_runs(found):
                piece = max(1, max(goal_bytes - released_bytes, RELEASE_MIN_BYTES) // found.disk_bytes(0, 1))
                last = min(last, first + piece)
                self._disk.begin_release(found, first, last)
                self._disk.settle(found)
                released_bytes += found.disk_bytes(first, last)
                out.append(Release(found.object_id, first, last))
                if released_bytes >= goal_bytes:
                    break
        return released_bytes

    def _consumed_runs(self, found: CachedObject) -> list[tuple[int, int]]:
        """The runs of resident chunks that nobody is near, from the start of the object."""
        chunks = found.chunks.replace(bytes((UNVERIFIED,)), bytes((RESIDENT,)))
        for first, last in self._protected(found):
            first, last = max(first, 0), min(last, len(chunks))
            chunks[first:last] = bytes(max(0, last - first))
        runs: list[tuple[int, int]] = []
        at = 0
        while (first := chunks.find(RESIDENT, at)) >= 0:
            rest = chunks[first:]
            at = len(chunks) - len(rest.lstrip(bytes((RESIDENT,))))
            runs.append((first, at))
        return runs
