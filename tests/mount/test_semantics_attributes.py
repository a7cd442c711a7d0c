"""What stat, statvfs, xattrs and locks say of files and directories, and that nothing can be written."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from s3prefetchfs.core.extent import CHUNK_BYTES
from tests.mount.conftest import Mount
from tests.mount.mounted import Mounted, forget_inodes
from tests.servers import StandInBucket

SIZES = (0, 1, 511, 512, 513, 10 << 20)


@pytest.fixture(scope="module")
def mnt(module_bucket: StandInBucket, module_mount: Mount) -> Mounted:
    for size in SIZES:
        module_bucket.put_ramp(f"sizes/{size}", size)
    module_bucket.put("dir/file", b"twelve bytes")
    module_bucket.put_ramp("big", 3 * CHUNK_BYTES + 1)
    module_bucket.put_object("attr/x", b"x" * 5000, storage_class="STANDARD_IA")
    return module_mount(module_bucket, "--workers", "1")


@pytest.mark.parametrize("size", SIZES)
def test_size_and_blocks(mnt: Mounted, size: int) -> None:
    """The size is S3's; st_blocks follows from it, so that du and cp see a file without holes."""
    found = os.stat(mnt / "sizes" / str(size))
    assert (found.st_size, found.st_blocks) == (size, -(-size // 512))
    assert found.st_blksize >= 4096
    done = subprocess.run(["du", "--block-size=512", mnt / "sizes" / str(size)], capture_output=True, check=True)
    assert int(done.stdout.split()[0]) == found.st_blocks


def test_sparse_copy(mnt: Mounted, tmp_path: Path) -> None:
    """`cp --sparse=auto` takes all of the bytes."""
    subprocess.run(["cp", "--sparse=auto", mnt / "big", tmp_path / "copy"], check=True)
    assert (tmp_path / "copy").read_bytes() == (mnt / "big").read_bytes()


def test_mtime_is_of_the_object(module_bucket: StandInBucket, mount: Mount) -> None:
    """To the millisecond that S3 gives, by name as in listings."""
    before = time.time()
    module_bucket.put("times/now", b"x")
    after = time.time()
    mnt = mount(module_bucket, "--workers", "1", "--metadata-ttl", "0")
    found = os.stat(mnt / "times/now")
    assert before - 0.001 <= found.st_mtime <= after
    (entry,) = os.scandir(mnt / "times")
    assert entry.stat().st_mtime_ns == found.st_mtime_ns == found.st_ctime_ns


def test_owner_and_permissions(mnt: Mounted) -> None:
    """Files are 0444 and directories 0555, of the user who mounted."""
    for path, mode in (("dir/file", stat.S_IFREG | 0o444), ("dir", stat.S_IFDIR | 0o555), ("", stat.S_IFDIR | 0o555)):
        found = os.stat(mnt / path)
        assert found.st_mode == mode
        assert (found.st_uid, found.st_gid) == (os.getuid(), os.getgid())
        assert found.st_nlink == 1


def test_owner_and_permissions_can_be_chosen(module_bucket: StandInBucket, mount: Mount) -> None:
    """--uid, --gid, --file-mode, --dir-mode."""
    options = ["--uid", "1234", "--gid", "5678", "--file-mode", "0640", "--dir-mode", "0750"]
    mnt = mount(module_bucket, "--workers", "1", *options)
    for path, mode in (("dir/file", 0o640), ("dir", 0o750), ("", 0o750)):
        found = os.stat(mnt / path)
        assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (mode, 1234, 5678)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
@pytest.mark.parametrize(
    ("options", "readable"),
    [
        ([], False),
        (["--allow-other"], True),
        (["--allow-other", "--file-mode", "0400"], False),
        (["--allow-other", "--file-mode", "0400", "--uid", "65534"], True),
    ],
)
def test_other_users(module_bucket: StandInBucket, mount: Mount, options: list[str], readable: bool) -> None:
    """They are let in by --allow-other, and then the permissions apply to them."""
    with tempfile.TemporaryDirectory() as public:
        os.chmod(public, 0o755)
        mnt = mount(module_bucket, "--workers", "1", *options, mountpoint=Path(public) / "mnt")
        done = subprocess.run(["cat", mnt / "dir/file"], user=65534, capture_output=True)
        assert done.stdout == (b"twelve bytes" if readable else b"")
        assert (b"Permission denied" in done.stderr) != readable
        mnt.close()


def test_inode_numbers(mnt: Mounted) -> None:
    """They are stable while mounted, also when the kernel forgot them, and readdir says the same as stat."""

    def numbers() -> dict[str, int]:
        return {entry.name: entry.inode() for entry in os.scandir(mnt / "sizes")}

    before = numbers()
    assert before == {name: os.stat(mnt / "sizes" / name).st_ino for name in before}
    assert len(set(before.values())) == len(SIZES)
    forget_inodes()
    assert numbers() == before
    assert before == {name: os.stat(mnt / "sizes" / name).st_ino for name in before}


def test_statfs(mnt: Mounted) -> None:
    """A large filesystem that is full, whose names may have 255 bytes."""
    found = os.statvfs(mnt.path)
    assert found.f_blocks * found.f_frsize >= 1 << 50
    assert found.f_bavail == 0
    assert found.f_namemax == 255


def test_df(mnt: Mounted, module_bucket: StandInBucket) -> None:
    """`df` shows the source, and does not list the directory that it opens."""
    done = subprocess.run(["df", "-h", mnt.path], capture_output=True, text=True, check=True)
    assert f"s3://{module_bucket.name}" in done.stdout
    assert not module_bucket.log()


def test_xattrs(mnt: Mounted) -> None:
    """ETag, key, storage class, and how much is cached."""
    etag = hashlib.md5(b"x" * 5000).hexdigest()
    path = mnt / "attr/x"
    names = ["user.s3.etag", "user.s3.key", "user.s3.storage_class", "user.s3prefetchfs.cached_bytes"]
    assert sorted(os.listxattr(path)) == names
    assert [os.getxattr(path, name) for name in names] == [etag.encode(), b"attr/x", b"STANDARD_IA", b"0"]
    path.read_bytes()
    assert int(os.getxattr(path, "user.s3prefetchfs.cached_bytes")) >= 5000
    assert os.listxattr(mnt / "attr") == ["user.s3.key"]
    assert os.getxattr(mnt / "attr", "user.s3.key") == b"attr/"
    with pytest.raises(OSError, match=os.strerror(errno.ENODATA)):
        os.getxattr(path, "user.other")


WRITES: dict[str, Callable[[Path], object]] = {
    "open for writing": lambda root: os.open(root / "dir/file", os.O_WRONLY),
    "open for both": lambda root: os.open(root / "dir/file", os.O_RDWR),
    "truncate on open": lambda root: os.open(root / "dir/file", os.O_RDONLY | os.O_TRUNC),
    "create": lambda root: os.open(root / "dir/new", os.O_WRONLY | os.O_CREAT),
    "mkdir": lambda root: os.mkdir(root / "new"),
    "rmdir": lambda root: os.rmdir(root / "dir"),
    "unlink": lambda root: os.unlink(root / "dir/file"),
    "rename": lambda root: os.rename(root / "dir/file", root / "dir/other"),
    "link": lambda root: os.link(root / "dir/file", root / "dir/other"),
    "symlink": lambda root: os.symlink("x", root / "dir/other"),
    "mkfifo": lambda root: os.mkfifo(root / "dir/other"),
    "chmod": lambda root: os.chmod(root / "dir/file", 0o777),
    "chown": lambda root: os.chown(root / "dir/file", 1, 1),
    "utime": lambda root: os.utime(root / "dir/file"),
    "truncate": lambda root: os.truncate(root / "dir/file", 0),
    "setxattr": lambda root: os.setxattr(root / "dir/file", "user.x", b"x"),
    "removexattr": lambda root: os.removexattr(root / "dir/file", "user.s3.key"),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_fail(mnt: Mounted, name: str) -> None:
    """Every operation that would change something is EROFS, and changes nothing."""
    with pytest.raises(OSError, match=os.strerror(errno.EROFS)):
        WRITES[name](mnt.path)
    assert (mnt / "dir/file").read_bytes() == b"twelve bytes"


def test_locks(mnt: Mounted) -> None:
    """flock and read locks of fcntl work, as HDF5 wants them, between processes of this host."""
    with open(mnt / "dir/file", "rb") as one, open(mnt / "dir/file", "rb") as other:
        fcntl.flock(one, fcntl.LOCK_SH)
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(other, fcntl.LOCK_UN)
        fcntl.flock(one, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.lockf(one, fcntl.LOCK_SH)


def test_the_control_directory_is_reached_by_name_only(mnt: Mounted) -> None:
    """`.s3prefetchfs/` is not listed, can be entered, and holds what the daemon tells and takes."""
    assert ".s3prefetchfs" not in os.listdir(mnt.path)
    control = mnt / ".s3prefetchfs"
    assert control.is_dir()
    assert os.listdir(control) == ["status.json", "opens", "plans"]
    assert (control / "status.json").read_bytes().startswith(b"{")
    assert not (control / "other").exists()
    assert not (mnt / "dir/.s3prefetchfs").exists()
    with pytest.raises(OSError, match=os.strerror(errno.EROFS)):
        os.open(control / "status.json", os.O_WRONLY)


def test_the_control_directory_cannot_be_shadowed(module_bucket: StandInBucket, mount: Mount) -> None:
    """A key of that name is not listed, and does not hide the status."""
    module_bucket.put("control/.s3prefetchfs/status.json", b"a fake")
    module_bucket.put("control/x", b"x")
    mnt = mount(module_bucket, "--workers", "1", source=f"{module_bucket.name}/control")
    assert os.listdir(mnt.path) == ["x"]
    assert mnt.status()["bucket"] == module_bucket.name
