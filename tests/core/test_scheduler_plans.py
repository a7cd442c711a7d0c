"""The scheduler with plans: what it fetches against the bound, and that no deviation leads astray for good."""

from __future__ import annotations

import random

import pytest

from s3prefetchfs.core import events as ev
from s3prefetchfs.core.extent import CHUNK_BYTES
from s3prefetchfs.core.follower import IDLE_S, PAGE_BYTES
from s3prefetchfs.core.plan import Order
from s3prefetchfs.core.residency import ABSENT
from tests.core.plan_world import MIB, PlanWorld, plan_of

FILES, FILE_BYTES, EPOCHS, INTERLEAVE = 32, 8 * MIB, 4, 2
DATASET_BYTES = FILES * FILE_BYTES
READER_BYTES_PER_S = 200e6


def orders(*, reshuffled: bool) -> list[list[int]]:
    chance = random.Random(1)
    order = list(range(FILES))
    found = []
    for _ in range(EPOCHS):
        if reshuffled:
            chance.shuffle(order)
        found.append(list(order))
    return found


def fetched_over_bound(share: float, epochs: list[list[int]], order: Order | None) -> float:
    """What is fetched in all epochs, as a multiple of the least possible; without a plan if there is no `order`."""
    world = PlanWorld(int(share * DATASET_BYTES), [FILE_BYTES] * FILES)
    if order is not None:
        world.declare(plan_of(epochs, interleave=INTERLEAVE, order=order))
        world.sleep(1.0)
    for entries in epochs:
        world.read_epoch(entries, interleave=INTERLEAVE, bytes_per_s=READER_BYTES_PER_S)
    return world.fetched_bytes / (DATASET_BYTES * (1 + (EPOCHS - 1) * (1 - share)))


@pytest.mark.parametrize("reshuffled", [False, True])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.8])
def test_bytes_against_the_bound(share: float, reshuffled: bool) -> None:
    """A declared order costs little more than the least possible; reading the same without a plan costs it all."""
    epochs = orders(reshuffled=reshuffled)
    assert fetched_over_bound(share, epochs, Order.STRICT) < 1.2
    if not reshuffled:
        assert fetched_over_bound(share, epochs, None) == pytest.approx(EPOCHS / (1 + (EPOCHS - 1) * (1 - share)))


def test_any_order() -> None:
    """Each file once in each epoch, in an order that only the reader knows."""
    assert fetched_over_bound(0.5, orders(reshuffled=True), Order.ANY) < 1.15


