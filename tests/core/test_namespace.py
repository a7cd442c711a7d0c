"""What names mean, how long that is believed, and what is kept of it."""

from __future__ import annotations

from math import inf

import hypothesis.strategies as st
import pytest
from hypothesis import given

from s3prefetchfs.core import namespace as namespace_module
from s3prefetchfs.core.listing import Listing, Reason, Unreachable
from s3prefetchfs.core.namespace import ROOT_INO, Answer, Counts, Namespace
from s3prefetchfs.core.record import Entry, ListedObject, directory_record, file_record

ETAG = "0123456789abcdef0123456789abcdef"
TTL_S = 60.0


def an_object(key: bytes, size_bytes: int = 5, mtime_ms: int = 1_700_000_000_123, etag: str = ETAG) -> ListedObject:
    return key, size_bytes, mtime_ms, etag, "STANDARD"


def list_root(namespace: Namespace, keys: list[bytes], now: float = 0.0, size_bytes: int = 5) -> Listing:
    """A complete one-page listing of the root; keys that end in "/" are common prefixes."""
    listing, _ = namespace.begin_listing(ROOT_INO, now)
    add_page(namespace, listing, keys, now, size_bytes)
    namespace.finish_listing(listing, now)
    return listing


def add_page(namespace: Namespace, listing: Listing, keys: list[bytes], now: float = 0.0, size_bytes: int = 5) -> None:
    objects = [an_object(key, size_bytes) for key in keys if not key.endswith(b"/")]
    namespace.add_page(listing, objects, [key for key in keys if key.endswith(b"/")], now)
    namespace.check()


def names(namespace: Namespace, listing: Listing, position: int = 0) -> list[bytes]:
    """What a reader at `position` gets; directories with a slash."""
    found = namespace.entries(listing, position)
    return [entry.name + b"/" if entry.is_directory else entry.name for _, entry, _ in found]


def found(answer: Answer | None) -> Entry:
    """The entry of an answer that says the name exists."""
    assert answer is not None
    assert answer.entry is not None
    return answer.entry


# ------------------------------------------------------------------------------------------------------ records


@given(
    name=st.binary(min_size=1, max_size=255).filter(lambda name: not {0, 47} & set(name)),
    size_bytes=st.integers(0, 2**63 - 1),
    mtime_ms=st.integers(-(2**63), 2**63 - 1),
    etag=st.one_of(
        st.text(max_size=40),
        st.from_regex(r"[0-9a-f]{32}(-[0-9]{1,5})?", fullmatch=True),
        st.sampled_from(["W/" + ETAG, ETAG.upper(), ETAG[:30] + " a", " " + ETAG, ETAG[:31]]),
    ),
    storage_class=st.one_of(st.text(max_size=40), st.sampled_from(["STANDARD", "GLACIER", "COLD_HDD"])),
)
def test_attributes_survive_packing(name: bytes, size_bytes: int, mtime_ms: int, etag: str, storage_class: str) -> None:
    """Whatever the ETag and storage class look like, they come back as they were."""
    entry = Entry(5, b"x/", file_record(name, size_bytes, mtime_ms, etag, storage_class))
    assert not entry.is_directory
    assert (entry.name, entry.key) == (name, b"x/" + name)
    assert (entry.size_bytes, entry.mtime_ms, entry.etag, entry.storage_class) == (
        *(size_bytes, mtime_ms, etag),
        storage_class,
    )


def test_directory_entry() -> None:
    """A directory has a key that ends in a slash and no attributes of its own."""
    entry = Entry(5, b"x/", directory_record(b"d"))
    assert entry.is_directory
    assert (entry.name, entry.key, entry.size_bytes, entry.mtime_ms, entry.etag) == (b"d", b"x/d/", 0, 0, "")
    assert entry.storage_class == ""


# --------------------------------------------------------------------------------------------------------- names


def test_root_exists_without_keys() -> None:
    """The root is a directory even if the prefix has no keys, and an empty listing says so."""
    namespace = Namespace(b"no/such/", TTL_S)
    root = namespace.entry(ROOT_INO)
    assert root.is_directory
    assert (root.ino, root.name, root.key) == (ROOT_INO, b"", b"no/such/")
    listing = list_root(namespace, [])
    assert names(namespace, listing) == []
    assert listing.is_end(0)
    assert namespace.lookup(ROOT_INO, b"a", 1.0) == Answer(None, TTL_S)


