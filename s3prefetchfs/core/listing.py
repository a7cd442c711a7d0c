"""One listing of one directory, from its first page on.

The theory. S3 sends the keys of a directory in byte order, a file `a` as "a" and a directory `a` as "a/". What is
between those two ("a-b", "a.txt") comes between them, perhaps on other pages. As the directory wins over a file of
the same name, the file is *certain* only when the listing has passed "a/". So entries become certain in the
order of name + "/", files and directories alike, and that is the order in which they are kept (see
`core.record`) and read: `sequence` grows at its end only, a position in it is an index, and while pages come in
in order there is nothing to sort but the page. At any time no more than a few files are held back: each one's
name begins with the name of the one before.

The *frontier* is the greatest key of the pages that are in. In order, everything up to it is certain, and so is the
absence of everything else.

A server may break the order (prefixes first, pages shuffled). This is noticed when a key comes that is not beyond
the frontier and not a repetition. From then on nothing more becomes certain until the last page is in;
`sequence` then goes on, from where it was, with what it does not have yet, so that every reader still gets every
name once.

A `Listing` knows nothing of inodes or of other directories: `core.namespace` owns it and calls it. An open
directory handle keeps the Listing it reads, which, once complete, never changes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from math import inf

from s3prefetchfs.core.record import (
    ListedObject,
    directory_record,
    file_record,
    is_component,
    is_directory,
    name_of,
)


class Reason(Enum):
    """Why a key cannot be reached through the mount."""

    NOT_A_PATH = "it has a component that no path can have"
    MARKER_WITH_DATA = "it ends in a slash, so it is a directory, but it has data"
    SHADOWED = "a directory has the same name"


@dataclass(frozen=True, slots=True)
class Unreachable:
    """A key, or a prefix that stands for all keys below it, that the mount cannot show."""

    key: bytes
    reason: Reason


class Listing:
    """See the module's docstring.

    Attributes:
        prefix: of the directory: empty or ending in "/".
        started_s: when the first page was asked for.
        sequence: the records that are certain, in the order of reading. A name never changes its place.
        directories: how many of them are directories.
        hidden, shadowed: keys found unreachable.
        complete: all pages are in. failed: they never will be.
    """

    __slots__ = (
        "_asked_s",
        "_ended_s",
        "_frontiers",
        "_held",
        "_late",
        "_sorted",
        "_stale",
        "_times_s",
        "_ttl_s",
        "_unreachable",
        "complete",
        "directories",
        "failed",
        "hidden",
        "prefix",
        "sequence",
        "shadowed",
        "started_s",
    )

    def __init__(self, prefix: bytes, started_s: float, ttl_s: float) -> None:
        self.prefix = prefix
        self.started_s = started_s
        self.sequence: list[bytes] = []
        self.directories = self.hidden = self.shadowed = 0
        self.complete = self.failed = False
        self._ttl_s = ttl_s
        self._sorted = self.sequence  # the same entries by name; another list only if the order was broken
        self._held: dict[bytes, bytes] = {}  # files by name, not certain yet
        self._late: dict[bytes, bytes] | None = None  # entries by name that came after the order was broken
        self._asked_s = started_s  # when the page to come was asked for
        # Entries and gaps up to _frontiers[i] are as of _times_s[i], what is beyond the last one as of _ended_s.
        self._frontiers: list[bytes] = []
        self._times_s: list[float] = []
        self._ended_s = started_s
        self._stale: set[bytes] | None = None  # names not to be believed; most listings never have any
        self._unreachable: dict[bytes, Reason] = {}  # while pages come in, to count each once

    # ------------------------------------------------------------------------------------------------ growing

    def add_page(self, objects: Iterable[ListedObject], prefixes: Iterable[bytes], now: float) -> list[Unreachable]:
        """Take in the next page.

        Args:
            objects, prefixes: Contents and CommonPrefixes, full keys; those outside `prefix` are ignored.
            now: when the page came, in seconds; the next page is asked for no earlier.

        Returns:
            The keys that were found unreachable and not returned before.
        """
        news: list[Unreachable] = []
        files, directories = self._sort_out(objects, prefixes, news)
        for name in directories & files.keys():
            self._shadow(name, news)
            del files[name]
        if self._late is None and (files or directories):
            keys = [*files, *(name + b"/" for name in directories)]
            frontier = self._frontiers[-1] if self._frontiers else b""
            if min(keys) > frontier or self._only_repeats(files, directories, frontier, news):
                self._append(files, directories, max(frontier, *keys), news)
            else:
                self._late = self._held
                self._held = {}
        if self._late is not None:
            self._set_aside(self._late, files, directories, news)
        self._asked_s = now
        return news

    def finish(self) -> list[Unreachable]:
        """The last page is in. Returns as `add_page` does."""
        news: list[Unreachable] = []
        if self._late is None:
            self.sequence.extend(sorted(self._held.values()))
            self._ended_s = self._times_s[-1] if self._times_s else self.started_s
        else:
            self._merge(self._late, news)
            self._late = None
            # Which page vouched for what is not known any more.
            self._frontiers, self._times_s = [], []
            self._ended_s = self.started_s
        self._held = {}
        self._unreachable = {}
        self.complete = True
        return news

    def fail(self) -> None:
        """No more pages will come."""
        self.failed = True

    def _sort_out(
        self, objects: Iterable[ListedObject], prefixes: Iterable[bytes], news: list[Unreachable]
    ) -> tuple[dict[bytes, bytes], set[bytes]]:
        """Files (name -> record) and directories (names) of a page."""
        files: dict[bytes, bytes] = {}
        directories: set[bytes] = set()
        start = len(self.prefix)
        for key, size_bytes, mtime_ms, etag, storage_class in objects:
            if not key.startswith(self.prefix):
                continue
            name = key[start:]
            if b"/" in name:  # a server that ignores the delimiter, or lists markers as objects
                self._sort_out_directory(name, directories, news)
            elif is_component(name):
                files[name] = file_record(name, size_bytes, mtime_ms, etag, storage_class)
            elif name:
                self._note(key, Reason.NOT_A_PATH, news)
            elif size_bytes:
                self._note(key, Reason.MARKER_WITH_DATA, news)
        for key in prefixes:
            if key.startswith(self.prefix) and len(key) > start:
                self._sort_out_directory(key[start:], directories, news)
        return files, directories

    def _sort_out_directory(self, path: bytes, directories: set[bytes], news: list[Unreachable]) -> None:
        name = path.partition(b"/")[0]  # the slash may be missing: some servers forget it
        if is_component(name):
            directories.add(name)
        else:
            self._note(self.prefix + name + b"/", Reason.NOT_A_PATH, news)

    def _only_repeats(
        self, files: dict[bytes, bytes], directories: set[bytes], frontier: bytes, news: list[Unreachable]
    ) -> bool:
        """Drop the entries of a page that are in already; says whether all others are beyond the frontier."""
        for name in [name for name in directories if name + b"/" <= frontier]:
            known = self._bisect(name)
            if known is None or not is_directory(known):
                return False
            directories.remove(name)
        for name in [name for name in files if name <= frontier]:
            known = self._held.get(name) or self._bisect(name)
            if known is None:
                return False
            if is_directory(known):
                self._shadow(name, news)
            del files[name]
        return True

    def _append(
        self, files: dict[bytes, bytes], directories: set[bytes], frontier: bytes, news: list[Unreachable]
    ) -> None:
        """Take in a page whose keys are all beyond the frontier before it."""
        for name in self._held.keys() & directories:
            self._shadow(name, news)
            del self._held[name]
        batch = sorted([*self._held.values(), *files.values(), *map(directory_record, directories)])
        certain = bisect_left(batch, frontier + b"\xff" if frontier.endswith(b"/") else frontier)
        self.sequence.extend(batch[:certain])
        self._held = {name_of(record): record for record in batch[certain:]}
        self.directories += len(directories)
        if not self._frontiers or frontier > self._frontiers[-1]:
            self._frontiers.append(frontier)
            self._times_s.append(self._asked_s)

    def _set_aside(
        self,
        late: dict[bytes, bytes],
        files: dict[bytes, bytes],
        directories: set[bytes],
        news: list[Unreachable],
    ) -> None:
        """Take in a page after the order was broken."""
        for name, record in files.items():
            if is_directory(late.setdefault(name, record)):
                self._shadow(name, news)
        for name in directories:
            if name in late and not is_directory(late[name]):
                self._shadow(name, news)
            late[name] = directory_record(name)

    def _merge(self, late: dict[bytes, bytes], news: list[Unreachable]) -> None:
        """Join what came in order with what came after."""
        first = list(map(name_of, self.sequence))
        records = dict(zip(first, self.sequence, strict=True))
        for name, record in late.items():
            if is_directory(record) != is_directory(records.setdefault(name, record)):
                self._shadow(name, news)
                records[name] = directory_record(name)
        self._sorted = sorted(records.values())
        # Readers stand at positions in `sequence`: its names stay where they are, the others follow.
        self.sequence[:] = [records.pop(name) for name in first]
        self.sequence.extend(sorted(records.values()))
        self.directories = sum(map(is_directory, self.sequence))
        if self.sequence == self._sorted:
            self._sorted = self.sequence

    def _shadow(self, name: bytes, news: list[Unreachable]) -> None:
        self._note(self.prefix + name, Reason.SHADOWED, news)

    def _note(self, key: bytes, reason: Reason, news: list[Unreachable]) -> None:
        if key in self._unreachable:
            return
        self._unreachable[key] = reason
        news.append(Unreachable(key, reason))
        if reason is Reason.SHADOWED:
            self.shadowed += 1
        else:
            self.hidden += 1

    # ------------------------------------------------------------------------------------------------- asking

    def find(self, name: bytes) -> tuple[bytes | None, float] | None:
        """The record of `name`, or None if the directory has no such entry, and until when that may be believed.

        Returns:
            None if it is not certain, because pages are still to come.
        """
        record = self._bisect(name)
        if not self.complete:
            if self._late is not None:
                if name in self._late and is_directory(self._late[name]):
                    record = self._late[name]
                elif record is None:
                    return None
            elif not self._frontiers or name + b"/" > self._frontiers[-1]:
                return None
        return record, self.name_fresh_until_s(name)

    def name_fresh_until_s(self, name: bytes) -> float:
        """Until when the listing may be believed about `name`: the TTL from when its page was asked for.

        So a listing that takes longer than the TTL still saves its reader from asking for every entry again.
        """
        if self._stale is not None and name in self._stale:
            return -inf
        page = bisect_left(self._frontiers, name)
        return (self._times_s[page] if page < len(self._times_s) else self._ended_s) + self._ttl_s

    @property
    def fresh_until_s(self) -> float:
        """Until when all of the listing may be believed."""
        return -inf if self._stale is not None else self.started_s + self._ttl_s

    @property
    def kept_until_s(self) -> float:
        """Until when any of the listing may be believed."""
        return max(self._ended_s, self._times_s[-1] if self._times_s else -inf) + self._ttl_s

    def distrust(self, name: bytes) -> None:
        """The listing is no longer to be believed about `name`."""
        self._stale = self._stale or set()
        self._stale.add(name)

    def is_end(self, position: int) -> bool:
        """Whether a reader at this position of `sequence` has read all there will be."""
        return self.complete and position >= len(self.sequence)

    def _bisect(self, name: bytes) -> bytes | None:
        start = name + b"/"
        index = bisect_left(self._sorted, start)
        if index < len(self._sorted) and self._sorted[index].startswith(start):
            return self._sorted[index]
        return None

    def check(self) -> None:
        """Assert the invariants."""
        by_name = self._sorted
        names = [name_of(record) for record in by_name]
        assert len(set(names)) == len(names) == len(self.sequence)
        assert by_name == sorted(by_name)
        assert sorted(self.sequence) == by_name
        assert all(map(is_component, names))
        assert self.directories == sum(map(is_directory, by_name))
        assert self._frontiers == sorted(set(self._frontiers))
        assert len(self._frontiers) == len(self._times_s)
        assert self._times_s == sorted(self._times_s)
        assert not self._held.keys() & set(names)
        if self.complete:
            assert not self.failed
            assert not self._held
            assert self._late is None
        elif self._late is None:
            frontier = self._frontiers[-1] if self._frontiers else b""
            assert all(name + b"/" <= frontier for name in names)
            assert all(name <= frontier < name + b"/" for name in self._held)
        else:
            assert not self._held
