"""What goes when something new must come."""

from __future__ import annotations

from s3prefetchfs.core import events as ev
from s3prefetchfs.core.eviction import RELEASE_MIN_BYTES, SQUEEZE_S, Claim, Evictor, Room
from s3prefetchfs.core.extent import CHUNK_BYTES
from s3prefetchfs.core.foresight import Foresight
from s3prefetchfs.core.residency import CachedObject, Residency
from s3prefetchfs.core.version import Version

MIB = 1024 * 1024
CAPACITY_BYTES = 64 * MIB
RESERVE_BYTES = CAPACITY_BYTES // 8


class Cache:
    """An evictor, its disk, and what the test protects."""

    def __init__(self, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self.disk = Residency()
        self.protected: list[tuple[int, int]] = []
        foresight = Foresight(self.disk, capacity_bytes)
        self.evictor = Evictor(self.disk, capacity_bytes, foresight, self.opened, lambda *_: self.protected)
        self.out: list[ev.Instruction] = []

    def add(self, object_id: int, size_bytes: int, *, handle: bool = False) -> CachedObject:
        """An object that is all there, open or idle."""
        found = self.disk.add(object_id, Version(str(object_id), "", size_bytes), None, bypass=False)
        self.disk.reserve(found, 0, len(found.chunks))
        self.disk.land(found, 0, len(found.chunks))
        if handle:
            found.handles.add(object_id)
        self.disk.settle(found)
        return found

    def opened(self) -> list[CachedObject]:
        return [found for found in self.disk.objects.values() if found.handles]

    def room_for(self, need_bytes: int, now: float = 0.0) -> Room:
        return self.evictor.room_for(need_bytes, now, Claim.READER, False, self.out)


def test_where_there_is_room_nothing_goes() -> None:
    """As long as the reserve stays free too."""
    cache = Cache()
    cache.add(1, CAPACITY_BYTES - RESERVE_BYTES - MIB)
    assert cache.room_for(MIB) is Room.NOW
    assert cache.out == []


def test_space_is_made_before_it_is_needed() -> None:
    """When the reserve is touched there is still room now, and the oldest idle object goes."""
    cache = Cache()
    cache.add(1, 20 * MIB)
    cache.add(2, 36 * MIB)
    assert cache.room_for(MIB) is Room.NOW
    assert cache.out == [ev.Evict(1)]
    assert cache.room_for(MIB) is Room.NOW
    assert cache.out == [ev.Evict(1)]


def test_space_that_is_being_freed_is_there_soon() -> None:
    """Not before the disk has it back."""
    cache = Cache()
    found = cache.add(1, 62 * MIB)
    assert cache.room_for(4 * MIB) is Room.SOON
    assert cache.room_for(4 * MIB) is Room.SOON
    assert cache.out == [ev.Evict(1)]
    cache.disk.end_evict(found)
    assert cache.room_for(4 * MIB) is Room.NOW


def test_the_least_recently_used_go_first_and_no_more_than_needed() -> None:
    """In order, until the need and the reserve are covered."""
    cache = Cache()
    for object_id in range(1, 7):
        cache.add(object_id, 10 * MIB)
    cache.add(7, 4 * MIB)
    cache.room_for(4 * MIB)
    assert cache.out == [ev.Evict(1), ev.Evict(2)]


def test_what_is_open_is_released_where_no_reader_is_near() -> None:
    """From the start of the object, in large pieces; the protected chunks stay."""
    cache = Cache()
    cache.add(1, CAPACITY_BYTES, handle=True)
    chunks = CAPACITY_BYTES // CHUNK_BYTES
    cache.protected = [(chunks - 16, chunks)]
    assert cache.room_for(MIB) is Room.SOON
    assert cache.out == [ev.Release(1, 0, RELEASE_MIN_BYTES // CHUNK_BYTES)]
    cache.out.clear()
    assert cache.room_for(CAPACITY_BYTES) is Room.NONE
    assert cache.out == [ev.Release(1, RELEASE_MIN_BYTES // CHUNK_BYTES, chunks - 16)]


def test_nothing_is_released_while_idle_objects_suffice() -> None:
    """A whole file that nobody has open goes before a piece of one that is being read."""
    cache = Cache()
    cache.add(1, 30 * MIB, handle=True)
    cache.add(2, 34 * MIB)
    assert cache.room_for(4 * MIB) is Room.SOON
    assert cache.out == [ev.Evict(2)]


def test_without_anything_to_give_up_there_is_no_room() -> None:
    """All of it is open and being read."""
    cache = Cache()
    cache.add(1, CAPACITY_BYTES, handle=True)
    cache.protected = [(0, 1 << 30)]
    assert cache.room_for(1) is Room.NONE
    assert cache.out == []


def test_a_full_disk_is_believed_for_a_while() -> None:
    """The limit falls to what fitted, never above the capacity, and comes back."""
    cache = Cache()
    cache.add(1, 10 * MIB, handle=True)
    cache.protected = [(0, 1 << 30)]
    cache.evictor.disk_is_full(10 * MIB, now=5.0)
    assert cache.evictor.limit_bytes(5.0) == 10 * MIB
    assert cache.room_for(1, now=5.0) is Room.NONE
    assert cache.room_for(MIB, now=5.0 + SQUEEZE_S) is Room.NOW
    cache.evictor.disk_is_full(2 * CAPACITY_BYTES, now=100.0)
    assert cache.evictor.limit_bytes(100.0) == CAPACITY_BYTES


def test_of_a_full_disk_no_more_is_kept_free_than_of_a_cache_of_its_size() -> None:
    """A disk that is much smaller than the capacity is not emptied ahead of need."""
    cache = Cache(640 * MIB)
    for object_id in range(5):
        cache.add(object_id, 8 * MIB)
    cache.evictor.disk_is_full(40 * MIB, now=5.0)
    assert cache.room_for(0, now=5.0) is Room.NOW
    assert [evict.object_id for evict in cache.out if isinstance(evict, ev.Evict)] == [0]


def test_only_evictions_that_free_bytes_are_counted() -> None:
    """An object without bytes is forgotten, not evicted."""
    cache = Cache()
    cache.evictor.evict(cache.disk.add(1, Version("1", "", MIB), None, bypass=False), cache.out)
    assert cache.evictor.evictions == 0
    cache.evictor.evict(cache.add(2, MIB), cache.out)
    assert cache.evictor.evictions == 1
