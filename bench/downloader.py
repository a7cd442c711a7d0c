"""The reference: the downloader that people write by hand, done well. python -m bench.downloader URL BUCKET N

A process with one boto3 client and N threads. Every thread takes the next 8 MiB range, asks for it with GetObject, and
moves it in pieces of 1 MiB to a file that was preallocated. It is told the sizes, as a reader of a listed directory
knows them: no HEAD. Nothing is hashed or checked except that every byte came.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config

from bench.child import serve

RANGE_BYTES = 8 << 20
"""What AWS advises (8 to 16 MiB), and the default of its own tools."""

PIECE_BYTES = 1 << 20
"""Of one read and write. A range at once is slower: urllib3 allocates what is read anew, and 8 MiB from the kernel."""


class Downloader:
    """See the module's docstring.

    Args:
        endpoint_url, bucket: where to download from. connections: threads, each with a connection.
    """

    def __init__(self, endpoint_url: str, bucket: str, connections: int) -> None:
        config = Config(max_pool_connections=connections, request_checksum_calculation="when_required",
                        response_checksum_validation="when_required")  # fmt: skip
        self._client = boto3.client("s3", endpoint_url=endpoint_url, region_name="us-east-1", config=config)
        self._bucket = bucket
        self._connections = connections
        self._threads = ThreadPoolExecutor(connections)
        self._own = threading.local()
        started = threading.Barrier(connections)
        list(self._threads.map(lambda _: self._start_thread(started), range(connections)))

    def work(self, **work: Any) -> dict[str, Any]:
        """Download files, or read the first bytes of them; returns what it took, in seconds."""
        return self._first_reads(**work) if "count" in work else self._download(**work)

    def _start_thread(self, started: threading.Barrier) -> None:
        self._own.buffer = memoryview(bytearray(PIECE_BYTES))
        started.wait()

    def _download(self, keys: list[str], sizes: list[int], directory: str) -> dict[str, Any]:
        began_s = time.perf_counter()
        ranges: queue.SimpleQueue[tuple[str, int, int, int]] = queue.SimpleQueue()
        fds = []
        for key, size in zip(keys, sizes, strict=True):
            path = Path(directory, key)
            path.parent.mkdir(parents=True, exist_ok=True)
            fds.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL))
            os.posix_fallocate(fds[-1], 0, size)
            for start in range(0, size, RANGE_BYTES):
                ranges.put((key, fds[-1], start, min(start + RANGE_BYTES, size)))
        list(self._threads.map(lambda _: self._take_ranges(ranges), range(self._connections)))
        for fd in fds:
            os.close(fd)
        return {"seconds": time.perf_counter() - began_s}

    def _take_ranges(self, ranges: queue.SimpleQueue[tuple[str, int, int, int]]) -> None:
        while True:
            try:
                key, fd, start, stop = ranges.get_nowait()
            except queue.Empty:
                return
            self._get(key, start, stop, fd)

    def _get(self, key: str, start: int, stop: int, fd: int | None) -> None:
        body = self._client.get_object(Bucket=self._bucket, Key=key, Range=f"bytes={start}-{stop - 1}")["Body"]
        while start < stop:
            count = body.readinto(self._own.buffer[: stop - start])
            if not count:
                raise EOFError(f"{key}: nothing after byte {start}")
            if fd is not None:
                os.pwrite(fd, self._own.buffer[:count], start)
            start += count

    def _first_reads(self, keys: list[str], count: int) -> dict[str, Any]:
        return {"seconds": self._threads.submit(lambda: [self._timed(key, count) for key in keys]).result()}

    def _timed(self, key: str, count: int) -> float:
        began_s = time.perf_counter()
        self._get(key, 0, count, None)
        return time.perf_counter() - began_s


if __name__ == "__main__":
    serve(Downloader(sys.argv[1], sys.argv[2], int(sys.argv[3])).work)
