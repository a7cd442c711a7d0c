"""The store on a real disk: bytes, residency, restarts, deletion."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import random
import resource
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from s3prefetchfs.core.extent import CHUNK_BYTES
from s3prefetchfs.errors import FailureKind, RequestError
from s3prefetchfs.store.index import SEGMENT_CHUNKS
from s3prefetchfs.store.store import Store
from tests.store.written import add_object, content, flip_byte, killed, write_chunks

ODD_BYTES = 3 * CHUNK_BYTES + 1001
"""Three chunks and a short one, of no page or word size."""


def reads_without_waiting(directory: Path) -> bool:
    """Whether the filesystem of `directory` knows RWF_NOWAIT (tmpfs does not)."""
    probe = directory / "probe"
    probe.write_bytes(b"x")
    fd = os.open(probe, os.O_RDONLY)
    try:
        os.preadv(fd, [bytearray(1)], 0, os.RWF_NOWAIT)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def open_in(directory: Path) -> list[str]:
    """The files under `directory` that this process has open."""
    names = []
    for number in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            continue
    return [name for name in names if name.startswith(f"{directory}/")]


def test_landed_bytes_are_read_back(tmp_path: Path) -> None:
    """What a worker wrote and reported is read back, at any offset and length."""
    store = Store(tmp_path / "cache")
    object_id = add_object(store, 1, ODD_BYTES)
    for start, stop in ((0, ODD_BYTES), (0, 1), (CHUNK_BYTES - 3, CHUNK_BYTES + 3), (ODD_BYTES - 7, ODD_BYTES)):
        assert store.read(object_id, start, stop) == content(1, start, stop)
    store.close()


def test_bytes_that_have_not_landed_are_refused(tmp_path: Path) -> None:
    """The zeros of a sparse file are never returned as data: a read across a missing chunk fails."""
    store = Store(tmp_path / "cache")
    object_id = store.create("k", "e", ODD_BYTES)
    write_chunks(store, object_id, 1, ODD_BYTES, 1, 2)
    buffer = memoryview(bytearray(CHUNK_BYTES))
    assert len(store.read(object_id, CHUNK_BYTES, 2 * CHUNK_BYTES)) == CHUNK_BYTES
    for start, stop in ((CHUNK_BYTES - 1, CHUNK_BYTES + 1), (2 * CHUNK_BYTES - 1, 2 * CHUNK_BYTES + 1)):
        with pytest.raises(RequestError, match="not resident"):
            store.read(object_id, start, stop)
        assert not store.read_now(object_id, start, stop, buffer)
    store.close()


def test_read_now_answers_from_memory_only(tmp_path: Path) -> None:
    """read_now declines a file that is not open and pages that are on the disk; it brings what is in memory."""
    if not reads_without_waiting(tmp_path):
        pytest.skip("no RWF_NOWAIT here")
    store = Store(tmp_path / "cache")
    object_id = add_object(store, 1, ODD_BYTES)
    buffer = memoryview(bytearray(b"-" * ODD_BYTES))
    assert not store.read_now(object_id, 5, 105, buffer)
    store.read(object_id, 0, 1)
    assert store.read_now(object_id, 5, 105, buffer)
    assert buffer[:101] == content(1, 5, 105) + b"-"
    fd = os.open(store.path(object_id), os.O_RDONLY)
    os.fsync(fd)
    for _ in range(200):  # the disk can be faster than the look at whether it has answered
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if not store.read_now(object_id, 0, ODD_BYTES, buffer):
            break
        assert buffer == content(1, 0, ODD_BYTES)
    else:
        pytest.fail("always answered, also when nothing was in memory")
    os.close(fd)
    store.close()


def test_short_file_is_an_error(tmp_path: Path) -> None:
    """A file that somebody cut short fails to read, and to verify, where it is short."""
    store = Store(tmp_path / "cache")
    object_id = add_object(store, 1, ODD_BYTES)
    os.truncate(store.path(object_id), 2 * CHUNK_BYTES + 5)
    with pytest.raises(RequestError) as caught:
        store.read(object_id, 2 * CHUNK_BYTES, 3 * CHUNK_BYTES)
    assert caught.value.kind is FailureKind.CACHE_IO
    assert not store.read_now(object_id, 2 * CHUNK_BYTES, 3 * CHUNK_BYTES, memoryview(bytearray(CHUNK_BYTES)))
    assert store.verify(object_id, 0, 4) == [2, 3]
    store.close()


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    """A file that somebody removed fails to read; all its chunks are bad."""
    store = Store(tmp_path / "cache")
    object_id = add_object(store, 1, ODD_BYTES)
    os.unlink(store.path(object_id))
    with pytest.raises(RequestError) as caught:
        store.read(object_id, 0, 1)
    assert caught.value.kind is FailureKind.CACHE_IO
    assert store.verify(object_id, 1, 3) == [1, 2]
    store.delete(object_id)
    store.close()


def test_flipped_byte_is_found(tmp_path: Path) -> None:
    """verify names the chunk with a changed byte, which is then not resident, also not after a restart."""
    store = Store(tmp_path / "cache")
    object_id = add_object(store, 1, ODD_BYTES)
    assert store.verify(object_id, 0, 4) == []
    flip_byte(store.path(object_id), ODD_BYTES - 1)
    flip_byte(store.path(object_id), CHUNK_BYTES)
    assert store.verify(object_id, 0, 4) == [1, 3]
    with pytest.raises(RequestError):
        store.read(object_id, CHUNK_BYTES, CHUNK_BYTES + 1)
    store.close()
    store = Store(tmp_path / "cache")
    assert store.recovered()[0].resident == b"\1\0\1\0"
    store.close()


@pytest.mark.parametrize(
    ("start", "stop", "crcs"),
    [
        (1, CHUNK_BYTES, [0]),
        (0, CHUNK_BYTES - 1, [0]),
        (0, CHUNK_BYTES, []),
        (0, CHUNK_BYTES, [0, 0]),
        (3 * CHUNK_BYTES, 4 * CHUNK_BYTES, [0]),
    ],
)
def test_landed_takes_whole_chunks_only(tmp_path: Path, start: int, stop: int, crcs: list[int]) -> None:
    """Half a chunk, bytes beyond the end, and a wrong number of checksums are refused and change nothing."""
    store = Store(tmp_path / "cache")
    object_id = store.create("k", "e", ODD_BYTES)
    with pytest.raises(ValueError, match="not whole chunks"):
        store.landed(object_id, start, stop, crcs)
    assert store.recovered()[0].resident == bytes(4)
    store.close()


def test_restart_brings_everything_back(tmp_path: Path) -> None:
    """After a clean close: keys, versions, sizes, residency, checksums and order of use."""
    store = Store(tmp_path / "cache")
    assert store.was_clean
    assert store.recovered() == []
    first, second, empty = add_object(store, 1, ODD_BYTES), add_object(store, 2, CHUNK_BYTES), add_object(store, 3, 0)
    store.forget_chunks(first, 1, 3)
    store.used([second])
    store.used([first])
    before = store.recovered()
    store.close()
    store = Store(tmp_path / "cache")
    assert store.was_clean
    assert store.recovered() == before
    assert [(it.object_id, it.key, it.etag, it.size_bytes, it.resident) for it in before] == [
        (empty, "3", "etag-3", 0, b""),
        (second, "2", "etag-2", CHUNK_BYTES, b"\1"),
        (first, "1", "etag-1", ODD_BYTES, b"\1\0\0\1"),
    ]
    assert store.verify(first, 0, 4) == [1, 2]
    assert store.verify(second, 0, 1) == []
    store.close()


def test_only_a_clean_close_is_clean(tmp_path: Path) -> None:
    """close(clean=False) saves what there is but leaves the mark of a crash."""
    store = Store(tmp_path / "cache")
    add_object(store, 1, 10)
    store.close(clean=False)
    store = Store(tmp_path / "cache")
    assert not store.was_clean
    assert len(store.recovered()) == 1
    store.close()
    store.close()  # twice is once


def test_map_of_a_large_object_is_kept_in_pieces(tmp_path: Path) -> None:
    """Residency on both sides of a segment's edge, and in the short last one, survives a restart."""
    chunks = 2 * SEGMENT_CHUNKS + 1
    size_bytes = (chunks - 1) * CHUNK_BYTES + 1
    store = Store(tmp_path / "cache")
    object_id = store.create("1", "e", size_bytes)
    write_chunks(store, object_id, 1, size_bytes, SEGMENT_CHUNKS - 1, SEGMENT_CHUNKS + 1)
    store.flush()
    write_chunks(store, object_id, 1, size_bytes, chunks - 1, chunks)
    store.close()
    store = Store(tmp_path / "cache")
    resident = [chunk for chunk, there in enumerate(store.recovered()[0].resident) if there]
    assert resident == [SEGMENT_CHUNKS - 1, SEGMENT_CHUNKS, chunks - 1]
    for chunk in resident:
        assert store.verify(object_id, chunk, chunk + 1) == []
    store.close()


