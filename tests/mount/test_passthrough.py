"""The kernel reads whole files by itself: right bytes by every way of reading, the modes of an inode, no leaks."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest

from s3prefetchfs.core.extent import CHUNK_BYTES
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
    for name in ("whole", "pieces", "other", *(f"many/{number}" for number in range(8))):
        module_bucket.put_ramp(name, SIZE)
    return module_bucket


@pytest.fixture(scope="module")
def possible() -> None:
    """What no installation can mend; all else must work."""
    release = [int(number) for number in re.findall(r"\d+", os.uname().release)[:2]]
    if os.geteuid() != 0 or release < [6, 9]:
        pytest.skip("passthrough needs root and Linux 6.9")


@pytest.fixture(scope="module")
def mounted(possible: None, filled: StandInBucket, module_mount: Mount) -> Mounted:
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


def descriptors(mounted: Mounted) -> int:
    """How many files the daemon has open."""
    return len(os.listdir(f"/proc/{mounted.process.pid}/fd"))


def kernels_files() -> int:
    """How many files are open on this machine: those that stand behind backing ids are no process's descriptors."""
    return int(Path("/proc/sys/fs/file-nr").read_text().split()[0])


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


def test_pread(mounted: Mounted) -> None:
    """Anywhere, across every boundary, up to the end and beyond."""
    chance = Random(1)
    with passed_through(mounted), (mounted / "whole").open("rb", buffering=0) as file:
        for _ in range(200):
            start, length = chance.randrange(SIZE + 4096), chance.choice([1, 4096, 100_000, 1 << 20])
            assert os.pread(file.fileno(), length, start) == ramp(min(start, SIZE), min(start + length, SIZE))


