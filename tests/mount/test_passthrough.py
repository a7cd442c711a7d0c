"""The kernel reads whole files by itself: right bytes by every way of reading, the modes of an inode, no leaks."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.mount.conftest import Mount
from tests.mount.mounted import Mounted, eventually
from tests.s3stub import ramp
from tests.servers import StandInBucket

SIZE = 5_000_001
"""Not a whole number of chunks, pages or sectors."""

HIDDEN = (sys.executable, "-m", "tests.mount.without_library")
"""`s3prefetchfs`, installed where there was no compiler."""


@pytest.fixture(scope="module")
def filled(module_bucket: StandInBucket) -> StandInBucket:
    for name in ("whole", "pieces", "other"):
        module_bucket.put_ramp(name, SIZE)
    return module_bucket


@pytest.fixture(scope="module")
def mounted(filled: StandInBucket, module_mount: Mount) -> Mounted:
    """A mount with passthrough, in which `whole` is complete and closed."""
    mounted = module_mount(filled, "--workers", "1", "--passthrough", "on")
    complete(mounted, "whole")
    return mounted


def kernel(mounted: Mounted) -> dict[str, Any]:
    section: dict[str, Any] = mounted.status()["kernel"]
    return section


def complete(mounted: Mounted, name: str) -> None:
    """Read the file through the daemon, and close it."""
    before = mounted.status()["cache"]["complete_objects"]
    assert (mounted / name).read_bytes() == ramp(0, (mounted / name).stat().st_size)
    eventually(lambda: mounted.status()["cache"]["complete_objects"] > before)
    released(mounted)


def backing_files(mounted: Mounted) -> int:
    """The cache files that the daemon or the kernel for it has open, as far as descriptors tell."""
    return len(os.listdir(f"/proc/{mounted.process.pid}/fd"))


def released(mounted: Mounted) -> None:
    """Wait until the daemon has heard of every close: a release comes after close(2) has returned."""
    eventually(lambda: mounted.status()["reads"]["open"] == 0)


@contextlib.contextmanager
def passed_through(mounted: Mounted) -> Iterator[None]:
    """What is opened inside is opened in passthrough, and no byte of it comes from the daemon."""
    before = mounted.status()
    yield
    after = mounted.status()
    assert after["kernel"]["opens_passthrough"] > before["kernel"]["opens_passthrough"]
    assert after["kernel"]["opens_normal"] == before["kernel"]["opens_normal"]
    assert after["reads"]["bytes_served"] == before["reads"]["bytes_served"]


# ------------------------------------------------------------------------------------------------ right bytes


def test_read(mounted: Mounted) -> None:
    with passed_through(mounted):
        assert (mounted / "whole").read_bytes() == ramp(0, SIZE)
