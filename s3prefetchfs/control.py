"""The files under `.s3prefetchfs/` in the mount: what the daemon says of itself, and the plans it is given.

The directory is at the root of the mount, is not listed there, and is reachable by name. So everything that can
read a file can ask, from any container that sees the mount, and there is no socket, port or protocol to secure.

`plans/` is the one place that can be written. A file there is a plan, and closing it submits it: `close` returns when
it is in force, or fails with EINVAL, and reading it tells how it goes. Names that editors and `rsync` use on the way
to a file (`.NAME`, `NAME~`, `NAME.tmp`, `NAME.swp`) are *scratch*: bytes in memory, submitted when they are renamed.
Who may enter may write: a plan has no more power over a mount than reading has.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import stat
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

from s3prefetchfs import __version__
from s3prefetchfs.catalog import Catalog
from s3prefetchfs.config import Config
from s3prefetchfs.core.plan_format import PlanError
from s3prefetchfs.core.plan_name import NAME_MAX_BYTES, is_scratch, plan_name
from s3prefetchfs.engine import Engine
from s3prefetchfs.errors import S3PrefetchError
from s3prefetchfs.metrics import Metrics
from s3prefetchfs.plan_file import PLAN_MAX_BYTES
from s3prefetchfs.plans import Plans
from s3prefetchfs.s3.pool import Pool

DIRECTORY_NAME = b".s3prefetchfs"
PLANS_NAME = b"plans"
DIRECTORY_INO = 2
PLANS_INO = 3
FIRST_FILE_INO = 4
FIRST_PLAN_INO = 1024
"""Inodes of the tree are hashes with the top bit set; small numbers are the root's (1) and ours. Plans' count up."""

DRAFTS_MAX_BYTES = 2 * PLAN_MAX_BYTES
"""What all files being written, and scratch files, may hold in memory."""


class Refused(S3PrefetchError):
    """An operation on a control file that cannot be done.

    Args:
        errno: what the program gets.
    """

    def __init__(self, errno: int) -> None:
        super().__init__(os.strerror(errno))
        self.errno = errno


@dataclass(slots=True, eq=False)
class _PlanFile:
    """A file in `plans/`; `name` is None when it has been removed, `scratch` its bytes if it is not a plan."""

    ino: int
    name: bytes | None
    scratch: bytes = b""


@dataclass(slots=True, eq=False)
class _Handle:
    """An open control file.

    Attributes:
        content: what it reads, and what was written.
        file: set if it was opened for writing.
        is_dirty: written since the last flush. is_submitted: there was a flush.
    """

    content: bytes | bytearray
    file: _PlanFile | None = None
    is_dirty: bool = False
    is_submitted: bool = False


@dataclass(frozen=True, slots=True)
class Attributes:
    """What stat shows of a control file or directory."""

    mode: int
    size_bytes: int = 0


class Control:
    """The tree under `.s3prefetchfs/`. Every method raises Refused with the errno that fits.

    Args:
        files: name to a function that makes the content at the moment of opening.
        plans: what is in `plans/`.
    """

    def __init__(self, files: dict[bytes, Callable[[], Awaitable[bytes]]], plans: Plans) -> None:
        self._contents = list(files.values())
        self._inodes = {name: FIRST_FILE_INO + number for number, name in enumerate(files)}
        self._plans = plans
        self._plan_inos = itertools.count(FIRST_PLAN_INO)
        self._plan_files: dict[bytes, _PlanFile] = {}
        self._plan_files_by_ino: dict[int, _PlanFile] = {}
        self._handle_ids = itertools.count(1)
        self._handles: dict[int, _Handle] = {}

    # ------------------------------------------------------------------------------------- names

    def lookup(self, parent: int, name: bytes) -> int:
        """The inode of a name in one of our directories."""
        ino = dict(self.entries(parent)).get(name)
        if ino is None:
            raise Refused(errno.ENOENT)
        return ino

    def entries(self, ino: int) -> list[tuple[bytes, int]]:
        """Name and inode of all that is in one of our directories."""
        if ino == DIRECTORY_INO:
            return [*self._inodes.items(), (PLANS_NAME, PLANS_INO)]
        if ino != PLANS_INO:
            raise Refused(errno.ENOTDIR)
        for name in map(os.fsencode, self._plans.names()):  # also those that did not come as a file
            if name not in self._plan_files:
                self._add_plan_file(name)
        return [(name, file.ino) for name, file in self._plan_files.items()]

    def attributes(self, ino: int) -> Attributes:
        """What stat shows of an inode, also of a file that was removed."""
        if ino == DIRECTORY_INO:
            return Attributes(stat.S_IFDIR | 0o555)
        if ino == PLANS_INO:
            return Attributes(stat.S_IFDIR | 0o777)
        if ino < FIRST_PLAN_INO:
            return Attributes(stat.S_IFREG | 0o444)
        file = self._plan_file(ino)
        return Attributes(stat.S_IFREG | 0o666, self._size_bytes(file))

    def is_writable(self, ino: int) -> bool:
        """Whether the inode is a file in `plans/`, which comes, changes and goes by itself."""
        return ino in self._plan_files_by_ino

    def forget(self, ino: int) -> None:
        """The kernel no longer knows the inode."""
        file = self._plan_files_by_ino.get(ino)
        if file is not None and file.name is None:
            del self._plan_files_by_ino[ino]

    # ------------------------------------------------------------------------------------- files

    async def open(self, ino: int, flags: int) -> int:
        """A handle of a file; one that writes begins with the submitted bytes, or empty (O_TRUNC)."""
        is_writing = flags & os.O_ACCMODE != os.O_RDONLY or bool(flags & os.O_TRUNC)
        if ino < FIRST_PLAN_INO:
            if is_writing:
                raise Refused(errno.EROFS)
            return self._add_handle(_Handle(await self._contents[ino - FIRST_FILE_INO]()))
        file = self._plan_file(ino)
        if is_writing:
            content = b"" if flags & os.O_TRUNC else await self._submitted(file)
            return self._add_handle(_Handle(bytearray(content), file))
        if file.name is None or self._is_scratch(file):
            return self._add_handle(_Handle(file.scratch))
        name = os.fsdecode(file.name)
        # One that was made and not written yet is no plan.
        return self._add_handle(_Handle(self._plans.document(name) if name in self._plans.names() else b""))

    def create(self, parent: int, name: bytes) -> tuple[int, int]:
        """Make a file in `plans/` and open it for writing; returns its inode and a handle."""
        if parent != PLANS_INO:
            raise Refused(errno.EROFS)
        file = self._plan_files.get(name)
        if file is None:
            _check_name(name)
            file = self._add_plan_file(name)
        return file.ino, self._add_handle(_Handle(bytearray(), file))

    def read(self, handle_id: int, start: int, stop: int) -> bytes:
        """Bytes of what the file was when it was opened, with what was written to this handle."""
        return bytes(self._handles[handle_id].content[start:stop])

    def write(self, handle_id: int, start: int, piece: bytes) -> int:
        """Take in a piece; returns its length."""
        handle = self._handles[handle_id]
        content = handle.content
        assert isinstance(content, bytearray)
        self._make_room(handle, start + len(piece))
        if start > len(content):
            content.extend(bytes(start - len(content)))
        content[start : start + len(piece)] = piece
        handle.is_dirty = True
        return len(piece)

    async def truncate(self, ino: int, handle_id: int | None, size_bytes: int) -> None:
        """Cut or lengthen what a handle has written; without a handle, the submitted file, which is submitted anew."""
        if ino < FIRST_PLAN_INO:
            raise Refused(errno.EROFS)
        if handle_id is None:
            own_id = await self.open(ino, os.O_WRONLY)
            try:
                await self.truncate(ino, own_id, size_bytes)
                await self.flush(own_id)
            finally:
                await self.release(own_id)
            return
        handle = self._handles[handle_id]
        if not isinstance(handle.content, bytearray):
            raise Refused(errno.EINVAL)
        self._make_room(handle, size_bytes)
        del handle.content[size_bytes:]
        handle.content.extend(bytes(size_bytes - len(handle.content)))
        handle.is_dirty = bool(handle.content)  # emptied before it is written anew, mostly; see `release`

    async def flush(self, handle_id: int) -> None:
        """A descriptor of the handle is closed: submit what was written. EINVAL if it is refused."""
        handle = self._handles[handle_id]
        if handle.is_dirty:
            await self._submit(handle)

    async def release(self, handle_id: int) -> None:
        """The last descriptor is closed. Nobody hears of errors any more, so they are left in the file."""
        handle = self._handles.pop(handle_id)
        file = handle.file
        if file is None or file.name is None or handle.is_submitted or handle.content:
            return  # with content and not submitted, it was opened and not written: `touch`
        with contextlib.suppress(Refused):
            await self._submit(handle)  # what was made empty: a shell's `> NAME` closes a copy before it writes

    async def unlink(self, parent: int, name: bytes) -> None:
        """Remove a file of `plans/`: cancel the plan."""
        if parent != PLANS_INO:
            raise Refused(errno.EROFS)
        self.lookup(parent, name)
        self._plan_files.pop(name).name = None
        if os.fsdecode(name) in self._plans.names():
            await self._plans.remove(os.fsdecode(name))

    async def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, *, replaces: bool) -> None:
        """Give a plan another name, in the place of one that has it; submit a scratch file that gets a plan's name.

        Args:
            replaces: whether there may be one of the new name.
        """
        if parent != PLANS_INO or new_parent != PLANS_INO:
            raise Refused(errno.EROFS)
        self.lookup(parent, name)
        _check_name(new_name)
        if new_name in dict(self.entries(PLANS_INO)) and not replaces:
            raise Refused(errno.EEXIST)
        if name == new_name:
            return
        file = self._plan_files[name]
        try:
            if not self._is_scratch(file):
                if is_scratch(os.fsdecode(new_name)):  # a backup on the way to a new version
                    file.scratch = await self._submitted(file)
                    await self._plans.remove(os.fsdecode(name))
                else:
                    await self._plans.rename(os.fsdecode(name), os.fsdecode(new_name))
            elif not is_scratch(os.fsdecode(new_name)):
                await self._plans.submit(os.fsdecode(new_name), file.scratch)
                file.scratch = b""
        except (PlanError, KeyError):
            raise Refused(errno.EINVAL) from None
        if self._plan_files.get(name) is file:
            del self._plan_files[name]
        if (displaced := self._plan_files.get(new_name)) is not None:
            displaced.name = None
        file.name = new_name
        self._plan_files[new_name] = file

    # ------------------------------------------------------------------------------------- within

    async def _submit(self, handle: _Handle) -> None:
        file = handle.file
        assert file is not None
        handle.is_dirty, handle.is_submitted = False, True
        if file.name is None:
            return  # removed while it was written
        content = bytes(handle.content)
        if self._is_scratch(file):
            file.scratch = content
            return
        try:
            await self._plans.submit(os.fsdecode(file.name), content)
        except PlanError:
            raise Refused(errno.EINVAL) from None

    async def _submitted(self, file: _PlanFile) -> bytes:
        """The bytes that a program would change: of the plan in force, if there is one."""
        if file.name is None or self._is_scratch(file):
            return file.scratch
        try:
            return await self._plans.content(os.fsdecode(file.name))
        except PlanError:
            return b""

    def _make_room(self, handle: _Handle, size_bytes: int) -> None:
        if size_bytes > PLAN_MAX_BYTES:
            raise Refused(errno.EFBIG)
        held_bytes = sum(len(other.content) for other in self._handles.values() if other is not handle)
        held_bytes += sum(len(file.scratch) for file in self._plan_files.values())
        if held_bytes + size_bytes > DRAFTS_MAX_BYTES:
            raise Refused(errno.ENOSPC)

    def _size_bytes(self, file: _PlanFile) -> int:
        writing = [len(handle.content) for handle in self._handles.values() if handle.file is file]
        if writing:
            return max(writing)
        if file.name is None or self._is_scratch(file):
            return len(file.scratch)
        name = os.fsdecode(file.name)
        return self._plans.size_bytes(name) if name in self._plans.names() else 0

    def _is_scratch(self, file: _PlanFile) -> bool:
        return file.name is not None and is_scratch(os.fsdecode(file.name))

    def _plan_file(self, ino: int) -> _PlanFile:
        file = self._plan_files_by_ino.get(ino)
        if file is None:
            raise Refused(errno.ESTALE)
        return file

    def _add_plan_file(self, name: bytes) -> _PlanFile:
        file = _PlanFile(next(self._plan_inos), name)
        self._plan_files[name] = self._plan_files_by_ino[file.ino] = file
        return file

    def _add_handle(self, handle: _Handle) -> int:
        handle_id = next(self._handle_ids)
        self._handles[handle_id] = handle
        return handle_id


def _check_name(name: bytes) -> None:
    if len(name) > NAME_MAX_BYTES:
        raise Refused(errno.ENAMETOOLONG)
    try:
        plan_name(name)
    except ValueError:
        raise Refused(errno.EINVAL) from None


class Status:
    """Builds the status document from those who know.

    Args:
        config, metrics, engine, catalog, pool: of this mount.
    """

    def __init__(self, config: Config, metrics: Metrics, engine: Engine, catalog: Catalog, pool: Pool) -> None:
        self._config = config
        self._metrics = metrics
        self._engine = engine
        self._catalog = catalog
        self._pool = pool
        self._started_s = time.monotonic()

    def document(self) -> dict[str, Any]:
        """The figures of this moment; docs/status.md names each. Sizes in bytes, times as the names say."""
        config, metrics = self._config, self._metrics
        scheduler = self._engine.snapshot()
        workers = self._pool.statistics()
        counts = self._catalog.counts()
        return {
            "version": __version__,
            "bucket": config.bucket,
            "prefix": config.prefix,
            "mountpoint": str(config.mountpoint),
            "pid": os.getpid(),
            "uptime_s": round(time.monotonic() - self._started_s, 3),
            "cache": {
                "capacity_bytes": scheduler.capacity_bytes,
                "used_bytes": scheduler.used_bytes,
                "objects": scheduler.objects,
                "complete_objects": scheduler.complete_objects,
                "evictions": scheduler.evictions,
                "corrupt_chunks": scheduler.corrupt_chunks,
            },
            "fetch": {
                "requests": metrics.requests,
                "bytes": metrics.fetched_bytes,
                "in_flight": scheduler.fetches_in_flight,
                "backing_off": scheduler.fetches_backing_off,
                "to_memory": scheduler.memory_fetches,
                "retries": scheduler.retries,
                "errors": metrics.errors,
                "first_byte_ms_p50": metrics.first_byte_ms(0.5),
                "first_byte_ms_p99": metrics.first_byte_ms(0.99),
            },
            "reads": {
                "opens": metrics.opens,
                "open": scheduler.open_handles,
                "bytes_served": metrics.bytes_served,
                "bytes_waited_for": metrics.bytes_waited_for,
                "wait_s": round(metrics.wait_s, 6),
                "waiting": scheduler.reads_waiting,
                "failed": scheduler.failed_reads,
                "handler_errors": metrics.handler_errors,
            },
            "kernel": {
                "passthrough": "on" if metrics.kernel.passthrough else "off",
                "reason": metrics.kernel.reason,
                "opens_passthrough": metrics.kernel.opens_passthrough,
                "opens_normal": metrics.kernel.opens_normal,
                "read_ahead_kb": metrics.kernel.read_ahead_kb,
                "max_background": metrics.kernel.max_background,
            },
            "namespace": {
                "objects": counts.objects,
                "directories": counts.directories,
                "hidden_keys": counts.hidden_keys,
                "shadowed_keys": counts.shadowed_keys,
                "inodes": self._catalog.inodes,
                "lists": metrics.lists,
                "heads": metrics.heads,
            },
            "workers": {
                "processes": workers.processes,
                "connections_in_use": workers.connections_in_use,
                "connections_limit": workers.connections_limit,
                "restarts": workers.restarts,
            },
            "plans": [asdict(progress) for progress in self._engine.plans()],
        }

    async def json(self) -> bytes:
        """The document as a file."""
        return json.dumps(self.document(), indent=2).encode() + b"\n"
