"""Who keeps a mount busy.

The kernel only says EBUSY. The processes that hold a path below the mountpoint are found by reading the links of
/proc: readlink there is answered from the kernel's own memory, so this never asks the filesystem itself and cannot
hang on it. Without root only one's own processes can be read. Used by `umount` and by the daemon when it cannot leave.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Holder:
    """One process and one path of the mount that it holds; `how` is `cwd`, `root`, `exe`, `open` or `mapped`."""

    pid: int
    command: str
    how: str
    path: str

    def __str__(self) -> str:
        return f"{self.command} (pid {self.pid}): {_HOW[self.how]} {self.path}"


_HOW = {
    "cwd": "works in",
    "root": "has its root at",
    "exe": "runs",
    "open": "has open",
    "mapped": "has mapped",
}


def find_holders(mountpoint: Path, proc: Path = Path("/proc")) -> list[Holder]:
    """The processes that use something at or below `mountpoint`, at most one entry for each pid and path.

    Args:
        mountpoint: absolute and free of symbolic links.
        proc: where /proc is; for tests.
    """
    holders: list[Holder] = []
    for process in _processes(proc):
        seen = set()
        for how, path in _used_paths(process):
            if path not in seen and _is_below(path, str(mountpoint)):
                seen.add(path)
                holders.append(Holder(int(process.name), _command(process), how, path))
    return holders


def _processes(proc: Path) -> list[Path]:
    return sorted((entry for entry in proc.iterdir() if entry.name.isdigit()), key=lambda entry: int(entry.name))


def _is_below(path: str, mountpoint: str) -> bool:
    return path == mountpoint or path.startswith(mountpoint.rstrip("/") + "/")


def _used_paths(process: Path) -> Iterator[tuple[str, str]]:
    """How and what; empty where the process is gone or not ours to look at."""
    for how in ("cwd", "root", "exe"):
        try:
            yield how, os.readlink(process / how)
        except OSError:
            continue
    try:
        descriptors = list((process / "fd").iterdir())
    except OSError:
        descriptors = []
    for descriptor in descriptors:
        try:
            yield "open", os.readlink(descriptor)
        except OSError:
            continue
    try:
        maps = (process / "maps").read_bytes()
    except OSError:
        return
    for line in maps.splitlines():
        # address perms offset dev inode path; the path is absent for anonymous memory and may hold blanks
        columns = line.split(None, 5)
        if len(columns) == 6:
            yield "mapped", os.fsdecode(columns[5])


def _command(process: Path) -> str:
    try:
        return (process / "comm").read_text(errors="replace").rstrip("\n")
    except OSError:
        return "?"
