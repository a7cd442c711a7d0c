"""The FUSE protocol adapter, and only that: arguments in, attributes and errnos out.

Runs in the daemon's event loop; each request is a task of pyfuse3's. What a name means is the catalog's business,
where bytes come from the engine's. Only `FUSEError` may leave a handler (pyfuse3 ends the session on anything
else), so every handler passes the same border, where exceptions become errnos.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import logging
import os
import stat
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import pyfuse3
import trio

from s3prefetchfs.catalog import Catalog
from s3prefetchfs.config import Config
from s3prefetchfs.control import DIRECTORY_INO, DIRECTORY_NAME, Control, Refused
from s3prefetchfs.core.opens import OpensRecord
from s3prefetchfs.core.record import NAME_MAX_BYTES, Entry
from s3prefetchfs.core.version import Version
from s3prefetchfs.engine import Engine
from s3prefetchfs.errors import FailureKind, RequestError
from s3prefetchfs.fuse import kernel
from s3prefetchfs.fuse.directories import Directories
from s3prefetchfs.fuse.passthrough import Passthrough
from s3prefetchfs.metrics import Metrics

log = logging.getLogger(__name__)

BLOCK_BYTES = 512
"""The unit of st_blocks, whatever the filesystem (stat(2))."""

IO_BYTES = 1024 * 1024
"""st_blksize, the unit programs are told to read in: the kernel's largest request."""

STATFS_BYTES = 1 << 60
"""The size that statfs reports, 1 EiB: S3 has no end, and programs that compute with it must not overflow."""

FOREVER_S = 10.0 * 365 * 86400
"""An `indefinite` timeout as the kernel can take it."""

CONTROL_HANDLE_BASE = 1 << 48
"""Handles of control files start here; the engine's count up from 1."""

FIRST_TREE_INO = 1 << 63
"""The tree's inode numbers (core.record) start here; below are the root and the control files."""

P = ParamSpec("P")
R = TypeVar("R")


