"""Reading mountinfo, and files that may never answer."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from s3prefetchfs.fuse import mounts
from s3prefetchfs.fuse.mounts import Mount, parse_mountinfo


def test_mountinfo() -> None:
    """Any number of optional fields, and names with blanks, newlines, backslashes and other bytes."""
    text = (
        rb"22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw" + b"\n"
        rb"40 22 0:45 / /mnt/a\040b\012c\134d ro,nosuid,nodev shared:2 master:1 - fuse.s3prefetchfs s3://my\040b/x ro"
        b"\n"
        rb"41 22 0:46 / /mnt/" + b"\xff" + rb" ro - fuse.sshfs host: rw" + b"\n"
    )
    assert parse_mountinfo(text) == [
        Mount(Path("/"), "ext4", "/dev/sda1"),
        Mount(Path("/mnt/a b\nc\\d"), "fuse.s3prefetchfs", "s3://my b/x"),
        Mount(Path(os.fsdecode(b"/mnt/\xff")), "fuse.sshfs", "host:"),
    ]
    assert [mount.is_ours for mount in parse_mountinfo(text)] == [False, True, False]


def test_mount_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of two mounts at one path the topmost counts; a symbolic link leads to it; a file below is not one."""
    low, high = Mount(tmp_path / "mnt", "ext4", "low"), Mount(tmp_path / "mnt", "ext4", "high")
    monkeypatch.setattr(mounts, "all_mounts", lambda: [low, high])
    (tmp_path / "link").symlink_to("mnt")
    assert mounts.mount_at(tmp_path / "mnt") == high
    assert mounts.mount_at(tmp_path / "link") == high
    assert mounts.mount_at(tmp_path / "mnt/file") is None
    assert mounts.mount_at(tmp_path) is None


def test_own_mounts_are_readable() -> None:
    """The real file is parsed to its end."""
    assert Path("/proc") in {mount.mountpoint for mount in mounts.all_mounts()}


@pytest.mark.parametrize("size_bytes", [0, 1, 65536, 1_000_000])
def test_read_file(tmp_path: Path, size_bytes: int) -> None:
    """The whole content, more than a pipe holds too."""
    content = bytes(index % 251 for index in range(size_bytes))
    (tmp_path / "file").write_bytes(content)
    assert mounts.read_file(tmp_path / "file", 30) == content


def test_read_file_errors(tmp_path: Path) -> None:
    """The error is the one that open() gave."""
    with pytest.raises(FileNotFoundError) as caught:
        mounts.read_file(tmp_path / "missing", 30)
    assert caught.value.errno == errno.ENOENT
    with pytest.raises(IsADirectoryError):
        mounts.read_file(tmp_path, 30)


def test_read_file_is_bounded(tmp_path: Path) -> None:
    """A file that never opens, here a pipe without a writer, costs the time that was given."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TimeoutError):
        mounts.read_file(tmp_path / "pipe", 0.05)


def test_unmount_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not mounted cannot be unmounted, by root or by fusermount3."""
    if os.geteuid() == 0:
        with pytest.raises(OSError, match="Invalid argument"):
            mounts.unmount(tmp_path, lazy=False)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(PermissionError):
        mounts.unmount(tmp_path, lazy=True)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(FileNotFoundError, match="fusermount3 is not installed"):
        mounts.unmount(tmp_path, lazy=True)
