"""Real mounts for the commands to look at."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from s3prefetchfs.fuse import mounts

ROOT = Path(__file__).parents[2]
"""Of the project: where `python -m tests.cli.fake_mount` is found."""

FakeMount = Callable[..., "tuple[Path, subprocess.Popen[bytes]]"]


@pytest.fixture
def fake_mount(tmp_path: Path) -> Iterator[FakeMount]:
    """Call it to mount `tests.cli.fake_mount`; returns the mountpoint and the process."""
    if not os.access("/dev/fuse", os.W_OK):
        pytest.skip("needs /dev/fuse")
    started: list[tuple[Path, subprocess.Popen[bytes]]] = []

    def start(name: str = "mnt", *arguments: str) -> tuple[Path, subprocess.Popen[bytes]]:
        mountpoint = tmp_path / name
        mountpoint.mkdir()
        command = [sys.executable, "-m", "tests.cli.fake_mount", str(mountpoint), *arguments]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
        started.append((mountpoint, process))
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 60)[0], "the fake mount does not start"
        assert process.stdout.readline() == b"ready\n"
        return mountpoint, process

    yield start
    for mountpoint, process in started:
        process.kill()  # first: a silent one would hold whoever looks at its mount
        process.communicate(timeout=60)
        with contextlib.suppress(OSError):
            mounts.unmount(mountpoint, lazy=True)
