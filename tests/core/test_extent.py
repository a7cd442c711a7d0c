"""The arithmetic of chunks: whatever the sizes, chunks tile the object."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from s3prefetchfs.core.extent import BLOCK_BYTES, CHUNK_BYTES, chunk_count, chunk_extent, chunk_span, disk_bytes

sizes = st.one_of(st.integers(1, 3 * CHUNK_BYTES + 1), st.integers(1, 1 << 50))


@given(sizes)
def test_chunks_tile_the_object(size_bytes: int) -> None:
    """The first chunk starts at 0, each starts where the one before ends, the last ends with the object."""
    last = chunk_count(size_bytes) - 1
    for chunk in {0, last // 2, last}:
        start, stop = chunk_extent(chunk, chunk + 1, size_bytes)
        assert start == chunk * CHUNK_BYTES
        assert stop == ((chunk + 1) * CHUNK_BYTES if chunk < last else size_bytes)
        assert 0 < stop - start <= CHUNK_BYTES


@given(st.integers(0, 1 << 50), st.integers(1, 1 << 24))
def test_a_span_is_the_least_that_covers_the_bytes(start: int, length_bytes: int) -> None:
    """Every byte is in the span, and its first and last chunks each hold one of them."""
    first, last = chunk_span(start, start + length_bytes)
    assert first * CHUNK_BYTES <= start < (first + 1) * CHUNK_BYTES
    assert (last - 1) * CHUNK_BYTES < start + length_bytes <= last * CHUNK_BYTES


@given(st.data(), sizes)
def test_an_extent_of_whole_chunks_spans_those_chunks(data: st.DataObject, size_bytes: int) -> None:
    """Chunk numbers to bytes and back, the short last chunk included."""
    first = data.draw(st.integers(0, chunk_count(size_bytes) - 1))
    last = data.draw(st.integers(first + 1, chunk_count(size_bytes)))
    assert chunk_span(*chunk_extent(first, last, size_bytes)) == (first, last)


def test_edges() -> None:
    """Nothing, exactly a chunk, a byte more."""
    assert chunk_count(0) == 0
    assert chunk_count(CHUNK_BYTES) == 1
    assert chunk_count(CHUNK_BYTES + 1) == 2
    assert chunk_extent(1, 2, CHUNK_BYTES + 1) == (CHUNK_BYTES, CHUNK_BYTES + 1)


def test_a_short_chunk_occupies_whole_blocks() -> None:
    """What a file system gives out: one byte costs a block, whole chunks cost themselves."""
    assert disk_bytes(0, 0) == 0
    assert disk_bytes(0, 1) == BLOCK_BYTES
    assert disk_bytes(CHUNK_BYTES, CHUNK_BYTES + BLOCK_BYTES + 1) == 2 * BLOCK_BYTES
    assert disk_bytes(0, 3 * CHUNK_BYTES) == 3 * CHUNK_BYTES
