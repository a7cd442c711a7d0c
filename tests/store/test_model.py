"""Random histories of a store, compared with a second, naive one that lives in dictionaries."""

from __future__ import annotations

import os
import shutil
import tempfile
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from s3prefetchfs.core.extent import CHUNK_BYTES, chunk_count, chunk_extent
from s3prefetchfs.errors import RequestError
from s3prefetchfs.store.store import Store
from tests.store.written import content, flip_byte, killed, write_chunks


@dataclass
class Model:
    """An object as it should be: which chunks are noted as resident, and whose bytes on the disk are right."""

    seed: int
    size_bytes: int
    noted: set[int] = field(default_factory=set)
    right: set[int] = field(default_factory=set)

    @property
    def resident(self) -> bytes:
        return bytes(chunk in self.noted for chunk in range(chunk_count(self.size_bytes)))


class StoreMachine(RuleBasedStateMachine):
    """The rules are the calls of the store, a flipped byte, a restart and a kill."""

    ids: Bundle[int] = Bundle("ids")

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="store-model-"))
        self.directory = self.root / "0"
        self.live: dict[int, Model] = {}
        self.saved: dict[int, Model] = {}  # as the index has it
        self.seeds = 0

    @initialize()
    def start(self) -> None:
        self.store = Store(self.directory)

    @rule(target=ids, size_bytes=st.integers(0, 4 * CHUNK_BYTES) | st.just(2 * CHUNK_BYTES))
    def create(self, size_bytes: int) -> int:
        self.seeds += 1
        object_id = self.store.create(str(self.seeds), f"etag-{self.seeds}", size_bytes)
        assert object_id not in self.live
        self.live[object_id] = Model(self.seeds, size_bytes)
        return object_id

    def span(self, object_id: int, data: st.DataObject) -> tuple[Model, int, int] | None:
        """Some chunks of an object, if it exists and has any."""
        model = self.live.get(object_id)
        if model is None or not model.size_bytes:
            return None
        count = chunk_count(model.size_bytes)
        first = data.draw(st.integers(0, count - 1))
        return model, first, data.draw(st.integers(first + 1, count))

    @rule(object_id=ids, data=st.data())
    def write(self, object_id: int, data: st.DataObject) -> None:
        if span := self.span(object_id, data):
            model, first, last = span
            write_chunks(self.store, object_id, model.seed, model.size_bytes, first, last)
            model.noted |= set(range(first, last))
            self.bytes_are(object_id, first, last, right=True)

    def bytes_are(self, object_id: int, first: int, last: int, right: bool) -> None:
        """Bytes on the disk changed: that is so whichever index is believed."""
        for models in (self.live, self.saved):
            if object_id in models:
                changed = set(range(first, last))
                if right:
                    models[object_id].right |= changed
                else:
                    models[object_id].right -= changed

    @rule(object_id=ids, data=st.data())
    def read(self, object_id: int, data: st.DataObject) -> None:
        if not (span := self.span(object_id, data)):
            return
        model, first, last = span
        start, stop = chunk_extent(first, last, model.size_bytes)
        start += data.draw(st.integers(0, stop - start - 1))
        chunks = set(range(start // CHUNK_BYTES, last))
        buffer = memoryview(bytearray(stop - start))
        now = self.store.read_now(object_id, start, stop, buffer)
        if not chunks <= model.noted:
            assert not now
            with pytest.raises(RequestError):
                self.store.read(object_id, start, stop)
        elif chunks <= model.right:
            expected = content(model.seed, start, stop)
            assert self.store.read(object_id, start, stop) == expected
            assert not now or buffer == expected

    @rule(object_id=ids, data=st.data())
    def verify(self, object_id: int, data: st.DataObject) -> None:
        if span := self.span(object_id, data):
            model, first, last = span
            good = model.noted & model.right
            assert self.store.verify(object_id, first, last) == [n for n in range(first, last) if n not in good]
            model.noted -= set(range(first, last)) - good

    @rule(object_id=ids, data=st.data())
    def flip(self, object_id: int, data: st.DataObject) -> None:
        if span := self.span(object_id, data):
            model, first, _ = span
            if first in model.right:
                start, stop = chunk_extent(first, first + 1, model.size_bytes)
                flip_byte(self.store.path(object_id), data.draw(st.integers(start, stop - 1)))
                self.bytes_are(object_id, first, first + 1, right=False)

    @rule(object_id=ids, data=st.data())
    def forget(self, object_id: int, data: st.DataObject) -> None:
        if span := self.span(object_id, data):
            model, first, last = span
            self.store.forget_chunks(object_id, first, last)
            model.noted -= set(range(first, last))

    @rule(object_id=ids, data=st.data())
    def punch(self, object_id: int, data: st.DataObject) -> None:
        if span := self.span(object_id, data):
            model, first, last = span
            self.store.punch(object_id, *chunk_extent(first, last, model.size_bytes))
            model.noted -= set(range(first, last))
            self.bytes_are(object_id, first, last, right=False)

    @rule(object_id=consumes(ids))
    def delete(self, object_id: int) -> None:
        self.store.delete(object_id)
        self.live.pop(object_id, None)
        self.saved.pop(object_id, None)
        assert not os.path.exists(self.store.path(object_id))

    @rule(object_ids=st.lists(ids, max_size=3))
    def use(self, object_ids: list[int]) -> None:
        self.store.used(object_ids)

    @rule()
    def flush(self) -> None:
        self.store.flush()
        self.saved = deepcopy(self.live)

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = Store(self.directory)
        assert self.store.was_clean
        self.saved = deepcopy(self.live)

    @rule()
    def kill(self) -> None:
        after = killed(self.directory, self.root / str(int(self.directory.name) + 1))
        self.store.close()
        shutil.rmtree(self.directory)
        self.directory = after
        self.store = Store(after)
        assert not (self.store.was_clean and (self.live or self.saved))
        self.live = deepcopy(self.saved)

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "store"):
            found = {it.object_id: (it.key, it.etag, it.size_bytes, it.resident) for it in self.store.recovered()}
            assert found == {
                object_id: (str(model.seed), f"etag-{model.seed}", model.size_bytes, model.resident)
                for object_id, model in self.live.items()
            }

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        shutil.rmtree(self.root)


def test_store_agrees_with_the_model() -> None:
    """After every call, restart and kill, store and model hold the same, and bytes are right or known to be bad."""
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(
            max_examples=30, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
