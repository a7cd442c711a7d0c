"""What is on the disk: states, space, and who is idle."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3prefetchfs.core.extent import BLOCK_BYTES, CHUNK_BYTES, chunk_count
from s3prefetchfs.core.residency import (
    ABSENT,
    IN_FLIGHT,
    RELEASING,
    RESIDENT,
    UNVERIFIED,
    VERIFYING,
    CachedObject,
    Residency,
)
from s3prefetchfs.core.version import Version

SHORT_BYTES = 1001
ODD_BYTES = 3 * CHUNK_BYTES + SHORT_BYTES
"""Three chunks and a short one that occupies one block."""


def add(disk: Residency, object_id: int, size_bytes: int = ODD_BYTES, resident: bytes | None = None) -> CachedObject:
    return disk.add(object_id, Version(str(object_id), "", size_bytes), resident, bypass=False)


def test_space_counts_from_the_reservation_until_the_disk_has_it_back() -> None:
    """Reserved, landed and releasing chunks all occupy; only the release's end gives space back."""
    disk = Residency()
    found = add(disk, 1)
    disk.reserve(found, 1, 4)
    assert disk.used_bytes == found.occupied_bytes == 2 * CHUNK_BYTES + BLOCK_BYTES
    disk.land(found, 1, 4)
    disk.begin_release(found, 1, 2)
    assert (disk.used_bytes, disk.freeing_bytes) == (2 * CHUNK_BYTES + BLOCK_BYTES, CHUNK_BYTES)
    disk.end_release(found, 1, 2)
    assert (disk.used_bytes, disk.freeing_bytes) == (CHUNK_BYTES + BLOCK_BYTES, 0)
    assert found.chunks == bytes((ABSENT, ABSENT, RESIDENT, RESIDENT))
    disk.settle(found)
    disk.check()


def test_a_fetch_that_gives_up_returns_its_space() -> None:
    """The part that landed stays."""
    disk = Residency()
    found = add(disk, 1)
    disk.reserve(found, 0, 4)
    disk.land(found, 0, 1)
    disk.give_up(found, 1, 4)
    assert disk.used_bytes == CHUNK_BYTES
    assert found.chunks == bytes((RESIDENT, ABSENT, ABSENT, ABSENT))
    disk.settle(found)
    disk.check()


def test_what_a_previous_session_left_occupies_and_is_not_trusted() -> None:
    """It counts from the start, is resident only after verification, and damaged chunks are given up."""
    disk = Residency()
    found = add(disk, 1, resident=bytes((1, 0, 1, 1)))
    assert found.chunks == bytes((UNVERIFIED, ABSENT, UNVERIFIED, UNVERIFIED))
    assert disk.used_bytes == 2 * CHUNK_BYTES + BLOCK_BYTES
    disk.begin_verify(found, 2, 4)
    assert found.chunks[2:] == bytes((VERIFYING, VERIFYING))
    disk.end_verify(found, 2, 4, bad=(3,))
    assert found.chunks == bytes((UNVERIFIED, ABSENT, RESIDENT, ABSENT))
    assert disk.used_bytes == 2 * CHUNK_BYTES
    disk.check()


def test_an_object_is_complete_when_every_chunk_is_trusted() -> None:
    """One chunk in any other state is enough to make it not so."""
    disk = Residency()
    found = add(disk, 1)
    disk.reserve(found, 0, 4)
    disk.land(found, 0, 3)
    assert not found.complete
    disk.land(found, 3, 4)
    assert found.complete
    disk.begin_release(found, 0, 1)
    assert not found.complete
    assert add(disk, 2, size_bytes=0).complete


