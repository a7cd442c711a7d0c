"""`s3prefetchfs umount` on real mounts: free, busy, dead, hung, and not ours."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from s3prefetchfs.cli import main
from s3prefetchfs.fuse import mounts
from tests.cli.conftest import FakeMount


@pytest.fixture(autouse=True)
def _go_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The command leaves the working directory; the other tests want it back."""
    monkeypatch.chdir(tmp_path)


def umount(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["umount", *map(str, arguments)])


def test_unmounts_and_waits(fake_mount: FakeMount) -> None:
    """When it returns, the mount and its daemon are gone."""
    mountpoint, process = fake_mount()
    done = umount(mountpoint)
    assert (done.exit_code, done.output) == (0, "")
    assert mounts.mount_at(mountpoint) is None
    assert process.poll() == 0


def test_as_a_user(fake_mount: FakeMount, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without root, fusermount3 does it, and tells busy from done."""
    mountpoint, process = fake_mount()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with (mountpoint / "data").open("rb"):
        assert f"{mountpoint} is busy" in umount(mountpoint).stderr
    assert umount(mountpoint).exit_code == 0
    assert process.poll() == 0


def test_through_a_link(fake_mount: FakeMount, tmp_path: Path) -> None:
    """A symbolic link to the mountpoint will do."""
    mountpoint, process = fake_mount("a mount\twith\\ odd\nname")
    (tmp_path / "link").symlink_to(mountpoint)
    assert umount(tmp_path / "link").exit_code == 0
    assert process.poll() == 0


def test_from_inside(fake_mount: FakeMount, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's own working directory does not keep the mount busy."""
    mountpoint, _ = fake_mount()
    monkeypatch.chdir(mountpoint)
    assert umount(".").exit_code == 0


def test_busy(fake_mount: FakeMount) -> None:
    """It names who works in it and who has what open, exits 1, and changes nothing."""
    mountpoint, process = fake_mount()
    sleeper = subprocess.Popen(["sleep", "60"], cwd=mountpoint)
    try:
        with (mountpoint / "data").open("rb") as file:
            done = umount(mountpoint)
            assert done.exit_code == 1
            assert f"{mountpoint} is busy, and stays mounted" in done.stderr
            assert f"sleep (pid {sleeper.pid}): works in {mountpoint}\n" in done.stderr
            assert f"(pid {os.getpid()}): has open {mountpoint}/data\n" in done.stderr
            assert "--lazy" in done.stderr
            assert os.pread(file.fileno(), 3, 0) == b"\0\1\2"
    finally:
        sleeper.kill()
        sleeper.wait()
    assert process.poll() is None
    assert umount(mountpoint).exit_code == 0


def test_lazy(fake_mount: FakeMount) -> None:
    """A busy mount is detached at once; who still has a file reads on, and the daemon ends with the last of them."""
    mountpoint, process = fake_mount()
    with (mountpoint / "data").open("rb") as file:
        done = umount("--lazy", mountpoint)
        assert done.exit_code == 0
        assert f"(pid {os.getpid()}): has open {mountpoint}/data\n" in done.stderr
        assert mounts.mount_at(mountpoint) is None
        assert process.poll() is None
        assert os.pread(file.fileno(), 3, 4096) == b"\0\1\2"
    assert process.wait(60) == 0


def test_a_mount_inside(fake_mount: FakeMount) -> None:
    """Another mount inside keeps it busy, though no process does; it is named."""
    mountpoint, process = fake_mount()
    inner = mountpoint / ".s3prefetchfs"
    if subprocess.run(["mount", "-t", "tmpfs", "none", inner], capture_output=True, timeout=60).returncode != 0:
        pytest.skip("needs to mount a tmpfs")
    try:
        done = umount(mountpoint)
    finally:
        mounts.unmount(inner, lazy=False)
    assert done.exit_code == 1
    assert f"unmount these first: {inner}" in done.stderr
    assert process.poll() is None


def test_dead(fake_mount: FakeMount) -> None:
    """A mount whose daemon was killed is cleared, though somebody still works in it."""
    mountpoint, process = fake_mount()
    sleeper = subprocess.Popen(["sleep", "60"], cwd=mountpoint)
    try:
        process.kill()
        process.wait()
        done = umount(mountpoint)
    finally:
        sleeper.kill()
        sleeper.wait()
    assert (done.exit_code, done.stderr) == (0, f"cleared {mountpoint}, whose daemon was dead\n")
    assert list(mountpoint.iterdir()) == []


def test_hung(fake_mount: FakeMount, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that never answers cannot say who it is, but its mount goes."""
    mountpoint, _ = fake_mount("mnt", "silent")
    monkeypatch.setattr(mounts, "read_file", functools.partial(mounts.read_file, timeout_s=0.3))
    done = umount("--lazy", mountpoint)
    assert done.exit_code == 0
    assert "was not waited for" in done.stderr
    assert mounts.mount_at(mountpoint) is None


def test_a_daemon_that_stays(fake_mount: FakeMount, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is waited for so long and no longer; then it is named."""
    mountpoint, _ = fake_mount()
    sleeper = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr("s3prefetchfs.cli.umount._DAEMON_TIMEOUT_S", 0.1)
    monkeypatch.setattr(mounts, "read_file", lambda path: b'{"pid": %d}' % sleeper.pid)
    try:
        done = umount(mountpoint)
    finally:
        sleeper.kill()
        sleeper.wait()
    assert done.exit_code == 1
    assert f"its daemon (pid {sleeper.pid}) still runs" in done.stderr


def test_nothing_mounted(tmp_path: Path) -> None:
    """An error, unless --quiet says that it is fine."""
    done = umount(tmp_path)
    assert (done.exit_code, done.stderr.splitlines()[0]) == (1, f"s3prefetchfs: nothing is mounted at {tmp_path}")
    done = umount("--quiet", tmp_path)
    assert (done.exit_code, done.output) == (0, "")


def test_not_ours() -> None:
    """Other filesystems are left alone."""
    done = umount("/proc")
    assert done.exit_code == 1
    assert "/proc is not an s3prefetchfs but" in done.stderr
    assert mounts.mount_at(Path("/proc")) is not None


def test_by_configuration(fake_mount: FakeMount, tmp_path: Path) -> None:
    """What systemd does after a stop: the mountpoint comes from the file."""
    mountpoint, process = fake_mount()
    file = tmp_path / "mount.toml"
    file.write_text(f"bucket = 'my-bucket'\nmountpoint = '{mountpoint}'\n")
    process.kill()
    process.wait()
    for _ in range(2):  # the second time nothing is left to do
        assert umount("--quiet", "--lazy", "--config", file).exit_code == 0
    assert mounts.mount_at(mountpoint) is None
