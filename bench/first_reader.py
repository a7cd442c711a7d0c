"""A process that opens files one after another and reads their first bytes. python -m bench.first_reader"""

from __future__ import annotations

import os
import time
from typing import Any

from bench.child import serve


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


if __name__ == "__main__":
    serve(first_reads)
