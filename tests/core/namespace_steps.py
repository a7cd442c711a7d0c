"""Short ways to say what the tests of the namespace say often."""

from __future__ import annotations

from s3prefetchfs.core.listing import Listing
from s3prefetchfs.core.namespace import ROOT_INO, Answer, Namespace
from s3prefetchfs.core.record import Entry, ListedObject

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
