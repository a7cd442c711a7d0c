"""A process that reads with plain system calls, in several ways. python -m bench.plain_reader"""

from __future__ import annotations

import mmap
import os
import queue
import threading
import time
from collections.abc import Callable
from random import Random
from typing import Any

from bench.child import serve

PIECE_BYTES = 1 << 20

PREFETCHED = 2
"""Samples that a training loop has ready, as with `prefetch(2)`."""


def first_reads(paths: list[str], count: int) -> dict[str, Any]:
    """Seconds from before open to after read of `count` bytes, for each path in turn; close is not in them."""
    seconds = []
    for path in paths:
        began_s = time.perf_counter()
        fd = os.open(path, os.O_RDONLY)
        got = len(os.read(fd, count))
        seconds.append(time.perf_counter() - began_s)
        os.close(fd)
        if got != count:
            raise EOFError(f"{path}: {got} bytes of {count}")
    return {"seconds": seconds}


def open_cycles(paths: list[str], count: int, cycles: int) -> dict[str, Any]:
    """Seconds of each of many times open, read of `count` bytes and close, over paths in turn."""
    seconds = []
    for number in range(cycles):
        path = paths[number % len(paths)]
        began_s = time.perf_counter()
        fd = os.open(path, os.O_RDONLY)
        got = len(os.read(fd, count))
        os.close(fd)
        seconds.append(time.perf_counter() - began_s)
        if got != count:
            raise EOFError(f"{path}: {got} bytes of {count}")
    return {"seconds": seconds}


def random_reads(path: str, count: int, jobs: int, reads: int) -> dict[str, Any]:
    """Seconds in which `jobs` processes make `reads` reads each, at random offsets that are multiples of `count`."""
    pipe_in, pipe_out = os.pipe()
    pids = [pid for number in range(jobs) if (pid := _forked(pipe_in, pipe_out, path, count, reads, number))]
    os.close(pipe_in)
    time.sleep(0.05)  # until they wait for the start; who comes late starts late, for every contender
    began_s = time.perf_counter()
    os.close(pipe_out)
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    if any(statuses):
        raise OSError(f"{path}: a random reader failed")
    return {"seconds": time.perf_counter() - began_s}


def _forked(pipe_in: int, pipe_out: int, path: str, count: int, reads: int, number: int) -> int:
    if pid := os.fork():
        return pid
    status = 1
    try:
        os.close(pipe_out)
        fd = os.open(path, os.O_RDONLY)
        blocks = os.fstat(fd).st_size // count
        random = Random(number)
        offsets = [random.randrange(blocks) * count for _ in range(reads)]
        buffer = [memoryview(mmap.mmap(-1, count))]
        os.read(pipe_in, 1)
        status = int(any(os.preadv(fd, buffer, offset) != count for offset in offsets))
    finally:
        os._exit(status)


def whole(paths: list[str]) -> dict[str, Any]:
    """Read files whole, one after another; when each was read, in seconds from the start."""
    buffer = memoryview(bytearray(PIECE_BYTES))
    began_s = time.perf_counter()
    ended_s = []
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        while os.readv(fd, [buffer]):
            pass
        os.close(fd)
        ended_s.append(time.perf_counter() - began_s)
    return {"seconds": ended_s[-1], "ended_s": ended_s}


def train(samples: list[tuple[str, int, int]], bytes_per_s: float, threads: int) -> dict[str, Any]:
    """Consume samples (path, offset, length) as an accelerator would: wait for one, then sleep for as long as it takes.

    Args:
        threads: loaders, each with a sample in the making, which the others do not wait for; they are PREFETCHED ahead.

    Returns:
        For each step what it waited, and its computation, in seconds, in the order in which samples came.
    """
    ready: queue.Queue[int | BaseException] = queue.Queue(PREFETCHED)
    position = iter(samples)
    lock = threading.Lock()
    stopped = threading.Event()

    def load() -> None:
        buffer = memoryview(bytearray(max(length for _, _, length in samples)))
        try:
            while not stopped.is_set():
                with lock:
                    sample = next(position, None)
                if sample is None:
                    return
                _load(*sample, buffer)
                ready.put(sample[2])
        except BaseException as error:
            ready.put(error)

    loaders = [threading.Thread(target=load, daemon=True) for _ in range(threads)]
    began_s = time.perf_counter()
    for loader in loaders:
        loader.start()
    waits_s, computes_s = [], []
    for _ in samples:
        asked_s = time.perf_counter()
        got = ready.get()
        if isinstance(got, BaseException):
            stopped.set()
            raise got
        had_s = time.perf_counter()
        time.sleep(got / bytes_per_s)
        waits_s.append(had_s - asked_s)
        computes_s.append(time.perf_counter() - had_s)
    return {"seconds": time.perf_counter() - began_s, "waits_s": waits_s, "computes_s": computes_s}


def _load(path: str, offset: int, length: int, buffer: memoryview) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        done = 0
        while done < length:
            count = os.preadv(fd, [buffer[done : min(length, done + PIECE_BYTES)]], offset + done)
            if not count:
                raise EOFError(f"{path}: nothing after byte {offset + done}")
            done += count
    finally:
        os.close(fd)


_WORKS: dict[str, Callable[..., dict[str, Any]]] = {
    work.__name__: work for work in (first_reads, open_cycles, random_reads, whole, train)
}

if __name__ == "__main__":
    serve(lambda work, **arguments: _WORKS[work](**arguments))