def test_what_is_declared_is_there_when_it_is_read() -> None:
    """With a pipe faster than the reader, who has declared his order a second before, nobody waits."""
    epochs = orders(reshuffled=True)
    world = PlanWorld(DATASET_BYTES // 2, [FILE_BYTES] * FILES)
    world.declare(plan_of(epochs, interleave=INTERLEAVE))
    world.sleep(1.0)
    assert world.read_epoch(epochs[0], interleave=INTERLEAVE, bytes_per_s=READER_BYTES_PER_S) > 0.95


@pytest.mark.parametrize("first_byte_s", [0.03, 0.3, 0.6])
def test_a_late_first_byte_leaves_the_pipe_full(first_byte_s: float) -> None:
    """However far the store is: what is on its way fills the pipe, as far as the connections allow."""
    world = PlanWorld(512 * 8 * MIB, [32 * MIB] * 100, bytes_per_s=200e6, first_byte_s=first_byte_s, connections=64)
    world.declare(plan_of([list(range(100))]))
    world.sleep(5.0)
    before_bytes = world.fetched_bytes
    world.sleep(5.0)
    assert world.fetched_bytes - before_bytes > 0.9 * 5.0 * 200e6


def test_segments_of_files_larger_than_the_cache() -> None:
    """Ranges are fetched, and released, without the rest of their files."""
    sizes = [64 * MIB] * 3
    ranges = [(file, offset * MIB, 8 * MIB) for file in range(3) for offset in range(0, 64, 8)]
    random.Random(2).shuffle(ranges)
    world = PlanWorld(48 * MIB, sizes)
    plan_id = world.declare(
        plan_of(
            [[file for file, _, _ in ranges]],
            interleave=1,
            ranges=[[number for _, offset, length in ranges for number in (offset, length)]],
        )
    )
    handles = [world.open(file) for file in range(3)]
    world.sleep(1.0)
    for file, offset, length in ranges:
        for start in range(offset, offset + length, MIB):
            world.read(handles[file], start, start + MIB)
        world.sleep(length / READER_BYTES_PER_S)
    assert world.fetched_bytes == sum(sizes)
    assert world.waited_s < 0.5
    assert world.scheduler.progress(plan_id).state == "finished"


class SegmentWorld(PlanWorld):
    """A reader of byte ranges behind the kernel: it asks for whole pages, and reads on behind the end.

    Args:
        ranges: (file, offset, length), in the order in which they are declared.
    """

    def __init__(self, capacity_bytes: int, sizes: list[int], ranges: list[tuple[int, int, int]]) -> None:
        super().__init__(capacity_bytes, sizes)
        numbers = [number for _, offset, length in ranges for number in (offset, length)]
        self.plan_id = self.declare(plan_of([[file for file, _, _ in ranges]], interleave=1, ranges=[numbers]))
        self.sleep(1.0)

    def read_range(self, file: int, offset: int, length: int, *, in_memory: float = 0.0) -> None:
        """Open, read one range, and close; of its end, `in_memory` is known to the kernel."""
        handle = self.open(file)
        stop = offset + length + MIB
        at = offset - offset % PAGE_BYTES
        while at < min(stop - int(in_memory * (length + MIB)), self.sizes[file]):
            reached = min(at + MIB, stop, self.sizes[file])
            self.read(handle, at, reached)
            at = reached
        self.sleep(length / READER_BYTES_PER_S)
        self.close(handle)


def overlapping_ranges(count: int) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Sizes of files, and ranges of them that begin anywhere and have bytes in common."""
    chance = random.Random(3)
    sizes = [96 * MIB] * 3
    lengths = [chance.randint(2 * MIB, 8 * MIB) for _ in range(count)]
    return sizes, [(number % 3, chance.randrange(96 * MIB - length), length) for number, length in enumerate(lengths)]


def test_ranges_are_followed_as_the_kernel_reads_them() -> None:
    """Page by page, beyond their ends, and where they overlap: nothing of that is a deviation."""
    sizes, ranges = overlapping_ranges(60)
    world = SegmentWorld(96 * MIB, sizes, ranges)
    for segment in ranges:
        world.read_range(*segment)
    progress = world.scheduler.progress(world.plan_id)
    assert (progress.state, progress.confidence) == ("finished", 1.0)
    assert progress.deviations <= 2  # where the kernel reads on into the range that is next but one
    assert world.fetched_bytes < 1.25 * sum(length for _, _, length in ranges)


def test_ranges_whose_ends_the_kernel_has_in_memory_do_not_hold_up_the_plan() -> None:
    """Their last bytes are never asked for; the handle is closed, and the plan goes on."""
    sizes, ranges = overlapping_ranges(60)
    world = SegmentWorld(96 * MIB, sizes, ranges)
    for number, segment in enumerate(ranges):
        world.read_range(*segment, in_memory=0.7 if number % 3 else 0.0)
    progress = world.scheduler.progress(world.plan_id)
    assert (progress.state, progress.confidence) == ("finished", 1.0)
    assert progress.deviations <= 2


def test_many_ranges_of_a_file_cost_no_more_with_time() -> None:
    """What is ranked again replaces its old ranking: the heaps stay as long as there are ranges, about."""
    sizes, ranges = overlapping_ranges(200)
    world = SegmentWorld(96 * MIB, sizes, ranges)
    longest = 0
    for segment in ranges:
        world.read_range(*segment)
        [follower] = world.scheduler._foresight._followers.values()
        longest = max(longest, len(follower.surplus), len(follower.retained))
    assert longest <= 4 * len(ranges) + 64


def test_what_is_left_out_does_not_hold_up_the_plan() -> None:
    """Files that are never opened, one in twenty: the others are still in place, and fetched ahead."""
    order = list(range(200))
    world = PlanWorld(50 * MIB, [MIB] * 200)
    plan_id = world.declare(plan_of([order], interleave=INTERLEAVE))
    world.sleep(1.0)
    world.read_epoch([n for n in order if n % 20], interleave=INTERLEAVE, bytes_per_s=READER_BYTES_PER_S)
    progress = world.scheduler.progress(plan_id)
    assert progress.position == 180  # which was left out, and not many were begun since
    assert progress.deviations <= 10
    assert world.waited_s < 0.05 * world.now


def test_a_reader_takes_no_more_from_a_plan_than_he_needs() -> None:
    """Of what is fetched ahead, the end of what is read last goes: not the whole of it."""
    released: list[ev.Instruction] = []

    class Watched(PlanWorld):
        def _obey(self, instruction: ev.Instruction) -> None:
            if isinstance(instruction, ev.Release | ev.Evict):
                released.append(instruction)
            super()._obey(instruction)

    world = Watched(90 * MIB, [32 * MIB] * 4)
    world.declare(plan_of([[0, 1, 2]], interleave=1))
    world.sleep(2.0)
    handle = world.open(3)
    world.read(handle, 16 * MIB, 16 * MIB + CHUNK_BYTES)
    [release] = released
    assert isinstance(release, ev.Release)
    assert release.last - release.first <= 8 * MIB // CHUNK_BYTES


def test_the_rate_of_readers_has_their_pauses_in_it() -> None:
    """Who reads in bursts consumes as much as he reads in all, not as fast as in a burst."""
    world = PlanWorld(400 * MIB, [8 * MIB] * 40)
    plan_id = world.declare(plan_of([list(range(40))], interleave=1))
    world.sleep(2.0)
    for number in range(20):
        handle = world.open(number)
        for start in range(0, 8 * MIB, MIB):
            world.read(handle, start, start + MIB)
        world.close(handle)
        world.sleep(0.2)
    assert world.scheduler.progress(plan_id).consumed_bytes_per_s == pytest.approx(8 * MIB / 0.2, rel=0.3)


def test_files_that_the_kernel_has_in_memory_are_read_all_the_same() -> None:
    """Nobody sees how they are read, only that they are opened and closed: the plan goes on, to its end."""
    world = PlanWorld(60 * MIB, [8 * MIB] * 16)
    plan_id = world.declare(plan_of([list(range(16)), list(range(16))], interleave=8))
    world.read_epoch(list(range(16)), interleave=8, bytes_per_s=READER_BYTES_PER_S)
    for number in range(16):
        world.close(world.open(number))
    progress = world.scheduler.progress(plan_id)
    assert (progress.state, progress.epoch, progress.deviations) == ("finished", 1, 0)


def test_what_is_ahead_of_readers_counts_to_the_byte() -> None:
    """Up to the first gap, also where it is in the middle of a file; what was read on both sides of it is not ahead."""
    world = PlanWorld(400 * MIB, [64 * MIB] * 3, bytes_per_s=64e6, connections=1)
    plan_id = world.declare(plan_of([[0, 1, 2]], interleave=2))
    handles = [world.open(0), world.open(1)]
    for handle in handles:
        world.read(handle, 0, 8 * MIB)
    world.sleep(1.0)
    resident = world.scheduler._disk.by_version[world._version(0)].chunks
    assert 8 * MIB < (reached := resident.find(ABSENT) * CHUNK_BYTES) < 64 * MIB
    assert world.scheduler.progress(plan_id).bytes_ahead == reached - 8 * MIB
    world.sleep(60.0)
    assert world.scheduler.progress(plan_id).bytes_ahead == (3 * 64 - 2 * 8) * MIB


def test_restarted_readers_are_found_again() -> None:
    """A job that begins anew from the middle of another epoch has its bytes ahead of it again."""
    chance = random.Random(1)
    epochs = [chance.sample(range(200), 200) for _ in range(3)]
    world = PlanWorld(50 * MIB, [MIB] * 200)
    plan_id = world.declare(plan_of(epochs, interleave=INTERLEAVE))
    world.read_epoch(epochs[0][:8], interleave=INTERLEAVE, bytes_per_s=READER_BYTES_PER_S)
    world.read_epoch(epochs[1][100:140], interleave=INTERLEAVE, bytes_per_s=READER_BYTES_PER_S)
    progress = world.scheduler.progress(plan_id)
    assert (progress.epoch, progress.position) == (1, 140)
    assert progress.deviations > 0


def test_a_plan_of_something_else_pins_nothing() -> None:
    """Files that no plan speaks of can be read while a plan that nobody follows fills the cache."""
    world = PlanWorld(64 * MIB, [FILE_BYTES] * 20)
    world.declare(plan_of([list(range(16))]))
    world.sleep(5.0)
    assert world.scheduler.snapshot().used_bytes > 48 * MIB
    world.read_epoch([16, 17, 18, 19], interleave=2, bytes_per_s=READER_BYTES_PER_S)


@pytest.mark.parametrize("was_read", [False, True])
def test_a_plan_that_nobody_reads_gives_way(was_read: bool) -> None:
    """After a while its bytes go for others, planned or not, and it takes nothing from them; then it is read again."""
    world = PlanWorld(64 * MIB, [FILE_BYTES] * 40)
    left = world.declare(plan_of([list(range(16))], interleave=2))
    if was_read:
        world.read_epoch([0, 1], interleave=2, bytes_per_s=READER_BYTES_PER_S)
    world.sleep(10.0)
    assert world.scheduler.progress(left).bytes_ahead > 40 * MIB
    world.sleep(IDLE_S + 10.0)
    others = [20, 21, 22, 23]
    world.read_epoch(others, interleave=2, bytes_per_s=READER_BYTES_PER_S)
    world.sleep(10.0)
    fetched_bytes = world.fetched_bytes
    world.read_epoch(others, interleave=2, bytes_per_s=READER_BYTES_PER_S)
    assert world.fetched_bytes == fetched_bytes, "what no plan speaks of was not kept"
    world.declare(plan_of([list(range(24, 32))], interleave=2))
    world.sleep(10.0)
    waited_s = world.waited_s
    world.read_epoch(list(range(24, 30)), interleave=2, bytes_per_s=READER_BYTES_PER_S)
    assert world.waited_s == waited_s, "a plan that is read was held up by one that is not"
    world.read_epoch(list(range(2 if was_read else 0, 16)), interleave=2, bytes_per_s=READER_BYTES_PER_S)
    assert world.scheduler.progress(left).state == "finished"


def play(seed: int) -> None:
    """Random plans, two or three at once, and readers who follow them more or less."""
    chance = random.Random(seed)
    sizes = [chance.choice([0, 1, CHUNK_BYTES, chance.randint(1, 16 * MIB)]) for _ in range(chance.randint(1, 24))]
    capacity_bytes = max(MIB, int(sum(sizes) * chance.choice([0.02, 0.1, 0.3, 0.6, 0.9, 1.5])))
    world = PlanWorld(
        capacity_bytes,
        sizes,
        bytes_per_s=chance.choice([5e7, 1e9]),
        connections=chance.randint(1, 16),
        passthrough=chance.random() < 0.5,
    )
    plans: list[int] = []
    path: list[int] = []

    def declare() -> None:
        epochs, ranges = [], []
        by_range = chance.random() < 0.3
        for _ in range(chance.randint(1, 4)):
            entries = chance.sample(range(len(sizes)), len(sizes))
            if chance.random() < 0.3:
                entries = chance.choices(range(len(sizes)), k=chance.randint(1, 40))
            epochs.append(entries)
            ranges.append(
                [n for file in entries for n in (chance.randrange(sizes[file] + 1), chance.randint(1, 8 * MIB))]
            )
            path.extend(entries)
        order = chance.choice([Order.STRICT, Order.STRICT, Order.ANY])
        plan = plan_of(epochs, interleave=chance.randint(1, 5), order=order, ranges=ranges if by_range else None)
        missing = [file for file in range(len(sizes)) if chance.random() < 0.05]
        plans.append(world.declare(plan, missing))

    declare()
    step = 0
    handles: dict[int, tuple[int, int]] = {}
    for _ in range(300):
        match chance.choices(["open", "read", "close", "time", "remove", "declare"], [35, 40, 18, 3, 1, 1])[0]:
            case "open" if len(handles) < 8:
                step = chance.randrange(len(path)) if chance.random() < 0.02 else step + 1
                number = path[step % len(path)] if chance.random() < 0.8 else chance.randrange(len(sizes))
                handles[world.open(number)] = number, 0
            case "read" if handles:
                handle_id = chance.choice(list(handles))
                number, start = handles[handle_id]
                start = chance.randint(0, sizes[number]) if chance.random() < 0.1 else start
                stop = min(sizes[number], start + chance.choice([4096, MIB]))
                if start < stop:
                    world.read(handle_id, start, stop)
                handles[handle_id] = number, stop
            case "close" if handles:
                handle_id = chance.choice(list(handles))
                del handles[handle_id]
                world.close(handle_id)
            case "time":
                world.sleep(chance.choice([0.01, 0.3, 2.0, 100.0]))
            case "remove" if plans:
                world.send(ev.PlanRemoved(plans.pop(chance.randrange(len(plans)))))
            case "declare" if len(plans) < 3:
                declare()
    for handle_id in handles:
        world.close(handle_id)
    world.sleep(500.0)
    for plan_id in plans:
        world.send(ev.PlanRemoved(plan_id))
    world.sleep(100.0)
    snapshot = world.scheduler.snapshot()
    assert (snapshot.fetches_in_flight, snapshot.reads_waiting, snapshot.fetches_backing_off) == (0, 0, 0)


@pytest.mark.parametrize("seed", range(60))
def test_random_histories(seed: int) -> None:
    """Whoever does whatever: every read is answered, the cache is kept to its size, and all comes to rest."""
    play(seed)
