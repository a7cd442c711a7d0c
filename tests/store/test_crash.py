"""kill -9 at any moment: what was saved is there, and nothing that is not true."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

from s3prefetchfs.core.extent import chunk_extent
from s3prefetchfs.store.store import Store
from tests.store.written import content

KILLS = 20

Saved = dict[int, set[int]]
"""The chunks of each object that are on record."""


def replay(journal: Path, saved: Saved) -> tuple[Saved, Saved]:
    """What must have survived of the life told in `journal`, and the chunks that were punched in it."""
    memory = {object_id: set(chunks) for object_id, chunks in saved.items()}
    saving: Saved = {}
    punched: Saved = {}
    for line in journal.read_text().splitlines():
        match json.loads(line):
            case ["create", object_id]:
                memory[object_id] = set()
            case ["landed", object_id, first, last]:
                memory[object_id].update(range(first, last))
            case ["flush"]:
                saving = {object_id: set(chunks) for object_id, chunks in memory.items()}
            case ["flushed"]:
                saved = saving
            case ["punch", object_id, first, last]:
                punched.setdefault(object_id, set()).update(range(first, last))
                for record in (memory, saved):
                    record.get(object_id, set()).difference_update(range(first, last))
            case ["delete", object_id]:
                del memory[object_id]
                saved.pop(object_id, None)
    return saved, punched


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """One directory through many lives, each ended by SIGKILL: half of them between two lines of the store's code.

    No chunk fails verification but punched ones, no verified chunk has a wrong byte, no saved chunk is missing.
    """
    directory, saved = tmp_path / "cache", Saved()
    choose = random.Random(11)
    for life in range(KILLS):
        journal = tmp_path / f"journal-{life}"
        lines = choose.randrange(1, 4000) if life % 2 else 0
        arguments = [str(directory), str(journal), str(life), str(lines)]
        with subprocess.Popen([sys.executable, "-m", "tests.store.crash_child", *arguments]) as child:
            if not lines:
                enough_bytes = choose.randrange(1, 4000)  # of journal
                deadline_s = time.monotonic() + 20
                while not journal.exists() or journal.stat().st_size < enough_bytes:
                    assert child.poll() is None
                    assert time.monotonic() < deadline_s
                    time.sleep(0.001)
                child.kill()
            assert child.wait(60) == -9
        must_have, punched = replay(journal, saved)

        store = Store(directory)
        saved = {}
        for it in store.recovered():
            bad = set(store.verify(it.object_id, 0, len(it.resident)))
            claimed = {chunk for chunk, there in enumerate(it.resident) if there}
            assert bad & claimed <= punched.get(it.object_id, set())
            saved[it.object_id] = claimed - bad
            for chunk in claimed - bad:
                start, stop = chunk_extent(chunk, chunk + 1, it.size_bytes)
                assert store.read(it.object_id, start, stop) == content(int(it.key), start, stop)
        for object_id, chunks in must_have.items():
            assert chunks <= saved[object_id]
        store.close()
    assert any(saved.values())
