"""A cache disk with no room left: nothing is lost, nothing crashes, and it starts."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from s3prefetchfs.core.extent import CHUNK_BYTES
from s3prefetchfs.errors import FailureKind, RequestError
from s3prefetchfs.store.index import SEGMENT_CHUNKS
from s3prefetchfs.store.store import Store
from tests.store.written import add_object, content

SIZE_BYTES = 2 * CHUNK_BYTES


def fill_up(disk: Path) -> Path:
    """Leave the disk with less room than a page. Returns the file that has the rest."""
    filler = disk / "filler"
    with filler.open("ab", buffering=0) as file:
        for piece_bytes in (1 << 20, 4096, 4096):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(piece_bytes))
            os.fsync(file.fileno())  # what the disk had set aside for writing this may be free now: once more
    status = os.statvfs(disk)
    assert status.f_bavail * status.f_frsize < 4096
    return filler


def change_much(store: Store, object_id: int) -> None:
    """More news for the index than any slack of the disk can take."""
    chunks = 60 * SEGMENT_CHUNKS
    store.landed(object_id, 0, chunks * CHUNK_BYTES, [7] * chunks)


def test_flush_on_a_full_disk(small_disk: Path) -> None:
    """flush fails as NO_SPACE and can be repeated; reads go on; with room again, everything is saved."""
    store = Store(small_disk / "cache")
    object_id = add_object(store, 1, SIZE_BYTES)
    large = store.create("large", "e", 60 * SEGMENT_CHUNKS * CHUNK_BYTES)
    store.flush()
    filler = fill_up(small_disk)
    change_much(store, large)
    for _ in range(2):
        with pytest.raises(RequestError) as caught:
            store.flush()
        assert caught.value.kind is FailureKind.NO_SPACE
    assert store.read(object_id, 0, SIZE_BYTES) == content(1, 0, SIZE_BYTES)
    filler.unlink()
    store.flush()
    expected = store.recovered()
    store.close()
    store = Store(small_disk / "cache")
    assert store.recovered() == expected
    assert expected[1].resident == b"\1" * (60 * SEGMENT_CHUNKS)
    store.close()


def test_close_on_a_full_disk(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """close says what it could not save, and what was saved before is there after a start on the full disk."""
    store = Store(small_disk / "cache")
    object_id = add_object(store, 1, SIZE_BYTES)
    large = store.create("large", "e", 60 * SEGMENT_CHUNKS * CHUNK_BYTES)
    store.flush()
    fill_up(small_disk)
    change_much(store, large)
    store.close()
    assert [line for line in caplog.messages if "could not be saved" in line]
    store = Store(small_disk / "cache")
    assert not store.was_clean
    assert [it.resident[:2] for it in store.recovered()] == [b"\1\1", b"\0\0"]
    assert store.verify(object_id, 0, 2) == []
    store.delete(object_id)  # what a scheduler does to get room
    add_object(store, 2, CHUNK_BYTES)
    store.close()
    store = Store(small_disk / "cache")
    assert [it.key for it in store.recovered()] == ["large", "2"]
    store.close()


def test_first_start_on_a_full_disk(small_disk: Path) -> None:
    """With no room for even an index the store starts, and makes one when there is room."""
    (small_disk / "cache" / "objects").mkdir(parents=True)  # ext4 needs a block for each directory
    filler = fill_up(small_disk)
    store = Store(small_disk / "cache")
    assert store.recovered() == []
    store.flush()  # nothing to save, so no reason to complain
    filler.unlink()
    object_id = add_object(store, 1, SIZE_BYTES)
    store.flush()
    store.close()
    store = Store(small_disk / "cache")
    assert [it.object_id for it in store.recovered()] == [object_id]
    store.close()


def test_create_without_room(small_disk: Path) -> None:
    """A file that cannot be made is NO_SPACE, and is not in the store."""
    store = Store(small_disk / "cache")
    fill_up(small_disk)
    made: list[int] = []

    def create_files() -> None:
        while True:  # each may need a directory, an inode, a piece of a directory
            made.append(store.create(str(len(made)), "e", 10))

    with pytest.raises(RequestError) as caught:
        create_files()
    assert caught.value.kind is FailureKind.NO_SPACE
    assert [it.object_id for it in store.recovered()] == made
    assert len(list(small_disk.glob("cache/objects/*/*"))) == len(made)
    store.close()