def test_prefix_must_end_in_a_slash() -> None:
    """Else `pre` would also show the keys of `prefix`."""
    with pytest.raises(ValueError, match="slash"):
        Namespace(b"pre", TTL_S)


@pytest.mark.parametrize("name", [b"", b".", b"..", b"a\0", b"x" * 256, "語".encode() * 86])
def test_names_that_cannot_be_paths_do_not_exist(name: bytes) -> None:
    """Nobody needs to ask S3 for them."""
    assert Namespace(b"", 0.0).lookup(ROOT_INO, name, 0.0) == Answer(None, inf)


@pytest.mark.parametrize(
    ("keys", "hidden"),
    [
        ([b"p//"], b"p//"),
        ([b"p/."], b"p/."),
        ([b"p/./"], b"p/./"),
        ([b"p/../"], b"p/../"),
        ([b"p/a\0b"], b"p/a\0b"),
        ([b"p/" + b"x" * 256], b"p/" + b"x" * 256),
        ([b"p/" + b"x" * 256 + b"/"], b"p/" + b"x" * 256 + b"/"),
    ],
)
def test_keys_that_cannot_be_paths_are_hidden(keys: list[bytes], hidden: bytes) -> None:
    """They are counted, named once, and do no harm to the others."""
    namespace = Namespace(b"p/", TTL_S)
    listing = list_root(namespace, [*keys, b"p/ok", b"p/" + b"y" * 255])
    assert names(namespace, listing) == [b"ok", b"y" * 255]
    assert namespace.counts() == Counts(objects=2, directories=0, hidden_keys=1, shadowed_keys=0)
    assert namespace.take_unreachable() == [Unreachable(hidden, Reason.NOT_A_PATH)]
    list_root(namespace, keys, now=100.0)
    assert namespace.take_unreachable() == []
    assert namespace.counts().hidden_keys == 1


def test_leading_slash_is_hidden() -> None:
    """A key `/lead` would be in a directory without a name."""
    namespace = Namespace(b"", TTL_S)
    assert names(namespace, list_root(namespace, [b"/"])) == []
    assert namespace.take_unreachable() == [Unreachable(b"/", Reason.NOT_A_PATH)]


def test_hidden_keys_repeated_on_pages_count_once() -> None:
    """Some servers send a common prefix again on each page."""
    namespace = Namespace(b"", TTL_S)
    listing, _ = namespace.begin_listing(ROOT_INO, 0.0)
    for page in ([b"//", b"a"], [b"//", b"b"]):
        add_page(namespace, listing, page)
    namespace.finish_listing(listing, 0.0)
    assert namespace.counts() == Counts(objects=2, directories=0, hidden_keys=1, shadowed_keys=0)


@pytest.mark.parametrize(
    "name",
    [b"\x01", b"\r", b"\n", b"a\tb", b" ", b"+", b"%41", b"%", b"\\", b"?#&", b"\xff\xfe", b"...", b"x" * 255]
    + ["é".encode(), "e\u0301".encode(), b"case", b"Case"],
)
def test_any_other_name_works(name: bytes) -> None:
    """Names are bytes: listed, looked up and kept apart as they are."""
    namespace = Namespace(b"", TTL_S)
    others = ["é".encode(), "e\u0301".encode(), b"case", b"Case", b"A"]
    listing = list_root(namespace, [name, *others])
    assert sorted(names(namespace, listing)) == sorted({name, *others})
    assert found(namespace.lookup(ROOT_INO, name, 1.0)).key == name


def test_directory_wins_over_file_of_the_same_name() -> None:
    """In readdir, lookup and probes alike; the shadowed key is counted and named once."""
    namespace = Namespace(b"", TTL_S)
    assert found(namespace.learn(ROOT_INO, b"a", an_object(b"a"), True, 0.0)).is_directory
    listing = list_root(namespace, [b"a", b"a-", b"a/"])
    assert names(namespace, listing) == [b"a-", b"a/"]
    assert found(namespace.lookup(ROOT_INO, b"a", 1.0)).is_directory
    assert namespace.counts() == Counts(objects=1, directories=1, hidden_keys=0, shadowed_keys=1)
    assert namespace.take_unreachable() == [Unreachable(b"a", Reason.SHADOWED)]


