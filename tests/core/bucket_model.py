"""A bucket, what S3 says of it, and the tree that a mount of it must show: the naive way."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from zlib import crc32

from s3prefetchfs.core.listing import Listing
from s3prefetchfs.core.namespace import Namespace
from s3prefetchfs.core.record import Entry, ListedObject

Page = tuple[list[ListedObject], list[bytes]]


def make_object(key: bytes, version: int = 0) -> ListedObject:
    """An object whose fields betray its key and version."""
    return key, len(key) + version, 1_700_000_000_000 + version, f"{crc32(key):032x}-{version}", "STANDARD"


@dataclass
class Tree:
    """What a mount must show: directories by prefix, each a dict of name -> key of the object, None = directory."""

    directories: dict[bytes, dict[bytes, bytes | None]] = field(default_factory=dict)
    hidden: set[bytes] = field(default_factory=set)
    shadowed: set[bytes] = field(default_factory=set)


def reference_tree(objects: dict[bytes, ListedObject], mount_prefix: bytes) -> Tree:
    """The tree of a bucket, one component of one key at a time."""
    tree = Tree({mount_prefix: {}})
    for key in sorted(objects):
        if not key.startswith(mount_prefix):
            continue
        here = mount_prefix
        *above, last = key[len(mount_prefix) :].split(b"/")
        for name in above:
            if name in (b"", b".", b"..") or b"\0" in name or len(name) > 255:
                tree.hidden.add(here + name + b"/")
                break
            if tree.directories[here].get(name) is not None:
                tree.shadowed.add(here + name)
            tree.directories[here][name] = None
            here += name + b"/"
            tree.directories.setdefault(here, {})
        else:
            if last == b"":
                if objects[key][1]:
                    tree.hidden.add(key)
            elif last in (b".", b"..") or b"\0" in last or len(last) > 255:
                tree.hidden.add(key)
            elif last in tree.directories[here]:
                tree.shadowed.add(key)
            else:
                tree.directories[here][last] = key
    return tree


def list_directory(
    objects: dict[bytes, ListedObject], prefix: bytes, after: bytes = b""
) -> list[tuple[bytes, ListedObject | None]]:
    """What ListObjectsV2 with delimiter "/" says: keys and common prefixes (with None) in byte order."""
    found: dict[bytes, ListedObject | None] = {}
    for key in sorted(objects):
        if key.startswith(prefix):
            below, slash, _ = key[len(prefix) :].partition(b"/")
            rolled = prefix + below + slash
            if rolled > after:
                found[rolled] = None if slash else objects[key]
    return list(found.items())


def page_of(entries: list[tuple[bytes, ListedObject | None]]) -> Page:
    return [found for _, found in entries if found], [key for key, found in entries if not found]


def probes(objects: dict[bytes, ListedObject], key: bytes) -> tuple[ListedObject | None, bool]:
    """The two Lists of a lookup: the first key that begins with `key`, and whether any begins with key + "/"."""
    first = min((other for other in objects if other.startswith(key)), default=None)
    found = objects[first] if first is not None else None
    return found, any(other.startswith(key + b"/") for other in objects)


class Reader:
    """An open directory handle: reads some entries at a time, sometimes goes back, like seekdir."""

    def __init__(self, listing: Listing) -> None:
        self.listing = listing
        self.read: list[Entry] = []

    def step(self, namespace: Namespace, limit: int, dice: random.Random) -> None:
        position = dice.randint(0, len(self.read)) if dice.random() < 0.2 else len(self.read)
        for after, entry, _ in namespace.entries(self.listing, position):
            assert after == position + 1
            position = after
            if position <= len(self.read):
                assert self.read[position - 1].name == entry.name
            else:
                self.read.append(entry)
                limit -= 1
            if limit <= 0:
                break

    @property
    def names(self) -> list[bytes]:
        return [entry.name for entry in self.read]
