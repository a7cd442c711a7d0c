"""For the whole suite: no mount of an aborted run stays behind, and none of this one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from s3prefetchfs.fuse import mounts


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes many seconds; leave it out with -m 'not slow'")


@pytest.fixture(scope="session", autouse=True)
def _no_mount_stays(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Detach what runs that are over left mounted below the temporary directory; at the end look for our own."""
    ours = tmp_path_factory.getbasetemp()
    (ours / "pytest.pid").write_text(str(os.getpid()))
    for mountpoint in _mounts_below(ours.parent):
        run = ours.parent / mountpoint.relative_to(ours.parent).parts[0]
        if not _is_running(run):
            with contextlib.suppress(OSError):
                mounts.unmount(mountpoint, lazy=True)
    yield
    left = _mounts_below(ours)
    for mountpoint in left:
        mounts.unmount(mountpoint, lazy=True)
    assert not left, "tests left these mounted"


def _mounts_below(directory: Path) -> list[Path]:
    """Our mounts; innermost first."""
    found = [
        mount.mountpoint for mount in mounts.all_mounts() if mount.is_ours and directory in mount.mountpoint.parents
    ]
    return found[::-1]


def _is_running(run: Path) -> bool:
    """Whether the pytest that uses this directory still runs."""
    try:
        os.kill(int((run / "pytest.pid").read_text()), 0)
    except (OSError, ValueError):
        return False
    return True
