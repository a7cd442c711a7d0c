"""`s3prefetchfs mount`: what reaches the caller, with a daemon that does what the test asks.

The command runs as a process, because it forks and because its stdio is what is tested.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import ROOT

pytestmark = pytest.mark.skipif(not os.access("/dev/fuse", os.W_OK), reason="needs /dev/fuse")


@pytest.fixture
def mountpoint(tmp_path: Path) -> Path:
    path = tmp_path / "mnt"
    path.mkdir()
    return path


def command(what: str, mountpoint: Path, *arguments: str) -> list[str]:
    cache_dir = mountpoint.parent / "cache"
    program = [sys.executable, "-m", "tests.cli.fake_daemon", what, "mount", "my-bucket/train", str(mountpoint)]
    return [*program, "--cache-dir", str(cache_dir), *arguments]


def mount(what: str, mountpoint: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(what, mountpoint, *arguments), cwd=ROOT, capture_output=True, text=True, timeout=60)


def daemon_pid(mountpoint: Path) -> int:
    return int((mountpoint.parent / "cache/pid").read_text())


def log_file(mountpoint: Path) -> Path:
    (path,) = (mountpoint.parent / "cache").glob("my-bucket-*.log")
    return path


def assert_gone(pid: int) -> None:
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_leaves_a_daemon_behind(mountpoint: Path) -> None:
    """It returns 0 once the daemon is ready, though that has processes with our stdio; the daemon is on its own."""
    done = mount("serve", mountpoint)
    pid = daemon_pid(mountpoint)
    pidfd = os.pidfd_open(pid)
    try:
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert os.getsid(pid) == pid
        assert os.readlink(f"/proc/{pid}/cwd") == "/"
        assert os.readlink(f"/proc/{pid}/fd/0") == "/dev/null"
        assert os.readlink(f"/proc/{pid}/fd/1") == str(log_file(mountpoint))
    finally:
        os.kill(pid, signal.SIGTERM)
    assert select.select([pidfd], [], [], 60)[0]
    os.close(pidfd)
    text = log_file(mountpoint).read_text()
    assert "printed before it is ready\n" in text
    assert "stdin holds '', working in /\n" in text


def test_warnings_reach_the_caller(mountpoint: Path) -> None:
    """What the daemon would have its user know is on the terminal, not only in a log that nobody reads."""
    done = mount("warn", mountpoint)
    lines = ["s3prefetchfs: warning: the prefix is empty", "s3prefetchfs: warning: the disk is small"]
    assert (done.returncode, done.stdout, done.stderr.splitlines()) == (0, "", lines)


def test_a_failure_reaches_the_caller(mountpoint: Path) -> None:
    """Message, hint and exit code of the daemon are those of the command; the log has it too."""
    done = mount("refuse", mountpoint)
    assert done.returncode == 7
    assert done.stderr == "s3prefetchfs: no such bucket: my-bucket\n  check its name\n"
    assert "ERROR s3prefetchfs.cli.background: no such bucket: my-bucket" in log_file(mountpoint).read_text()
    assert_gone(daemon_pid(mountpoint))


def test_a_bug_reaches_the_caller(mountpoint: Path) -> None:
    """An exception that nobody foresaw is one line for the caller and a traceback in the log."""
    done = mount("crash", mountpoint)
    assert done.returncode == 1
    assert done.stderr.startswith("s3prefetchfs: internal error: RuntimeError: a bug\n")
    assert str(log_file(mountpoint)) in done.stderr
    assert "Traceback" in log_file(mountpoint).read_text()


def test_a_silent_death_is_told(mountpoint: Path) -> None:
    """A killed daemon cannot say why; the command says how it ended and where to look."""
    done = mount("die", mountpoint)
    assert done.returncode == 1
    assert "the daemon died without a word: killed by SIGKILL" in done.stderr
    assert str(log_file(mountpoint)) in done.stderr


def test_leaving_early_is_a_failure(mountpoint: Path) -> None:
    """A daemon that returns before it was ready mounted nothing, whatever its exit code."""
    done = mount("leave", mountpoint)
    assert done.returncode == 1
    assert "the daemon ended before it was ready" in done.stderr


def test_a_start_is_bounded(mountpoint: Path) -> None:
    """A daemon that does not get ready is ended, by force if it must be."""
    done = mount("hang", mountpoint, "--mount-timeout", "0")
    assert done.returncode == 1
    assert "the mount was not usable after 1 s and was given up" in done.stderr
    assert_gone(daemon_pid(mountpoint))


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """Whatever starts us in the background of a script has us, and all that we start, ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_interrupting_a_start(mountpoint: Path) -> None:
    """Ctrl-C while waiting ends the daemon too, which is in a session of its own."""
    process = subprocess.Popen(
        command("hang", mountpoint, "--mount-timeout", "50s"), cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    pid_file = mountpoint.parent / "cache/pid"
    while not (pid_file.exists() and pid_file.read_text()):
        assert process.poll() is None
        select.select([], [], [], 0.02)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert stderr.strip() == "Aborted!"
    assert_gone(daemon_pid(mountpoint))


def test_foreground(mountpoint: Path) -> None:
    """The daemon runs in the command's own process, logs to stderr, and its exit code is the command's."""
    process = subprocess.Popen(
        command("serve", mountpoint, "-f"), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "printed before it is ready\n"
    assert process.stdout.readline() == f"stdin holds '', working in {ROOT}\n"
    assert daemon_pid(mountpoint) == process.pid
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert not list((mountpoint.parent / "cache").glob("*.log"))


def test_foreground_failure(mountpoint: Path) -> None:
    """The same words and exit code as from the background."""
    done = mount("refuse", mountpoint, "--foreground")
    assert done.returncode == 7
    assert done.stderr == "s3prefetchfs: no such bucket: my-bucket\n  check its name\n"


@pytest.mark.parametrize("foreground", ["--foreground", "--no-foreground"])
def test_checks_come_first(mountpoint: Path, foreground: str) -> None:
    """What can be known to fail starts no daemon."""
    (mountpoint / "file").touch()
    done = mount("serve", mountpoint, foreground)
    assert done.returncode == 1
    assert "is not empty" in done.stderr
    assert not (mountpoint.parent / "cache/pid").exists()


def test_log_file(mountpoint: Path, tmp_path: Path) -> None:
    """--log-file says where the log goes; one that cannot be written is refused."""
    done = mount("crash", mountpoint, "--log-file", str(tmp_path / "my.log"))
    assert str(tmp_path / "my.log") in done.stderr
    assert re.search(r"Z ERROR s3prefetchfs\.\S+: the daemon failed\n    Traceback", (tmp_path / "my.log").read_text())
    done = mount("serve", mountpoint, "--log-file", "/proc/my.log")
    assert done.returncode == 1
    assert "cannot write the log /proc/my.log: No such file or directory" in done.stderr


def test_mount8_form(mountpoint: Path) -> None:
    """What mount(8) runs for an fstab line mounts."""
    program = [sys.executable, "-m", "tests.cli.fake_daemon", "refuse", "my-bucket", str(mountpoint)]
    options = f"ro,noexec,dev,suid,cache_dir={mountpoint.parent}/cache"
    done = subprocess.run([*program, "-o", options], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr == "s3prefetchfs: no such bucket: my-bucket\n  check its name\n"
