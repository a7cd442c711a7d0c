"""The index file: damage to it, its size, and keys that SQLite might not like."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from s3prefetchfs.core.extent import CHUNK_BYTES
from s3prefetchfs.errors import UserError
from s3prefetchfs.store.index import SEGMENT_CHUNKS
from s3prefetchfs.store.store import Store
from tests.store.written import add_object, content, flip_byte, killed

OBJECTS = 12
SIZE_BYTES = 5000


def fill(directory: Path) -> list[int]:
    """A closed store with small objects."""
    store = Store(directory)
    ids = [add_object(store, seed, SIZE_BYTES) for seed in range(OBJECTS)]
    store.close()
    return ids


def check_true(store: Store) -> int:
    """Whatever the store claims is what was written under that key. Returns how many objects it claims."""
    found = store.recovered()
    for it in found:
        seed = int(it.key)
        assert (it.etag, it.size_bytes) == (f"etag-{seed}", SIZE_BYTES)
        if store.verify(it.object_id, 0, 1) == []:
            assert store.read(it.object_id, 0, SIZE_BYTES) == content(seed, 0, SIZE_BYTES)
    return len(found)


def cut_to_half(index: Path) -> None:
    os.truncate(index, index.stat().st_size // 2)


def fill_with_garbage(index: Path) -> None:
    index.write_bytes(random.Random(1).randbytes(index.stat().st_size))


def make_of_the_future(index: Path) -> None:
    with sqlite3.connect(index) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()


def make_foreign(index: Path) -> None:
    index.unlink()
    with sqlite3.connect(index) as db:
        db.execute("CREATE TABLE recipes (name TEXT)")
    db.close()


def drop_table(index: Path) -> None:
    with sqlite3.connect(index) as db:
        db.execute("DROP TABLE segments")
    db.close()


def put_directory_in_its_place(index: Path) -> None:
    index.unlink()
    (index / "notes").mkdir(parents=True)


@pytest.mark.parametrize(
    "harm",
    [cut_to_half, fill_with_garbage, make_of_the_future, make_foreign, drop_table, put_directory_in_its_place],
)
def test_useless_index_is_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: Callable[[Path], None]
) -> None:
    """The store starts, says so, keeps the old index, deletes files it knows nothing of, and works on."""
    fill(tmp_path)
    harm(tmp_path / "index.sqlite")
    store = Store(tmp_path)
    assert [line for line in caplog.messages if "set aside" in line]
    assert (tmp_path / "index.sqlite.damaged").exists()
    claimed = check_true(store)
    assert len(list(tmp_path.glob("objects/*/*"))) == claimed
    add_object(store, 77, SIZE_BYTES)
    store.close()
    store = Store(tmp_path)
    assert check_true(store) == claimed + 1
    store.close()


def test_missing_index(tmp_path: Path) -> None:
    """Without an index the store is empty, and so is its disk."""
    fill(tmp_path)
    (tmp_path / "index.sqlite").unlink()
    store = Store(tmp_path)
    assert store.recovered() == []
    assert list(tmp_path.glob("objects/*/*")) == []
    store.close()


def test_flipped_bits_in_the_index(tmp_path: Path) -> None:
    """Whatever byte of the index changes: no crash, no key with another's bytes, and the store can be saved."""
    fill(tmp_path / "cache")
    index = (tmp_path / "cache" / "index.sqlite").read_bytes()
    choose = random.Random(5)
    places = [*range(16, 100, 7), *(choose.randrange(len(index)) for _ in range(25))]
    for turn, place in enumerate(places):
        directory = killed(tmp_path / "cache", tmp_path / str(turn))
        flip_byte(str(directory / "index.sqlite"), place)
        store = Store(directory)
        check_true(store)
        add_object(store, 77, SIZE_BYTES)
        store.flush()
        store.close()
        store = Store(directory)
        assert "77" in {it.key for it in store.recovered()}
        check_true(store)
        store.close()
        shutil.rmtree(directory)


