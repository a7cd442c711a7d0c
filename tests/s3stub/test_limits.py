"""Latency, rates and request limits: the arithmetic in virtual time, and that real answers keep to it."""

from __future__ import annotations

import asyncio
import selectors
import time
from random import Random
from typing import Any

import pytest

from tests.s3stub import S3Stub, ramp
from tests.s3stub.knobs import Knobs
from tests.s3stub.probe import Raw, error_of
from tests.s3stub.shaping import Link, Pace, sleep_until

MIB = 1 << 20


def test_latency_holds_back_the_first_byte(s3: S3Stub, client: Any) -> None:
    """latency_ms is for every kind of request, and list_latency_ms replaces it for listings."""
    s3.put("k", b"x")
    s3.configure(latency_ms=40, list_latency_ms=80)
    client.get_object(Bucket=s3.bucket, Key="k")
    client.head_object(Bucket=s3.bucket, Key="k")
    client.list_objects_v2(Bucket=s3.bucket)
    assert error_of(client.get_object, Bucket=s3.bucket, Key="missing")[0] == 404
    waits = [(record.first_byte_s or 0) - record.start_s for record in s3.log()]
    for wait_s, least_s in zip(waits, (0.04, 0.04, 0.08, 0.04), strict=True):
        assert wait_s >= least_s - 0.001


def test_latency_distributions() -> None:
    """fixed is exact; lognormal has its median and spread; anything else is refused."""
    random = Random(0)
    assert Knobs(latency="fixed:30").latency_s("GET", random) == 0.03
    drawn = sorted(Knobs(latency="lognormal:30:0.5").latency_s("GET", random) for _ in range(4001))
    assert 0.029 < drawn[2000] < 0.031
    assert 1.55 < drawn[3365] / drawn[2000] < 1.75  # one sigma above the median: e**0.5
    for bad in ("gauss:1:2", "fixed:", "lognormal:30", "lognormal:0:1"):
        with pytest.raises(ValueError, match=r"."):
            Knobs().changed({"latency": bad})


class VirtualTimeSelector(selectors.DefaultSelector):
    """Instead of waiting, the clock moves; and by whole milliseconds, rounded up, as epoll's does."""

    now = 1000.0

    def select(self, timeout: float | None = None) -> list[Any]:
        self.now += -(-(timeout or 0) // 0.001) * 0.001
        return super().select(0)


def shape(rate: float, aggregate: float, sizes: list[int]) -> list[float]:
    """Send bodies of these sizes at once into nothing; returns the seconds each took, in virtual time."""
    selector = VirtualTimeSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]

    async def send(link: Link, size: int) -> float:
        begin, sent = loop.time(), 0
        pace = Pace(begin)
        link.active += 1
        while sent < size:
            piece = link.piece_bytes(rate, sent, size - sent)
            due_at = pace.reserve(piece, rate, loop.time()) if rate else 0
            await link.take(piece)
            await sleep_until(due_at)
            sent += piece
            assert not rate or sent <= rate * (loop.time() - begin + 0.001)
        link.active -= 1
        return loop.time() - begin

    async def main() -> list[float]:
        link = Link()
        link.set_rate(aggregate)
        return await asyncio.gather(*(send(link, size) for size in sizes))

    try:
        return loop.run_until_complete(main())
    finally:
        loop.close()


@pytest.mark.parametrize("rate", [50_000, 1_000_000, 90_000_000, 1_000_000_000])
def test_rate_per_connection_is_exact(rate: float) -> None:
    """A body takes its size over its rate, within the timers' millisecond, and no byte of it comes early."""
    assert shape(rate, 0, [int(rate / 4)]) == [pytest.approx(0.25, abs=0.0012)]


def test_aggregate_rate_is_exact_and_fair() -> None:
    """Sixteen equal bodies share the cap: all take the same time, and together exactly the cap."""
    took = shape(90e6, 400e6, [20_000_000] * 16)
    assert max(took) == pytest.approx(320 / 400, rel=0.01)
    assert min(took) > 0.93 * max(took)


def test_aggregate_rate_is_work_conserving() -> None:
    """What slow bodies leave is used by the others, and what short ones leave by those that are still there."""
    took = shape(0, 100e6, [1_000_000] * 4 + [96_000_000])
    assert max(took) == pytest.approx(1.0, rel=0.01)
    assert shape(90e6, 400e6, [9_000_000]) == [pytest.approx(0.1, abs=0.0012)]


@pytest.mark.parametrize("rate", [3e6, 20e6, 400e6])
def test_aggregate_rate_with_many_bodies(rate: float) -> None:
    """Five hundred bodies do not lose or gain rate by the smallness of their pieces."""
    assert max(shape(0, rate, [int(rate / 500)] * 500)) == pytest.approx(1.0, rel=0.02)


def test_rates_of_real_bodies(s3: S3Stub) -> None:
    """Bodies over sockets are never faster than the caps, and a cap that is lifted lets a slow one finish."""
    s3.put_ramp("k", MIB)
    with Raw(s3) as raw:
        s3.configure(rate_per_connection=10 * MIB)
        begin = time.monotonic()
        assert raw.get("/k")[2] == ramp(0, MIB)
        assert time.monotonic() - begin >= 0.099
        s3.configure(rate_per_connection=0, aggregate_rate=10 * MIB)
        begin = time.monotonic()
        for _ in range(2):
            assert raw.get("/k")[2] == ramp(0, MIB)
        assert time.monotonic() - begin >= 0.18
        s3.configure(aggregate_rate=1000)
        raw.ask("/k")
        s3.configure(aggregate_rate=0)
        assert raw.file.read(MIB) == ramp(0, MIB)


def test_max_requests_per_s(s3: S3Stub, client: Any) -> None:
    """One second's worth is served at once, the rest is told to slow down."""
    s3.put("k", b"x")
    s3.configure(max_requests_per_s=5)
    statuses = []
    with Raw(s3) as raw:
        for _ in range(40):
            statuses.append(raw.get("/k")[0])
    assert statuses[:5] == [200] * 5
    assert 503 in statuses
    assert {record.fault for record in s3.log() if record.status == 503} == {"slow_down"}
    s3.configure(faults=[], max_requests_per_s=1)
    codes = {error_of(client.get_object, Bucket=s3.bucket, Key="missing")[1] for _ in range(5)}
    assert "SlowDown" in codes
