"""What is kept from one reading to the next: against the best there is, and against the bound."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from s3prefetchfs.core.retention import Retention


def kept(reads: list[int], capacity: int) -> list[int]:
    """The bytes kept for each reading of items of one byte."""
    retention = Retention(capacity, len(reads))
    last: dict[int, int] = {}
    found = []
    for position, item in enumerate(reads):
        found.append(retention.append(position, 1, last.get(item)))
        last[item] = position
    return found


def most_hits(reads: list[int], capacity: int) -> int:
    """The most readings that any choice of intervals serves: all choices are tried."""
    last: dict[int, int] = {}
    intervals = []
    for position, item in enumerate(reads):
        if item in last:
            intervals.append((last[item], position))
        last[item] = position
    for count in range(len(intervals), 0, -1):
        for chosen in itertools.combinations(intervals, count):
            if all(sum(a <= moment < b for a, b in chosen) <= capacity for moment in range(len(reads))):
                return count
    return 0


@settings(deadline=None)
@given(reads=st.lists(st.integers(0, 4), max_size=11), capacity=st.integers(0, 4))
def test_no_choice_is_better(reads: list[int], capacity: int) -> None:
    """As many hits as the best of all choices gives, and never more kept than there is room for."""
    assert sum(kept(reads, capacity)) == most_hits(reads, capacity)


def epochs(share: float, files: int, count: int, *, reshuffled: bool) -> list[list[float]]:
    """The share of bytes missed in each tenth of each epoch, for files of 1000 bytes."""
    chance = random.Random(1)
    order = list(range(files))
    retention = Retention(int(share * files * 1000), files)
    last: dict[int, int] = {}
    found = []
    for epoch in range(count):
        if reshuffled:
            chance.shuffle(order)
        missed = [0.0] * 10
        for index, file in enumerate(order):
            position = epoch * files + index
            missed[10 * index // files] += 1000 - retention.append(position, 1000, last.get(file))
            last[file] = position
        retention.end_epoch(epoch * files)
        found.append([part / (files * 100) for part in missed])
    return found


@pytest.mark.parametrize("reshuffled", [False, True])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.8])
def test_epochs_meet_the_bound(share: float, reshuffled: bool) -> None:
    """Every epoch after the first misses what does not fit, and 1 % of the dataset more at most."""
    first, *others = epochs(share, 200, 5, reshuffled=reshuffled)
    assert first == [1.0] * 10
    for missed in others:
        assert 1 - share <= sum(missed) / 10 + 1e-9 <= 1 - share + 0.01


def test_the_same_order_is_missed_evenly() -> None:
    """From the third epoch on: a pipe of constant rate keeps up."""
    for missed in epochs(0.5, 200, 6, reshuffled=False)[2:]:
        assert max(missed) < 0.6


def test_long_plans_in_buckets() -> None:
    """Looked at in buckets, little is lost."""
    assert sum(epochs(0.5, 5000, 3, reshuffled=True)[2]) / 10 < 0.52
