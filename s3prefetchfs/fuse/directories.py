"""Open directories, and which listings of them the kernel keeps.

Each reply to OPENDIR says whether the kernel may keep what it reads through the handle, and whether what it kept
before is still good. It may where the listing is complete and believed, and what it kept is good as long as that
same listing is: a directory that is read again and again is then read without us. The kernel fills what it keeps
from all handles that may, by position, so those must all read one listing; any other is read without being kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import trio

from s3prefetchfs.catalog import Catalog, OpenDirectory
from s3prefetchfs.fuse import kernel, open_reply

EXPIRE_INTERVAL_S = 5.0
"""How often the kernel is told to forget listings that are no longer believed: a handle may be rewound after hours."""


@dataclass(slots=True, eq=False)
class DirectoryHandle:
    """What one open directory reads.

    Attributes:
        directory: None before the first read, unless the kernel keeps it. kept: it does.
        names: of a control directory instead, which stay as they were.
    """

    ino: int
    directory: OpenDirectory | None = None
    kept: bool = False
    names: Sequence[tuple[bytes, int]] = ()


@dataclass(slots=True, eq=False)
class _Kept:
    """The listing of a directory that the kernel may have, by when it was asked for, and the handles that fill it.

    `started_s` is None when what it has is of no listing that is believed.
    """

    started_s: float | None
    handles: int = 0


class Directories:
    """See the module's docstring.

    Args:
        catalog: has the listings.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._handles: dict[int, DirectoryHandle] = {}
        self._kept: dict[int, _Kept] = {}

    def __getitem__(self, handle_id: int) -> DirectoryHandle:
        return self._handles[handle_id]

    def open_control(self, handle_id: int, ino: int) -> None:
        """A control directory was opened: it changes without notice."""
        self._handles[handle_id] = DirectoryHandle(ino)

    def open(self, handle_id: int, ino: int) -> None:
        """A directory was opened; the caller replies to the OPENDIR without an await."""
        handle = self._handles[handle_id] = DirectoryHandle(ino)
        listing = self._catalog.believed_listing(ino)
        if listing is None:
            return
        kept = self._kept.get(ino)
        flags = open_reply.CACHE_DIR
        if kept is not None and listing.started_s == kept.started_s:
            flags |= open_reply.KEEP_CACHE
        elif kept is not None and kept.handles:
            return  # they may still fill what is kept from another listing
        else:
            kept = self._kept[ino] = _Kept(listing.started_s)
        kept.handles += 1
        handle.directory = OpenDirectory(listing, None)
        handle.kept = True
        open_reply.prepare(handle_id, flags)

    async def begin(self, handle: DirectoryHandle) -> OpenDirectory:
        """What a handle reads from the first entry on: one that is rewound sees what is there now.

        Raises:
            KeyError, NotADirectoryError: as Namespace.
        """
        directory = await self._catalog.open_directory(handle.ino)
        if handle.kept and handle.directory is not None and handle.directory.listing is not directory.listing:
            self._kept[handle.ino].started_s = None  # what it fills from now on is no good to others
        handle.directory = directory
        return directory

    def close(self, handle_id: int) -> None:
        """A directory was closed."""
        handle = self._handles.pop(handle_id)
        if handle.kept:
            self._kept[handle.ino].handles -= 1

    async def run(self) -> None:
        """Have the kernel forget listings that are no longer believed, until cancelled."""
        while True:
            await trio.sleep(EXPIRE_INTERVAL_S)
            for ino in list(self._kept):
                kept = self._kept[ino]  # only this task removes any
                listing = self._catalog.believed_listing(ino)
                if listing is None or listing.started_s != kept.started_s:
                    kept.started_s = None
                    if not kept.handles:
                        del self._kept[ino]
                    await kernel.content_forgotten(ino)
