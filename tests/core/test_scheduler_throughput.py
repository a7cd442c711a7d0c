"""How much of a pipe the scheduler fills, in simulated time, against a plain downloader on the same pipe.

The pipe has 30 ms to the first byte, 90 MB/s per connection, 400 MB/s in all. Readers take no time. These are
deterministic figures of the decisions alone; what Python, FUSE and the disk cost is for `bench/`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import pytest

from s3prefetchfs.core import events as ev
from s3prefetchfs.core.scheduler import Scheduler
from tests.core.pipe import AGGREGATE_BYTES_PER_S, Pipe, Read

KIB = 1024
MIB = 1024 * KIB
MB = 1_000_000
PART_BYTES = 8 * MIB


class Downloader:
    """Whole files in parts of 8 MiB, in order, on all connections: what people write by hand."""

    def __init__(self, max_connections: int) -> None:
        self._free = max_connections
        self._parts: deque[tuple[int, int, int, int]] = deque()
        self._missing_parts: dict[int, int] = {}
        self._readers: dict[int, int] = {}
        self._handles: dict[int, int] = {}
        self._last_id = 0

    def handle(self, event: ev.Event, now: float) -> list[ev.Instruction]:
        out: list[ev.Instruction] = []
        match event:
            case ev.Opened():
                self._handles[event.handle_id] = event.object_id
            case ev.ReadStarted():
                starts = range(event.start, event.stop, PART_BYTES)
                self._missing_parts[event.read_id] = len(starts)
                for start in starts:
                    part = self._handles[event.handle_id], start, min(start + PART_BYTES, event.stop), event.read_id
                    self._parts.append(part)
            case ev.FetchDone():
                self._free += 1
                read_id = self._readers.pop(event.fetch_id)
                self._missing_parts[read_id] -= 1
                if not self._missing_parts[read_id]:
                    out.append(ev.Wake(read_id))
        while self._free and self._parts:
            object_id, start, stop, read_id = self._parts.popleft()
            self._free -= 1
            self._last_id += 1
            self._readers[self._last_id] = read_id
            out.append(ev.Fetch(self._last_id, object_id, start, stop, to_memory=False))
        return out


def in_order(name: object, size_bytes: int, step_bytes: int) -> Iterator[Read]:
    """One file from its start to its end."""
    for start in range(0, size_bytes, step_bytes):
        stop = min(start + step_bytes, size_bytes)
        yield Read(name, size_bytes, start, stop, last=stop == size_bytes)


def one_after_another(names: list[int], size_bytes: int, step_bytes: int) -> Iterator[Read]:
    for name in names:
        yield from in_order(name, size_bytes, step_bytes)


def in_turns(files: int, size_bytes: int, step_bytes: int, cycle: int) -> Iterator[Read]:
    """`tf.data`'s interleave by one thread: a block of each of `cycle` open files in turn."""
    unread = deque(in_order(name, size_bytes, step_bytes) for name in range(files))
    reading = deque(unread.popleft() for _ in range(cycle))
    while reading:
        stream = reading.popleft()
        read = next(stream)
        yield read
        if not read.last:
            reading.append(stream)
        elif unread:
            reading.append(unread.popleft())


CASES = {
    "256 MB in order, 128 KiB reads": (0.85, 1, 256 * MB, lambda: [in_order(0, 256 * MB, 128 * KIB)]),
    "256 MB in order, 1 MiB reads": (0.85, 1, 256 * MB, lambda: [in_order(0, 256 * MB, MIB)]),
    "16 of 32 x 32 MB in turns, 128 KiB": (0.80, 32, 32 * MB, lambda: [in_turns(32, 32 * MB, 128 * KIB, 16)]),
    "16 of 32 x 32 MB in turns, 1 MiB": (0.80, 32, 32 * MB, lambda: [in_turns(32, 32 * MB, MIB, 16)]),
    "16 readers of 2 x 32 MB each": (
        0.80,
        32,
        32 * MB,
        lambda: [one_after_another([name, name + 16], 32 * MB, 128 * KIB) for name in range(16)],
    ),
}
"""The least share of the downloader's speed, how many files of what size, the readers."""


def share_of_a_downloader(name: str, readers: list[Iterator[Read]], files: int, size_bytes: int, conns: int) -> float:
    """The downloader's time for the files over the readers'."""
    plain_s = Pipe(Downloader(conns)).run([in_order(number, size_bytes, size_bytes) for number in range(files)])
    pipe = Pipe(Scheduler(capacity_bytes=100 * 1024 * MIB, max_connections=conns, retry_timeout_s=60.0))
    elapsed_s = pipe.run(readers)
    ideal_s = files * size_bytes / AGGREGATE_BYTES_PER_S
    print(
        f"\n{name}, {conns} connections: {ideal_s / elapsed_s:.3f} of the pipe, "
        f"{plain_s / elapsed_s:.3f} of a downloader, {len(pipe.fetches)} GETs"
    )
    assert pipe.fetched_bytes == files * size_bytes
    return plain_s / elapsed_s


@pytest.mark.parametrize("conns", [8, 32])
@pytest.mark.parametrize("name", CASES)
def test_the_pipe_is_filled(name: str, conns: int) -> None:
    """A cold read is nearly as fast as a downloader with as many connections, and fetches nothing else."""
    least_share, files, size_bytes, readers = CASES[name]
    assert share_of_a_downloader(name, readers(), files, size_bytes, conns) >= least_share


@pytest.mark.parametrize("readers", [7, 8, 9, 12, 24])
def test_about_as_many_readers_as_connections(readers: int) -> None:
    """The connections that are kept for demand do not make everybody's requests small."""
    files = 2 * readers
    streams = [one_after_another([name, name + readers], 32 * MB, 128 * KIB) for name in range(readers)]
    assert share_of_a_downloader(f"{readers} readers of 2 x 32 MB each", streams, files, 32 * MB, 8) >= 0.75
