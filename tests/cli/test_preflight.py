"""Every check that comes before anything is started, against the real thing where there is one."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
from pathlib import Path

import pytest

from s3prefetchfs.cli import preflight
from s3prefetchfs.config import Config
from s3prefetchfs.errors import UserError
from s3prefetchfs.fuse import mounts
from tests.cli.conftest import FakeMount


@pytest.fixture
def config(tmp_path: Path) -> Config:
    if not os.access("/dev/fuse", os.W_OK):
        pytest.skip("needs /dev/fuse")
    (tmp_path / "empty").mkdir()
    return Config(bucket="my-bucket", mountpoint=tmp_path / "empty", cache_dir=tmp_path / "cache")


def refused(config: Config, message: str, hint: str = "") -> None:
    with pytest.raises(UserError) as caught:
        preflight.check(config)
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.exit_code == 1


def test_all_is_well(config: Config, tmp_path: Path) -> None:
    """An empty directory passes; the mountpoint comes back without symbolic links."""
    assert preflight.check(config) == config
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    linked = dataclasses.replace(config, mountpoint=tmp_path / "link")
    assert preflight.check(linked) == config


def test_missing_mountpoint(config: Config, tmp_path: Path) -> None:
    """It is not made by guessing."""
    missing = dataclasses.replace(config, mountpoint=tmp_path / "missing")
    refused(missing, f"the mountpoint {tmp_path}/missing does not exist", "mkdir -p")


def test_mountpoint_is_a_file(config: Config, tmp_path: Path) -> None:
    """A file, or something below one, is no mountpoint."""
    (tmp_path / "file").touch()
    refused(dataclasses.replace(config, mountpoint=tmp_path / "file"), "is not a directory")
    refused(dataclasses.replace(config, mountpoint=tmp_path / "file/below"), "is not a directory")


def test_nonempty_mountpoint(config: Config) -> None:
    """What the mount would hide is named; --nonempty accepts that."""
    (config.mountpoint / "precious").touch()
    refused(config, "is not empty: it holds 'precious'", "--nonempty")
    preflight.check(dataclasses.replace(config, nonempty=True))


def test_another_mount(config: Config) -> None:
    """Somebody else's mount is not hidden unless --nonempty says so."""
    command = ["mount", "-t", "tmpfs", "memory", config.mountpoint]
    if subprocess.run(command, capture_output=True, timeout=60).returncode != 0:
        pytest.skip("needs to mount a tmpfs")
    try:
        refused(config, f"{config.mountpoint} already is a mountpoint, of memory (tmpfs)", "--nonempty")
        preflight.check(dataclasses.replace(config, nonempty=True))
    finally:
        mounts.unmount(config.mountpoint, lazy=False)


def test_already_mounted_by_us(config: Config, fake_mount: FakeMount) -> None:
    """A second mount on a live one is refused, with --nonempty too."""
    mountpoint, _ = fake_mount()
    twice = dataclasses.replace(config, mountpoint=mountpoint)
    refused(twice, "already mounted by s3prefetchfs, with fake", "s3prefetchfs umount")
    refused(dataclasses.replace(twice, nonempty=True), "already mounted by s3prefetchfs")


def test_already_mounted_and_hung(config: Config, fake_mount: FakeMount, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hung mount is told from a live one, in bounded time."""
    mountpoint, _ = fake_mount("mnt", "silent")
    monkeypatch.setattr(mounts, "read_file", functools.partial(mounts.read_file, timeout_s=0.3))
    refused(dataclasses.replace(config, mountpoint=mountpoint), "whose daemon does not answer", "umount --lazy")


def test_dead_mount_is_cleared(config: Config, fake_mount: FakeMount, caplog: pytest.LogCaptureFixture) -> None:
    """What a killed daemon left is detached, even with somebody still in it, and logged in one line."""
    mountpoint, process = fake_mount()
    sleeper = subprocess.Popen(["sleep", "60"], cwd=mountpoint)
    try:
        process.kill()
        process.wait()
        preflight.check(dataclasses.replace(config, mountpoint=mountpoint))
    finally:
        sleeper.kill()
        sleeper.wait()
    assert mounts.mount_at(mountpoint) is None
    (line,) = caplog.messages
    assert line == f"cleared a mount whose daemon was dead mountpoint={mountpoint}"


def test_no_dev_fuse(config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No device, and one that cannot be opened, are told apart."""
    monkeypatch.setattr(preflight, "_DEVICE", tmp_path / "fuse")
    refused(config, f"there is no {tmp_path}/fuse", "modprobe fuse")
    (tmp_path / "fuse").mkdir()
    refused(config, f"cannot open {tmp_path}/fuse: Is a directory")


def test_user_without_fusermount(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only root can do without it."""
    monkeypatch.setenv("PATH", "/nowhere")
    preflight.check(config)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    refused(config, "fusermount3 is not installed", "package fuse3")


def test_user_with_allow_other(config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Root decides in fuse.conf whether users may; a comment decides nothing."""
    conf = tmp_path / "fuse.conf"
    monkeypatch.setattr(preflight, "_FUSE_CONF", conf)
    shared = dataclasses.replace(config, allow_other=True)
    preflight.check(shared)  # as root
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    refused(shared, "has no line `user_allow_other`")
    conf.write_text("#user_allow_other\nmount_max = 10\n")
    refused(shared, "has no line `user_allow_other`", f"add that line to {conf}")
    conf.write_text("mount_max = 10\n  user_allow_other \n")
    preflight.check(shared)


def test_cache_directory(tmp_path: Path) -> None:
    """It is made, for its owner only, and must be writable."""
    preflight.check_cache_dir(tmp_path / "a/b")
    assert (tmp_path / "a/b").stat().st_mode & 0o777 == 0o700
    assert list((tmp_path / "a/b").iterdir()) == []
    (tmp_path / "file").touch()
    for path, reason in [
        (tmp_path / "file", "it is not a directory"),
        (tmp_path / "file/below", "Not a directory"),
        (Path("/proc/cache"), "No such file or directory"),
    ]:
        with pytest.raises(UserError, match=f"{path} cannot be written: {reason}"):
            preflight.check_cache_dir(path)
