"""Disks to keep a cache on: the usual one, and small ones that can be filled."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

SMALL_DISK_BYTES = 16 * 1024 * 1024
SMALL_DISK_INODES = 2000


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """An empty filesystem of 16 MiB. It goes even if a failed test still has a file open there."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    mountpoint = tmp_path / "disk"
    mountpoint.mkdir()
    if request.param == "tmpfs":
        mount = [
            "mount",
            "-t",
            "tmpfs",
            "-o",
            f"size={SMALL_DISK_BYTES},nr_inodes={SMALL_DISK_INODES}",
            "tmpfs",
            str(mountpoint),
        ]
    else:
        image = tmp_path / "image"
        image.touch()
        os.truncate(image, SMALL_DISK_BYTES)
        subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", "-N", str(SMALL_DISK_INODES), str(image)], check=True)
        mount = ["mount", "-o", "loop", str(image), str(mountpoint)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount {request.param}: {mounted.stderr.strip()}")
    yield mountpoint
    subprocess.run(["umount", "--lazy", str(mountpoint)], check=True)
