"""Connections, backoff and the bandwidth cap. Time is a number."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3prefetchfs.core.pacing import AMPLE_S, BACKOFF_CAP_S, BURST_S, Pacing, Pipe, backoff_s

MB = 1_000_000


def test_all_connections_may_be_used_until_the_server_complains() -> None:
    """No slow start: the configured number is the limit at once."""
    assert Pacing(32, None).limit(0.0) == 32


def test_a_complaint_halves_the_limit_and_a_storm_halves_it_once() -> None:
    """Thirty-two refusals of one second are one message; the next second's are another."""
    pacing = Pacing(32, None)
    for _ in range(32):
        pacing.throttled(10.0)
    assert pacing.limit(10.0) == 16
    pacing.throttled(10.9)
    assert pacing.limit(10.9) == 16
    pacing.throttled(11.0)
    assert pacing.limit(11.0) == 8


def test_the_limit_grows_back_by_one_a_second_after_a_second_of_peace() -> None:
    """However often it is asked for meanwhile."""
    pacing = Pacing(32, None)
    pacing.throttled(0.0)
    limits = {ms: pacing.limit(ms / 1000) for ms in range(0, 20_000, 10)}
    assert limits[990] == limits[1990] == 16
    assert limits[2010] == 17
    assert limits[5010] == 20
    assert limits[17_010] == limits[19_990] == 32


def test_the_limit_never_falls_below_one() -> None:
    """The last connection is how we learn that the storm is over."""
    pacing = Pacing(4, None)
    for second in range(10):
        pacing.throttled(float(second))
    assert pacing.limit(9.0) == 1
    assert pacing.prefetch_limit(9.0) == 1


@given(st.integers(2, 1024))
def test_prefetch_leaves_some_connections_to_demand(max_connections: int) -> None:
    """At least one, at most about an eighth."""
    reserved = max_connections - Pacing(max_connections, None).prefetch_limit(0.0)
    assert 1 <= reserved <= max(1, max_connections // 8)


@given(st.integers(1, 1000), st.floats(0, 1, exclude_max=True), st.none() | st.floats(0, 1e6))
def test_backoff_is_bounded_whatever_the_server_asks(attempt: int, jitter: float, retry_after_s: float | None) -> None:
    """Between nothing and the cap."""
    assert 0 <= backoff_s(attempt, jitter, retry_after_s) <= BACKOFF_CAP_S


def test_backoff_doubles_and_spreads() -> None:
    """Full jitter under a ceiling that doubles: 0.2, 0.4, 0.8 ... 5 s."""
    assert [backoff_s(attempt, 0.5) for attempt in (1, 2, 3, 10)] == [0.1, 0.2, 0.4, 2.5]
    assert backoff_s(3, 0.0) == 0.0


def test_retry_after_is_a_lower_bound() -> None:
    """A server that says 2 s is not asked sooner; one that says an hour is."""
    assert backoff_s(1, 0.5, 2.0) == 2.0
    assert backoff_s(1, 0.5, 3600.0) == BACKOFF_CAP_S
    assert backoff_s(10, 0.9, 1.0) == 4.5


def test_without_a_cap_nothing_waits() -> None:
    """And no request is too long."""
    pacing = Pacing(4, None)
    pacing.spend(10**12, 0.0)
    assert pacing.wait_s(0.0) == 0.0
    assert pacing.burst_bytes > 10**15


def test_the_wait_is_as_long_as_it_must_be() -> None:
    """After the time it names, and not much before, another request may go."""
    pacing = Pacing(4, 10 * MB)
    assert pacing.wait_s(0.0) == 0.0
    pacing.spend(int(pacing.burst_bytes) + 5 * MB, 0.0)
    wait_s = pacing.wait_s(0.0)
    assert wait_s == pytest.approx(0.5, abs=0.01)
    assert pacing.wait_s(wait_s - 0.01) > 0
    assert pacing.wait_s(wait_s) == 0.0


@given(st.lists(st.tuples(st.integers(1, 8 * MB), st.floats(0, 0.5)), min_size=1, max_size=60))
def test_the_cap_is_kept_over_time(requests: list[tuple[int, float]]) -> None:
    """Whoever waits as told asks for no more than rate x time, a burst and the last request, over any stretch."""
    rate = 10 * MB
    pacing = Pacing(4, rate)
    now = 100.0
    asked: list[tuple[float, int]] = []
    for count_bytes, idle_s in requests:
        now += idle_s
        now += pacing.wait_s(now)
        assert pacing.wait_s(now) == 0.0
        pacing.spend(count_bytes, now)
        asked.append((now, count_bytes))
    for index, (began_s, _) in enumerate(asked):
        for last in range(index, len(asked)):
            stretch_bytes = sum(count_bytes for _, count_bytes in asked[index:last])
            assert stretch_bytes <= rate * (asked[last][0] - began_s + BURST_S) + 1


def _carry(pipe: Pipe, bytes_per_s: float, coming_bytes: int, begin_s: float, seconds: float) -> float:
    """Let bytes come in, a tenth of a second's worth at a time; returns when it ended."""
    for tick in range(round(10 * seconds)):
        pipe.landed(round(bytes_per_s / 10), coming_bytes, begin_s + tick / 10)
    return begin_s + seconds


def test_the_bandwidth_follows_a_full_pipe_down() -> None:
    """When the pipe is full and yet brings less, there is less, after the best of the last intervals is forgotten."""
    pipe = Pipe()
    now = _carry(pipe, 100e6, 1 << 30, 0.0, 5.0)
    assert pipe.bytes_per_s == pytest.approx(100e6, rel=0.25)
    _carry(pipe, 40e6, 1 << 30, now, 5.0)
    assert pipe.bytes_per_s == pytest.approx(40e6, rel=0.25)


def test_a_pipe_that_nobody_fills_is_not_taken_to_be_narrow() -> None:
    """Little comes in because little was asked for; but if it is more than was known, it counts."""
    pipe = Pipe()
    now = _carry(pipe, 100e6, 1 << 30, 0.0, 5.0)
    known = pipe.bytes_per_s
    now = _carry(pipe, 1e6, 1 << 20, now, 60.0)
    assert pipe.bytes_per_s == known
    _carry(pipe, 200e6, 1 << 20, now, 5.0)
    assert pipe.bytes_per_s == pytest.approx(200e6, rel=0.25)


def test_an_unknown_pipe_takes_anything() -> None:
    """Until it is known what it carries, only the number of connections limits what is asked for."""
    pipe = Pipe()
    assert pipe.ample_bytes == math.inf
    _carry(pipe, 100e6, 1 << 30, 0.0, 5.0)
    assert pipe.ample_bytes == pytest.approx(100e6 * AMPLE_S, rel=0.25)
