"""What a plan would cost, without a network: bytes and waiting per epoch, beside the least possible and beside LRU.

The least is what Belady's MIN fetches with the whole cache to keep in (`core.retention`). Utilisation is that of a
consumer who does nothing but wait for bytes and consume them: with a share m of an epoch's bytes to fetch at bandwidth
B, and a consumer of rate R, it is at most B / (m R), which is also how the advice is found.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from s3prefetchfs.core.plan import Plan
from s3prefetchfs.core.plan_order import Entry, entries
from s3prefetchfs.core.retention import Retention, reserve_bytes
from s3prefetchfs.simulation.network import FIRST_BYTE_S, Network
from s3prefetchfs.simulation.world import World

GOOD_UTILISATION = 0.9
"""What MLPerf Storage asks of most of its workloads."""

SEARCH_STEPS = 8
"""Halvings in the search for a cache size: the answer is good to half a percent of the dataset."""


@dataclass(frozen=True, slots=True)
class EpochCost:
    """What an epoch cost. What is fetched before it begins belongs to the epoch before, or to the first.

    Attributes:
        read_bytes: what the readers read. fetched_bytes: what that took. least_bytes: the least it could have taken.
        lru_bytes: what it would have taken if the cache kept what was read last.
        seconds: how long it took. stalled_s: how much of that the readers waited.
    """

    read_bytes: int
    fetched_bytes: int
    least_bytes: int
    lru_bytes: int
    seconds: float
    stalled_s: float

    @property
    def utilisation(self) -> float:
        """The share of the time in which nobody waited."""
        return 1 - self.stalled_s / self.seconds if self.seconds else 1.0


@dataclass(frozen=True, slots=True)
class Advice:
    """What would keep the consumer at `GOOD_UTILISATION`.

    Attributes:
        first_bytes_per_s: bandwidth in the first epoch. warm_bytes_per_s: in the later ones, with the cache as it is.
        cache_bytes: the cache with which the bandwidth as it is would do in the later ones; None if none would, or any.
    """

    first_bytes_per_s: float
    warm_bytes_per_s: float
    cache_bytes: int | None


def simulate(
    plan: Plan,
    sizes: Sequence[int],
    capacity_bytes: int,
    bandwidth_bytes_per_s: float,
    rate_bytes_per_s: float,
    *,
    connections: int,
    lead_s: float = 0.0,
    first_byte_s: Callable[[], float] = lambda: FIRST_BYTE_S,
    progress: Callable[[int], object] = lambda _: None,
) -> list[EpochCost]:
    """Run the scheduler over a plan.

    Args:
        sizes: of the plan's files, in bytes. capacity_bytes: of the cache.
        bandwidth_bytes_per_s: of the network. rate_bytes_per_s: what the readers consume while they do not wait.
        lead_s: how long before the readers the plan is declared.
        first_byte_s: called for each request. progress: called with the bytes of each read.
    """
    world = World(capacity_bytes, sizes, Network(bandwidth_bytes_per_s, first_byte_s), connections=connections)
    world.declare(plan)
    world.sleep(lead_s)
    least_bytes = least_fetched(plan, sizes, capacity_bytes)
    lru_bytes = lru_fetched(plan, sizes, capacity_bytes)
    costs = []
    fetched_bytes = 0
    for number, epoch in enumerate(plan.epochs):
        began_s, waited_s = world.now, world.waited_s
        world.train(entries(epoch), interleave=plan.interleave, bytes_per_s=rate_bytes_per_s, progress=progress)
        costs.append(
            EpochCost(
                sum(_length(entry, sizes) for entry in entries(epoch)),
                world.fetched_bytes - fetched_bytes,
                least_bytes[number],
                lru_bytes[number],
                world.now - began_s,
                world.waited_s - waited_s,
            )
        )
        fetched_bytes = world.fetched_bytes
    return costs


def least_fetched(plan: Plan, sizes: Sequence[int], capacity_bytes: int) -> list[int]:
    """Bytes that each epoch must fetch at least, with a cache that keeps the best there is to keep."""
    retention = Retention(capacity_bytes, max(len(epoch.files) for epoch in plan.epochs))
    last: dict[Entry, int] = {}
    position = 0
    fetched = []
    for epoch in plan.epochs:
        missed_bytes = 0
        retention.forget_before(min(last.values(), default=0))
        for entry in entries(epoch):
            length = _length(entry, sizes)
            missed_bytes += length - retention.append(position, length, last.get(entry))
            last[entry] = position
            position += 1
        fetched.append(missed_bytes)
    return fetched


def lru_fetched(plan: Plan, sizes: Sequence[int], capacity_bytes: int) -> list[int]:
    """Bytes that each epoch fetches with a cache that gives up what was read least recently."""
    cache: OrderedDict[Entry, int] = OrderedDict()
    used_bytes = 0
    fetched = []
    for epoch in plan.epochs:
        missed_bytes = 0
        for entry in entries(epoch):
            if entry in cache:
                cache.move_to_end(entry)
                continue
            length = _length(entry, sizes)
            missed_bytes += length
            if length > capacity_bytes:
                continue
            cache[entry] = length
            used_bytes += length
            while used_bytes > capacity_bytes:
                used_bytes -= cache.popitem(last=False)[1]
        fetched.append(missed_bytes)
    return fetched


def advise(
    plan: Plan, sizes: Sequence[int], capacity_bytes: int, bandwidth_bytes_per_s: float, rate_bytes_per_s: float
) -> Advice:
    """What bandwidth, or what cache, a plan needs. Arguments as for `simulate`."""
    read = [sum(_length(entry, sizes) for entry in entries(epoch)) for epoch in plan.epochs]

    def missed_share(cache_bytes: int, epochs: slice) -> float:
        """Of an epoch's bytes, the worst of these epochs, with the room left that fetches land in."""
        kept_bytes = cache_bytes - (reserve_bytes(cache_bytes, max(read)) if cache_bytes < max(read) else 0)
        fetched = least_fetched(plan, sizes, kept_bytes)[epochs]
        return max((missed / total for missed, total in zip(fetched, read[epochs], strict=True) if total), default=0.0)

    warm = slice(1, None)
    enough = bandwidth_bytes_per_s / (GOOD_UTILISATION * rate_bytes_per_s)
    few_bytes, many_bytes = 0, sum(sizes)
    cache_bytes = None
    if len(read) > 1 and missed_share(many_bytes, warm) <= enough < missed_share(few_bytes, warm):
        for _ in range(SEARCH_STEPS):
            middle_bytes = (few_bytes + many_bytes) // 2
            if missed_share(middle_bytes, warm) <= enough:
                many_bytes = middle_bytes
            else:
                few_bytes = middle_bytes
        cache_bytes = many_bytes
    needed = GOOD_UTILISATION * rate_bytes_per_s
    return Advice(
        missed_share(capacity_bytes, slice(1)) * needed, missed_share(capacity_bytes, warm) * needed, cache_bytes
    )


def _length(entry: Entry, sizes: Sequence[int]) -> int:
    number, offset, length = entry
    rest_bytes = max(0, sizes[number] - offset)
    return min(length, rest_bytes) if length else rest_bytes