def test_markers_make_directories() -> None:
    """`dir/` is the directory itself, not an entry without a name; with data it is a key that nobody can read."""
    namespace = Namespace(b"", TTL_S)
    list_root(namespace, [b"dir/"])
    directory = found(namespace.lookup(ROOT_INO, b"dir", 1.0))
    namespace.remember(directory)
    for size_bytes in (0, 10):
        listing, _ = namespace.begin_listing(directory.ino, 0.0)
        namespace.add_page(listing, [an_object(b"dir/", size_bytes), an_object(b"dir/x")], [], 0.0)
        namespace.finish_listing(listing, 0.0)
        assert names(namespace, listing) == [b"x"]
        assert listing.hidden == (1 if size_bytes else 0)
    assert namespace.take_unreachable() == [Unreachable(b"dir/", Reason.MARKER_WITH_DATA)]


def test_odd_answers_of_servers() -> None:
    """Prefixes without a slash, keys from elsewhere, a delimiter that is ignored: the tree is right all the same."""
    namespace = Namespace(b"p/", TTL_S)
    listing, _ = namespace.begin_listing(ROOT_INO, 0.0)
    objects = [an_object(key) for key in (b"a", b"p/f", b"p/deep/er/x", b"p/deep/y", b"p/marker/", b"q/z", b"p")]
    namespace.add_page(listing, objects, [b"p/bare", b"p/slash/", b"q/", b"p/", b"p"], 0.0)
    namespace.finish_listing(listing, 0.0)
    assert names(namespace, listing) == [b"bare/", b"deep/", b"f", b"marker/", b"slash/"]
    assert namespace.counts() == Counts(objects=1, directories=4, hidden_keys=0, shadowed_keys=0)


# ---------------------------------------------------------------------------------------------- pages and readers


def test_first_entries_come_before_the_last_page() -> None:
    """All but the last name of a page are certain at once."""
    namespace = Namespace(b"", TTL_S)
    listing, _ = namespace.begin_listing(ROOT_INO, 0.0)
    assert names(namespace, listing) == []
    add_page(namespace, listing, [b"a", b"b/", b"c"])
    assert names(namespace, listing) == [b"a", b"b/"]
    assert not listing.is_end(2)
    add_page(namespace, listing, [b"d"])
    assert names(namespace, listing, 2) == [b"c"]
    namespace.finish_listing(listing, 0.0)
    assert names(namespace, listing, 3) == [b"d"]
    assert listing.is_end(4)


def test_file_waits_until_no_directory_of_its_name_can_come() -> None:
    """ "a" and "a/" may be pages apart; only the file itself is held back, not what is between."""
    namespace = Namespace(b"", TTL_S)
    listing, _ = namespace.begin_listing(ROOT_INO, 0.0)
    add_page(namespace, listing, [b"a", b"a-"])
    add_page(namespace, listing, [b"a-1", b"a-2", b"a-b/"])
    assert names(namespace, listing) == [b"a-1", b"a-2", b"a-b/"]
    assert namespace.lookup(ROOT_INO, b"a", 0.0) is None
    add_page(namespace, listing, [b"a.txt", b"a/", b"b"])
    assert names(namespace, listing, 3) == [b"a-", b"a.txt", b"a/"]
    namespace.finish_listing(listing, 0.0)
    assert names(namespace, listing, 6) == [b"b"]
    assert namespace.counts() == Counts(objects=5, directories=2, hidden_keys=0, shadowed_keys=1)


def test_names_in_progress_are_answered_from_the_pages_that_are_in() -> None:
    """Up to the last key, presence and absence; beyond it, S3 must be asked."""
    namespace = Namespace(b"", TTL_S)
    listing, _ = namespace.begin_listing(ROOT_INO, 0.0)
    add_page(namespace, listing, [b"b", b"d/"])
    assert found(namespace.lookup(ROOT_INO, b"b", 1.0)).key == b"b"
    assert found(namespace.lookup(ROOT_INO, b"d", 1.0)).key == b"d/"
    assert namespace.lookup(ROOT_INO, b"c", 1.0) == Answer(None, TTL_S)
    assert namespace.lookup(ROOT_INO, b"e", 1.0) is None
    assert namespace.counts() == Counts(objects=1, directories=1, hidden_keys=0, shadowed_keys=0)


