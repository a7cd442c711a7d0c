"""What the kernel sees of the bucket: a tree of names, inodes, and how long each answer may be believed.

Pure: it asks S3 nothing. `catalog.py`, in the daemon's trio task, owns the only Namespace, sends the requests, and
feeds the answers in. Two things bring knowledge: a *listing* of a directory, page by page (`core.listing`), and
the two *probes* of a lookup in a directory that is not listed, one for the object and one for a key below it. Both
are believed for the metadata TTL from when they were asked for, then forgotten; absence as well as presence.
Where neither says anything, a name that was *declared* (in a plan with sizes and ETags) is what was declared, until
its version is found gone or the declaration is withdrawn.

An *inode* is one version of one path, so what it says never changes, and it lives as long as the kernel
remembers it, whatever the bucket does meanwhile. Its number comes from a hash of both, so it is the same in readdir
and stat, and after it was forgotten and found again. What has a TTL is the way from a name to an inode.

Memory: a record (`core.record`) shared by listing and inode, the inode, and a slot in a list and in a dict: about
280 bytes for each key that the kernel remembers, with names of 30 bytes. Expired listings go in `sweep`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf

from cachetools import LRUCache

from s3prefetchfs.core.listing import Listing, Reason, Unreachable
from s3prefetchfs.core.record import (
    Entry,
    ListedObject,
    directory_record,
    file_record,
    inode_number,
    is_component,
    is_directory,
    next_inode_number,
    version_of,
)

ROOT_INO = 1
"""FUSE's number for the root of a mount."""

MAX_PROBES = 100_000
"""Names remembered outside of listings, about 500 bytes each."""

MAX_REPORTED = 10_000
"""Unreachable keys named to the caller. Beyond, they are only counted: nobody reads a longer log."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a name means.

    Attributes:
        entry: None if there is no such file or directory.
        fresh_until_s: until when this may be believed; may be past, or infinite.
    """

    entry: Entry | None
    fresh_until_s: float


@dataclass(frozen=True, slots=True)
class Counts:
    """What is known now from listings that are kept or in progress. Shadowed keys are not objects here."""

    objects: int
    directories: int
    hidden_keys: int
    shadowed_keys: int


class _Directory:
    """A directory that has a listing, or inodes in it; else there is no such object.

    Attributes:
        listing: the last one that was completed, if it may still be believed about any name.
        inodes: how many inodes are in it, not counting those further below.
    """

    __slots__ = ("inodes", "listing", "prefix")

    def __init__(self, prefix: bytes) -> None:
        self.prefix = prefix
        self.listing: Listing | None = None
        self.inodes = 0


class _Inode:
    """An inode that the kernel remembers; `lookups` is its lookup count."""

    __slots__ = ("directory", "lookups", "record")

    def __init__(self, directory: _Directory, record: bytes) -> None:
        self.directory = directory
        self.record = record
        self.lookups = 0


