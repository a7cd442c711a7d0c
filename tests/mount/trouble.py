"""What the tests of faults have in common: reading past the page cache, readers that can be lost, and time limits."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.s3stub import ramp

MIB = 1 << 20

READER_S = 60.0
"""How long a reader may take that has nothing to wait for, on a crowded host."""


def read(path: Path) -> bytes:
    """All of a file, past the kernel's page cache of it."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        with open(fd, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(fd)


def errno_of(action: Callable[[], object]) -> int:
    """The errno with which `action` fails; 0 if it does not."""
    try:
        action()
    except OSError as error:
        assert error.errno is not None
        return error.errno
    return 0


@contextlib.contextmanager
def within(limit_s: float) -> Iterator[None]:
    """What is inside takes less than this: a bound that the product promises, with room for a crowded host."""
    began_s = time.monotonic()
    yield
    took_s = time.monotonic() - began_s
    assert took_s < limit_s, f"took {took_s:.1f} s, more than {limit_s:g}"


class Reader:
    """A process that reads a file from its start to its end, and can be killed. A context manager that does.

    Args:
        path: the file. repeat: how many times, each through an open of its own and past the page cache.
    """

    _SCRIPT = """if True:
        import hashlib, os, sys
        for _ in range(int(sys.argv[2])):
            try:
                fd = os.open(sys.argv[1], os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                digest, size = hashlib.sha256(), 0
                while piece := os.read(fd, 1 << 18):
                    digest.update(piece)
                    size += len(piece)
                os.close(fd)
                print(digest.hexdigest(), size, flush=True)
            except OSError as error:
                print("errno", error.errno, flush=True)
    """

    def __init__(self, path: Path, repeat: int = 1) -> None:
        self._repeat = repeat
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", self._SCRIPT, path, str(repeat)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel may hold it until the daemon answers
            self.process.wait(READER_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def results(self, timeout_s: float = READER_S) -> list[str]:
        """What came of each round: `digest_of` the bytes, or "errno N".

        Raises:
            subprocess.TimeoutExpired: it has not ended.
        """
        output, _ = self.process.communicate(timeout=timeout_s)
        lines = output.splitlines()
        assert len(lines) == self._repeat, lines
        return lines

    def result(self, timeout_s: float = READER_S) -> str:
        """The only result."""
        (line,) = self.results(timeout_s)
        return line


def digest_of(size: int, seed: int) -> str:
    """What a `Reader` says of an object whose bytes are `ramp(0, size, seed)`."""
    return f"{hashlib.sha256(ramp(0, size, seed)).hexdigest()} {size}"
