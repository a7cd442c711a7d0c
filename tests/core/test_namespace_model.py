"""The namespace against a second, naive tree, on random keys, servers and histories."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from zlib import crc32

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from s3prefetchfs.core.listing import Listing
from s3prefetchfs.core.namespace import ROOT_INO, Answer, Namespace
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
    first = min((found for found in objects if found.startswith(key)), default=None)
    return first and objects[first], any(found.startswith(key + b"/") for found in objects)


# ------------------------------------------------------------------------------- any keys, any server, no changes

COMPONENTS = st.one_of(
    st.sampled_from(
        [b"", b".", b"..", b"...", b"a", b"a-", b"a-b", b"a.txt", b"a0", b"b", b"a%2F", b"%41", b"+", b" ", b"\\"]
        + [b"\x01", b"\r", b"\n", b"a\x01", b"\0", b"a\0", b"\xff", b"a\xff", b"x" * 255, b"x" * 256]
        + ["é".encode(), "e\u0301".encode(), "語".encode() * 86]
    ),
    st.binary(min_size=1, max_size=3).map(lambda name: name.replace(b"/", b"a")),
)
KEYS = st.lists(COMPONENTS, min_size=1, max_size=4).map(b"/".join).filter(bool)
ORDERLY = ["plain", "shuffled within pages", "repeated prefixes", "no final slash", "no delimiter", "strangers"]
DISORDERLY = ["shuffled", "prefixes first", "objects first", "repeated and shuffled"]


def pages_of(
    objects: dict[bytes, ListedObject], prefix: bytes, page_size: int, manner: str, dice: random.Random
) -> Iterator[Page]:
    """The pages of a listing from a server with that manner."""
    entries = list_directory(objects, prefix)
    if manner == "no delimiter":
        entries = [(key, objects[key]) for key in sorted(objects) if key.startswith(prefix)]
    elif manner == "prefixes first":
        entries.sort(key=lambda entry: (entry[1] is not None, entry[0]))
    elif manner == "objects first":
        entries.sort(key=lambda entry: (entry[1] is None, entry[0]))
    elif manner == "shuffled":
        dice.shuffle(entries)
    elif manner == "repeated and shuffled":
        entries += dice.choices(entries, k=len(entries)) if entries else []
        dice.shuffle(entries)
    seen: list[bytes] = []
    for start in range(0, len(entries), page_size) or [0]:
        contents, prefixes = page_of(entries[start : start + page_size])
        if manner == "shuffled within pages":
            dice.shuffle(contents)
            dice.shuffle(prefixes)
        elif manner == "repeated prefixes":
            seen += prefixes
            prefixes = list(seen)
            contents += contents
        elif manner == "no final slash":
            prefixes = [found if found == prefix + b"/" else found[:-1] for found in prefixes]
        elif manner == "strangers" and prefix:
            contents = [make_object(b"\x01stranger"), *contents, make_object(b"~stranger")]
            prefixes = [b"\x01stranger/", *prefixes, prefix, b"~"]
        yield contents, prefixes


def assert_answer(tree: Tree, objects: dict[bytes, ListedObject], parent: bytes, name: bytes, answer: Answer) -> None:
    directory = tree.directories[parent]
    if name not in directory:
        assert answer.entry is None
    else:
        assert answer.entry is not None
        assert_entry(directory[name], objects, parent, name, answer.entry)


def assert_entry(
    key: bytes | None, objects: dict[bytes, ListedObject], parent: bytes, name: bytes, entry: Entry
) -> None:
    assert entry.name == name
    if key is None:
        assert entry.is_directory
        assert entry.key == parent + name + b"/"
    else:
        assert not entry.is_directory
        fields = (entry.key, entry.size_bytes, entry.mtime_ms, entry.etag, entry.storage_class)
        assert fields == objects[key]


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


@settings(max_examples=250, deadline=None)
@given(
    keys=st.sets(KEYS, max_size=25),
    mount_prefix=st.sampled_from([b"", b"", b"a/", b"a//", b"a-b/a/", b"nothing/"]),
    page_size=st.integers(1, 5),
    manner=st.sampled_from(ORDERLY + DISORDERLY),
    seed=st.integers(0, 2**32),
)
def test_agrees_with_the_reference_tree(
    keys: set[bytes], mount_prefix: bytes, page_size: int, manner: str, seed: int
) -> None:
    """readdir of every directory and lookup of every name, present or not, before, while and after listing it."""
    dice = random.Random(seed)
    objects = {key: make_object(key, dice.randint(0, 3)) for key in keys}
    tree = reference_tree(objects, mount_prefix)
    namespace = Namespace(mount_prefix, 60.0)
    some_names = [key.rpartition(b"/")[2] for key in keys] + [b"absent", b"a", b"a-", b"zz", b"\x02"]
    todo = [(ROOT_INO, mount_prefix)]
    while todo:
        ino, prefix = todo.pop()
        names = [*tree.directories[prefix], *dice.sample(some_names, 5)]
        for name in dice.sample(names, min(3, len(names))):
            answer = namespace.lookup(ino, name, 0.0)
            if answer is None:
                answer = namespace.learn(ino, name, *probes(objects, prefix + name), now=0.0)
            assert_answer(tree, objects, prefix, name, answer)
        listing, is_new = namespace.begin_listing(ino, 0.0)
        assert is_new
        readers = [Reader(listing), Reader(listing)]
        for contents, prefixes in pages_of(objects, prefix, page_size, manner, dice):
            namespace.add_page(listing, contents, prefixes, 0.0)
            namespace.check()
            for reader in readers:
                reader.step(namespace, dice.randint(0, 4), dice)
                assert len(set(reader.names)) == len(reader.names)
            if manner in ORDERLY:
                for name in names:
                    answer = namespace.lookup(ino, name, 0.0)
                    if answer is not None:
                        assert_answer(tree, objects, prefix, name, answer)
                for entry in readers[0].read:
                    answer = namespace.lookup(ino, entry.name, 0.0)
                    assert answer == Answer(entry, 60.0), "what was read needs no request"
            if dice.random() < 0.2:
                readers.append(Reader(listing))
        namespace.finish_listing(listing, 0.0)
        namespace.check()
        for reader in readers:
            while not listing.is_end(len(reader.read)):
                reader.step(namespace, dice.randint(1, 4), dice)
            assert sorted(reader.names) == sorted(tree.directories[prefix])
        fresh = Reader(listing)
        fresh.step(namespace, len(names) + 1, dice)
        assert sorted(fresh.names) == sorted(tree.directories[prefix])
        for entry in fresh.read:
            assert_entry(tree.directories[prefix][entry.name], objects, prefix, entry.name, entry)
            namespace.remember(entry)
            if entry.is_directory:
                todo.append((entry.ino, entry.key))
        for name in names:
            answer = namespace.lookup(ino, name, 59.0)
            assert answer is not None
            assert_answer(tree, objects, prefix, name, answer)
            if name in tree.directories[prefix]:
                assert namespace.lookup(ino, name, 60.0) is None
    counts = namespace.counts()
    files = [key for directory in tree.directories.values() for key in directory.values()]
    assert counts.objects == len([key for key in files if key is not None])
    assert counts.directories == files.count(None)
    assert counts.shadowed_keys == len(tree.shadowed)
    assert counts.hidden_keys == len(tree.hidden)
    assert {found.key for found in namespace.take_unreachable()} == tree.shadowed | tree.hidden


# -------------------------------------------------------------------------------------- a bucket that changes

DIRECTORIES = [b"", b"a/", b"d/"]
NAMES = [b"a", b"a-", b"a.t", b"a0", b"b", b"d"]


@dataclass
class Walk:
    """A listing in progress, and where its server is."""

    ino: int
    listing: Listing
    token: bytes = b""


class ChangingBucket(RuleBasedStateMachine):
    """Every answer was true within the last TTL; a directory read has what did not change meanwhile, once."""

    @initialize(ttl_s=st.sampled_from([0.0, 3.0, 10.0, float("inf")]), seed=st.integers(0, 2**32))
    def start(self, ttl_s: float, seed: int) -> None:
        self.ttl_s = ttl_s
        self.dice = random.Random(seed)
        self.now = 100.0
        self.version = 0
        self.history: list[tuple[float, dict[bytes, ListedObject]]] = [(-1e9, {})]
        self.namespace = Namespace(b"", ttl_s)
        self.directories = {ROOT_INO: b""}
        self.lookups: dict[int, int] = {}
        self.identities: dict[int, tuple[bytes, str]] = {}
        self.numbers: dict[tuple[bytes, str], int] = {}
        self.walks: list[Walk] = []
        self.readers: list[tuple[Reader, float]] = []
        self.probes_under_way: list[tuple[int, bytes, ListedObject | None, bool, float]] = []
        for key in [b"a", b"a-", b"a/a", b"d/a", b"d/b"]:
            self.put(key)

    @property
    def bucket(self) -> dict[bytes, ListedObject]:
        return self.history[-1][1]

    def truths(self, since_s: float, until_s: float) -> list[dict[bytes, ListedObject]]:
        """Every state of the bucket from `since_s` to `until_s`."""
        ends = [began_s for began_s, _ in self.history[1:]] + [float("inf")]
        return [
            state
            for (began_s, state), ended_s in zip(self.history, ends, strict=True)
            if began_s <= until_s and ended_s >= since_s
        ]

    def assert_plausible(self, prefix: bytes, name: bytes, entry: Entry | None, truths: list[dict]) -> None:
        """File and directory are asked for apart, so each must have been so at some time, not both at once."""
        key = prefix + name
        was_directory = [any(found.startswith(key + b"/") for found in state) for state in truths]
        if entry is None:
            assert any(key not in state for state in truths)
            assert not all(was_directory)
        elif entry.is_directory:
            assert any(was_directory)
        else:
            assert entry.etag in [state[key][3] for state in truths if key in state]
            assert not all(was_directory)

    def remember(self, entry: Entry) -> None:
        identity = (entry.key, entry.etag)
        assert self.numbers.setdefault(identity, entry.ino) == entry.ino, "a number for life"
        assert self.identities.setdefault(entry.ino, identity) == identity, "never used for another"
        self.namespace.remember(entry)
        self.lookups[entry.ino] = self.lookups.get(entry.ino, 0) + 1
        if entry.is_directory:
            self.directories[entry.ino] = entry.key

    # The bucket and the clock.

    @rule(parent=st.sampled_from(DIRECTORIES), name=st.sampled_from(NAMES))
    def put_some(self, parent: bytes, name: bytes) -> None:
        self.put(parent + name)

    def put(self, key: bytes) -> None:
        self.version += 1
        self.history.append((self.now, self.bucket | {key: make_object(key, self.version)}))

    @rule(number=st.integers(0, 30))
    def delete(self, number: int) -> None:
        if self.bucket:
            gone = sorted(self.bucket)[number % len(self.bucket)]
            self.history.append((self.now, {key: found for key, found in self.bucket.items() if key != gone}))

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0, 5.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    # Lookups.

    @rule(number=st.integers(0, 5), name=st.sampled_from(NAMES), remember=st.booleans(), late=st.booleans())
    def look_up(self, number: int, name: bytes, remember: bool, late: bool) -> None:
        ino = sorted(self.directories)[number % len(self.directories)]
        prefix = self.directories[ino]
        answer = self.namespace.lookup(ino, name, self.now)
        if answer is not None:
            assert self.ttl_s > 0
            assert self.now < answer.fresh_until_s <= self.now + self.ttl_s
        else:
            found, has_keys_below = probes(self.bucket, prefix + name)
            if late:
                self.probes_under_way.append((ino, name, found, has_keys_below, self.now))
                return
            answer = self.namespace.learn(ino, name, found, has_keys_below, self.now)
            assert answer.fresh_until_s == self.now + self.ttl_s
        self.assert_plausible(prefix, name, answer.entry, self.truths(self.now - self.ttl_s, self.now))
        if remember and answer.entry is not None:
            self.remember(answer.entry)

    @precondition(lambda self: self.probes_under_way)
    @rule()
    def probes_come_back(self) -> None:
        ino, name, found, has_keys_below, sent_s = self.probes_under_way.pop()
        if ino in self.directories:
            answer = self.namespace.learn(ino, name, found, has_keys_below, sent_s)
            self.assert_plausible(self.directories[ino], name, answer.entry, self.truths(sent_s, sent_s))

    @rule(parent=st.sampled_from(DIRECTORIES), name=st.sampled_from(NAMES))
    def invalidate(self, parent: bytes, name: bytes) -> None:
        self.namespace.invalidate(parent + name)
        for ino, prefix in self.directories.items():
            if prefix == parent:
                assert self.namespace.lookup(ino, name, self.now) is None
                assert self.namespace.listing(ino, self.now) is None or self.namespace.lookup(ino, b"q", self.now)

    @precondition(lambda self: self.lookups)
    @rule(number=st.integers(0, 30), all_of_it=st.booleans())
    def forget(self, number: int, all_of_it: bool) -> None:
        ino = sorted(self.lookups)[number % len(self.lookups)]
        prefix = self.directories.get(ino)
        if prefix is not None and any(
            known != ino and self.identities[known][0].startswith(prefix) for known in self.lookups
        ):
            return  # the kernel forgets the children first
        taken = self.lookups[ino] if all_of_it else 1
        self.namespace.forget(ino, taken)
        self.lookups[ino] -= taken
        if not self.lookups[ino]:
            del self.lookups[ino]
            self.directories.pop(ino, None)
            with pytest.raises(KeyError):
                self.namespace.entry(ino)

    # Listings.

    @rule(number=st.integers(0, 5))
    def open_directory(self, number: int) -> None:
        ino = sorted(self.directories)[number % len(self.directories)]
        listing = self.namespace.listing(ino, self.now)
        if listing is not None:
            assert self.now - listing.started_s < self.ttl_s
        else:
            listing, is_new = self.namespace.begin_listing(ino, self.now)
            assert is_new == all(walk.listing is not listing for walk in self.walks)
            if is_new:
                self.walks.append(Walk(ino, listing))
        self.readers.append((Reader(listing), listing.started_s))

    @precondition(lambda self: self.walks)
    @rule(number=st.integers(0, 5), size=st.integers(1, 3))
    def page_comes(self, number: int, size: int) -> None:
        walk = self.walks[number % len(self.walks)]
        rest = list_directory(self.bucket, walk.listing.prefix, walk.token)
        contents, prefixes = page_of(rest[:size])
        # The server reads when it is asked, which is when the page before came.
        self.namespace.add_page(walk.listing, contents, prefixes, self.now)
        if len(rest) > size:
            walk.token = rest[size - 1][0]
        else:
            self.namespace.finish_listing(walk.listing, self.now)
            self.walks.remove(walk)

    @precondition(lambda self: self.walks)
    @rule()
    def listing_fails(self) -> None:
        self.namespace.fail_listing(self.walks.pop().listing)

    @precondition(lambda self: self.readers)
    @rule(number=st.integers(0, 5), limit=st.integers(1, 10), remember=st.booleans())
    def read_directory(self, number: int, limit: int, remember: bool) -> None:
        reader, opened_s = self.readers[number % len(self.readers)]
        prefix = reader.listing.prefix
        before = len(reader.read)
        reader.step(self.namespace, limit, self.dice)
        for after, entry, fresh_until_s in self.namespace.entries(reader.listing, before):
            if after > len(reader.read):
                break
            self.assert_plausible(prefix, entry.name, entry, self.truths(opened_s, self.now))
            if fresh_until_s > self.now:
                since_s = fresh_until_s - self.ttl_s if self.ttl_s != float("inf") else opened_s
                self.assert_plausible(prefix, entry.name, entry, self.truths(since_s, self.now))
            if remember:
                self.remember(entry)
        if reader.listing.failed:
            self.readers.remove((reader, opened_s))
        elif reader.listing.is_end(len(reader.read)):
            self.readers.remove((reader, opened_s))
            assert len(set(reader.names)) == len(reader.names)
            for name in NAMES:
                key = prefix + name
                truths = self.truths(opened_s, self.now)
                if all(any(found == key or found.startswith(key + b"/") for found in state) for state in truths):
                    kinds = {any(found.startswith(key + b"/") for found in state) for state in truths}
                    if len(kinds) == 1:
                        assert name in reader.names, "it was there all the time"

    @rule()
    def sweep(self) -> None:
        self.namespace.sweep(self.now)

    @invariant()
    def invariants_hold(self) -> None:
        if not hasattr(self, "namespace"):
            return
        self.namespace.check()
        for ino in self.lookups:
            entry = self.namespace.entry(ino)
            assert (entry.key, entry.etag) == self.identities[ino]


TestChangingBucket = ChangingBucket.TestCase
TestChangingBucket.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
