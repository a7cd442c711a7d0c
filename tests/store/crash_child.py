"""A process that uses a store at random until it is killed, and tells its journal what it is about to do.

Arguments: the directory, the journal file, a seed, and after how many lines of the store's code to kill itself
(0: never, somebody else will). The journal is written with `write(2)`, so it survives the kill.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import s3prefetchfs.store.store as store_module
from s3prefetchfs.core.extent import CHUNK_BYTES, chunk_count
from s3prefetchfs.store.store import Store
from tests.store.written import write_chunks

STORE_ROOM = os.path.dirname(store_module.__file__)


def kill_after(lines: int) -> None:
    """Kill this process when so many lines of the package `store` have run."""
    left = lines

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(STORE_ROOM):
            return None
        left -= event == "line"
        if left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


def main(directory: Path, journal: Path, seed: int, lines: int) -> None:
    choose = random.Random(seed)
    fd = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(*words: str | int) -> None:
        os.write(fd, json.dumps(words).encode() + b"\n")

    say("start")
    if lines:
        kill_after(lines)
    store = Store(directory)
    sizes = {it.object_id: (int(it.key), it.size_bytes) for it in store.recovered()}
    while True:
        action = choose.choice(["create", "write", "write", "write", "flush", "flush", "punch", "delete", "use"])
        if action == "flush":
            say("flush")
            store.flush()
            say("flushed")
        elif action == "create" or not sizes:
            key, size_bytes = choose.randrange(1 << 20), choose.randrange(1, 3 * CHUNK_BYTES)
            object_id = store.create(str(key), "e", size_bytes)
            sizes[object_id] = key, size_bytes
            say("create", object_id)
        else:
            object_id = choose.choice(list(sizes))
            key, size_bytes = sizes[object_id]
            first = choose.randrange(chunk_count(size_bytes))
            last = choose.randrange(first, chunk_count(size_bytes)) + 1
            if action == "write":
                write_chunks(store, object_id, key, size_bytes, first, last)
                say("landed", object_id, first, last)
            elif action == "punch":
                say("punch", object_id, first, last)
                store.punch(object_id, first * CHUNK_BYTES, last * CHUNK_BYTES)
            elif action == "use":
                store.used([object_id])
            elif len(sizes) > 10:
                say("delete", object_id)
                store.delete(object_id)
                del sizes[object_id]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
