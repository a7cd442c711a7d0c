"""What a worker process does to an object file, and bytes that betray where they belong."""

from __future__ import annotations

import os
import shutil
from array import array
from pathlib import Path

from awscrt.checksums import crc32c

from s3prefetchfs.core.extent import CHUNK_BYTES, chunk_count, chunk_extent
from s3prefetchfs.store.store import Store

WORD_BYTES = 8


def content(seed: int, start: int, stop: int) -> bytes:
    """Bytes `[start, stop)` of the object `seed`: each 8-byte word is the seed and its own number, never zero."""
    first, last = start // WORD_BYTES, -(-stop // WORD_BYTES)
    base = (seed + 1) << 40
    words = array("Q", range(base + first, base + last)).tobytes()
    return words[start - first * WORD_BYTES : stop - first * WORD_BYTES]


def write_chunks(store: Store, object_id: int, seed: int, size_bytes: int, first: int, last: int) -> None:
    """Write the chunks `[first, last)` as a worker would, and report them."""
    start, stop = chunk_extent(first, last, size_bytes)
    data = content(seed, start, stop)
    fd = os.open(store.path(object_id), os.O_WRONLY)
    try:
        os.pwrite(fd, data, start)
    finally:
        os.close(fd)
    crcs = [crc32c(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES)]
    store.landed(object_id, start, stop, crcs)


def add_object(store: Store, seed: int, size_bytes: int) -> int:
    """A complete object, whose key is its seed."""
    object_id = store.create(str(seed), f"etag-{seed}", size_bytes)
    write_chunks(store, object_id, seed, size_bytes, 0, chunk_count(size_bytes))
    return object_id


def flip_byte(path: str, at: int) -> None:
    """Damage one byte of a file."""
    fd = os.open(path, os.O_RDWR)
    try:
        (value,) = os.pread(fd, 1, at)
        os.pwrite(fd, bytes([value ^ 0x10]), at)
    finally:
        os.close(fd)


def killed(directory: Path, copy: Path) -> Path:
    """What a kill -9 at this moment would leave of the store in `directory`."""
    shutil.copytree(directory, copy)
    return copy