class Namespace:
    """See the module's docstring. `now` is always seconds on one monotonic clock.

    Methods that take an inode number raise KeyError if the kernel cannot know it, and those that take one of a
    directory raise NotADirectoryError if it is a file's.

    Args:
        prefix: of the keys in the mount: empty or ending in "/".
        metadata_ttl_s: how long an answer of S3 is believed; 0 and infinity are allowed.
    """

    def __init__(self, prefix: bytes, metadata_ttl_s: float) -> None:
        if prefix and not prefix.endswith(b"/"):
            raise ValueError(f"prefix {prefix!r} does not end in a slash")
        self._root = Entry(ROOT_INO, prefix, directory_record(b""))
        self._ttl_s = metadata_ttl_s
        self._inodes: dict[int, _Inode] = {}
        self._displaced: dict[bytes, int] = {}  # version -> number, where the hash met another inode
        self._directories: dict[bytes, _Directory] = {}
        self._in_progress: dict[bytes, Listing] = {}
        self._expiring: deque[tuple[float, bytes]] = deque()  # when to look at a directory's listing again
        self._probes: LRUCache[bytes, tuple[bytes | None, float]] = LRUCache(MAX_PROBES)
        self._declared: dict[str, dict[bytes, bytes]] = {}  # by who declares: full key, without a last slash -> record
        self._kept = Counts(0, 0, 0, 0)  # sums over the kept listings
        self._reported: set[bytes] = set()
        self._to_report: list[Unreachable] = []

    # ---------------------------------------------------------------------------------------------- by name

    def lookup(self, parent_ino: int, name: bytes, now: float) -> Answer | None:
        """What `name` means in a directory; None if S3 must be asked: see `learn`."""
        prefix = self.prefix_of(parent_ino)
        if not is_component(name):
            return Answer(None, inf)
        for listing in self._listings(prefix):
            found = listing.find(name)
            if found is not None and now < found[1]:
                return self._answer(prefix, *found)
        key = prefix + name
        probed = self._probes.get(key)
        if probed is not None and now < probed[1]:
            return self._answer(prefix, *probed)
        for declared in reversed(self._declared.values()):
            if (record := declared.get(key)) is not None:
                return self._answer(prefix, record, now + self._ttl_s)
        return None

    def learn(
        self, parent_ino: int, name: bytes, found: ListedObject | None, has_keys_below: bool, now: float
    ) -> Answer:
        """Take in the answers of the two probes for `name`.

        Args:
            found: the first object that begins with the name's full key; only that very key counts.
            has_keys_below: whether any key begins with that key and a slash.
            now: when the probes were sent.
        """
        prefix = self.prefix_of(parent_ino)
        key = prefix + name
        if found is not None and found[0] != key:
            found = None
        record = None
        if has_keys_below:
            record = directory_record(name)
            if found is not None:
                self._report([Unreachable(key, Reason.SHADOWED)])
        elif found is not None:
            record = file_record(name, *found[1:])
        fresh_until_s = now + self._ttl_s
        if self._ttl_s > 0:
            self._probes[key] = (record, fresh_until_s)
        return self._answer(prefix, record, fresh_until_s)

    def invalidate(self, key: bytes) -> None:
        """The object at this full key was replaced or deleted: what is known of its name is no longer believed."""
        self._probes.pop(key, None)
        for declared in self._declared.values():
            declared.pop(key, None)
        prefix, slash, name = key.rpartition(b"/")
        for listing in self._listings(prefix + slash):
            listing.distrust(name)

    def declare(self, owner: str, declaration: dict[bytes, bytes]) -> None:
        """Believe a declaration, in the place of an earlier one of the same owner, of later ones before earlier.

        Args:
            declaration: of `declaration`; belongs to the namespace from now on.
        """
        self._declared.pop(owner, None)
        self._declared[owner] = declaration

    def withdraw(self, owner: str) -> None:
        """Forget what this owner declared, if anything."""
        self._declared.pop(owner, None)

    # --------------------------------------------------------------------------------------------- by inode

    def entry(self, ino: int) -> Entry:
        """The file or directory with this number, which the kernel remembers."""
        if ino == ROOT_INO:
            return self._root
        inode = self._inodes[ino]
        return Entry(ino, inode.directory.prefix, inode.record)

    def directory_ino(self, prefix: bytes) -> int:
        """The inode number of the directory whose keys begin with `prefix`, whether the kernel remembers it or not."""
        if prefix == self._root.prefix:
            return ROOT_INO
        above, slash, name = prefix[:-1].rpartition(b"/")
        return self._number(above + slash, directory_record(name))

    def remember(self, entry: Entry) -> None:
        """The kernel is told of this entry and counts one lookup more. To be called as soon as it is handed out.

        Raises:
            ValueError: the number was given to another inode since.
        """
        if entry.ino == ROOT_INO:
            return
        inode = self._inodes.get(entry.ino)
        if inode is None:
            directory = self._directory(entry.prefix)
            directory.inodes += 1
            inode = self._inodes[entry.ino] = _Inode(directory, entry.record)
        elif not _is_same(inode, entry.prefix, entry.record):
            raise ValueError(f"inode {entry.ino} is no longer {entry.key!r}")
        inode.record = entry.record  # the newest listing's, so that an older one can go
        inode.lookups += 1

    def forget(self, ino: int, lookups: int) -> None:
        """The kernel takes back that many lookups; with the last one the inode goes."""
        if ino == ROOT_INO:
            return
        inode = self._inodes[ino]
        inode.lookups -= lookups
        if inode.lookups <= 0:
            del self._inodes[ino]
            inode.directory.inodes -= 1
            self._drop_if_unused(inode.directory)

    # --------------------------------------------------------------------------------------------- listings

    def prefix_of(self, ino: int) -> bytes:
        """The prefix of the keys in a directory."""
        if ino == ROOT_INO:
            return self._root.prefix
        inode = self._inodes[ino]
        if not is_directory(inode.record):
            raise NotADirectoryError(f"inode {ino} is a file")
        return inode.directory.prefix + inode.record

    def listing(self, ino: int, now: float) -> Listing | None:
        """The complete listing of a directory, if all of it may still be believed."""
        return self.listing_below(self.prefix_of(ino), now)

    def listing_below(self, prefix: bytes, now: float) -> Listing | None:
        """As `listing`, of the directory whose keys begin with `prefix`, whether the kernel knows it or not."""
        directory = self._directories.get(prefix)
        listing = directory.listing if directory is not None else None
        return listing if listing is not None and now < listing.fresh_until_s else None

    def begin_listing(self, ino: int, now: float) -> tuple[Listing, bool]:
        """The listing in progress of a directory, and whether it is new, so that the caller must do it.

        The caller of a new one feeds its pages to `add_page` and ends it with `finish_listing` or `fail_listing`.
        """
        return self.begin_listing_below(self.prefix_of(ino), now)

    def begin_listing_below(self, prefix: bytes, now: float) -> tuple[Listing, bool]:
        """As `begin_listing`, of the directory whose keys begin with `prefix`, whether the kernel knows it or not."""
        listing = self._in_progress.get(prefix)
        if listing is not None:
            return listing, False
        prefix = self._directory(prefix).prefix
        listing = self._in_progress[prefix] = Listing(prefix, now, self._ttl_s)
        return listing, True

    def add_page(
        self, listing: Listing, objects: Iterable[ListedObject], prefixes: Iterable[bytes], now: float
    ) -> None:
        """The next page of a listing in progress came: Contents and CommonPrefixes, full keys in any order."""
        self._require_in_progress(listing)
        self._report(listing.add_page(objects, prefixes, now))

    def finish_listing(self, listing: Listing, now: float) -> None:
        """The page before was the last one."""
        self._require_in_progress(listing)
        self._report(listing.finish())
        del self._in_progress[listing.prefix]
        directory = self._directory(listing.prefix)
        if now < listing.kept_until_s:
            self._keep(directory, listing)
            if listing.kept_until_s < inf:
                self._expiring.append((listing.kept_until_s, listing.prefix))
        self._drop_if_unused(directory)

    def fail_listing(self, listing: Listing) -> None:
        """The listing cannot be completed. Readers get what it has, then see that it failed."""
        self._require_in_progress(listing)
        listing.fail()
        del self._in_progress[listing.prefix]
        self._drop_if_unused(self._directory(listing.prefix))

    def entries(self, listing: Listing, position: int = 0) -> Iterator[tuple[int, Entry, float]]:
        """What a reader of a directory gets next.

        A handle keeps the listing it reads, complete or not, and so reads a snapshot; to rewind it may take
        another one. Positions are only good for the listing they came with.

        Args:
            position: 0, or any one that was handed out.

        Yields:
            The position after an entry, the entry, and until when its name may be believed to mean it. Ends
            where no more is certain; `listing.is_end(position)` tells whether that is the end.
        """
        prefix = listing.prefix
        for index in range(position, len(listing.sequence)):
            record = listing.sequence[index]
            entry = Entry(self._number(prefix, record), prefix, record)
            yield index + 1, entry, listing.name_fresh_until_s(entry.name)

    # -------------------------------------------------------------------------------------------- housekeeping

    def sweep(self, now: float) -> None:
        """Drop listings that may no longer be believed; call it now and then. Open handles keep theirs."""
        while self._expiring and self._expiring[0][0] <= now:
            directory = self._directories.get(self._expiring.popleft()[1])
            if directory is not None and directory.listing is not None and directory.listing.kept_until_s <= now:
                self._keep(directory, None)
                self._drop_if_unused(directory)

    def take_unreachable(self) -> list[Unreachable]:
        """Keys found unreachable since the last call, for the log. Each one is handed out once."""
        taken, self._to_report = self._to_report, []
        return taken

    @property
    def inodes(self) -> int:
        """How many the kernel remembers, not counting the root."""
        return len(self._inodes)

    def counts(self) -> Counts:
        total = self._kept
        for listing in self._in_progress.values():
            total = _add(total, listing, 1)
        return total

    def check(self) -> None:
        """Assert the invariants. Takes time: for tests."""
        total = Counts(0, 0, 0, 0)
        inodes = dict.fromkeys(self._directories, 0)
        for ino, inode in self._inodes.items():
            assert inode.lookups > 0
            assert self._directories[inode.directory.prefix] is inode.directory
            assert self._number(inode.directory.prefix, inode.record) == ino
            inodes[inode.directory.prefix] += 1
        for prefix, directory in self._directories.items():
            assert directory.prefix == prefix
            assert directory.inodes == inodes[prefix]
            assert directory.inodes or directory.listing or prefix in self._in_progress
            if directory.listing is not None:
                assert directory.listing.complete
                assert directory.listing.prefix == prefix
                directory.listing.check()
                total = _add(total, directory.listing, 1)
                assert self._ttl_s == inf or any(prefix == queued for _, queued in self._expiring)
        assert total == self._kept
        for prefix, listing in self._in_progress.items():
            assert prefix in self._directories
            assert listing.prefix == prefix
            assert not listing.complete
            assert not listing.failed
            listing.check()

    # ----------------------------------------------------------------------------------------------- within

    def _answer(self, prefix: bytes, record: bytes | None, fresh_until_s: float) -> Answer:
        if record is None:
            return Answer(None, fresh_until_s)
        return Answer(Entry(self._number(prefix, record), prefix, record), fresh_until_s)

    def _number(self, prefix: bytes, record: bytes) -> int:
        """The inode number of an entry, also of one that the kernel does not know."""
        wanted = inode_number(prefix, record)
        if self._displaced:
            wanted = self._displaced.get(prefix + version_of(record), wanted)
        ino = wanted
        while (inode := self._inodes.get(ino)) is not None and not _is_same(inode, prefix, record):
            ino = next_inode_number(ino)
        if ino != wanted:
            self._displaced[prefix + version_of(record)] = ino
        return ino

    def _listings(self, prefix: bytes) -> list[Listing]:
        """Those of a directory that may answer: the kept one, then the one in progress."""
        directory = self._directories.get(prefix)
        listings = (directory.listing if directory is not None else None, self._in_progress.get(prefix))
        return [listing for listing in listings if listing is not None]

    def _directory(self, prefix: bytes) -> _Directory:
        directory = self._directories.get(prefix)
        if directory is None:
            directory = self._directories[prefix] = _Directory(prefix)
        return directory

    def _drop_if_unused(self, directory: _Directory) -> None:
        if not directory.inodes and directory.listing is None and directory.prefix not in self._in_progress:
            del self._directories[directory.prefix]

    def _keep(self, directory: _Directory, listing: Listing | None) -> None:
        """Put `listing` in the place of the one the directory has."""
        if directory.listing is not None:
            self._kept = _add(self._kept, directory.listing, -1)
        directory.listing = listing
        if listing is not None:
            self._kept = _add(self._kept, listing, 1)

    def _require_in_progress(self, listing: Listing) -> None:
        if self._in_progress.get(listing.prefix) is not listing:
            raise ValueError(f"the listing of {listing.prefix!r} is not in progress")

    def _report(self, found: list[Unreachable]) -> None:
        for unreachable in found:
            if unreachable.key not in self._reported and len(self._reported) < MAX_REPORTED:
                self._reported.add(unreachable.key)
                self._to_report.append(unreachable)