def test_files_and_rows_are_made_to_agree(tmp_path: Path) -> None:
    """A row without its file, or with one of another length, goes; so does a file without a row. Others stay."""
    store = Store(tmp_path / "cache")
    gone, short, kept = (add_object(store, seed, ODD_BYTES) for seed in range(3))
    store.flush()
    unsaved = add_object(store, 4, ODD_BYTES)
    os.truncate(store.path(short), ODD_BYTES - 1)
    misplaced = tmp_path / "cache" / "objects" / "misplaced" / os.path.basename(store.path(gone))
    misplaced.parent.mkdir()
    os.rename(store.path(gone), misplaced)
    directory = killed(tmp_path / "cache", tmp_path / "after")
    store.close()
    (directory / "objects" / "misplaced" / "notes.txt").touch()
    store = Store(directory)
    assert [it.object_id for it in store.recovered()] == [kept]
    left = {path.name for path in directory.glob("objects/*/*")}
    assert left == {os.path.basename(store.path(kept)), misplaced.name, "notes.txt"}
    assert not os.path.exists(store.path(unsaved))
    store.close()
    store = Store(directory)
    assert [it.object_id for it in store.recovered()] == [kept]
    store.close()


def test_of_two_objects_of_one_version_the_latest_is_kept(tmp_path: Path) -> None:
    """A crash can leave an object that was to go, and the one that came in its place."""
    store = Store(tmp_path / "cache")
    first, second, other = (store.create("key", etag, ODD_BYTES) for etag in ("v1", "v1", "v2"))
    store.used([second])
    store.flush()
    directory = killed(tmp_path / "cache", tmp_path / "after")
    store.close()
    store = Store(directory)
    assert {it.object_id for it in store.recovered()} == {second, other}
    assert not os.path.exists(store.path(first))
    store.close()


