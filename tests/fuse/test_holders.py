"""Who holds a mount, in a /proc made for the purpose and in the real one."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from s3prefetchfs.fuse.holders import Holder, find_holders

MAPS = """\
7f00-7f01 r--p 00000000 08:01 42                         /usr/lib/libc.so.6
7f02-7f03 r--s 00000000 00:2d 9                          /mnt/a b/data 1.bin
7f04-7f05 rw-p 00000000 00:00 0
7f06-7f07 rw-p 00000000 00:00 0                          [stack]
"""


def _process(proc: Path, pid: int, command: str, links: dict[str, str], maps: str = "") -> None:
    (proc / str(pid) / "fd").mkdir(parents=True)
    (proc / str(pid) / "comm").write_text(f"{command}\n")
    (proc / str(pid) / "maps").write_text(maps)
    for name, target in links.items():
        (proc / str(pid) / name).symlink_to(target)


def test_every_way_to_hold(tmp_path: Path) -> None:
    """Working directory, root, program, descriptor and mapping count, each path once; lookalikes do not."""
    _process(tmp_path, 30, "bash", {"cwd": "/mnt/a b", "root": "/"})
    _process(tmp_path, 4, "python3", {"cwd": "/", "fd/0": "/dev/null", "fd/3": "/mnt/a b/x", "fd/4": "/mnt/a b/x"})
    _process(tmp_path, 5, "reader", {"exe": "/mnt/a b/bin/tool", "root": "/mnt/a b"}, MAPS)
    _process(tmp_path, 6, "other", {"cwd": "/mnt/a bc", "root": "/mnt", "fd/0": "pipe:[123]"})
    (tmp_path / "7").mkdir()  # a process that is gone, or that we may not look into
    (tmp_path / "self").mkdir()
    assert find_holders(Path("/mnt/a b"), tmp_path) == [
        Holder(4, "python3", "open", "/mnt/a b/x"),
        Holder(5, "reader", "root", "/mnt/a b"),
        Holder(5, "reader", "exe", "/mnt/a b/bin/tool"),
        Holder(5, "reader", "mapped", "/mnt/a b/data 1.bin"),
        Holder(30, "bash", "cwd", "/mnt/a b"),
    ]


def test_holders_are_said_in_words() -> None:
    """One line a holder."""
    assert str(Holder(30, "bash", "cwd", "/mnt")) == "bash (pid 30): works in /mnt"
    assert str(Holder(4, "python3", "mapped", "/mnt/x")) == "python3 (pid 4): has mapped /mnt/x"


def test_the_real_proc(tmp_path: Path) -> None:
    """This process, with a file open and another one only mapped."""
    for name in ("opened", "mapped"):
        (tmp_path / name).write_bytes(b"x" * 4096)
    with (tmp_path / "mapped").open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    os.close(os.dup(0))
    with mapping, (tmp_path / "opened").open("rb"):
        found = {(holder.pid, holder.how, holder.path) for holder in find_holders(tmp_path)}
    # mmap keeps a descriptor of its own
    assert {path for pid, _, path in found if pid == os.getpid()} == {f"{tmp_path}/opened", f"{tmp_path}/mapped"}
    assert find_holders(tmp_path) == []
