"""How plans are made: each byte in one segment, each file in one shard, epochs in their order, merged ones."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from s3prefetchfs.core.plan import Order, Plan, PlannedFile
from s3prefetchfs.core.plan_format import parse, to_json
from s3prefetchfs.core.plan_order import Shard, cut, entries, make_plan, merged, summarise


def files(count: int) -> list[PlannedFile]:
    return [PlannedFile(f"f{number:03d}", 1000) for number in range(count)]


def shuffle(epoch: int, count: int) -> Sequence[int]:
    return random.Random(epoch).sample(range(count), count)


def read(plan: Plan) -> list[list[tuple[str, int, int]]]:
    """Path, offset and length of the entries of each epoch."""
    return [
        [(plan.files[number].path, offset, length) for number, offset, length in entries(epoch)]
        for epoch in plan.epochs
    ]


@given(st.integers(0, 5000), st.integers(0, 2**32), st.integers(1, 900), st.integers(0, 900))
def test_segments_cover_every_byte_once(size: int, seed: int, low: int, more: int) -> None:
    """One begins where the other ends; none but the last is shorter than asked for; a file of one is read whole."""
    chance = random.Random(seed)
    segments = cut(size, lambda: chance.randint(low, low + more))
    if segments == [(0, 0)]:
        assert size <= low + more
        return
    at = 0
    for offset, length in segments:
        assert offset == at
        assert length <= low + more
        at += length
    assert at == size
    assert all(length >= low for _, length in segments[:-1])


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 4), st.booleans(), st.booleans(), st.booleans())
def test_shards_share_out_an_epoch(
    count: int, shards: int, epochs: int, is_first: bool, is_shuffled: bool, is_cut: bool
) -> None:
    """All shards together read in each epoch what one reader would, each entry once; none knows files of others."""
    shards = min(shards, count)
    pieces = [[(0, 600), (600, 400)]] * count if is_cut else None
    arrange = shuffle if is_shuffled else None
    plans = [
        make_plan(
            "p", files(count), epochs, arrange=arrange, shard=Shard(index, shards, is_first), segments=pieces,
            mixes_segments=is_shuffled,
        )
        for index in range(shards)
    ]  # fmt: skip
    whole = read(make_plan("p", files(count), epochs, arrange=arrange, segments=pieces, mixes_segments=is_shuffled))
    for epoch in range(epochs):
        parts = [read(plan)[epoch] for plan in plans]
        assert sorted(entry for part in parts for entry in part) == sorted(whole[epoch])
        if not is_first and is_shuffled:
            assert parts == [whole[epoch][index::shards] for index in range(shards)]
    for plan in plans:
        assert {entry[0] for epoch in read(plan) for entry in epoch} == {file.path for file in plan.files}
        if is_first:
            assert len({frozenset(entry[0] for entry in epoch) for epoch in read(plan)}) == 1


@given(st.integers(1, 30), st.integers(1, 4), st.booleans(), st.booleans())
def test_what_is_made_comes_back(count: int, epochs: int, is_shuffled: bool, is_cut: bool) -> None:
    """`parse` of `to_json` reads the same."""
    plan = make_plan(
        "p", files(count), epochs, interleave=4, arrange=shuffle if is_shuffled else None,
        segments=[[(0, 600), (600, 400)]] * count if is_cut else None, mixes_segments=is_shuffled,
    )  # fmt: skip
    again = parse(to_json(plan), "p")
    assert (again.files, again.interleave, again.order, read(again)) == (plan.files, 4, Order.STRICT, read(plan))


def test_an_empty_shard_is_an_error() -> None:
    """More shards than files."""
    for is_first in (False, True):
        try:
            make_plan("p", files(2), 1, shard=Shard(2, 3, is_first))
        except ValueError as error:
            assert "shard 2 of 3" in str(error)
        else:
            raise AssertionError("made a plan of nothing")


def test_merging() -> None:
    """Runs follow one another; ranks are read side by side, with the files of both once."""
    one = make_plan("a", files(3), 2, interleave=2)
    two = make_plan("b", [PlannedFile("f001"), PlannedFile("g")], 1, interleave=3)
    after = merged("m", [one, two], beside=False)
    paths = [[path for path, _, _ in epoch] for epoch in read(after)]
    assert paths == [["f000", "f001", "f002"], ["f000", "f001", "f002"], ["f001", "g"]]
    assert (after.interleave, [file.path for file in after.files]) == (3, ["f000", "f001", "f002", "g"])
    beside = merged("m", [one, two], beside=True)
    paths = [[path for path, _, _ in epoch] for epoch in read(beside)]
    assert paths == [["f000", "f001", "f001", "g", "f002"], ["f000", "f001", "f002"]]
    assert beside.interleave == 5


def test_summaries() -> None:
    """Bytes of ranges and of whole files, and what was read before; the same for shared epochs."""
    pieces = [[(0, 600), (600, 300)], [(0, 0)]]
    first, second = summarise(make_plan("p", files(2), 2, segments=pieces))
    assert (first.entries, first.files, first.bytes, first.seen_files) == (3, 2, 1900, 0)
    assert (second.entries, second.files, second.bytes, second.seen_files) == (3, 2, 1900, 2)
    assert summarise(make_plan("p", [PlannedFile("x")], 1))[0].bytes is None
