"""The simulation: its baselines against closed forms, and what it predicts against what must be."""

from __future__ import annotations

import math
import random
from array import array

import pytest

from s3prefetchfs.core.eviction import FREE_RESERVE_MAX_BYTES
from s3prefetchfs.core.plan import Epoch, Order, Plan, PlannedFile
from s3prefetchfs.core.plan_order import cut, make_plan
from s3prefetchfs.simulation.network import Network
from s3prefetchfs.simulation.run import GOOD_UTILISATION, advise, least_fetched, lru_fetched, simulate
from s3prefetchfs.simulation.world import World

MIB = 1024 * 1024
EPOCHS = 4


def plan_of(files: int, *, reshuffled: bool, epochs: int = EPOCHS) -> Plan:
    """A plan that reads each file once in each epoch, four at a time."""

    def arrange(epoch: int, count: int) -> list[int]:
        return random.Random(epoch if reshuffled else 0).sample(range(count), count)

    planned = [PlannedFile(f"{number:05d}", MIB, "etag") for number in range(files)]
    return make_plan("plan", planned, epochs, interleave=4, arrange=arrange)


def lru_hits(share: float, *, reshuffled: bool) -> float:
    """The share of a warm epoch that LRU has in a cache of this share of the dataset.

    In a fixed order what is needed next went longest ago. In an order that is new in each epoch, a file at place x of
    the one and y of the next is there if fewer than `share` of all other files were read in between, which gives
    c + (1 - c) ln(1 - c).
    """
    return share + (1 - share) * math.log(1 - share) if reshuffled else 0.0


@pytest.mark.parametrize("reshuffled", [False, True])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.8])
def test_lru_against_its_closed_form(share: float, reshuffled: bool) -> None:
    """The LRU column is what LRU does."""
    files = 2000
    fetched = lru_fetched(plan_of(files, reshuffled=reshuffled), [1] * files, int(share * files))
    assert fetched[0] == files
    hits = 1 - sum(fetched[1:]) / (files * (EPOCHS - 1))
    assert hits == pytest.approx(lru_hits(share, reshuffled=reshuffled), abs=0.02)


@pytest.mark.parametrize("reshuffled", [False, True])
def test_the_rig_without_a_plan(reshuffled: bool) -> None:
    """Without a plan the scheduler evicts what was read least recently, all but the space that it keeps free."""
    share, files = 0.5, 1500
    plan = plan_of(files, reshuffled=reshuffled)
    world = World(int(share * files) * MIB, [MIB] * files, Network(1e9), connections=8)
    for number, epoch in enumerate(plan.epochs):
        if number == 1:
            first_bytes = world.fetched_bytes
        world.train(((file, 0, 0) for file in epoch.files), interleave=1, bytes_per_s=1e9)
    hits = 1 - (world.fetched_bytes - first_bytes) / (files * MIB * (EPOCHS - 1))
    assert first_bytes == files * MIB
    used = share - FREE_RESERVE_MAX_BYTES / (files * MIB)
    assert hits == pytest.approx(lru_hits(used, reshuffled=reshuffled), abs=0.02)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.8, 1.2])
def test_the_least(share: float) -> None:
    """In a fixed order all but a cache full must come in each epoch."""
    files = 400
    fetched = least_fetched(plan_of(files, reshuffled=False), [MIB] * files, int(share * files) * MIB)
    assert fetched[0] == files * MIB
    for missed_bytes in fetched[1:]:
        assert missed_bytes / (files * MIB) == pytest.approx(max(0.0, 1 - share), abs=0.005)


@pytest.mark.parametrize("reshuffled", [False, True])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.8])
def test_bytes_and_waiting(share: float, reshuffled: bool) -> None:
    """What the plan costs is near the least; with a pipe a little above the need, hardly anybody waits."""
    files, rate = 512, 200e6
    plan = plan_of(files, reshuffled=reshuffled)
    capacity_bytes = int(share * files) * 4 * MIB
    costs = simulate(
        plan, [4 * MIB] * files, capacity_bytes, 1.1 * (1 - share) * rate, rate, connections=16, lead_s=10.0
    )
    total_bytes = sum(cost.fetched_bytes for cost in costs)
    assert total_bytes <= 1.10 * sum(cost.least_bytes for cost in costs)
    assert total_bytes < sum(cost.lru_bytes for cost in costs)
    warm = costs[1:]
    assert sum(cost.utilisation for cost in warm) / len(warm) > 0.93


def test_advice_is_true() -> None:
    """With the bandwidth, or the cache, that the advice names, the goal is reached, and not with much less."""
    files, rate = 256, 200e6
    sizes = [8 * MIB] * files
    plan = plan_of(files, reshuffled=True)
    capacity_bytes = files * 4 * MIB
    advice = advise(plan, sizes, capacity_bytes, 60e6, rate)
    assert advice.first_bytes_per_s == pytest.approx(GOOD_UTILISATION * rate)
    assert advice.cache_bytes is not None

    def busy(cache_bytes: int, bytes_per_s: float) -> float:
        costs = simulate(plan, sizes, cache_bytes, bytes_per_s, rate, connections=16)
        return sum(cost.utilisation for cost in costs[1:]) / (len(costs) - 1)

    assert busy(capacity_bytes, 1.1 * advice.warm_bytes_per_s) > GOOD_UTILISATION
    assert busy(capacity_bytes, 0.8 * advice.warm_bytes_per_s) < GOOD_UTILISATION
    assert busy(int(1.1 * advice.cache_bytes), 60e6) > GOOD_UTILISATION
    assert busy(int(0.8 * advice.cache_bytes), 60e6) < GOOD_UTILISATION


def test_advice_where_no_cache_helps() -> None:
    """A dataset that is read once has no later epochs to cache for."""
    plan = plan_of(16, reshuffled=False, epochs=1)
    assert advise(plan, [MIB] * 16, MIB, 1e6, 1e9).cache_bytes is None


def test_segments() -> None:
    """Ranges of files three times larger than the cache, read in random order by a consumer at 0.8 of the pipe."""
    chance = random.Random(1)
    sizes = [256 * MIB] * 6
    segments = [cut(size, lambda: chance.randint(5, 30) * MIB) for size in sizes]
    files = [PlannedFile(str(number), size, "etag") for number, size in enumerate(sizes)]
    plan = make_plan(
        "plan",
        files,
        1,
        arrange=lambda _, count: chance.sample(range(count), count),
        segments=segments,
        mixes_segments=True,
    )
    (cost,) = simulate(plan, sizes, sum(sizes) // 3, 300e6, 240e6, connections=16, lead_s=5.0)
    assert cost.fetched_bytes == cost.read_bytes == sum(sizes)
    assert cost.stalled_s < 0.01 * cost.seconds


def test_files_that_are_odd() -> None:
    """Empty files, files larger than the cache, ranges beyond the end, and files that are read again and again."""
    sizes = [0, 1, 40 * MIB, 3 * MIB]
    numbers = [0, 2, 3, 1, 3, 2, 0]
    ranges = [0, 0, 0, 0, 2 * MIB, 9 * MIB, 0, 0, 5 * MIB, MIB, 39 * MIB, 0, 0, 7]
    epoch = Epoch(memoryview(array("I", numbers)), memoryview(array("Q", ranges)))
    plan = Plan("plan", Order.STRICT, 3, [PlannedFile(str(number)) for number in range(4)], (epoch, epoch))
    for cost in simulate(plan, sizes, 16 * MIB, 100e6, 50e6, connections=4):
        assert cost.read_bytes == 40 * MIB + MIB + 1 + MIB
        assert cost.seconds > 0
