"""The index of a cache directory: which object is in which file, and which of its chunks, in SQLite.

It is a copy. While a mount runs, the truth is in the memory of `store.py`, which writes here what changed, about once a
second. So a damaged index is moved aside and written anew from memory, and an index that cannot be written
(disk full) is written later. What it says after a crash can be old but is harmless: chunks are checked against
their CRC before use, and rows carry a CRC of their own, so that a flipped bit cannot give one key another's bytes.

Two tables. `objects` has a short row per object, rewritten when it is used. `segments` has a row per
SEGMENT_CHUNKS chunks of an object with anything resident: a byte of residency and four of CRC32C for each chunk. A
download therefore rewrites only the few kilobytes around what has landed, not its object's whole map.

SQLite's settings: WAL, because a commit is then one append and no fsync (`synchronous=NORMAL` syncs at checkpoints
only: power loss costs the last commits, not the database). Exclusive locking, because the directory is locked anyway
and SQLite then needs no shared-memory file, so that opening writes nothing and works on a full disk.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import struct
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from awscrt.checksums import crc32c

from s3prefetchfs.errors import FailureKind, RequestError

log = logging.getLogger(__name__)

FORMAT = 1
"""Version of the tables (SQLite's user_version). An index of any other is set aside."""

SEGMENT_CHUNKS = 1024
"""Chunks per row of `segments`: 128 MiB of an object, 5 KiB of row, which is a page and a quarter."""

_WAL_PAGES = 1000
"""Checkpoint after so many pages (4 MiB), SQLite's default."""

_WAL_KEEP_BYTES = 16 * 1024 * 1024
"""A WAL that a large commit made longer than this is cut back after its checkpoint."""

_BUSY_S = 1.0
"""How long to wait for a person who has the index open in the sqlite3 shell."""

_NOT_THE_FILES_FAULT = (
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_PERM,
)
"""Errors that a new index would meet too, unless a directory is in its place. Any other is damage, the statements here
being fixed and right: also an unreadable sector, a missing table, and "read-only", which one flipped bit of the header
can bring about."""

_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE objects (
    id INTEGER PRIMARY KEY, key BLOB NOT NULL, etag BLOB NOT NULL, size_bytes INTEGER NOT NULL,
    used_at REAL NOT NULL, crc INTEGER NOT NULL
);
CREATE TABLE segments (
    object_id INTEGER NOT NULL, number INTEGER NOT NULL, resident BLOB NOT NULL, crcs BLOB NOT NULL,
    PRIMARY KEY (object_id, number)
);
PRAGMA user_version = {FORMAT};
COMMIT;
"""


class ObjectRow(NamedTuple):
    """One object version. `used_at` is wall clock, seconds."""

    object_id: int
    key: str
    etag: str
    size_bytes: int
    used_at: float


class SegmentRow(NamedTuple):
    """Chunks `[number * SEGMENT_CHUNKS, ...)` of an object: a byte 0 or 1, and a native uint32, for each."""

    object_id: int
    number: int
    resident: bytes
    crcs: bytes


class IndexDamaged(RequestError):
    """The index is not a database, is malformed, or is of another format: set it aside and write it anew."""

    def __init__(self, detail: str) -> None:
        super().__init__(FailureKind.CACHE_IO, detail)


class Index:
    """The SQLite file at `path`. It is opened, or created, by the first use. Thread-safe; all calls block."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._db: sqlite3.Connection | None = None
        self._closed = False
        self._lock = threading.Lock()  # of _db: one connection, used by one thread at a time

    def objects(self) -> Iterator[ObjectRow]:
        """All rows that are sound; others are passed over with a log line.

        Raises:
            IndexDamaged: possibly after some rows, which are sound.
            RequestError: NO_SPACE: there is no index yet and no room for one. CACHE_IO: anything else.
        """
        damaged = 0
        for object_id, raw_key, raw_etag, size_bytes, used_at, crc in self._select("objects"):
            try:
                row = ObjectRow(object_id, _text(raw_key), _text(raw_etag), size_bytes, used_at)
                sound = _row_crc(row) == crc and size_bytes >= 0
            except (TypeError, ValueError, AttributeError, struct.error):
                sound = False
            if sound:
                yield row
            else:
                damaged += 1
        if damaged:
            log.warning("%s: %d objects have damaged rows and are dropped", self._path, damaged)

    def segments(self) -> Iterator[SegmentRow]:
        """All rows of the right form. That they are true is for the chunks' CRCs to show.

        Raises: as `objects`.
        """
        for object_id, number, resident, crcs in self._select("segments"):
            if (
                isinstance(object_id, int)
                and isinstance(number, int)
                and isinstance(resident, bytes)
                and isinstance(crcs, bytes)
                and number >= 0
                and len(crcs) == 4 * len(resident)
                and not resident.translate(None, b"\0\1")
            ):
                yield SegmentRow(object_id, number, resident, crcs)

    def write(self, objects: Iterable[ObjectRow], segments: Iterable[SegmentRow], deleted: Iterable[int]) -> None:
        """Insert or replace rows, and delete all rows of the objects `deleted`, in one transaction.

        Raises:
            IndexDamaged, RequestError: NO_SPACE or CACHE_IO; then nothing is written.
        """
        with self._lock:
            try:
                db = self._connect()
                db.execute("BEGIN IMMEDIATE")
                try:
                    gone = [(object_id,) for object_id in deleted]
                    db.executemany("DELETE FROM segments WHERE object_id = ?", gone)
                    db.executemany("DELETE FROM objects WHERE id = ?", gone)
                    db.executemany(
                        "INSERT OR REPLACE INTO objects VALUES (?, ?, ?, ?, ?, ?)",
                        (
                            (row.object_id, _raw(row.key), _raw(row.etag), row.size_bytes, row.used_at, _row_crc(row))
                            for row in objects
                        ),
                    )
                    db.executemany("INSERT OR REPLACE INTO segments VALUES (?, ?, ?, ?)", segments)
                    db.execute("COMMIT")
                except BaseException:
                    with contextlib.suppress(sqlite3.Error):  # SQLite may have rolled back already
                        db.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                raise self._failure(error) from error

    def set_aside(self) -> None:
        """Move the files away, over those set aside before; the next use starts an empty index.

        Raises:
            RequestError: CACHE_IO.
        """
        with self._lock:
            self._disconnect()
            try:
                # The WAL first: a WAL left alone would be replayed into the new database.
                for suffix in ("-wal", ""):
                    with contextlib.suppress(FileNotFoundError):
                        os.replace(f"{self._path}{suffix}", f"{self._path}.damaged{suffix}")
            except OSError as error:
                raise RequestError(FailureKind.CACHE_IO, f"cannot move {self._path} away: {error}") from error

    def size_bytes(self) -> int:
        """What the index files occupy now."""
        total = 0
        for suffix in ("", "-wal"):
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(f"{self._path}{suffix}").st_size
        return total

    def close(self) -> None:
        """Close for good. The last connection checkpoints the WAL and removes it: SQLite's own doing."""
        with self._lock:
            self._disconnect()
            self._closed = True

    def _select(self, table: str) -> Iterator[tuple[Any, ...]]:
        try:
            yield from self._connect().execute(f"SELECT * FROM {table}")
        except sqlite3.Error as error:
            raise self._failure(error) from error

    def _connect(self) -> sqlite3.Connection:
        if self._closed:
            raise RequestError(FailureKind.CACHE_IO, f"{self._path} is closed")
        if self._db is None:
            db = sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
            try:
                db.execute("PRAGMA locking_mode = EXCLUSIVE")
                db.execute("PRAGMA journal_mode = WAL")
                db.execute("PRAGMA synchronous = NORMAL")
                db.execute("PRAGMA temp_store = MEMORY")
                db.execute(f"PRAGMA wal_autocheckpoint = {_WAL_PAGES}")
                db.execute(f"PRAGMA journal_size_limit = {_WAL_KEEP_BYTES}")
                (found,) = db.execute("PRAGMA user_version").fetchone()
                (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
                if found == 0 and tables == 0:
                    db.executescript(_SCHEMA)
                elif found != FORMAT:
                    raise IndexDamaged(f"{self._path} has format {found}, this program writes {FORMAT}")
            except BaseException:
                db.close()
                raise
            self._db = db
        return self._db

    def _disconnect(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def _failure(self, error: sqlite3.Error) -> RequestError:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF  # the rest is detail
        if code == sqlite3.SQLITE_FULL:
            return RequestError(FailureKind.NO_SPACE, f"{self._path}: {error}")
        if code in _NOT_THE_FILES_FAULT and not self._path.is_dir():
            return RequestError(FailureKind.CACHE_IO, f"{self._path}: {error}")
        return IndexDamaged(f"{self._path}: {error}")


def _raw(text: str) -> bytes:
    """Any Python string, lone surrogates included: one odd key must not make every later commit fail."""
    return text.encode("utf-8", "surrogatepass")


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


def _row_crc(row: ObjectRow) -> int:
    key = _raw(row.key)
    numbers = struct.pack("<qqdq", row.object_id, row.size_bytes, row.used_at, len(key))
    crc: int = crc32c(numbers + key + _raw(row.etag))
    return crc
