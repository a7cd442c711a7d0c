"""How long names are believed, what inodes are, and what is kept of them."""

from __future__ import annotations

from math import inf

import pytest

from s3prefetchfs.core import namespace as namespace_module
from s3prefetchfs.core.namespace import ROOT_INO, Answer, Counts, Namespace
from tests.core.namespace_steps import TTL_S, add_page, an_object, found, list_root, names

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
    assert namespace.counts() == Counts(0, 0, 0, 0)
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


@pytest.mark.parametrize("mount_prefix", [b"", b"m/n/"])
def test_directory_ino(mount_prefix: bytes) -> None:
    """The number of a directory follows from its prefix, also when the kernel does not know it."""
    namespace = Namespace(mount_prefix, TTL_S)
    assert namespace.directory_ino(mount_prefix) == ROOT_INO
    ino = ROOT_INO
    for name, prefix in ((b"d", mount_prefix + b"d/"), (b"e", mount_prefix + b"d/e/")):
        entry = found(namespace.learn(ino, name, None, True, 0.0))
        assert namespace.directory_ino(prefix) == entry.ino
        namespace.remember(entry)
        ino = entry.ino


def test_replaced_object_is_another_inode() -> None:
    """The old one keeps its attributes as long as the kernel remembers it."""
    namespace = Namespace(b"", TTL_S)
    old = found(namespace.learn(ROOT_INO, b"a", an_object(b"a", 5, 1, "one"), False, 0.0))
    namespace.remember(old)
    touched = found(namespace.learn(ROOT_INO, b"a", an_object(b"a", 5, 2, "one"), False, 1.0))
    assert touched.ino == old.ino
    namespace.remember(touched)
    assert namespace.entry(old.ino).mtime_ms == 2
    new = found(namespace.learn(ROOT_INO, b"a", an_object(b"a", 5, 2, "two"), False, 2.0))
    assert new.ino != old.ino
    assert namespace.entry(old.ino) == touched
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
