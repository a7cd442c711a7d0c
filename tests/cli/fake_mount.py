"""A real FUSE mount that looks like ours from outside, for the commands: `python -m tests.cli.fake_mount DIR [silent]`.

It holds `data`, and `.s3prefetchfs/status.json` with this process's pid. With `silent` it takes every lookup and never
answers, as a hung daemon does. It is a process of its own, so that it can be killed.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys

import pyfuse3
import trio

STATUS = {
    "version": "9.9.9",
    "bucket": "my-bucket",
    "prefix": "train/",
    "mountpoint": sys.argv[1] if len(sys.argv) > 1 else "",
    "pid": os.getpid(),
    "uptime_s": 93784.2,
    "cache": {"capacity_bytes": 4 * 2**30, "used_bytes": 2**30, "objects": 1234, "complete_objects": 617},
    "fetch": {"requests": 12, "bytes": 3 * 2**20, "first_byte_ms_p50": 27.41, "first_byte_ms_p99": None},
    "workers": {"processes": 2, "connections_in_use": 3, "connections_limit": 32},
    "something_new": {"rate_bytes_per_s": 5 * 2**20, "inner": {"wait_s": 0.25}, "names": ["a", "b"], "on": True},
}
NAMES = {b".s3prefetchfs": 2, b"status.json": 3, b"data": 4}
CONTENT = {3: json.dumps(STATUS, indent=2).encode(), 4: bytes(range(256)) * 64}


class FakeOperations(pyfuse3.Operations):
    def __init__(self, silent: bool) -> None:
        super().__init__()
        self.silent = silent

    async def getattr(self, inode: int, ctx: object = None) -> pyfuse3.EntryAttributes:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = inode
        entry.st_mode = stat.S_IFREG | 0o444 if inode in CONTENT else stat.S_IFDIR | 0o555
        entry.st_size = len(CONTENT.get(inode, b""))
        return entry

    async def lookup(self, parent_inode: int, name: bytes, ctx: object = None) -> pyfuse3.EntryAttributes:
        if self.silent:
            await trio.sleep_forever()
        if name not in NAMES:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return await self.getattr(NAMES[name])

    async def open(self, inode: int, flags: int, ctx: object) -> pyfuse3.FileInfo:
        return pyfuse3.FileInfo(fh=inode)

    async def read(self, fh: int, off: int, size: int) -> bytes:
        return CONTENT[fh][off : off + size]


async def serve() -> None:
    pyfuse3.init(FakeOperations(sys.argv[2:] == ["silent"]), sys.argv[1], {"fsname=fake", "subtype=s3prefetchfs"})
    print("ready", flush=True)
    await pyfuse3.main()
    pyfuse3.close(unmount=False)


if __name__ == "__main__":
    trio.run(serve)