def _border(
    handler: Callable[Concatenate[Adapter, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Adapter, P], Coroutine[Any, Any, R]]:
    """Turn every exception of a handler into an errno; the unexpected are logged and counted."""

    @functools.wraps(handler)
    async def guarded(self: Adapter, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return await handler(self, *args, **kwargs)
        except pyfuse3.FUSEError:
            raise
        except RequestError as error:
            raise pyfuse3.FUSEError(error.kind.errno) from None
        except Refused as error:
            raise pyfuse3.FUSEError(error.errno) from None
        except Exception:
            self.metrics.handler_errors += 1
            log.exception("%s failed", handler.__name__)
            raise pyfuse3.FUSEError(errno.EIO) from None

    return guarded


class Adapter(pyfuse3.Operations):
    """See the module's docstring.

    Args:
        config: owner, modes, TTL.
        engine, catalog, control: who answers.
        directories: those that are open.
        passthrough: which files the kernel reads by itself.
        metrics: counted into.
        opens: told of every file that is opened.
    """

    supports_dot_lookup = False
    enable_writeback_cache = False

    def __init__(
        self,
        config: Config,
        engine: Engine,
        catalog: Catalog,
        control: Control,
        directories: Directories,
        passthrough: Passthrough,
        metrics: Metrics,
        opens: OpensRecord,
    ) -> None:
        super().__init__()
        self.metrics = metrics
        self._config = config
        self._engine = engine
        self._catalog = catalog
        self._control = control
        self._opens = opens
        self._prefix_bytes = len(config.prefix.encode())
        self._handles = itertools.count(1)
        self._passthrough = passthrough
        self._directories = directories
        self._mounted_ns = time.time_ns()

    # ------------------------------------------------------------------------------------- names

    @_border
    async def lookup(self, parent: int, name: bytes, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        if _is_control(parent):
            return self._control_attributes(self._control.lookup(parent, name))
        if parent == pyfuse3.ROOT_INODE and name == DIRECTORY_NAME:
            return self._control_attributes(DIRECTORY_INO)
        answer = await self._catalog.lookup(parent, name)
        valid_s = self._valid_s(answer.fresh_until_s)
        if answer.entry is None:
            if valid_s <= 0:
                raise pyfuse3.FUSEError(errno.ENOENT)
            absent = pyfuse3.EntryAttributes()  # inode 0: the kernel remembers that there is nothing
            absent.st_ino = 0
            absent.entry_timeout = valid_s
            return absent
        self._catalog.remember(answer.entry)
        return self._attributes(answer.entry, valid_s)

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        with contextlib.suppress(pyfuse3.FUSEError):  # it has no reply: pyfuse3 takes this, too, for the end
            await self._forget(inode_list)

    @_border
    async def _forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        for ino, lookups in inode_list:
            if ino >= FIRST_TREE_INO:
                self._catalog.forget(ino, lookups)
            else:
                self._control.forget(ino)

    @_border
    async def getattr(self, inode: int, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        return self._stat(inode)

    @_border
    async def getxattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> bytes:
        if not name.startswith(b"user."):
            raise pyfuse3.FUSEError(errno.ENOTSUP)  # so that `ls -l` stops asking for the ACL of every file
        value = self._xattrs(inode).get(name)
        if value is None:
            raise pyfuse3.FUSEError(pyfuse3.ENOATTR)
        return value

    @_border
    async def listxattr(self, inode: int, ctx: pyfuse3.RequestContext) -> Sequence[bytes]:
        return list(self._xattrs(inode))

    @_border
    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        figures = pyfuse3.StatvfsData()
        figures.f_bsize = figures.f_frsize = IO_BYTES
        figures.f_blocks = STATFS_BYTES // IO_BYTES
        figures.f_bfree = figures.f_bavail = 0  # nothing can be written
        figures.f_files = 1 << 32
        figures.f_ffree = figures.f_favail = 0
        figures.f_namemax = NAME_MAX_BYTES
        return figures

    # ------------------------------------------------------------------------------------- directories

    @_border
    async def opendir(self, inode: int, ctx: pyfuse3.RequestContext) -> int:
        handle_id = next(self._handles)
        if _is_control(inode):
            self._directories.open_control(handle_id, inode)
        else:
            self._directories.open(handle_id, inode)
        return handle_id

    @_border
    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        handle = self._directories[fh]
        # Positions 1 and 2 are behind the two names that every directory has.
        for position, name in enumerate((b".", b".."), start=1):
            if start_id < position and not pyfuse3.readdir_reply(token, name, self._stat(handle.ino), position):
                return
        if _is_control(handle.ino):
            names = self._control.entries(handle.ino)
            if start_id == 0:
                handle.names = names
            for position, (name, ino) in enumerate(handle.names, start=3):
                if start_id >= position or (name, ino) not in names:
                    continue
                if not pyfuse3.readdir_reply(token, name, self._stat(ino), position):
                    return
            return
        # Not before somebody reads: programs like df open directories for other reasons.
        directory = handle.directory
        if directory is None or start_id == 0:
            directory = await self._directories.begin(handle)
        first = max(start_id - 2, 0)
        replied = False
        while not replied:  # for a reply without entries means the end
            entries = await self._catalog.entries(directory, first)
            now = trio.current_time()
            before = first
            for first, entry, fresh_until_s in entries:
                if handle.ino == pyfuse3.ROOT_INODE and entry.name == DIRECTORY_NAME:
                    continue  # keys like this are behind the control directory
                attributes = self._attributes(entry, max(0.0, fresh_until_s - now))
                if not pyfuse3.readdir_reply(token, entry.name, attributes, first + 2):
                    return
                self._catalog.remember(entry)
                replied = True
            if first == before:
                return

    @_border
    async def releasedir(self, fh: int) -> None:
        self._directories.close(fh)

    # ------------------------------------------------------------------------------------- files

    @_border
    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        if _is_control(inode):
            return _control_file_info(await self._control.open(inode, flags))
        if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
            raise pyfuse3.FUSEError(errno.EROFS)
        entry = self._entry(inode)
        self._opens.add(entry.key[self._prefix_bytes :].decode())
        version = Version(entry.key.decode(), entry.etag, entry.size_bytes)
        handle_id = self._engine.open(version)
        try:
            await self._passthrough.open(
                inode, handle_id, functools.partial(self._engine.whole_file, handle_id, self._config.open_wait_s)
            )
        except BaseException:
            self._engine.close(handle_id)
            raise
        # An inode is one version, so the pages the kernel has of it are never those of another. But what it gives from
        # memory is read unseen.
        keep_cache = not self._engine.read_by_plan(version)
        return pyfuse3.FileInfo(fh=pyfuse3.FileHandleT(handle_id), keep_cache=keep_cache)

    @_border
    async def read(self, fh: int, off: int, size: int) -> bytes | memoryview:  # type: ignore[override]  # any buffer does
        if fh >= CONTROL_HANDLE_BASE:
            return self._control.read(fh - CONTROL_HANDLE_BASE, off, off + size)
        try:
            return await self._engine.read(fh, off, off + size)
        except RequestError as error:
            if error.kind in (FailureKind.CHANGED, FailureKind.NOT_FOUND):
                # Who opens it again when he sees this error shall find the version that is there now.
                await kernel.name_forgotten(*self._catalog.place_of(self._engine.key_of(fh)))
            raise

    @_border
    async def release(self, fh: int) -> None:
        if fh >= CONTROL_HANDLE_BASE:
            await self._control.release(fh - CONTROL_HANDLE_BASE)
        else:
            self._passthrough.release(fh)
            self._engine.close(fh)

    # ------------------------------------------------------------------------------------- what changes something

    # The kernel cannot be told that one directory of a mount is writable, so it sends everything, and whatever is
    # not about a plan is EROFS here.

    @_border
    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: pyfuse3.RequestContext
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        ino, handle_id = self._control.create(parent_inode, name)
        return _control_file_info(handle_id), self._control_attributes(ino)

    @_border
    async def write(self, fh: int, off: int, buf: bytes) -> int:
        return self._control.write(fh - CONTROL_HANDLE_BASE, off, buf)

    @_border
    async def flush(self, fh: int) -> None:
        if fh >= CONTROL_HANDLE_BASE:
            await self._control.flush(fh - CONTROL_HANDLE_BASE)

    @_border
    async def setattr(
        self,
        inode: int,
        attr: pyfuse3.EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: int | None,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        if not self._control.is_writable(inode):
            raise pyfuse3.FUSEError(errno.EROFS)
        if fields.update_size:
            await self._control.truncate(inode, None if fh is None else fh - CONTROL_HANDLE_BASE, attr.st_size)
        return self._control_attributes(inode)  # owner, mode and times stay: `cp -p` and `mv` may go on

    @_border
    async def unlink(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        await self._control.unlink(parent_inode, name)

    @_border
    async def rename(
        self,
        parent_inode_old: int,
        name_old: bytes,
        parent_inode_new: int,
        name_new: bytes,
        flags: int,
        ctx: pyfuse3.RequestContext,
    ) -> None:
        if flags & pyfuse3.RENAME_EXCHANGE:
            raise pyfuse3.FUSEError(errno.EINVAL)
        replaces = not flags & pyfuse3.RENAME_NOREPLACE
        await self._control.rename(parent_inode_old, name_old, parent_inode_new, name_new, replaces=replaces)

    @_border
    async def _refuse(self, *arguments: object) -> Any:
        raise pyfuse3.FUSEError(errno.EROFS)

    mkdir = rmdir = mknod = symlink = link = cast(Any, _refuse)

    @_border
    async def setxattr(self, inode: int, name: bytes, value: bytes, ctx: pyfuse3.RequestContext) -> None:
        # `cp -p` gives up an ACL that is not supported, and fails on any other error.
        raise pyfuse3.FUSEError(errno.ENOTSUP if self._control.is_writable(inode) else errno.EROFS)

    @_border
    async def removexattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        raise pyfuse3.FUSEError(errno.ENOTSUP if self._control.is_writable(inode) else errno.EROFS)

    # ------------------------------------------------------------------------------------- attributes

    def _entry(self, ino: int) -> Entry:
        try:
            return self._catalog.entry(ino)
        except KeyError:
            raise pyfuse3.FUSEError(errno.ESTALE) from None

    def _valid_s(self, fresh_until_s: float) -> float:
        return min(max(0.0, fresh_until_s - trio.current_time()), FOREVER_S)

    def _stat(self, ino: int) -> pyfuse3.EntryAttributes:
        return self._control_attributes(ino) if _is_control(ino) else self._attributes(self._entry(ino), 0.0)

    def _attributes(self, entry: Entry, valid_s: float) -> pyfuse3.EntryAttributes:
        """What stat shows. An inode is one version of an object, so only the way to it grows old: `valid_s`."""
        config = self._config
        attributes = pyfuse3.EntryAttributes()
        attributes.st_ino = entry.ino
        attributes.generation = 0
        attributes.entry_timeout = min(valid_s, FOREVER_S)
        attributes.attr_timeout = min(config.metadata_ttl_s, FOREVER_S)
        attributes.st_nlink = 1
        attributes.st_uid = config.uid
        attributes.st_gid = config.gid
        attributes.st_blksize = IO_BYTES
        if entry.is_directory:
            attributes.st_mode = stat.S_IFDIR | config.dir_mode
            mtime_ns = self._mounted_ns
        else:
            size_bytes = entry.size_bytes
            attributes.st_mode = stat.S_IFREG | config.file_mode
            attributes.st_size = size_bytes
            attributes.st_blocks = -(-size_bytes // BLOCK_BYTES)
            mtime_ns = entry.mtime_ms * 1_000_000
        attributes.st_atime_ns = attributes.st_mtime_ns = attributes.st_ctime_ns = mtime_ns
        return attributes

    def _control_attributes(self, ino: int) -> pyfuse3.EntryAttributes:
        attributes = pyfuse3.EntryAttributes()
        attributes.st_ino = ino
        valid_s = 0.0 if self._control.is_writable(ino) else min(self._config.metadata_ttl_s, FOREVER_S)
        attributes.entry_timeout = attributes.attr_timeout = valid_s
        found = self._control.attributes(ino)
        attributes.st_mode = found.mode
        attributes.st_size = found.size_bytes
        attributes.st_nlink = 1
        attributes.st_uid = self._config.uid
        attributes.st_gid = self._config.gid
        attributes.st_atime_ns = attributes.st_mtime_ns = attributes.st_ctime_ns = self._mounted_ns
        return attributes

    def _xattrs(self, ino: int) -> dict[bytes, bytes]:
        if _is_control(ino):
            return {}
        entry = self._entry(ino)
        values = {b"user.s3.key": entry.key}
        if not entry.is_directory:
            version = Version(entry.key.decode(), entry.etag, entry.size_bytes)
            values[b"user.s3.etag"] = entry.etag.encode()
            values[b"user.s3.storage_class"] = entry.storage_class.encode()
            values[b"user.s3prefetchfs.cached_bytes"] = b"%d" % self._engine.cached_bytes(version)
        return values


def _is_control(ino: int) -> bool:
    return DIRECTORY_INO <= ino < FIRST_TREE_INO


def _control_file_info(handle_id: int) -> pyfuse3.FileInfo:
    # Its size is not known before it is read: the page cache would cut it at the size in its attributes.
    return pyfuse3.FileInfo(fh=pyfuse3.FileHandleT(CONTROL_HANDLE_BASE + handle_id), direct_io=True, keep_cache=False)