def declaration(prefix: bytes, files: Iterable[tuple[bytes, int, str]]) -> dict[bytes, bytes]:
    """What `Namespace.declare` takes: the records of the files and of the directories above them.

    Args:
        prefix: of the keys in the mount.
        files: path below the mount, size in bytes and ETag of each. A path that cannot exist is left out.
    """
    records: dict[bytes, bytes] = {}
    directories: dict[bytes, bytes] = {}
    for path, size_bytes, etag in files:
        above, _, name = path.rpartition(b"/")
        if not all(map(is_component, path.split(b"/"))):
            continue
        records[prefix + path] = file_record(name, size_bytes, 0, etag, "")
        while above and prefix + above not in directories:
            directories[prefix + above] = directory_record(above.rpartition(b"/")[2])
            above = above.rpartition(b"/")[0]
    return records | directories


def _is_same(inode: _Inode, prefix: bytes, record: bytes) -> bool:
    """Whether the inode is that version of that entry."""
    return inode.directory.prefix == prefix and (
        inode.record is record or version_of(inode.record) == version_of(record)
    )


def _add(counts: Counts, listing: Listing, sign: int) -> Counts:
    return Counts(
        counts.objects + sign * (len(listing.sequence) - listing.directories),
        counts.directories + sign * listing.directories,
        counts.hidden_keys + sign * listing.hidden,
        counts.shadowed_keys + sign * listing.shadowed,
    )
