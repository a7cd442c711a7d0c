"""Which names a directory has, and how readers get them while its pages come in."""

from __future__ import annotations

from math import inf

import pytest

from s3prefetchfs.core.listing import Reason, Unreachable
from s3prefetchfs.core.namespace import ROOT_INO, Answer, Counts, Namespace
from tests.core.namespace_steps import TTL_S, add_page, an_object, found, list_root, names

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
    [
        *(b"\x01", b"\r", b"\n", b"a\tb", b" ", b"+", b"%41", b"%", b"\\", b"?#&", b"\xff\xfe", b"...", b"x" * 255),
        *("é".encode(), "e\u0301".encode(), b"case", b"Case"),
    ],
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
    """A file "a" and a directory "a/" may be pages apart; only the file itself is held back, not what is between."""
    namespace = Namespace(b"", TTL_S)
    listing, _ = namespace.begin_listing(ROOT_INO, 0.0)
    add_page(namespace, listing, [b"a", b"a-"])
    add_page(namespace, listing, [b"a-!", b"a-2", b"a-b/"])
    assert names(namespace, listing) == [b"a-!", b"a-", b"a-2", b"a-b/"]
    assert namespace.lookup(ROOT_INO, b"a", 0.0) is None
    add_page(namespace, listing, [b"a.txt", b"a/", b"b"])
    assert names(namespace, listing, 4) == [b"a.txt", b"a/"]
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
    add_page(namespace, listing, [b"a", b"c/", b"x/"], 1.0)
    add_page(namespace, listing, [b"a/", b"zz"], 2.0)
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


def test_listing_out_of_order_is_as_old_as_its_first_page() -> None:
    """Any page could have had any name, so none of them is newer than the first."""
    namespace = Namespace(b"", TTL_S)
    listing, _ = namespace.begin_listing(ROOT_INO, 0.0)
    for now, keys in ((10.0, [b"b", b"c"]), (20.0, [b"m", b"n"]), (30.0, [b"a", b"z"])):
        add_page(namespace, listing, keys, now)
    namespace.finish_listing(listing, 30.0)
    assert {until_s for _, _, until_s in namespace.entries(listing)} == {TTL_S}
    assert namespace.lookup(ROOT_INO, b"l", 59.0) == Answer(None, TTL_S)


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