def test_order_is_never_trusted() -> None:
    """When a page goes back, readers wait for the end, then get what they have not had."""
    namespace = Namespace(b"", TTL_S)
    listing, _ = namespace.begin_listing(ROOT_INO, 0.0)
    add_page(namespace, listing, [b"c", b"m/", b"z"])
    assert names(namespace, listing) == [b"c", b"m/"]
    add_page(namespace, listing, [b"a", b"c/", b"x/"])
    add_page(namespace, listing, [b"a/", b"zz"])
    assert names(namespace, listing, 2) == []
    assert namespace.lookup(ROOT_INO, b"z", 0.0) is None
    assert found(namespace.lookup(ROOT_INO, b"x", 0.0)).is_directory
    assert namespace.lookup(ROOT_INO, b"b", 0.0) is None
    namespace.finish_listing(listing, 0.0)
    namespace.check()
    assert names(namespace, listing, 2) == [b"a/", b"x/", b"z", b"zz"]
    assert names(namespace, listing) == [b"c/", b"m/", b"a/", b"x/", b"z", b"zz"]
    assert found(namespace.lookup(ROOT_INO, b"c", 0.0)).is_directory
    assert namespace.counts() == Counts(objects=2, directories=4, hidden_keys=0, shadowed_keys=2)


def test_repetitions_do_not_break_the_order() -> None:
    """Keys and prefixes sent again are dropped, and later pages still come out at once."""
    namespace = Namespace(b"", TTL_S)
    listing, _ = namespace.begin_listing(ROOT_INO, 0.0)
    add_page(namespace, listing, [b"a", b"b/", b"c"])
    add_page(namespace, listing, [b"a", b"b/", b"c", b"d/", b"d/", b"e", b"e"])
    assert names(namespace, listing) == [b"a", b"b/", b"c", b"d/"]