def test_directory_in_place_of_a_file(tmp_path: Path) -> None:
    """What somebody put where an object's file was costs that object, and does not keep the store from starting."""
    store = Store(tmp_path / "cache")
    gone, kept = (add_object(store, seed, ODD_BYTES) for seed in range(2))
    path = Path(store.path(gone))
    store.close()
    path.unlink()
    (path / "notes").mkdir(parents=True)
    for _ in range(2):
        store = Store(tmp_path / "cache")
        assert [it.object_id for it in store.recovered()] == [kept]
        store.close()
    assert (path / "notes").exists()


def test_ids_are_never_given_twice(tmp_path: Path) -> None:
    """Not after a deletion, a restart, a crash with nothing saved, a lost index, or a clock set back."""
    given = []
    directory = tmp_path / "cache"
    for turn in range(4):
        store = Store(directory)
        given += [store.create("k", "e", 10), store.create("k", "e", 10)]
        store.delete(given[-1])
        if turn == 1:
            directory = killed(directory, tmp_path / "after")
        store.close()
        if turn == 2:
            (directory / "index.sqlite").write_bytes(b"no database")
    assert given == sorted(set(given))


def test_clock_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock of the last century, ids still grow."""
    store = Store(tmp_path / "cache")
    first = add_object(store, 1, 10)
    store.close()
    monkeypatch.setattr("s3prefetchfs.store.store.time.time_ns", lambda: 10**9)
    store = Store(tmp_path / "cache")
    assert add_object(store, 2, 10) > first
    store.close()


def test_deleted_object_is_gone(tmp_path: Path) -> None:
    """The file goes at once, the row with the next flush; late calls for the object do nothing."""
    store = Store(tmp_path / "cache")
    object_id = add_object(store, 1, ODD_BYTES)
    store.flush()
    store.read(object_id, 0, 1)
    store.delete(object_id)
    assert not os.path.exists(store.path(object_id))
    assert open_in(tmp_path / "cache" / "objects") == []
    store.landed(object_id, 0, CHUNK_BYTES, [0])
    store.forget_chunks(object_id, 0, 1)
    store.used([object_id])
    store.delete(object_id)
    assert store.verify(object_id, 0, 4) == [0, 1, 2, 3]
    assert not store.read_now(object_id, 0, 1, memoryview(bytearray(1)))
    with pytest.raises(RequestError):
        store.read(object_id, 0, 1)
    store.flush()
    after = Store(killed(tmp_path / "cache", tmp_path / "after"))
    assert after.recovered() == []
    after.close()
    store.close()


def test_deletion_while_reading(tmp_path: Path) -> None:
    """Readers of an object that is deleted under them get its bytes or an error, and leave nothing open."""
    store = Store(tmp_path / "cache")
    for seed in range(20):
        object_id = add_object(store, seed, ODD_BYTES)
        expected = content(seed, 7, ODD_BYTES)
        started = threading.Barrier(3)

        def read_until_deleted(object_id: int, expected: bytes, started: threading.Barrier) -> None:
            started.wait(10)
            try:
                while True:
                    assert store.read(object_id, 7, ODD_BYTES) == expected
            except RequestError:
                return

        def verify_until_deleted(object_id: int, started: threading.Barrier) -> None:
            started.wait(10)
            while not (bad := store.verify(object_id, 0, 1)):
                pass
            assert bad == [0]

        with ThreadPoolExecutor(2) as pool:
            readers = [
                pool.submit(read_until_deleted, object_id, expected, started),
                pool.submit(verify_until_deleted, object_id, started),
            ]
            started.wait(10)
            store.delete(object_id)
            for reader in readers:
                reader.result(10)
        assert open_in(tmp_path / "cache" / "objects") == []
    store.close()


@pytest.mark.parametrize("call", [Store.read, Store.verify])
def test_deletion_between_opening_and_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[Store, int, int, int], object]
) -> None:
    """A file that is opened just before its deletion does not stay open, and its blocks with it."""
    store = Store(tmp_path / "cache")
    object_id = add_object(store, 1, ODD_BYTES)
    open_for_real = os.open

    def open_and_lose(path: str, flags: int, mode: int) -> int:
        fd = open_for_real(path, flags, mode)
        store.delete(object_id)
        return fd

    monkeypatch.setattr(os, "open", open_and_lose)
    with contextlib.suppress(RequestError):
        call(store, object_id, 0, 1)
    monkeypatch.undo()
    assert not os.path.exists(store.path(object_id))
    assert open_in(tmp_path / "cache" / "objects") == []
    store.close()


def test_punched_chunks_free_their_blocks(tmp_path: Path) -> None:
    """A punched range is forgotten and its blocks are the disk's again, up to the short last chunk."""
    store = Store(tmp_path / "cache")
    object_id = add_object(store, 1, ODD_BYTES)
    full = os.stat(store.path(object_id)).st_blocks * 512
    assert full >= ODD_BYTES
    store.punch(object_id, CHUNK_BYTES, ODD_BYTES)
    status = os.stat(store.path(object_id))
    assert status.st_size == ODD_BYTES
    assert CHUNK_BYTES <= status.st_blocks * 512 < 2 * CHUNK_BYTES
    assert store.recovered()[0].resident == b"\1\0\0\0"
    assert store.read(object_id, 0, CHUNK_BYTES) == content(1, 0, CHUNK_BYTES)
    store.punch(object_id, CHUNK_BYTES - 1, CHUNK_BYTES)
    assert os.stat(store.path(object_id)).st_blocks == 0
    store.close()


