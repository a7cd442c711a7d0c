"""How plans are made: files in epochs, shuffled, shared out between ranks, cut into segments, and merged. Pure.

Chance and other people's orders come in as functions: an `Arrange` says in which order an epoch reads its units. A
unit is a file, or, where segments of all files are shuffled together, a segment.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from s3prefetchfs.core.plan import Epoch, Order, Plan, PlannedFile

Arrange = Callable[[int, int], Sequence[int]]
"""Epoch and number of units to the numbers of the units, in reading order."""

Entry = tuple[int, int, int]
"""File number, offset, length; a length of 0 is the whole file."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Every `count`-th unit, from `index` on, as `tf.data.Dataset.shard`.

    Args:
        is_first: the files are shared out once, in name order, and each epoch orders those of the shard; else each
            epoch is ordered first, and then shared out.
    """

    index: int = 0
    count: int = 1
    is_first: bool = False


def cut(size_bytes: int, next_length: Callable[[], int]) -> list[tuple[int, int]]:
    """Offsets and lengths of the segments of a file, which cover each of its bytes once; the last is what is left.

    A file that is one segment is read whole: `[(0, 0)]`.

    Args:
        next_length: of the next segment, in bytes, at least 1.
    """
    segments: list[tuple[int, int]] = []
    at = 0
    while at < size_bytes:
        length = min(next_length(), size_bytes - at)
        segments.append((at, length))
        at += length
    return segments if len(segments) > 1 else [(0, 0)]


def make_plan(
    name: str,
    files: Sequence[PlannedFile],
    epochs: int,
    *,
    order: Order = Order.STRICT,
    interleave: int = 1,
    arrange: Arrange | None = None,
    shard: Shard = Shard(),
    segments: Sequence[Sequence[tuple[int, int]]] | None = None,
    mixes_segments: bool = False,
) -> Plan:
    """A plan that reads these files in each epoch.

    Args:
        files: in name order.
        arrange: None reads them in this order.
        segments: of each file, as `cut` makes them; None for whole files.
        mixes_segments: the units that are arranged are segments; else files, each with its segments in order.

    Raises:
        ValueError: the shard is empty; says so.
    """
    numbers: Sequence[int] = range(len(files))
    if shard.is_first:
        numbers = numbers[shard.index :: shard.count]
    pieces = segments or [[(0, 0)]] * len(files)
    units: list[list[Entry]] = [[(number, *piece) for piece in pieces[number]] for number in numbers]
    if mixes_segments:
        units = [[entry] for unit in units for entry in unit]

    def epoch(number: int) -> Epoch:
        ordered = range(len(units)) if arrange is None else arrange(number, len(units))
        if not shard.is_first:
            ordered = ordered[shard.index :: shard.count]
        if not ordered:
            raise ValueError(f"shard {shard.index} of {shard.count} of epoch {number} has no entries")
        return _epoch(entry for unit in ordered for entry in units[unit])

    made = (epoch(0),) * epochs if arrange is None else tuple(epoch(number) for number in range(epochs))
    return _without_unread(Plan(name, order, interleave, list(files), made))


def merged(name: str, plans: Sequence[Plan], *, beside: bool) -> Plan:
    """One plan of several.

    Args:
        beside: epoch by epoch, entries in turn from each (the ranks of one run); else the epochs of each plan follow
            those of the one before (runs after one another).
    """
    numbers: dict[str, int] = {}
    files: list[PlannedFile] = []
    lists: list[list[list[Entry]]] = []
    for plan in plans:
        new = []
        for file in plan.files:
            if numbers.setdefault(file.path, len(files)) == len(files):
                files.append(file)
            new.append(numbers[file.path])
        lists.append([[(new[file], *piece) for file, *piece in entries(epoch)] for epoch in plan.epochs])  # type: ignore[misc]
    if beside:
        epochs = [_in_turn([some[at] for some in lists if at < len(some)]) for at in range(max(map(len, lists)))]
    else:
        epochs = [epoch for some in lists for epoch in some]
    is_strict = all(plan.order is Order.STRICT for plan in plans)
    interleaves = [plan.interleave for plan in plans]
    return Plan(
        name,
        Order.STRICT if is_strict else Order.ANY,
        sum(interleaves) if beside else max(interleaves),
        files,
        tuple(_epoch(epoch) for epoch in epochs),
    )


def entries(epoch: Epoch) -> Iterable[Entry]:
    """The entries of an epoch, in reading order."""
    if epoch.ranges is None:
        return ((file, 0, 0) for file in epoch.files)
    return zip(epoch.files, epoch.ranges[::2], epoch.ranges[1::2], strict=True)


@dataclass(frozen=True, slots=True)
class EpochSummary:
    """What one epoch reads.

    Attributes:
        entries, files: how many, and how many different files.
        bytes: that it reads; None where a size is not known.
        seen_files: of the files, those that an earlier epoch has read.
    """

    entries: int
    files: int
    bytes: int | None
    seen_files: int


def summarise(plan: Plan) -> list[EpochSummary]:
    """What each epoch reads."""
    seen: set[int] = set()
    summaries: list[EpochSummary] = []
    for number, epoch in enumerate(plan.epochs):
        if number and epoch is plan.epochs[number - 1]:  # as where a plan only says how many epochs there are
            last = summaries[-1]
            summaries.append(EpochSummary(last.entries, last.files, last.bytes, last.files))
            continue
        files = set(epoch.files)
        lengths = [length or plan.files[file].size_bytes for file, _, length in entries(epoch)]
        known = [length for length in lengths if length is not None]
        size_bytes = sum(known) if len(known) == len(lengths) else None
        summaries.append(EpochSummary(len(epoch.files), len(files), size_bytes, len(files & seen)))
        seen |= files
    return summaries


def _in_turn(lists: Sequence[Sequence[Entry]]) -> list[Entry]:
    return [some[at] for at in range(max(map(len, lists))) for some in lists if at < len(some)]


def _epoch(items: Iterable[Entry]) -> Epoch:
    files, ranges, has_ranges = array("I"), array("Q"), False
    for file, offset, length in items:
        files.append(file)
        ranges.extend((offset, length))
        has_ranges |= length > 0
    return Epoch(memoryview(files), memoryview(ranges) if has_ranges else None)


def _without_unread(plan: Plan) -> Plan:
    """The plan without the files that no epoch reads, those of other shards."""
    read: set[int] = set()
    for epoch in {id(epoch): epoch for epoch in plan.epochs}.values():
        read.update(epoch.files)
    if len(read) == len(plan.files):
        return plan
    kept = sorted(read)
    new = {number: place for place, number in enumerate(kept)}
    renumbered: dict[int, Epoch] = {}
    for epoch in plan.epochs:
        if id(epoch) not in renumbered:
            renumbered[id(epoch)] = Epoch(memoryview(array("I", [new[file] for file in epoch.files])), epoch.ranges)
    return Plan(
        plan.name,
        plan.order,
        plan.interleave,
        [plan.files[number] for number in kept],
        tuple(renumbered[id(epoch)] for epoch in plan.epochs),
    )