def test_mmap(mounted: Mounted) -> None:
    with (
        passed_through(mounted),
        (mounted / "whole").open("rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view,
    ):
        assert view[SIZE - 1 :] == ramp(SIZE - 1, SIZE)
        assert view[:] == ramp(0, SIZE)


def test_sendfile(mounted: Mounted) -> None:
    with passed_through(mounted), (mounted / "whole").open("rb") as file, tempfile.TemporaryFile() as copy:
        at = 0
        while sent := os.sendfile(copy.fileno(), file.fileno(), at, SIZE):
            at += sent
        copy.seek(0)
        assert copy.read() == ramp(0, SIZE)


def test_direct(mounted: Mounted) -> None:
    """O_DIRECT, aligned as other filesystems want it."""
    length = 1 << 20
    with passed_through(mounted), mmap.mmap(-1, length) as buffer:
        fd = os.open(mounted / "whole", os.O_RDONLY | os.O_DIRECT)
        try:
            for start in range(0, SIZE, length):
                count = os.preadv(fd, [buffer], start)
                assert buffer[:count] == ramp(start, min(start + length, SIZE))
        finally:
            os.close(fd)


def test_threads(mounted: Mounted) -> None:
    """Of one file description, and each with its own."""

    def check(fd: int, seed: int) -> None:
        chance = Random(seed)
        for _ in range(50):
            start = chance.randrange(SIZE)
            assert os.pread(fd, 70_000, start) == ramp(start, min(start + 70_000, SIZE))

    def check_own(seed: int) -> None:
        with (mounted / "whole").open("rb", buffering=0) as file:
            check(file.fileno(), seed)

    with passed_through(mounted), (mounted / "whole").open("rb") as shared, ThreadPoolExecutor(8) as threads:
        jobs = [threads.submit(check, shared.fileno(), seed) for seed in range(8)]
        jobs += [threads.submit(check_own, seed) for seed in range(8, 16)]
        for job in jobs:
            job.result()


def test_processes(mounted: Mounted) -> None:
    digest = hashlib.sha256(ramp(0, SIZE)).hexdigest()
    with passed_through(mounted):
        readers = [
            subprocess.Popen(["sha256sum", mounted / "whole"], stdout=subprocess.PIPE, text=True) for _ in range(4)
        ]
        for reader in readers:
            output, _ = reader.communicate(timeout=60)
            assert output.split()[0] == digest


# ------------------------------------------------------------------------------------------------ modes


def test_a_file_that_was_opened_incomplete_stays_with_the_daemon(mounted: Mounted) -> None:
    """Also for those who open it when it is complete; it is the kernel's once all have closed it."""
    before, complete_objects = kernel(mounted), mounted.status()["cache"]["complete_objects"]
    with (mounted / "pieces").open("rb") as first:
        assert first.read() == ramp(0, SIZE)
        eventually(lambda: mounted.status()["cache"]["complete_objects"] > complete_objects)
        assert (mounted / "pieces").read_bytes() == ramp(0, SIZE)
        during = kernel(mounted)
        assert during["opens_normal"] == before["opens_normal"] + 2
        assert during["opens_passthrough"] == before["opens_passthrough"]
        assert os.pread(first.fileno(), 10, 0) == ramp(0, 10)
    released(mounted)
    with passed_through(mounted):
        assert (mounted / "pieces").read_bytes() == ramp(0, SIZE)


@pytest.mark.usefixtures("possible")
def test_a_file_that_the_kernel_reads_stays_with_it_and_in_the_cache(bucket: StandInBucket, mount: Mount) -> None:
    """Whatever larger than the cache streams through it meanwhile, and whichever handle is closed first."""
    bucket.put_ramp("held", SIZE)
    for name in ("large", "larger"):
        bucket.put_ramp(name, 12 * SIZE)
    mounted = mount(bucket, "--workers", "1", "--passthrough", "on", "--cache-size", "24MiB")
    complete(mounted, "held")
    first = (mounted / "held").open("rb", buffering=0)
    with first:
        assert kernel(mounted)["opens_passthrough"] == 1
        assert (mounted / "large").read_bytes() == ramp(0, 12 * SIZE)
        second = (mounted / "held").open("rb", buffering=0)
    with second:
        assert (mounted / "larger").read_bytes() == ramp(0, 12 * SIZE)
        bucket.clear_log()
        assert second.read() == ramp(0, SIZE)
    assert kernel(mounted)["opens_passthrough"] == 2
    assert bucket.log("GET", "held") == []


@pytest.mark.usefixtures("possible")
def test_what_an_earlier_mount_left_is_checked_first(bucket: StandInBucket, mount: Mount) -> None:
    """A file that is whole and good is the kernel's from the first open on; one with a flipped bit is healed first."""
    for name in ("good", "flipped"):
        bucket.put_ramp(name, SIZE, seed=len(name))
    earlier = mount(bucket, "--workers", "1")
    for name in ("good", "flipped"):
        assert (earlier / name).read_bytes() == ramp(0, SIZE, seed=len(name))
    earlier.close()
    at = 3 * CHUNK_BYTES + 17
    (flipped,) = (
        path
        for path in earlier.cache_dir.rglob("objects/**/*")
        if path.is_file() and path.read_bytes() == ramp(0, SIZE, seed=len("flipped"))
    )
    with flipped.open("r+b") as file:
        file.seek(at)
        file.write(bytes([ramp(at, at + 1, seed=len("flipped"))[0] ^ 0x10]))
    bucket.clear_log()
    options = ("--workers", "1", "--passthrough", "on", "--open-wait", "30s")
    mounted = mount(bucket, *options, cache_dir=earlier.cache_dir)
    with passed_through(mounted):
        assert (mounted / "good").read_bytes() == ramp(0, SIZE, seed=len("good"))
    assert bucket.log("GET") == []
    assert (mounted / "flipped").read_bytes() == ramp(0, SIZE, seed=len("flipped"))
    assert kernel(mounted)["opens_normal"] == 1
    assert mounted.status()["cache"]["corrupt_chunks"] == 1
    released(mounted)
    with passed_through(mounted):
        assert (mounted / "flipped").read_bytes() == ramp(0, SIZE, seed=len("flipped"))


@pytest.mark.usefixtures("possible")
def test_an_empty_file(bucket: StandInBucket, mount: Mount) -> None:
    """It has no cache file, so there is nothing to hand over and nothing to complain of."""
    bucket.put_object("empty", b"")
    mounted = mount(bucket, "--workers", "1", "--passthrough", "on")
    assert (mounted / "empty").read_bytes() == b""
    assert kernel(mounted)["opens_normal"] == 1
    assert " WARNING " not in mounted.log()


# ------------------------------------------------------------------------------------------------ without


def test_off(bucket: StandInBucket, mount: Mount) -> None:
    bucket.put_ramp("x", SIZE)
    mounted = mount(bucket, "--workers", "1", "--passthrough", "off")
    complete(mounted, "x")
    assert (mounted / "x").read_bytes() == ramp(0, SIZE)
    section = kernel(mounted)
    assert (section["passthrough"], section["reason"]) == ("off", "--passthrough is off")
    assert (section["opens_passthrough"], section["opens_normal"]) == (0, 2)


def test_without_the_library(bucket: StandInBucket, mount: Mount) -> None:
    """Status and log say why; all else works."""
    bucket.put_ramp("x", SIZE)
    mounted = mount(bucket, "--workers", "1", program=HIDDEN)
    complete(mounted, "x")
    assert (mounted / "x").read_bytes() == ramp(0, SIZE)
    section = kernel(mounted)
    assert section["passthrough"] == "off"
    assert "the C library was not built" in section["reason"]
    assert section["opens_passthrough"] == 0
    assert f"no passthrough: files are read through the daemon, because {section['reason']}" in mounted.log()


def test_a_condition_that_cannot_be_met(bucket: StandInBucket, mount: Mount, tmp_path: Path) -> None:
    """`--passthrough on` without the library: no mount, and the reason."""
    with pytest.raises(AssertionError, match=r"no mount, exit code [1-9](.|\n)*no passthrough: the C library"):
        mount(bucket, "--workers", "1", "--passthrough", "on", program=HIDDEN)
    assert not any(os.path.ismount(path) for path in tmp_path.rglob("mnt"))


# ------------------------------------------------------------------------------------------------ leaks


def test_nothing_leaks(mounted: Mounted) -> None:
    """Thousands of opens by eight threads, of files that others have open or not: no descriptor, no backing file."""
    names = [f"many/{number}" for number in range(8)]
    for name in names:
        complete(mounted, name)
    opens, threads = 400, 8

    def churn(seed: int) -> None:
        chance = Random(seed)
        for _ in range(opens):
            name = chance.choice([names[seed], names[seed], names[seed], *names])
            with (mounted / name).open("rb", buffering=0) as file:
                start = chance.randrange(SIZE)
                assert os.pread(file.fileno(), 1000, start) == ramp(start, min(start + 1000, SIZE))

    churn(0)
    released(mounted)
    before, files = descriptors(mounted), kernels_files()
    with passed_through(mounted), ThreadPoolExecutor(threads) as pool:
        for job in [pool.submit(churn, seed) for seed in range(threads)]:
            job.result()
    released(mounted)
    eventually(lambda: descriptors(mounted), lambda count: count <= before)
    eventually(kernels_files, lambda count: count < files + opens)