def test_disk_without_holes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Where holes cannot be punched, chunks are forgotten all the same, and that is said once."""

    def refuse(*_: object) -> int:
        ctypes.set_errno(errno.EOPNOTSUPP)
        return -1

    monkeypatch.setattr("s3prefetchfs.store.files._libc.fallocate", refuse)
    store = Store(tmp_path / "cache")
    object_id = add_object(store, 1, ODD_BYTES)
    store.punch(object_id, 0, CHUNK_BYTES)
    store.punch(object_id, CHUNK_BYTES, ODD_BYTES)
    assert store.recovered()[0].resident == bytes(4)
    assert len([line for line in caplog.messages if "cannot punch holes" in line]) == 1
    store.close()


@pytest.fixture
def few_descriptors() -> Iterator[Callable[[int], None]]:
    """Sets the soft limit of open files, for the length of a test."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda limit: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_open_files_are_bounded(tmp_path: Path, few_descriptors: Callable[[int], None]) -> None:
    """A quarter of the allowed descriptors at most are kept, the most recently used ones."""
    few_descriptors(64)
    store = Store(tmp_path / "cache")
    ids = [add_object(store, seed, 1000) for seed in range(50)]
    for object_id in ids:
        store.read(object_id, 0, 1000)
    assert set(open_in(tmp_path / "cache" / "objects")) == {store.path(object_id) for object_id in ids[-16:]}
    store.close()
    assert open_in(tmp_path / "cache") == []


