"""The namespace over a bucket that changes, on random histories."""

from __future__ import annotations

import random
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from s3prefetchfs.core.listing import Listing
from s3prefetchfs.core.namespace import ROOT_INO, Namespace
from s3prefetchfs.core.record import Entry, ListedObject
from tests.core.bucket_model import Reader, list_directory, make_object, page_of, probes

Bucket = dict[bytes, ListedObject]
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
        self.history: list[tuple[float, Bucket]] = [(-1e9, {})]
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
    def bucket(self) -> Bucket:
        return self.history[-1][1]

    def truths(self, since_s: float, until_s: float) -> list[Bucket]:
        """Every state of the bucket from `since_s` to `until_s`."""
        ends = [began_s for began_s, _ in self.history[1:]] + [float("inf")]
        return [
            state
            for (began_s, state), ended_s in zip(self.history, ends, strict=True)
            if began_s <= until_s and ended_s >= since_s
        ]

    def assert_plausible(self, prefix: bytes, name: bytes, entry: Entry | None, truths: list[Bucket]) -> None:
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
