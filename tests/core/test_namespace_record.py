"""How an entry is packed, and what it says when unpacked."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from s3prefetchfs.core.record import Entry, directory_record, file_record
from tests.core.namespace_steps import ETAG


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
