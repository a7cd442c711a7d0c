"""`s3prefetchfs plan ...` where there is no mount to speak to; with one: `tests/mount/test_plans.py`."""

from __future__ import annotations

import errno
import functools
from pathlib import Path

import pytest
from click.testing import CliRunner

from s3prefetchfs.cli import main
from s3prefetchfs.cli.plan.control import cannot
from s3prefetchfs.fuse import mounts
from tests.cli.conftest import FakeMount

VERBS = {"submit": ["plan.txt"], "list": [], "cancel": ["mine"]}


@pytest.mark.parametrize("verb", VERBS)
def test_not_a_mount(tmp_path: Path, verb: str) -> None:
    """A directory that is no mount of ours is named."""
    done = CliRunner().invoke(main, ["plan", verb, str(tmp_path), *VERBS[verb]])
    assert done.exit_code == 1
    assert f"no s3prefetchfs is mounted at {tmp_path}" in done.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_a_hung_mount(fake_mount: FakeMount, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    """A daemon that does not answer does not hold the command."""
    mountpoint, _ = fake_mount("mnt", "silent")
    monkeypatch.setattr(mounts, "read_file", functools.partial(mounts.read_file, timeout_s=0.3))
    done = CliRunner().invoke(main, ["plan", verb, str(mountpoint), *VERBS[verb]])
    assert done.exit_code == 1
    assert "does not answer" in done.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_a_mount_without_plans(fake_mount: FakeMount, tmp_path: Path, verb: str) -> None:
    """A daemon that knows no plans, as one of an older version, is an error and no traceback."""
    (tmp_path / "plan.txt").write_text("x\n")
    mountpoint, _ = fake_mount()
    arguments = [str(tmp_path / "plan.txt")] if verb == "submit" else VERBS[verb]
    done = CliRunner().invoke(main, ["plan", verb, str(mountpoint), *arguments])
    assert done.exit_code == 1
    assert done.stderr.startswith("s3prefetchfs: ")


@pytest.mark.parametrize("name", [".x", "x~", "x.tmp", "a/b", "n" * 81, "line\nbreak"])
def test_names(fake_mount: FakeMount, tmp_path: Path, name: str) -> None:
    """A name that the mount would refuse, or take for a scratch file, is refused with what to do."""
    (tmp_path / "plan.txt").write_text("x\n")
    mountpoint, _ = fake_mount()
    arguments = ["plan", "submit", str(mountpoint), str(tmp_path / "plan.txt"), "--name", name]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 1
    assert "--name" in done.stderr


def test_a_file_and_a_mountpoint_that_changed_places(tmp_path: Path) -> None:
    """Who gives the file first is told so."""
    (tmp_path / "plan.txt").write_text("x\n")
    done = CliRunner().invoke(main, ["plan", "submit", str(tmp_path / "plan.txt"), str(tmp_path)])
    assert done.exit_code == 2
    assert "the mountpoint comes first" in done.stderr


def test_errors_have_hints() -> None:
    """The errno that the mount gives becomes a sentence with what to do."""
    error = cannot("submit x", OSError(errno.EFBIG, "File too large"))
    assert (error.message, "256 MiB" in error.hint) == ("the mount cannot submit x: File too large", True)
    assert "dead" in cannot("submit x", OSError(errno.ENOTCONN, "")).message
