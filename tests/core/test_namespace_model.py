"""The namespace against a second, naive tree, on random keys and servers of all manners."""

from __future__ import annotations

import random
from collections.abc import Iterator

import hypothesis.strategies as st
from hypothesis import given, settings

from s3prefetchfs.core.namespace import ROOT_INO, Answer, Namespace
from s3prefetchfs.core.record import Entry, ListedObject
from tests.core.bucket_model import Page, Reader, Tree, list_directory, make_object, page_of, probes, reference_tree

COMPONENTS = st.one_of(
    st.sampled_from(
        [
            *(b"", b".", b"..", b"...", b"a", b"a-", b"a-b", b"a.txt", b"a0", b"b", b"a%2F", b"%41", b"+", b" "),
            *(b"\x01", b"\r", b"\n", b"a\x01", b"\0", b"a\0", b"\xff", b"a\xff", b"x" * 255, b"x" * 256),
            *("é".encode(), "e\u0301".encode(), "語".encode() * 86, b"\\"),
        ]
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
