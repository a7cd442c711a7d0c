"""The cache directory of one mount: object files, what is resident in them, and its memory across restarts.

    DIRECTORY/lock             held while a mount uses the directory (lock.py)
    DIRECTORY/index.sqlite     what survives a restart (index.py)
    DIRECTORY/objects/3f/...   one sparse file per object version (files.py)
    DIRECTORY/clean            there if the last mount ended in good order

The daemon owns it. It decides nothing: which object to keep and which chunk to fetch is the scheduler's business. It
knows no bucket either: whoever opens it gives each bucket, endpoint and prefix a directory of its own.
The calls marked "Non-blocking" may be made from the event loop, the ones marked "Blocking" belong in a thread.

Why a crash cannot make a wrong byte readable. A worker writes the bytes, then `landed` notes them in memory, then
`flush` notes that in the index. A kill between any two of these loses the note, never the order. What
was noted and then changed without a flush (a hole punched, pages lost with the power, a flipped bit) no longer
agrees with the CRC32C noted with it; so the chunks that a restart finds must pass `verify` before they are used,
however clean the shutdown was. The row of an object has a CRC of its own, against giving one key another's bytes.

Why a late write cannot either. A worker may still hold a path after its daemon has died and a new one has started.
Ids are therefore never given twice: the first one of a run is the clock in units of 1024 ns, later ones count
up, slower than the clock does. The largest id found on disk is a floor under that, for clocks that were set back.
This needs no counter in the index, which a full disk could not take.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from s3prefetchfs.core.extent import CHUNK_BYTES, chunk_count, chunk_extent, chunk_span
from s3prefetchfs.errors import FailureKind, RequestError
from s3prefetchfs.store.files import ObjectFiles, OpenFile
from s3prefetchfs.store.index import SEGMENT_CHUNKS, Index, IndexDamaged, ObjectRow, SegmentRow
from s3prefetchfs.store.lock import lock_directory, unusable

log = logging.getLogger(__name__)

_CLOCK_SHIFT = 10
"""Ids start at `time_ns() >> 10`: about a microsecond each, and making a file takes several."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object version in the cache.

    Attributes:
        resident: a byte for each chunk, 1 if its bytes were written. used_at: wall clock, seconds.
    """

    object_id: int
    key: str
    etag: str
    size_bytes: int
    resident: bytes
    used_at: float


@dataclass(slots=True)
class _Object:
    key: str
    etag: str
    size_bytes: int
    used_at: float
    resident: bytearray  # a byte per chunk
    crcs: array[int]  # CRC32C per chunk, of those that are resident


@dataclass(slots=True)
class _Unsaved:
    """What the index does not know yet. Only names: a flush saves the state of its own moment."""

    objects: set[int] = field(default_factory=set)
    segments: set[tuple[int, int]] = field(default_factory=set)  # (object id, number)
    deleted: set[int] = field(default_factory=set)

    def add(self, other: _Unsaved) -> None:
        self.objects |= other.objects
        self.segments |= other.segments
        self.deleted |= other.deleted

    def __bool__(self) -> bool:
        return bool(self.objects or self.segments or self.deleted)


class Store:
    """The cache in `directory`, which is created if missing and locked until `close`.

    Blocking: opening reads the whole index. A damaged index costs what it held, not the start; a full disk
    costs new entries, not the start. To be opened by the process that uses it, after any fork.

    Attributes:
        was_clean: the last mount here closed its store in good order (or there was none).

    Raises:
        UserError: the directory is in use by another mount, or cannot be used.
    """

    was_clean: bool

    def __init__(self, directory: Path) -> None:
        self._objects: dict[int, _Object] = {}
        self._unsaved = _Unsaved()
        # Of the two above. Held for microseconds at a time, never over I/O: the event loop takes it too.
        self._lock = threading.Lock()
        self._lock_fd = lock_directory(directory)
        self._clean_mark = directory / "clean"
        self._index = Index(directory / "index.sqlite")
        try:
            self._files = ObjectFiles(directory / "objects")
            self._recover()
        except BaseException as error:
            self._index.close()
            os.close(self._lock_fd)
            if isinstance(error, OSError | RequestError):
                raise unusable(directory, error) from error
            raise

    def recovered(self) -> list[StoredObject]:
        """Blocking (it copies). The objects in the store, least recently used first; asked after opening."""
        found = [
            StoredObject(object_id, it.key, it.etag, it.size_bytes, bytes(it.resident), it.used_at)
            for object_id, it in self._objects.items()
        ]
        found.sort(key=lambda it: it.used_at)
        return found

    def create(self, key: str, etag: str, size_bytes: int) -> int:
        """Blocking (file metadata only). Make the file of a new object version and return its id.

        Raises:
            RequestError: NO_SPACE or CACHE_IO.
        """
        with self._lock:
            object_id = self._next_id
            self._next_id += 1
        self._files.create(object_id, size_bytes)
        made = _empty(key, etag, size_bytes, time.time())
        with self._lock:
            self._objects[object_id] = made
            self._unsaved.objects.add(object_id)
        return object_id

    def path(self, object_id: int) -> str:
        """Non-blocking. The file that a worker writes the object's bytes to."""
        return self._files.path(object_id)

    def landed(self, object_id: int, start: int, stop: int, crc32c: Sequence[int]) -> None:
        """Non-blocking. The whole chunks `[start, stop)` (bytes) are in the file. Ignored if the object was deleted.

        Args:
            crc32c: one per chunk.

        Raises:
            ValueError: these are not whole chunks of the object, or not as many as checksums.
        """
        first, last = chunk_span(start, stop)
        with self._lock:
            it = self._objects.get(object_id)
            if it is None:
                return
            if (start, stop) != chunk_extent(first, last, it.size_bytes) or len(crc32c) != last - first:
                raise ValueError(f"not whole chunks of {it.size_bytes} bytes: [{start}, {stop}), {len(crc32c)} CRCs")
            it.crcs[first:last] = array("I", crc32c)
            it.resident[first:last] = b"\1" * (last - first)
            self._changed(object_id, first, last)

    def read_now(self, object_id: int, start: int, stop: int, buffer: memoryview) -> bool:
        """Non-blocking. Bytes `[start, stop)` into the front of `buffer`, if that needs no disk.

        Returns:
            Whether all of them came. If not, `read` will bring them or say what is wrong.
        """
        return self._files.read_now(object_id, start, stop, buffer) and self._holds(object_id, start, stop)

    def read(self, object_id: int, start: int, stop: int) -> bytes:
        """Blocking. The bytes `[start, stop)`. Safe against a `delete` meanwhile: right bytes or the error.

        Raises:
            RequestError: CACHE_IO: unreadable, too short, or not resident.
        """
        try:
            data = self._files.read(object_id, start, stop)
        finally:
            self._release_if_deleted(object_id)
        if not self._holds(object_id, start, stop):
            raise RequestError(FailureKind.CACHE_IO, f"{self.path(object_id)}: [{start}, {stop}) is not resident")
        return data

    def file(self, object_id: int) -> OpenFile | None:
        """The object's file, for somebody else to read; None if there is none, or one of another length.

        Blocking if it was not opened lately, for as long as open(2) takes.
        """
        it = self._objects.get(object_id)
        return None if it is None else self._files.intact(object_id, it.size_bytes)

    def verify(self, object_id: int, first: int, last: int) -> list[int]:
        """Blocking. Read the chunks `[first, last)` and compare them with their CRCs.

        No fetch may be writing them meanwhile.

        Returns:
            The numbers of those that are wrong, unreadable or not resident. None of them is resident any more.
        """
        with self._lock:
            it = self._objects.get(object_id)
            if it is None:
                return list(range(first, last))
            chunks = range(first, min(last, len(it.resident)))
            extents = [chunk_extent(chunk, chunk + 1, it.size_bytes) for chunk in chunks]
            expected = [it.crcs[chunk] if it.resident[chunk] else None for chunk in chunks]
        found = self._files.checksums(object_id, extents)
        self._release_if_deleted(object_id)
        bad = []
        for chunk, noted, actual in zip(chunks, expected, found, strict=True):
            if noted is None or noted != actual:
                self.forget_chunks(object_id, chunk, chunk + 1)
                bad.append(chunk)
        return bad

    def forget_chunks(self, object_id: int, first: int, last: int) -> None:
        """Non-blocking. The chunks `[first, last)` are no longer resident. Ignored if the object was deleted."""
        with self._lock:
            it = self._objects.get(object_id)
            if it is None:
                return
            it.resident[first:last] = bytes(len(it.resident[first:last]))
            self._changed(object_id, first, last)

    def punch(self, object_id: int, start: int, stop: int) -> None:
        """Blocking. Forget every chunk that the bytes `[start, stop)` touch, and give its blocks back to the disk.

        A filesystem that has no holes keeps the blocks; that is logged once.

        Raises:
            RequestError: CACHE_IO: the chunks are forgotten, their blocks may be kept.
        """
        first, last = chunk_span(start, stop)
        # Forget first: a read that meets the hole then finds, after it, that the chunk is not resident.
        self.forget_chunks(object_id, first, last)
        # To the end of the last chunk, beyond the file's if need be: only whole blocks are freed.
        self._files.punch(object_id, first * CHUNK_BYTES, last * CHUNK_BYTES)

    def delete(self, object_id: int) -> None:
        """Blocking. Remove the object; reads under way finish. Ignored if it is gone already.

        Raises:
            RequestError: CACHE_IO: the object is gone from the store, its file goes at the next start.
        """
        # The file first, its row with the next flush. A crash between leaves a row without a file, which
        # recovery drops and which no later file can fill, ids being unique. The other order would be as safe, but
        # would cost a transaction for each deletion, and on a full disk, where the index cannot be written, it would
        # keep the very deletion from happening that makes room.
        with self._lock:
            if self._objects.pop(object_id, None) is None:
                return
            self._unsaved.deleted.add(object_id)
        self._files.delete(object_id)

    def used(self, object_ids: Iterable[int]) -> None:
        """Non-blocking. These objects were used just now."""
        now = time.time()
        with self._lock:
            for object_id in object_ids:
                it = self._objects.get(object_id)
                if it is not None:
                    it.used_at = now
                    self._unsaved.objects.add(object_id)

    def flush(self) -> None:
        """Blocking. Write to the index what changed since the last flush, in one transaction.

        Raises:
            RequestError: NO_SPACE or CACHE_IO: nothing was written, and the next flush writes it all.
        """
        try:
            self._save()
        except IndexDamaged as damage:
            self._replace_index(damage)
            self._save()

    def close(self, clean: bool = True) -> None:
        """Blocking. Flush, close the index, and let the directory go. Never fails; what it could not save is logged.

        Args:
            clean: False leaves the directory marked as after a crash.
        """
        if self._lock_fd < 0:
            return
        try:
            self.flush()
        except RequestError as error:
            log.warning("the cache index could not be saved: %s", error)
            clean = False
        self._index.close()
        self._files.close()
        if clean:
            with contextlib.suppress(OSError):
                self._clean_mark.touch(0o600)
        os.close(self._lock_fd)
        self._lock_fd = -1

    def index_bytes(self) -> int:
        """Non-blocking. What the index files occupy on the disk now."""
        return self._index.size_bytes()

    def _recover(self) -> None:
        """Load the index, and make it and the object files agree.

        Raises:
            OSError, RequestError: the files or the index cannot be read, which a new index would not cure.
        """
        started_s = time.monotonic()
        damage = self._load()
        lost = set(self._objects)
        newest, orphans = max(lost, default=0), 0
        for object_id, size_bytes in self._files.scan():
            newest = max(newest, object_id)
            it = self._objects.get(object_id)
            if it is not None and it.size_bytes == size_bytes:
                lost.discard(object_id)
            elif it is None:
                self._discard(partial(self._files.delete, object_id))
                orphans += 1
        versions: dict[tuple[str, str, int], int] = {}
        for object_id, it in sorted(self._objects.items(), key=lambda item: item[1].used_at, reverse=True):
            if object_id not in lost and versions.setdefault((it.key, it.etag, it.size_bytes), object_id) != object_id:
                lost.add(object_id)
        for object_id in lost:  # without a file, with one of the wrong length, or of a version that another one is of
            self._discard(partial(self.delete, object_id))
        self._next_id = max(time.time_ns() >> _CLOCK_SHIFT, newest + 1)
        if damage is not None:
            self._replace_index(damage)
        self.was_clean = self._clean_mark.exists() or not newest
        self._clean_mark.unlink(missing_ok=True)
        log.info(
            "cache: %d objects in %.2f s (%s); dropped %d rows without a file and %d files without a row",
            len(self._objects),
            time.monotonic() - started_s,
            "clean" if self.was_clean else "after a crash",
            len(lost),
            orphans,
        )

    @staticmethod
    def _discard(delete: Callable[[], None]) -> None:
        """Delete what is of no use. What cannot be deleted, such as a directory that somebody made there, stays."""
        try:
            delete()
        except RequestError as error:
            log.warning("what the cache has no use for stays on its disk: %s", error)

    def _load(self) -> IndexDamaged | None:
        """Read the index into memory: as much of it as can be read, and what was wrong."""
        damage = None
        for load in (self._load_objects, self._load_segments):
            try:
                load()
            except IndexDamaged as error:
                damage = error
            except RequestError as error:
                if error.kind is not FailureKind.NO_SPACE:
                    raise
                log.warning("no room for a cache index, it is kept in memory until there is: %s", error)
        return damage

    def _load_objects(self) -> None:
        for row in self._index.objects():
            self._objects[row.object_id] = _empty(row.key, row.etag, row.size_bytes, row.used_at)

    def _load_segments(self) -> None:
        for row in self._index.segments():
            it = self._objects.get(row.object_id)
            first = row.number * SEGMENT_CHUNKS
            if it is not None and len(row.resident) == min(SEGMENT_CHUNKS, len(it.resident) - first):
                it.resident[first : first + SEGMENT_CHUNKS] = row.resident
                it.crcs[first : first + SEGMENT_CHUNKS] = array("I", row.crcs)

    def _replace_index(self, damage: IndexDamaged) -> None:
        """Set the index aside; the next flush writes a new one, of all that is in memory."""
        log.error("the cache index is set aside and written anew: %s", damage)
        self._index.set_aside()
        with self._lock:
            self._unsaved = _Unsaved(set(self._objects))
            for object_id, it in self._objects.items():
                if 1 in it.resident:
                    self._changed(object_id, 0, len(it.resident))

    def _save(self) -> None:
        with self._lock:
            unsaved, self._unsaved = self._unsaved, _Unsaved()
        if not unsaved:
            return
        try:
            self._index.write(self._object_rows(unsaved.objects), self._segment_rows(unsaved.segments), unsaved.deleted)
        except BaseException:
            with self._lock:
                self._unsaved.add(unsaved)
            raise

    # The rows are made one by one while SQLite takes them, so that the lock is never held for long.

    def _object_rows(self, object_ids: Iterable[int]) -> Iterator[ObjectRow]:
        for object_id in object_ids:
            it = self._objects.get(object_id)
            if it is not None:
                yield ObjectRow(object_id, it.key, it.etag, it.size_bytes, it.used_at)

    def _segment_rows(self, segments: Iterable[tuple[int, int]]) -> Iterator[SegmentRow]:
        for object_id, number in segments:
            first, last = number * SEGMENT_CHUNKS, (number + 1) * SEGMENT_CHUNKS
            with self._lock:
                it = self._objects.get(object_id)
                if it is None:
                    continue
                row = SegmentRow(object_id, number, bytes(it.resident[first:last]), it.crcs[first:last].tobytes())
            yield row

    def _changed(self, object_id: int, first: int, last: int) -> None:
        """Note, under the lock, that the chunks `[first, last)` differ from the index."""
        for number in range(first // SEGMENT_CHUNKS, -(-last // SEGMENT_CHUNKS)):
            self._unsaved.segments.add((object_id, number))

    def _holds(self, object_id: int, start: int, stop: int) -> bool:
        """Whether all chunks of `[start, stop)` are resident: asked after a read, to answer for what it returned."""
        it = self._objects.get(object_id)
        first, last = chunk_span(start, stop)
        return it is not None and it.resident.find(0, first, last) < 0

    def _release_if_deleted(self, object_id: int) -> None:
        """Opening a file in one thread can overtake its deletion in another: then it must not stay open."""
        if object_id not in self._objects:
            self._files.release(object_id)


def _empty(key: str, etag: str, size_bytes: int, used_at: float) -> _Object:
    chunks = chunk_count(size_bytes)
    return _Object(key, etag, size_bytes, used_at, bytearray(chunks), array("I", bytes(4 * chunks)))