@pytest.mark.parametrize("count", [0, 1, 23, 24, 100, 5000])
def test_positions(count: int) -> None:
    """Any position handed out leads back to the same place, as often as asked, after re-listing too."""
    namespace = Namespace(b"", TTL_S)
    keys = [b"%05d" % number for number in range(count)]
    listing = list_root(namespace, keys)
    listed = list(namespace.entries(listing))
    assert [position for position, _, _ in listed] == list(range(1, count + 1))
    list_root(namespace, keys[::2], now=1.0, size_bytes=6)
    for start in {0, count // 3, count - 1, count} - {-1}:
        assert [entry for _, entry, _ in namespace.entries(listing, start)] == [e for _, e, _ in listed[start:]]
    assert listing.is_end(count)
    assert names(namespace, listing, count + 10) == []


def test_readers_share_one_listing_in_progress() -> None:
    """A second begin joins the first; only the first caller has to fetch pages."""
    namespace = Namespace(b"", TTL_S)
    listing, is_new = namespace.begin_listing(ROOT_INO, 0.0)
    assert is_new
    assert namespace.begin_listing(ROOT_INO, 5.0) == (listing, False)
    assert namespace.listing(ROOT_INO, 5.0) is None
    namespace.finish_listing(listing, 5.0)
    assert namespace.listing(ROOT_INO, 5.0) is listing


def test_failed_listing_leaves_nothing_complete() -> None:
    """What came is still there for its readers, but says nothing about any name."""
    namespace = Namespace(b"", TTL_S)
    listing, _ = namespace.begin_listing(ROOT_INO, 0.0)
    add_page(namespace, listing, [b"a", b"b/", b"c"])
    namespace.fail_listing(listing)
    namespace.check()
    assert listing.failed
    assert names(namespace, listing) == [b"a", b"b/"]
    assert not listing.is_end(2)
    assert namespace.lookup(ROOT_INO, b"a", 0.0) is None
    assert namespace.listing(ROOT_INO, 0.0) is None
    assert namespace.counts() == Counts(0, 0, 0, 0)
    with pytest.raises(ValueError, match="not in progress"):
        namespace.add_page(listing, [], [], 0.0)
    assert namespace.begin_listing(ROOT_INO, 0.0)[1]


# ------------------------------------------------------------------------------------------------------------ time


def test_listing_is_believed_for_the_ttl_from_its_start() -> None:
    """Present and absent names alike; then S3 must be asked again."""
    namespace = Namespace(b"", TTL_S)
    listing, _ = namespace.begin_listing(ROOT_INO, 100.0)
    namespace.add_page(listing, [an_object(b"a")], [], 130.0)
    namespace.finish_listing(listing, 130.0)
    assert namespace.lookup(ROOT_INO, b"a", 159.0) == Answer(found(namespace.lookup(ROOT_INO, b"a", 159.0)), 160.0)
    assert namespace.lookup(ROOT_INO, b"b", 159.0) == Answer(None, 160.0)
    assert [fresh_until_s for _, _, fresh_until_s in namespace.entries(listing)] == [160.0]
    assert namespace.lookup(ROOT_INO, b"a", 160.0) is None
    assert namespace.lookup(ROOT_INO, b"b", 160.0) is None
    assert namespace.listing(ROOT_INO, 160.0) is None


def test_listing_that_takes_longer_than_the_ttl_still_answers_for_its_last_pages() -> None:
    """Each name is as old as the request for its page, so `ls -l` of a huge directory asks for nothing twice."""
    namespace = Namespace(b"", TTL_S)
    listing, _ = namespace.begin_listing(ROOT_INO, 0.0)
    add_page(namespace, listing, [b"a", b"b"], now=50.0)
    add_page(namespace, listing, [b"c", b"d"], now=100.0)
    namespace.finish_listing(listing, 100.0)
    until = {entry.name: fresh_until_s for _, entry, fresh_until_s in namespace.entries(listing)}
    assert until == {b"a": 60.0, b"b": 60.0, b"c": 110.0, b"d": 110.0}
    assert namespace.lookup(ROOT_INO, b"a", 100.0) is None
    assert found(namespace.lookup(ROOT_INO, b"d", 100.0)).key == b"d"
    assert namespace.lookup(ROOT_INO, b"bb", 100.0) == Answer(None, 110.0)
    assert namespace.listing(ROOT_INO, 100.0) is None


def test_ttl_zero_answers_nothing_from_memory() -> None:
    """Every lookup asks S3; a directory that is open is read to its end all the same."""
    namespace = Namespace(b"", 0.0)
    listing, _ = namespace.begin_listing(ROOT_INO, 0.0)
    add_page(namespace, listing, [b"a", b"b/"])
    assert namespace.lookup(ROOT_INO, b"a", 0.0) is None
    namespace.finish_listing(listing, 0.0)
    assert namespace.lookup(ROOT_INO, b"a", 0.0) is None
    assert namespace.listing(ROOT_INO, 0.0) is None
    assert namespace.learn(ROOT_INO, b"a", an_object(b"a"), False, 0.0).fresh_until_s == 0.0
    assert namespace.lookup(ROOT_INO, b"a", 0.0) is None
    assert names(namespace, listing) == [b"a", b"b/"]
    namespace.check()


def test_ttl_infinite() -> None:
    """Nothing is asked twice, and a sweep drops nothing."""
    namespace = Namespace(b"", inf)
    listing = list_root(namespace, [b"a"])
    namespace.sweep(1e12)
    assert namespace.listing(ROOT_INO, 1e12) is listing
    assert namespace.lookup(ROOT_INO, b"b", 1e12) == Answer(None, inf)
    namespace.invalidate(b"a")
    assert namespace.lookup(ROOT_INO, b"a", 1e12) is None
    assert namespace.listing(ROOT_INO, 1e12) is None


def test_probes_are_believed_for_the_ttl() -> None:
    """Positive and negative answers, from when they were sent."""
    namespace = Namespace(b"p/", TTL_S)
    for name, answer in {
        b"file": (an_object(b"p/file"), False),
        b"dir": (an_object(b"p/dir/x"), True),
        b"neither": (an_object(b"p/neither-nor"), False),
        b"nothing": (None, False),
    }.items():
        assert namespace.lookup(ROOT_INO, name, 10.0) is None
        learned = namespace.learn(ROOT_INO, name, *answer, now=10.0)
        assert learned.fresh_until_s == 70.0
        assert namespace.lookup(ROOT_INO, name, 69.0) == learned
        assert namespace.lookup(ROOT_INO, name, 70.0) is None
    assert found(namespace.learn(ROOT_INO, b"file", an_object(b"p/file", 7), False, 80.0)).size_bytes == 7
    assert found(namespace.learn(ROOT_INO, b"dir", None, True, 80.0)).key == b"p/dir/"
    assert namespace.learn(ROOT_INO, b"neither", an_object(b"p/neither-nor"), False, 80.0).entry is None


def test_probes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used go first."""
    monkeypatch.setattr(namespace_module, "MAX_PROBES", 2)
    namespace = Namespace(b"", TTL_S)
    namespace.learn(ROOT_INO, b"a", None, False, 0.0)
    namespace.learn(ROOT_INO, b"b", None, False, 0.0)
    namespace.lookup(ROOT_INO, b"a", 0.0)
    namespace.learn(ROOT_INO, b"c", None, False, 0.0)
    assert namespace.lookup(ROOT_INO, b"a", 0.0) is not None
    assert namespace.lookup(ROOT_INO, b"b", 0.0) is None


def test_reports_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million odd keys are counted, not named one by one."""
    monkeypatch.setattr(namespace_module, "MAX_REPORTED", 2)
    namespace = Namespace(b"", TTL_S)
    list_root(namespace, [b"a\0%d" % number for number in range(5)])
    assert len(namespace.take_unreachable()) == 2
    assert namespace.counts().hidden_keys == 5


def test_invalidated_name_is_asked_for_again() -> None:
    """A replaced object is noticed at once; its neighbours are still answered, the directory is listed again."""
    namespace = Namespace(b"", TTL_S)
    listing = list_root(namespace, [b"a", b"b"])
    in_progress, _ = namespace.begin_listing(ROOT_INO, 1.0)
    add_page(namespace, in_progress, [b"a", b"c"], 1.0)
    namespace.invalidate(b"a")
    assert namespace.lookup(ROOT_INO, b"a", 2.0) is None
    assert found(namespace.lookup(ROOT_INO, b"b", 2.0)).key == b"b"
    assert namespace.listing(ROOT_INO, 2.0) is None
    assert [until_s > 2.0 for _, _, until_s in namespace.entries(listing)] == [False, True]
    learned = namespace.learn(ROOT_INO, b"a", an_object(b"a", etag="new"), False, 2.0)
    assert found(learned).etag == "new"
    assert namespace.lookup(ROOT_INO, b"a", 3.0) == learned
    namespace.invalidate(b"a")
    assert namespace.lookup(ROOT_INO, b"a", 3.0) is None
    namespace.invalidate(b"no/such/directory")


# ---------------------------------------------------------------------------------------------------------- inodes


def test_inode_numbers_are_the_same_in_readdir_and_stat() -> None:
    """Also after they were forgotten, re-listed, or looked up by probes; and large, so that small ones are free."""
    namespace = Namespace(b"", TTL_S)
    listed = {entry.name: entry for _, entry, _ in namespace.entries(list_root(namespace, [b"a", b"d/"]))}
    for name, entry in listed.items():
        assert entry.ino >= 2**63
        assert found(namespace.lookup(ROOT_INO, name, 1.0)) == entry
        namespace.remember(entry)
        assert namespace.entry(entry.ino) == entry
        namespace.forget(entry.ino, 1)
    probed = namespace.learn(ROOT_INO, b"a", an_object(b"a"), False, 100.0)
    assert found(probed) == listed[b"a"]
    assert found(namespace.learn(ROOT_INO, b"d", None, True, 100.0)) == listed[b"d"]
    assert found(Namespace(b"", 1.0).learn(ROOT_INO, b"a", an_object(b"a"), False, 0.0)) == listed[b"a"]


def test_replaced_object_is_another_inode() -> None:
    """The old one keeps its attributes as long as the kernel remembers it."""
    namespace = Namespace(b"", TTL_S)
    old = found(namespace.learn(ROOT_INO, b"a", an_object(b"a", 5, 1, "one"), False, 0.0))
    namespace.remember(old)
    touched = found(namespace.learn(ROOT_INO, b"a", an_object(b"a", 5, 2, "one"), False, 1.0))
    assert touched.ino == old.ino
    new = found(namespace.learn(ROOT_INO, b"a", an_object(b"a", 5, 2, "two"), False, 2.0))
    assert new.ino != old.ino
    assert namespace.entry(old.ino) == old
    assert found(namespace.learn(ROOT_INO, b"a", an_object(b"a", 6, 2, "two"), False, 2.0)).ino != new.ino


def test_without_etags_the_mtime_tells_versions_apart() -> None:
    """A server that gives no ETag still gets one inode per version."""
    namespace = Namespace(b"", TTL_S)
    first, second = (
        found(namespace.learn(ROOT_INO, b"a", an_object(b"a", 5, mtime_ms, ""), False, 0.0)) for mtime_ms in (1, 2)
    )
    assert first.ino != second.ino


def test_lookup_counts() -> None:
    """An inode goes with its last lookup, not before; the root never goes."""
    namespace = Namespace(b"", TTL_S)
    entry = found(namespace.learn(ROOT_INO, b"a", an_object(b"a"), False, 0.0))
    with pytest.raises(KeyError):
        namespace.entry(entry.ino)
    for _ in range(3):
        namespace.remember(entry)
    namespace.forget(entry.ino, 2)
    namespace.check()
    assert namespace.entry(entry.ino) == entry
    namespace.forget(entry.ino, 1)
    namespace.check()
    with pytest.raises(KeyError):
        namespace.entry(entry.ino)
    with pytest.raises(KeyError):
        namespace.forget(entry.ino, 1)
    namespace.remember(namespace.entry(ROOT_INO))
    namespace.forget(ROOT_INO, 100)
    assert namespace.entry(ROOT_INO).is_directory


def test_files_and_unknown_numbers_are_not_directories() -> None:
    """The kernel does not ask that; a bug would."""
    namespace = Namespace(b"", TTL_S)
    entry = found(namespace.learn(ROOT_INO, b"a", an_object(b"a"), False, 0.0))
    with pytest.raises(KeyError):
        namespace.lookup(entry.ino, b"x", 0.0)
    namespace.remember(entry)
    with pytest.raises(NotADirectoryError):
        namespace.lookup(entry.ino, b"x", 0.0)


def test_colliding_inode_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two entries with one hash gets the next number, for the mount's life."""
    monkeypatch.setattr(namespace_module, "inode_number", lambda prefix, record: 2**64 - 1)
    namespace = Namespace(b"", TTL_S)
    listing = list_root(namespace, [b"a", b"b", b"c"])
    unseen = found(namespace.lookup(ROOT_INO, b"b", 0.0))
    inos = {}
    for _, entry, _ in namespace.entries(listing):
        namespace.remember(entry)
        inos[entry.name] = entry.ino
    assert inos == {b"a": 2**64 - 1, b"b": 2**63, b"c": 2**63 + 1}
    namespace.check()
    with pytest.raises(ValueError, match="no longer"):
        namespace.remember(unseen)
    for ino in inos.values():
        namespace.forget(ino, 1)
    for name in (b"c", b"b"):
        assert found(namespace.lookup(ROOT_INO, name, 0.0)).ino == inos[name]


# ---------------------------------------------------------------------------------------------------------- memory


def test_sweep_drops_what_is_expired() -> None:
    """Listings beyond the TTL go, unless a handle holds them; inodes stay until the kernel forgets them."""
    namespace = Namespace(b"", TTL_S)
    listing = list_root(namespace, [b"a", b"d/"], now=0.0)
    directory = found(namespace.lookup(ROOT_INO, b"d", 0.0))
    namespace.remember(directory)
    below, _ = namespace.begin_listing(directory.ino, 30.0)
    namespace.add_page(below, [an_object(b"d/x")], [], 30.0)
    namespace.finish_listing(below, 30.0)
    namespace.sweep(59.0)
    assert namespace.counts() == Counts(objects=2, directories=1, hidden_keys=0, shadowed_keys=0)
    namespace.sweep(60.0)
    namespace.check()
    assert namespace.counts() == Counts(objects=1, directories=0, hidden_keys=0, shadowed_keys=0)
    assert names(namespace, listing) == [b"a", b"d/"]
    assert namespace.entry(directory.ino) == directory
    namespace.sweep(90.0)
    namespace.check()
    assert namespace.counts() == Counts(0, 0, 0, 0)
    assert found(namespace.learn(directory.ino, b"x", an_object(b"d/x"), False, 100.0)).key == b"d/x"


def test_newer_listing_survives_the_sweep_of_the_older() -> None:
    """A re-listed directory is kept for its own TTL."""
    namespace = Namespace(b"", TTL_S)
    list_root(namespace, [b"a", b"b"], now=0.0)
    namespace.invalidate(b"a")
    newer = list_root(namespace, [b"a"], now=50.0)
    namespace.sweep(61.0)
    namespace.check()
    assert namespace.listing(ROOT_INO, 61.0) is newer
    assert namespace.counts() == Counts(objects=1, directories=0, hidden_keys=0, shadowed_keys=0)
