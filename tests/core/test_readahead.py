"""What one open file's reading pattern is worth reading ahead."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from s3prefetchfs.core.readahead import EXPECTED_MAX_BYTES, GROWTH, REORDER_BYTES, START_MAX_BYTES, ReadAhead

KIB = 1024
MIB = 1024 * KIB
FAR = 100 * MIB


def after(*reads: tuple[int, int]) -> ReadAhead:
    """The pattern after reads of (start, length)."""
    pattern = ReadAhead()
    for start, length in reads:
        pattern.observe(start, start + length)
    return pattern


def run(start: int, total: int, step: int = 128 * KIB) -> list[tuple[int, int]]:
    """A stretch of reads in order."""
    return [(at, step) for at in range(start, start + total, step)]


def test_nothing_is_read_ahead_before_the_first_read() -> None:
    """Open is not a wish."""
    pattern = ReadAhead()
    assert not pattern.started
    assert pattern.window_bytes == 0


def test_a_stream_from_the_start_opens_wide() -> None:
    """The first request of a stream already asks for what the pipe holds; a look at a header costs 1 MiB."""
    assert after((0, 16 * KIB)).window_bytes == 1 * MIB
    assert after((0, 128 * KIB)).window_bytes == 8 * MIB
    assert after((0, 1 * MIB)).window_bytes == START_MAX_BYTES


def test_a_window_grows_with_its_run() -> None:
    """Past the start, eight bytes ahead for each byte read: 64 MiB after 8 MiB."""
    assert after(*run(0, 8 * MIB)).window_bytes == 64 * MIB


def test_a_first_read_in_the_middle_is_not_a_stream() -> None:
    """Nothing is read ahead until a neighbour follows; from then on the window grows."""
    assert after((FAR, 128 * KIB)).window_bytes == 0
    assert after(*run(FAR, 256 * KIB)).window_bytes == GROWTH * 128 * KIB


def test_small_random_reads_get_no_window() -> None:
    """After a seek a run is expected to be as long as the last one was, which for one read is nothing more."""
    rng = random.Random(1)
    pattern = after((FAR, 4 * KIB))
    for _ in range(1000):
        start = rng.randrange(0, 1000) * 10 * MIB + 5 * MIB
        pattern.observe(start, start + 4 * KIB)
        assert pattern.window_bytes == 0


def test_random_pieces_are_expected_whole() -> None:
    """Who read 1 MiB at the last place gets the rest of 1 MiB at the next, up to a fixed end."""
    pattern = after(*run(FAR, 1 * MIB), (5 * FAR, 128 * KIB))
    assert pattern.window_bytes == 1 * MIB - 128 * KIB
    assert not pattern.moving
    for start, length in run(5 * FAR, 1 * MIB):
        pattern.observe(start, start + length)
        assert pattern.position + pattern.window_bytes == 5 * FAR + 1 * MIB


def test_a_run_that_outgrows_the_last_one_grows_its_window_again() -> None:
    """From the expected end on it is a stream."""
    pattern = after(*run(FAR, 1 * MIB), *run(5 * FAR, 1 * MIB + 128 * KIB))
    assert pattern.moving
    assert pattern.window_bytes == GROWTH * 128 * KIB


def test_a_whole_file_is_not_expected_again() -> None:
    """After a long stream and a seek, a bounded stretch is fetched at once."""
    pattern = after(*run(0, 50 * MIB), (FAR, 128 * KIB))
    assert pattern.window_bytes == EXPECTED_MAX_BYTES - 128 * KIB


def test_the_kernel_may_swap_neighbours() -> None:
    """A stream whose requests come out of order by up to the kernel's read-ahead is one run."""
    swapped = [(256 * KIB, 128 * KIB), (128 * KIB, 128 * KIB), (0, 128 * KIB), (384 * KIB, 128 * KIB)]
    pattern = ReadAhead()
    assert [pattern.observe(start, start + length) for start, length in swapped] == [True, False, False, False]
    assert pattern.position == 512 * KIB
    assert pattern.window_bytes > 0


def test_a_jump_beyond_the_reorder_distance_begins_a_new_run() -> None:
    """In either direction."""
    pattern = after((FAR, 4 * KIB))
    assert not pattern.observe(FAR + REORDER_BYTES, FAR + REORDER_BYTES + 4 * KIB)
    assert pattern.observe(FAR + 3 * REORDER_BYTES, FAR + 3 * REORDER_BYTES + 4 * KIB)
    assert pattern.observe(FAR, FAR + 4 * KIB)


@given(st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(1, MIB)), min_size=1))
def test_the_window_is_bounded_by_what_was_read(reads: list[tuple[int, int]]) -> None:
    """Whatever the reads: never negative, never more than the run so far justifies."""
    pattern = after(*reads)
    span_bytes = max(start + length for start, length in reads)
    assert 0 <= pattern.window_bytes <= max(GROWTH * span_bytes, START_MAX_BYTES, EXPECTED_MAX_BYTES)
    assert pattern.position <= span_bytes
