"""Declared names: known without a request, until S3 says something else."""

from __future__ import annotations

from s3prefetchfs.core.namespace import ROOT_INO, Namespace, declaration
from tests.core.namespace_steps import ETAG, TTL_S, found, list_root


def declared(prefix: bytes = b"") -> Namespace:
    namespace = Namespace(prefix, TTL_S)
    namespace.declare("plan", declaration(prefix, [(b"a/b/x", 7, ETAG), (b"y", 8, ETAG)]))
    return namespace


def test_files_and_the_directories_above_them() -> None:
    """Down to the file each name is answered, below a prefix too; others must be asked for."""
    for prefix in (b"", b"train/"):
        namespace = declared(prefix)
        ino = ROOT_INO
        for name in (b"a", b"b"):
            entry = found(namespace.lookup(ino, name, 10.0))
            assert entry.is_directory
            assert namespace.lookup(ino, b"other", 10.0) is None
            namespace.remember(entry)
            ino = entry.ino
        answer = namespace.lookup(ino, b"x", 10.0)
        entry = found(answer)
        assert (entry.key, entry.size_bytes, entry.etag) == (prefix + b"a/b/x", 7, ETAG)
        assert answer is not None
        assert answer.fresh_until_s == 10.0 + TTL_S
        namespace.check()


def test_the_inode_is_that_of_the_listing() -> None:
    """The same version found otherwise is the same inode, so pages and handles stay good."""
    namespace = declared()
    before = found(namespace.lookup(ROOT_INO, b"y", 0.0))
    list_root(namespace, [b"y"], 0.0, size_bytes=8)
    after = found(namespace.lookup(ROOT_INO, b"y", 0.0))
    assert before.ino == after.ino
    assert after.mtime_ms > 0


def test_what_s3_said_goes_first() -> None:
    """A listing that is believed knows better: the file is gone. When it is not believed any more, the plan is."""
    namespace = declared()
    list_root(namespace, [b"other"], 0.0)
    answer = namespace.lookup(ROOT_INO, b"y", 1.0)
    assert answer is not None
    assert answer.entry is None
    assert found(namespace.lookup(ROOT_INO, b"y", TTL_S)).size_bytes == 8


def test_a_version_that_is_gone() -> None:
    """It is declared no more, by nobody; the rest still is."""
    namespace = declared()
    namespace.declare("other", declaration(b"", [(b"y", 9, ETAG)]))
    assert found(namespace.lookup(ROOT_INO, b"y", 0.0)).size_bytes == 9
    namespace.invalidate(b"y")
    assert namespace.lookup(ROOT_INO, b"y", 0.0) is None
    assert found(namespace.lookup(ROOT_INO, b"a", 0.0)).is_directory


def test_withdrawing() -> None:
    """What one owner takes back another one may still say; to declare again replaces."""
    namespace = declared()
    namespace.declare("other", declaration(b"", [(b"y", 9, ETAG)]))
    namespace.withdraw("other")
    assert found(namespace.lookup(ROOT_INO, b"y", 0.0)).size_bytes == 8
    namespace.declare("plan", declaration(b"", [(b"z", 1, ETAG)]))
    assert namespace.lookup(ROOT_INO, b"y", 0.0) is None
    namespace.withdraw("plan")
    namespace.withdraw("plan")
    assert namespace.lookup(ROOT_INO, b"z", 0.0) is None


def test_paths_that_cannot_exist() -> None:
    """They are left out; a directory hides a file of the same name, as everywhere."""
    records = declaration(
        b"", [(b"a//b", 1, ETAG), (b"../x", 1, ETAG), (b"", 1, ETAG), (b"d", 1, ETAG), (b"d/e", 1, ETAG)]
    )
    assert records.keys() == {b"d", b"d/e"}
    assert records[b"d"] == b"d/"
