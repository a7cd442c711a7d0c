"""One mount per cache directory, and directories that cannot be one."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from s3prefetchfs.errors import UserError
from s3prefetchfs.store.store import Store

HOLDER = """
import sys, pathlib
from s3prefetchfs.store.store import Store
store = Store(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the store in `tmp_path/cache` open."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "cache")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_second_mount_is_refused(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    """The message names the process that has the directory; once that is killed, the directory is free."""
    with pytest.raises(UserError, match=rf"in use by another mount \(pid {holder.pid}\)") as caught:
        Store(tmp_path / "cache")
    assert "--cache-dir" in caught.value.hint
    holder.kill()
    holder.wait()
    store = Store(tmp_path / "cache")
    with pytest.raises(UserError, match=rf"\(pid {os.getpid()}\)"):
        Store(tmp_path / "cache")
    store.close()


def test_child_process_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A worker that outlives the store, with every descriptor it could inherit, does not hold the directory."""
    store = Store(tmp_path / "cache")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False) as child:
        store.close()
        Store(tmp_path / "cache").close()
        child.kill()


def test_directory_is_private(tmp_path: Path) -> None:
    """Missing directories are made; the cache's own is for its user only."""
    Store(tmp_path / "a" / "cache").close()
    assert stat.S_IMODE((tmp_path / "a" / "cache").stat().st_mode) == 0o700


def test_failed_start_lets_go(tmp_path: Path) -> None:
    """A store that could not start does not keep the directory locked."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "objects").touch()
    for _ in range(2):
        with pytest.raises(UserError, match="cannot use the cache directory"):
            Store(tmp_path / "cache")
    (tmp_path / "cache" / "objects").unlink()
    Store(tmp_path / "cache").close()


def test_file_in_place_of_the_directory(tmp_path: Path) -> None:
    """A path that is a file is refused with words."""
    (tmp_path / "cache").touch()
    with pytest.raises(UserError, match="File exists"):
        Store(tmp_path / "cache")


def test_directory_of_somebody_else(tmp_path: Path) -> None:
    """A directory that this user cannot write to is refused with words."""
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    (tmp_path / "cache").mkdir(mode=0o755)
    os.seteuid(65534)
    try:
        with pytest.raises(UserError, match="Permission denied"):
            Store(tmp_path / "cache")
    finally:
        os.seteuid(0)