def test_index_damaged_while_in_use(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The memory is the truth: an index that breaks under a running mount is written anew from it, complete."""
    store = Store(tmp_path)
    long_key = "k" * 4000
    ids = [store.create(f"{seed}{long_key}", "e", 1) for seed in range(700)]  # more than SQLite's page cache
    for object_id in ids[:-1]:
        store.landed(object_id, 0, 1, [object_id % 1000])
    store.flush()
    before = store.recovered()
    store.close()
    store = Store(tmp_path)
    size_bytes = (tmp_path / "index.sqlite").stat().st_size
    fd = os.open(tmp_path / "index.sqlite", os.O_WRONLY)
    os.pwrite(fd, random.Random(1).randbytes(size_bytes - 4096), 4096)
    os.close(fd)
    store.delete(ids[0])
    store.flush()
    assert [line for line in caplog.messages if "set aside" in line]
    store.close()
    store = Store(tmp_path)
    assert store.recovered() == before[1:]
    store.close()


def test_journal_of_a_useless_index(tmp_path: Path) -> None:
    """The WAL that a killed mount left goes with its index: it is not replayed into the new one."""
    ids = fill(tmp_path / "cache")
    store = Store(tmp_path / "cache")
    store.used(ids)
    store.flush()
    directory = killed(tmp_path / "cache", tmp_path / "after")
    store.close()
    assert (directory / "index.sqlite-wal").stat().st_size
    fill_with_garbage(directory / "index.sqlite")
    store = Store(directory)
    assert store.recovered() == []
    object_id = add_object(store, 1, SIZE_BYTES)
    store.close()
    store = Store(directory)
    assert [it.object_id for it in store.recovered()] == [object_id]
    store.close()


def test_index_in_somebodys_hands(tmp_path: Path) -> None:
    """An index that a person is writing to is not mistaken for a damaged one."""
    ids = fill(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "index.sqlite", isolation_level=None)) as db:
        db.execute("BEGIN EXCLUSIVE")
        with pytest.raises(UserError, match="locked"):
            Store(tmp_path)
    store = Store(tmp_path)
    assert [it.object_id for it in store.recovered()] == ids
    store.close()


def test_nonsense_in_a_map(tmp_path: Path) -> None:
    """A map with other values than 0 and 1, of the wrong length or type, or of no object, counts for nothing."""
    ids = fill(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "index.sqlite", isolation_level=None)) as db:
        for object_id, nonsense in zip(ids, ["x'02'", "x''", "x'0101'", "7", "'1'"], strict=False):
            db.execute(f"UPDATE segments SET resident = {nonsense} WHERE object_id = ?", (object_id,))
        db.execute("UPDATE segments SET crcs = x'00000000000000' WHERE object_id = ?", (ids[5],))
        db.execute("UPDATE segments SET number = -1 WHERE object_id = ?", (ids[6],))
        db.execute("UPDATE segments SET number = 1 << 60 WHERE object_id = ?", (ids[7],))
        db.execute("UPDATE segments SET object_id = 1 WHERE object_id = ?", (ids[8],))
    store = Store(tmp_path)
    assert [it.resident for it in store.recovered()] == [b"\0"] * 9 + [b"\1"] * (OBJECTS - 9)
    store.close()


def test_deleted_objects_leave_no_rows(tmp_path: Path) -> None:
    """Both rows of an object go with it."""
    ids = fill(tmp_path)
    store = Store(tmp_path)
    for object_id in ids:
        store.delete(object_id)
    store.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "index.sqlite")) as db:
        assert db.execute("SELECT (SELECT count(*) FROM objects), (SELECT count(*) FROM segments)").fetchone() == (0, 0)


@pytest.mark.parametrize("key", ["a\0b", "\udce9\ud800", "k" * 1024, "é", "e\u0301", "'; DROP TABLE objects; --", ""])
def test_odd_keys(tmp_path: Path, key: str) -> None:
    """Any Python string is a key, and is itself after a restart."""
    store = Store(tmp_path)
    store.create(key, key, 1)
    store.close()
    store = Store(tmp_path)
    assert [(it.key, it.etag) for it in store.recovered()] == [(key, key)]
    store.close()


def test_nothing_to_save_writes_nothing(tmp_path: Path) -> None:
    """A flush without changes does not touch the disk: an idle mount lets it sleep."""
    store = Store(tmp_path)
    add_object(store, 1, SIZE_BYTES)
    store.flush()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("index*")}
    store.flush()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("index*")} == before
    store.close()


def test_index_stays_small(tmp_path: Path) -> None:
    """Hundreds of flushes leave a short WAL, and a clean close none."""
    store = Store(tmp_path)
    chunks = 4 * SEGMENT_CHUNKS
    object_id = store.create("1", "e", chunks * CHUNK_BYTES)
    for turn in range(400):
        store.landed(object_id, 0, chunks * CHUNK_BYTES, [turn] * chunks)
        store.flush()
    assert store.index_bytes() == sum(path.stat().st_size for path in tmp_path.glob("index*"))
    assert store.index_bytes() < 6 * 1024 * 1024
    store.close()
    assert [path.name for path in tmp_path.glob("index*")] == ["index.sqlite"]
    assert store.index_bytes() < 128 * 1024
