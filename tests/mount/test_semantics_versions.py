"""How long metadata is believed, and what an open file shows when its object is replaced."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import pytest

from s3prefetchfs.core.extent import CHUNK_BYTES
from tests.mount.conftest import Mount
from tests.mount.mounted import Mounted, eventually
from tests.s3stub import ramp
from tests.servers import StandInBucket

MIB = 1 << 20
TTL_S = 1.0
"""Short enough to wait for; what must hold within it is asked right after what it counts from."""

LARGE_BYTES = 300 * MIB
"""Too large for read-ahead to have all of it when its first bytes are read."""


@pytest.fixture(scope="module")
def believing(module_bucket: StandInBucket, module_mount: Mount) -> Mounted:
    """What it learnt it believes for ever."""
    return module_mount(module_bucket, "--workers", "1", "--metadata-ttl", "indefinite")


@pytest.fixture(scope="module")
def doubting(module_bucket: StandInBucket, module_mount: Mount) -> Mounted:
    """It believes nothing."""
    return module_mount(module_bucket, "--workers", "1", "--metadata-ttl", "0")


@pytest.fixture(scope="module")
def brief(module_bucket: StandInBucket, module_mount: Mount) -> Mounted:
    """It believes for TTL_S."""
    return module_mount(module_bucket, "--workers", "1", "--metadata-ttl", f"{TTL_S}s")


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    """A key of the test's own."""
    name: str = request.node.name
    return f"dir-{name}/object"


def drop_pages(fd: int) -> None:
    """Have the kernel forget the pages of this file, so that reads reach the daemon."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def read_all(fd: int, size: int) -> bytes:
    return b"".join(os.pread(fd, MIB, at) for at in range(0, size, MIB))


def read_again(path: Path) -> bytes:
    """All of a file, opened anew; as a program does that tries once more after ESTALE."""
    try:
        return path.read_bytes()
    except OSError as error:
        assert error.errno == errno.ESTALE
        return path.read_bytes()


# ------------------------------------------------------------------------------------------- the TTL


def test_no_ttl_asks_each_time(doubting: Mounted, module_bucket: StandInBucket, key: str) -> None:
    """With --metadata-ttl 0 presence, absence, sizes and listings are those of the moment."""
    path = doubting / key
    assert not path.exists()
    module_bucket.put(key, b"one")
    assert path.stat().st_size == 3
    module_bucket.put(key, b"seven..")
    assert path.stat().st_size == 7
    assert path.read_bytes() == b"seven.."
    assert os.listdir(path.parent) == ["object"]
    module_bucket.put(key + "2", b"x")
    assert sorted(os.listdir(path.parent)) == ["object", "object2"]
    module_bucket.delete(key)
    assert not path.exists()


def test_an_indefinite_ttl_asks_once(believing: Mounted, module_bucket: StandInBucket, key: str) -> None:
    """Attributes and listings stay as they were found, without another request."""
    module_bucket.put(key, b"one")
    path = believing / key
    assert path.stat().st_size == 3
    assert os.listdir(path.parent) == ["object"]
    module_bucket.clear_log()
    module_bucket.put(key, b"seven..")
    module_bucket.put(key + "2", b"x")
    assert path.stat().st_size == 3
    assert os.listdir(path.parent) == ["object"]
    assert not (path.parent / "object2").exists()
    assert not module_bucket.log("LIST")


def test_a_change_shows_when_the_ttl_is_over(brief: Mounted, module_bucket: StandInBucket, key: str) -> None:
    """A replaced, a new and a deleted object are seen in time, by name and in listings."""
    module_bucket.put(key, b"one")
    path = brief / key
    assert path.stat().st_size == 3
    os.listdir(path.parent)
    module_bucket.put(key, b"seven..")
    module_bucket.put(key + "2", b"x")
    assert eventually(lambda: path.stat().st_size, lambda size: size != 3) == 7
    eventually(lambda: sorted(os.listdir(path.parent)), lambda names: names == ["object", "object2"])
    module_bucket.delete(key)
    eventually(path.exists, lambda found: not found)


def test_a_reopened_file_is_the_new_one(brief: Mounted, module_bucket: StandInBucket, key: str) -> None:
    """Size, time and content of the same version, though the old one's pages are cached (same size, new bytes)."""
    module_bucket.put_ramp(key, 3 * MIB, 1)
    path = brief / key
    old = path.stat()
    assert path.read_bytes() == ramp(0, 3 * MIB, 1)
    module_bucket.put_ramp(key, 3 * MIB, 2)
    new = eventually(path.stat, lambda found: found.st_ino != old.st_ino)
    assert new.st_mtime >= old.st_mtime
    assert path.read_bytes() == ramp(0, 3 * MIB, 2)


def test_absence_is_believed_too(believing: Mounted, module_bucket: StandInBucket, key: str) -> None:
    """A name that was not found is not asked for again within the TTL, by any of its readers."""
    path = believing / key
    assert not path.exists()
    module_bucket.clear_log()
    module_bucket.put(key, b"x")
    for name in (path, path.parent):
        assert not name.exists()
    assert not module_bucket.log()


# ------------------------------------------------------------------------------------------- open versions


