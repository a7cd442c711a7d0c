"""The arithmetic of chunks and extents.

An *extent* is a half-open byte range `[start, stop)` of one object. A *chunk* is an aligned piece of
`CHUNK_BYTES`; the last chunk of an object is as short as the object makes it. Chunks are the unit of residency
(which bytes are on the disk) and of checksums; extents of whole chunks are the unit of transfer.
"""

from __future__ import annotations

CHUNK_BYTES = 128 * 1024
"""Unit of residency, in bytes. 128 KiB is the kernel's own default read-ahead, so a random read fetches little
more than it asked for and a demand read is answered 1.4 ms after its first byte at 90 MB/s. Larger GETs are
made of many chunks, so smaller chunks cost a byte of state and four of checksum each, not a request."""

BLOCK_BYTES = 4096
"""What the last, short chunk of an object occupies on disk is rounded up to this (ext4's and xfs's block)."""


def chunk_count(size_bytes: int) -> int:
    """How many chunks an object of `size_bytes` has."""
    return -(-size_bytes // CHUNK_BYTES)


def chunk_span(start: int, stop: int) -> tuple[int, int]:
    """The half-open range of chunk numbers that the bytes `[start, stop)` touch."""
    return start // CHUNK_BYTES, -(-stop // CHUNK_BYTES)


def chunk_extent(first: int, last: int, size_bytes: int) -> tuple[int, int]:
    """The bytes of the chunks `[first, last)` in an object of `size_bytes`."""
    return first * CHUNK_BYTES, min(last * CHUNK_BYTES, size_bytes)


def disk_bytes(start: int, stop: int) -> int:
    """What the bytes `[start, stop)`, `start` on a chunk boundary, occupy on the cache disk."""
    return -(-(stop - start) // BLOCK_BYTES) * BLOCK_BYTES
