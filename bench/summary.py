"""What the runs come to: medians with extremes, ratios within rounds, and targets met or missed. Pure.

A *round* holds one sample of each contender, taken one after another; a sample is numbers by the name of what was
measured. Ratios are formed within rounds and the median is taken of them: a machine that is slow for a minute is then
slow on both sides of the fraction. The ratio of two medians would compare a good minute with a bad one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

INTERVALS = 100
"""Of a picture of something over time."""

Sample = dict[str, float]
Rounds = Sequence[dict[str, Sample]]


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle and the ends of some numbers."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None if there are no numbers."""
        return cls(median(values), min(values), max(values)) if values else None


@dataclass(frozen=True, slots=True)
class Target:
    """What a figure has to be.

    Args:
        contender, metric: whose, and which. limit: the value.
        versus: the contender in whose multiples `limit` is; empty for the figure itself.
        at_most: the figure must not be above the limit; else not below.
        enough: with this figure the target is met, whatever others have.
    """

    contender: str
    metric: str
    limit: float
    versus: str = ""
    at_most: bool = False
    enough: float | None = None

    def measured(self, rounds: Rounds) -> float | None:
        """The median that is compared with the limit; None if there is nothing to form it from."""
        if self.versus:
            spread = ratios(rounds, self.metric, self.contender, self.versus)
        else:
            spread = spread_of(rounds, self.metric, self.contender)
        return spread.median if spread else None

    def met(self, rounds: Rounds) -> bool:
        """Whether it is so. What was not measured is not met."""
        value = self.measured(rounds)
        if value is None:
            return False
        own = spread_of(rounds, self.metric, self.contender)
        if self.enough is not None and own is not None and own.median >= self.enough:
            return True
        return value <= self.limit if self.at_most else value >= self.limit


def spread_of(rounds: Rounds, metric: str, contender: str) -> Spread | None:
    """One contender's figure over all rounds that have it."""
    samples = [samples[contender] for samples in rounds if contender in samples]
    return Spread.of([sample[metric] for sample in samples if metric in sample])


def ratios(rounds: Rounds, metric: str, contender: str, reference: str) -> Spread | None:
    """One contender's figure as multiples of another's in the same round, over all rounds that have both."""
    both = [samples for samples in rounds if contender in samples and reference in samples]
    pairs = [(samples[contender].get(metric), samples[reference].get(metric)) for samples in both]
    return Spread.of([ours / theirs for ours, theirs in pairs if ours is not None and theirs])


def percentile(values: Sequence[float], fraction: float) -> float:
    """The value that at least this fraction of all are not above (nearest rank, so it is one of them)."""
    return sorted(values)[max(0, math.ceil(fraction * len(values)) - 1)]


def utilisation(waits_s: Sequence[float], computes_s: Sequence[float]) -> float:
    """The share of the time in which an accelerator computes, the first step left out.

    The formula of MLPerf Storage, as DLIO has it; computation is what it took, not what it should have taken.
    """
    computed_s = sum(computes_s[1:])
    return computed_s / (computed_s + sum(waits_s[1:]))


def throughput(bodies: Sequence[tuple[float, float, int]], began_s: float, ended_s: float) -> tuple[float, list[float]]:
    """What came in over time: the width of an interval in seconds, and MB/s in each of `INTERVALS`.

    Args:
        bodies: first byte, last byte and size of each answer; its bytes are taken to come evenly.
    """
    width_s = max(ended_s - began_s, 1e-9) / INTERVALS
    rates = [0.0] * INTERVALS
    for first_s, last_s, size_bytes in bodies:
        first, last = (min(max((at_s - began_s) / width_s, 0.0), INTERVALS) for at_s in (first_s, last_s))
        span = last - first
        for number in range(int(first), min(int(last) + 1, INTERVALS)):
            inside = min(last, number + 1) - max(first, number)
            rates[number] += (inside / span if span else 1.0) * size_bytes / width_s / 1e6
    return width_s, rates


def order(contenders: Sequence[str], number: int) -> list[str]:
    """Who goes first in round `number`: to and fro, so that nobody always comes after the same one."""
    return list(contenders) if number % 2 == 0 else list(reversed(contenders))


@dataclass(frozen=True, slots=True)
class Metric:
    """How a figure is shown: its heading, and its digits."""

    label: str
    show: Callable[[float], str]


def _digits(count: int) -> Callable[[float], str]:
    return lambda value: f"{value:,.{count}f}"


METRICS = {
    "mb_per_s": Metric("MB/s", _digits(0)),
    "p50_ms": Metric("p50 ms", _digits(1)),
    "p99_ms": Metric("p99 ms", _digits(1)),
    "open_p50_ms": Metric("p50 ms", _digits(3)),
    "open_p99_ms": Metric("p99 ms", _digits(3)),
    "fio_mb_per_s": Metric("fio MB/s", _digits(0)),
    "random_1_mb_per_s": Metric("MB/s, 1 job", _digits(0)),
    "random_8_mb_per_s": Metric("MB/s, 8 jobs", _digits(0)),
    "files_per_s": Metric("files/s", _digits(0)),
    "first_batch_ms": Metric("first batch ms", _digits(0)),
    "of_bound": Metric("bytes / least possible", _digits(2)),
    "first_au": Metric("AU, first epoch", _digits(3)),
    "warm_au": Metric("AU, later epochs", _digits(3)),
    "waiting_percent": Metric("waiting %", _digits(2)),
    "accept_s": Metric("s until in force", _digits(1)),
    "daemon_cpu_s_per_gb": Metric("daemon CPU s/GB", _digits(4)),
    "rss_mib": Metric("RSS MiB", _digits(0)),
    "peak_rss_mib": Metric("peak RSS MiB", _digits(0)),
    "pss_mib": Metric("PSS MiB", _digits(0)),
    "cpu_s_per_gb": Metric("CPU s/GB: own + reader + stand-in + rest", _digits(2)),
    "s3_mb": Metric("MB from S3", _digits(1)),
    "gets": Metric("GETs", _digits(0)),
    "start_s": Metric("start s", _digits(2)),
}
"""Sizes are decimal (MB = 10^6 bytes) except memory."""

TOGETHER = {
    "cpu_s_per_gb": ("cpu_s_per_gb", "reader_cpu_s_per_gb", "stub_cpu_s_per_gb", "other_cpu_s_per_gb"),
}
"""Metrics that are shown in one column. The rest of the CPU time is the kernel's own threads, and strangers."""