def test_running_out_of_descriptors(tmp_path: Path, few_descriptors: Callable[[int], None]) -> None:
    """With no descriptor left, the store closes some of its own, and creates, reads, verifies and punches on."""
    store = Store(tmp_path / "cache")
    ids = [add_object(store, seed, 1000) for seed in range(20)]
    for object_id in ids[:10]:
        store.read(object_id, 0, 1000)
    few_descriptors(max(int(name) for name in os.listdir("/proc/self/fd")))
    for seed, object_id in enumerate(ids):
        assert store.read(object_id, 0, 1000) == content(seed, 0, 1000)
    assert store.verify(ids[0], 0, 1) == []
    store.create("one more", "e", 10)
    store.punch(ids[1], 0, 1000)
    store.close()


def test_many_threads_and_few_descriptors(tmp_path: Path, few_descriptors: Callable[[int], None]) -> None:
    """No thread ever reads another object's bytes through a descriptor that was closed and opened again."""
    few_descriptors(64)  # 16 for the cache, shared by 40 objects
    store = Store(tmp_path / "cache")
    ids = [add_object(store, seed, 5000) for seed in range(40)]

    def read(turn: int) -> None:
        choose = random.Random(turn)
        buffer = memoryview(bytearray(5000))
        for _ in range(1500):
            seed = choose.randrange(len(ids))
            start = choose.randrange(4900)
            expected = content(seed, start, 5000)
            assert store.read(ids[seed], start, 5000) == expected
            assert not store.read_now(ids[seed], start, 5000, buffer) or buffer[: 5000 - start] == expected

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(read, turn) for turn in range(4)]:
            done.result(30)
    store.close()


def test_file_that_cannot_be_made(tmp_path: Path) -> None:
    """An object beyond the largest file the disk takes is an error, and leaves nothing behind."""
    store = Store(tmp_path / "cache")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(RequestError) as caught:
            store.create("large", "e", 1001)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.kind is FailureKind.CACHE_IO
    assert store.recovered() == []
    assert list(tmp_path.glob("cache/objects/*/*")) == []
    store.close()


def test_many_objects(tmp_path: Path) -> None:
    """Two thousand objects are kept and come back in the order of their last use."""
    store = Store(tmp_path / "cache")
    ids = [store.create(f"key-{seed}", "e", 4000) for seed in range(2000)]
    store.used(ids[:700])
    order = [it.object_id for it in store.recovered()]
    assert order == ids[700:] + ids[:700]
    store.close()
    store = Store(tmp_path / "cache")
    assert [it.object_id for it in store.recovered()] == order
    store.close()