def test_cached_bytes_of_a_replaced_object(doubting: Mounted, module_bucket: StandInBucket, key: str) -> None:
    """A handle opened before goes on with the old version where that is cached; a new open has the new one."""
    size = 3 * MIB + 5
    module_bucket.put_ramp(key, size, 1)
    fd = os.open(doubting / key, os.O_RDONLY)
    try:
        assert read_all(fd, size) == ramp(0, size, 1)
        module_bucket.put_ramp(key, size + 1, 2)
        drop_pages(fd)
        module_bucket.clear_log()
        assert read_all(fd, size) == ramp(0, size, 1)
        assert os.fstat(fd).st_size == size
        assert not module_bucket.log("GET")
        assert (doubting / key).read_bytes() == ramp(0, size + 1, 2)
        drop_pages(fd)
        assert read_all(fd, size) == ramp(0, size, 1)
    finally:
        os.close(fd)


def test_bytes_of_a_replaced_object_that_are_not_cached(
    believing: Mounted, module_bucket: StandInBucket, key: str
) -> None:
    """Such a read fails with ESTALE, never with the other version's bytes; opening again has the new one at once."""
    module_bucket.put_ramp(key, LARGE_BYTES, 1)
    path = believing / key
    fd = os.open(path, os.O_RDONLY)
    try:
        assert os.pread(fd, MIB, 0) == ramp(0, MIB, 1)
        module_bucket.put_ramp(key, MIB + 1, 2)
        with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
            os.pread(fd, 4096, LARGE_BYTES - MIB)
        assert os.pread(fd, 4096, 0) == ramp(0, 4096, 1)
    finally:
        os.close(fd)
    assert read_again(path) == ramp(0, MIB + 1, 2)
    assert path.stat().st_size == MIB + 1


def test_versions_are_never_mixed(believing: Mounted, module_bucket: StandInBucket, key: str) -> None:
    """A sequential read over the replacement: old bytes to some point, then ESTALE; not one of the new."""
    module_bucket.put_ramp(key, LARGE_BYTES, 1)
    at = 0
    with pytest.raises(OSError, match=os.strerror(errno.ESTALE)), open(believing / key, "rb", buffering=0) as file:
        while piece := file.read(MIB):
            assert piece == ramp(at, at + len(piece), 1)
            at += len(piece)
            if at == 10 * MIB:
                module_bucket.put_ramp(key, LARGE_BYTES, 2)
    assert 10 * MIB <= at < LARGE_BYTES


@pytest.mark.parametrize("size", [MIB // 2, 2 * MIB, 0])
def test_a_size_that_changed_since_it_was_seen(
    believing: Mounted, module_bucket: StandInBucket, key: str, size: int
) -> None:
    """Replaced by a shorter, longer or empty one between stat and open: no padding, no cut; a second open is right."""
    module_bucket.put_ramp(key, MIB, 1)
    path = believing / key
    assert path.stat().st_size == MIB
    module_bucket.put_ramp(key, size, 2)
    assert read_again(path) == ramp(0, size, 2)
    assert path.stat().st_size == size


def test_the_same_size_and_other_bytes(believing: Mounted, module_bucket: StandInBucket, key: str) -> None:
    """Replaced between stat and open by as many bytes: the ETag tells."""
    module_bucket.put_ramp(key, MIB, 1)
    path = believing / key
    path.stat()
    module_bucket.put_ramp(key, MIB, 2)
    assert read_again(path) == ramp(0, MIB, 2)


def test_a_mapping_keeps_its_version(doubting: Mounted, module_bucket: StandInBucket, key: str) -> None:
    """Pages of a mapped, replaced object are the old ones as long as they are cached, in memory or on disk."""
    size = 2 * MIB
    module_bucket.put_ramp(key, size, 1)
    with open(doubting / key, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert mapped[:] == ramp(0, size, 1)
        module_bucket.put_ramp(key, size, 2)
        assert (doubting / key).read_bytes() == ramp(0, size, 2)
        assert mapped[:] == ramp(0, size, 1)


def test_an_object_deleted_while_open(believing: Mounted, module_bucket: StandInBucket, key: str) -> None:
    """What is cached can be read, the rest is ENOENT, and so is the name from then on."""
    module_bucket.put_ramp(key, LARGE_BYTES, 1)
    path = believing / key
    with open(path, "rb", buffering=0) as file:
        assert file.read(CHUNK_BYTES) == ramp(0, CHUNK_BYTES, 1)
        module_bucket.delete(key)
        with pytest.raises(FileNotFoundError):
            os.pread(file.fileno(), 4096, LARGE_BYTES - MIB)
    eventually(path.exists, lambda found: not found)


@pytest.mark.parametrize("etag", ["weak", "unquoted"])
def test_the_etag_is_opaque(doubting: Mounted, module_bucket: StandInBucket, key: str, etag: str) -> None:
    """Weak and unquoted ones are as good as others."""
    module_bucket.configure(faults=[{"etag": etag}])
    module_bucket.put_ramp(key, 2 * MIB, 1)
    assert (doubting / key).read_bytes() == ramp(0, 2 * MIB, 1)
    module_bucket.put_ramp(key, 2 * MIB, 2)
    assert (doubting / key).read_bytes() == ramp(0, 2 * MIB, 2)