def test_idle_objects_are_kept_least_recently_used_first() -> None:
    """Use takes an object out; coming to rest puts it at the end; settling twice changes nothing."""
    disk = Residency()
    one, two, three = (add(disk, object_id, resident=b"\1\1\1\1") for object_id in (1, 2, 3))
    one.handles.add(7)
    disk.settle(one)
    assert list(disk.idle) == [2, 3]
    one.handles.remove(7)
    disk.settle(one)
    disk.settle(two)
    disk.settle(three)
    assert list(disk.idle) == [2, 3, 1]
    disk.check()


@pytest.mark.parametrize(
    "use",
    [
        lambda disk, found: found.handles.add(1),
        lambda disk, found: found.reads.add(1),
        lambda disk, found: setattr(found, "fetches", 1),
        lambda disk, found: disk.begin_verify(found, 0, 1),
        lambda disk, found: (
            disk.begin_verify(found, 0, 1),
            disk.end_verify(found, 0, 1, ()),
            disk.begin_release(found, 0, 1),
        ),
        lambda disk, found: disk.begin_evict(found),
    ],
    ids=["open", "read", "fetched", "verified", "released", "evicted"],
)  # fmt: skip
def test_an_object_in_any_use_is_not_idle(use: Callable[[Residency, CachedObject], object]) -> None:
    """Each use alone is enough."""
    disk = Residency()
    found = add(disk, 1, resident=b"\1\1\1\1")
    assert 1 in disk.idle
    use(disk, found)
    disk.settle(found)
    assert 1 not in disk.idle
    disk.check()


def test_an_object_without_bytes_is_not_worth_evicting() -> None:
    """It is new, and about to be opened."""
    disk = Residency()
    assert add(disk, 1).idle
    assert not disk.idle


def test_eviction_frees_its_space_at_the_end() -> None:
    """Between the decision and the unlink the bytes are being freed, not free."""
    disk = Residency()
    found = add(disk, 1, resident=b"\1\1\1\1")
    used_bytes = disk.used_bytes
    disk.begin_evict(found)
    assert (disk.used_bytes, disk.freeing_bytes) == (used_bytes, used_bytes)
    disk.end_evict(found)
    assert (disk.used_bytes, disk.freeing_bytes, disk.objects) == (0, 0, {})
    disk.check()


@given(st.binary(max_size=40).map(lambda raw: bytes(byte % 6 for byte in raw)), st.data())
def test_a_run_is_what_a_loop_would_find(states: bytes, data: st.DataObject) -> None:
    """The first run of a state in a range, against the obvious way to find it."""
    first = data.draw(st.integers(0, len(states)))
    last = data.draw(st.integers(first, len(states)))
    wanted = data.draw(st.integers(0, 5))
    begin = first
    while begin < last and states[begin] != wanted:
        begin += 1
    end = begin
    while end < last and states[end] == wanted:
        end += 1
    found = CachedObject(1, Version("1", "", len(states) * CHUNK_BYTES), bytearray(states))
    assert found.run_of(wanted, first, last) == (begin, end)


@given(st.integers(0, 10 * CHUNK_BYTES), st.data())
def test_bytes_in_a_state_are_the_sum_over_its_chunks(size_bytes: int, data: st.DataObject) -> None:
    """The short last chunk counts as what it occupies."""
    count = chunk_count(size_bytes)
    states = data.draw(st.lists(st.sampled_from([ABSENT, IN_FLIGHT, RELEASING]), min_size=count, max_size=count))
    found = CachedObject(1, Version("1", "", size_bytes), bytearray(states))
    by_chunk = [found.disk_bytes(chunk, chunk + 1) for chunk in range(count) if states[chunk] == RELEASING]
    assert found.bytes_in(RELEASING) == sum(by_chunk)


def test_check_sees_a_wrong_figure() -> None:
    """Any of the counts going astray is noticed."""
    for name in ("used_bytes", "freeing_bytes"):
        disk = Residency()
        add(disk, 1, resident=b"\1\1\1\1")
        disk.check()
        setattr(disk, name, getattr(disk, name) + 1)
        with pytest.raises(AssertionError):
            disk.check()
