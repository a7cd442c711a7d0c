"""What is on the cache disk: the state of every chunk of every object, and the bytes they occupy.

A chunk is in one state:

    ABSENT -> IN_FLIGHT -> RESIDENT -> RELEASING -> ABSENT      (and IN_FLIGHT -> ABSENT when a fetch gives up)
    UNVERIFIED -> VERIFYING -> RESIDENT or ABSENT               (left by a previous session)

Everything but ABSENT counts against the capacity, from the moment it is reserved until the disk has it back. An
object is *idle* when nobody has it open, reads it or fetches it; only idle objects are evicted, those that no plan
speaks of least recently used first. The chunks of any object can be released one by one, where no reader is near.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from s3prefetchfs.core.extent import CHUNK_BYTES, chunk_count, chunk_extent, disk_bytes
from s3prefetchfs.core.version import Version
from s3prefetchfs.errors import FailureKind

ABSENT, IN_FLIGHT, RESIDENT, UNVERIFIED, VERIFYING, RELEASING = range(6)


@dataclass(slots=True, eq=False)
class CachedObject:
    """One version of one object.

    Attributes:
        chunks: the state of each chunk, one byte each, so that C code searches and counts them.
        resident_chunks: how many are RESIDENT.
        occupied_bytes: what its chunks occupy or have reserved on disk.
        bypass: the cache has no usable file for it: absent chunks are read through memory, by each reader for itself.
        handles, reads: ids of the open handles, and of the reads not finished.
        whole_wanted: what is UNVERIFIED is to be verified, piece by piece, whether or not anybody reads it.
        passed_through: the kernel may be reading its file anywhere: no chunk is released while it is open.
        fetches: how many fetches are on their way, those waiting to be tried again included.
        failure: why its absent chunks cannot be had, and until when (seconds) that is believed.
        planned: a plan says when it is read next.
    """

    object_id: int
    version: Version
    chunks: bytearray
    bypass: bool = False
    resident_chunks: int = 0
    occupied_bytes: int = 0
    evicting: bool = False
    handles: set[int] = field(default_factory=set)
    reads: set[int] = field(default_factory=set)
    whole_wanted: bool = False
    passed_through: bool = False
    fetches: int = 0
    failure: tuple[FailureKind, float] | None = None
    planned: bool = False

    @property
    def size_bytes(self) -> int:
        return self.version.size_bytes

    @property
    def idle(self) -> bool:
        return not (self.handles or self.reads or self.fetches or self.evicting) and self.settled

    @property
    def settled(self) -> bool:
        """Whether no verification or release is under way."""
        return VERIFYING not in self.chunks and RELEASING not in self.chunks

    @property
    def complete(self) -> bool:
        """Whether every chunk is resident and trusted."""
        return self.resident_chunks == len(self.chunks)

    def run_of(self, state: int, first: int, last: int) -> tuple[int, int]:
        """The first run of chunks in `state` within `[first, last)`; empty (last, last) if there is none."""
        begin = self.chunks.find(state, first, last)
        if begin < 0:
            return last, last
        rest = self.chunks[begin:last]
        return begin, last - len(rest.lstrip(bytes((state,))))

    def bytes_in(self, state: int) -> int:
        """What all chunks in `state` occupy when present."""
        count = self.chunks.count(state)
        if not count or self.chunks[-1] != state:
            return count * CHUNK_BYTES
        return (count - 1) * CHUNK_BYTES + self.disk_bytes(len(self.chunks) - 1, len(self.chunks))

    def disk_bytes(self, first: int, last: int) -> int:
        """What the chunks `[first, last)` occupy when present."""
        return disk_bytes(*chunk_extent(first, last, self.size_bytes)) if first < last else 0


class Residency:
    """All objects, and the space they take.

    Invariants (see `check`): `used_bytes` is the sum of what every non-absent chunk occupies; `freeing_bytes` is
    the part of it that is being given back; `planned_bytes` the part of it that is of planned objects; `idle` holds
    exactly the idle objects that occupy any and are not planned, least recently used first; `by_version` holds those
    that are not on their way out.
    """

    def __init__(self) -> None:
        self.objects: dict[int, CachedObject] = {}
        self.by_version: dict[Version, CachedObject] = {}
        self.idle: OrderedDict[int, CachedObject] = OrderedDict()
        self.used_bytes = 0
        self.freeing_bytes = 0
        self.planned_bytes = 0

    @property
    def unplanned_bytes(self) -> int:
        """The part of `used_bytes` that no plan speaks of."""
        return self.used_bytes - self.planned_bytes

    def add(self, object_id: int, version: Version, resident: bytes | None, bypass: bool) -> CachedObject:
        """A new object, or one that a previous session left."""
        if resident is None:
            chunks = bytearray(chunk_count(version.size_bytes))
        else:
            chunks = bytearray(resident.translate(_FROM_INDEX))
        found = CachedObject(object_id, version, chunks, bypass)
        self._occupy(found, found.bytes_in(UNVERIFIED))
        self.objects[object_id] = self.by_version[version] = found
        self.settle(found)
        return found

    def settle(self, found: CachedObject) -> None:
        """Put the object where it belongs after a change; becoming idle makes it the most recently used."""
        if found.occupied_bytes and not found.planned and found.idle:
            self.idle.setdefault(found.object_id, found)
        else:
            self.idle.pop(found.object_id, None)

    def set_planned(self, found: CachedObject, planned: bool) -> None:
        """A plan speaks of the object now, or none does any more; it then counts as just used."""
        if planned != found.planned:
            found.planned = planned
            self.planned_bytes += found.occupied_bytes if planned else -found.occupied_bytes
            self.settle(found)

    def reserve(self, found: CachedObject, first: int, last: int) -> None:
        """ABSENT -> IN_FLIGHT."""
        self._mark(found, first, last, IN_FLIGHT)
        self._occupy(found, found.disk_bytes(first, last))

    def land(self, found: CachedObject, first: int, last: int) -> None:
        """IN_FLIGHT -> RESIDENT."""
        self._mark(found, first, last, RESIDENT)

    def give_up(self, found: CachedObject, first: int, last: int) -> None:
        """Any state -> ABSENT: a fetch gave up, or bytes were lost."""
        self._mark(found, first, last, ABSENT)
        self._occupy(found, -found.disk_bytes(first, last))

    def begin_verify(self, found: CachedObject, first: int, last: int) -> None:
        """UNVERIFIED -> VERIFYING."""
        self._mark(found, first, last, VERIFYING)

    def end_verify(self, found: CachedObject, first: int, last: int, bad: tuple[int, ...]) -> None:
        """VERIFYING -> RESIDENT, or ABSENT where the bytes are wrong."""
        self._mark(found, first, last, RESIDENT)
        for chunk in bad:
            self.give_up(found, chunk, chunk + 1)

    def begin_release(self, found: CachedObject, first: int, last: int) -> None:
        """RESIDENT -> RELEASING."""
        self._mark(found, first, last, RELEASING)
        self.freeing_bytes += found.disk_bytes(first, last)

    def end_release(self, found: CachedObject, first: int, last: int) -> None:
        """RELEASING -> ABSENT."""
        self.freeing_bytes -= found.disk_bytes(first, last)
        self.give_up(found, first, last)

    def begin_evict(self, found: CachedObject) -> None:
        """An idle object is on its way out."""
        found.evicting = True
        del self.by_version[found.version]
        self.freeing_bytes += found.occupied_bytes
        self.settle(found)

    def end_evict(self, found: CachedObject) -> None:
        """The object is gone."""
        del self.objects[found.object_id]
        self.freeing_bytes -= found.occupied_bytes
        self.used_bytes -= found.occupied_bytes
        self.planned_bytes -= found.occupied_bytes if found.planned else 0

    def _mark(self, found: CachedObject, first: int, last: int, state: int) -> None:
        found.resident_chunks -= found.chunks.count(RESIDENT, first, last)
        found.chunks[first:last] = bytes((state,)) * (last - first)
        found.resident_chunks += found.chunks.count(RESIDENT, first, last)

    def _occupy(self, found: CachedObject, change_bytes: int) -> None:
        found.occupied_bytes += change_bytes
        self.used_bytes += change_bytes
        self.planned_bytes += change_bytes if found.planned else 0

    def check(self) -> None:
        """Assert the invariants."""
        used_bytes = freeing_bytes = planned_bytes = 0
        for found in self.objects.values():
            occupied_bytes = sum(found.bytes_in(state) for state in set(found.chunks) - {ABSENT})
            assert found.occupied_bytes == occupied_bytes, found
            assert found.resident_chunks == found.chunks.count(RESIDENT), found
            used_bytes += occupied_bytes
            planned_bytes += occupied_bytes if found.planned else 0
            freeing_bytes += occupied_bytes if found.evicting else found.bytes_in(RELEASING)
            assert (found.object_id in self.idle) == (found.idle and found.occupied_bytes > 0 and not found.planned), (
                found
            )
            assert found.evicting or self.by_version[found.version] is found
        assert len(self.by_version) == sum(not found.evicting for found in self.objects.values())
        assert self.used_bytes == used_bytes
        assert self.freeing_bytes == freeing_bytes
        assert self.planned_bytes == planned_bytes
        assert all(self.objects.get(object_id) is found for object_id, found in self.idle.items())


_FROM_INDEX = bytes((ABSENT, UNVERIFIED)) + bytes(254)
