"""`s3prefetchfs plan simulate`: what a plan costs with a given cache, bandwidth and consumer, without a network."""

from __future__ import annotations

import json
import math
import os
import random
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import click

from s3prefetchfs.cli.manual import EXIT_CODES, ManualCommand
from s3prefetchfs.cli.plan.matching import S3_SCHEME
from s3prefetchfs.cli.plan.output import load_plan
from s3prefetchfs.cli.status import absolute, read_status
from s3prefetchfs.config import OPTIONS
from s3prefetchfs.core.plan import Plan
from s3prefetchfs.core.plan_format import PlanError, check_bytes, relative_path
from s3prefetchfs.core.plan_order import entries
from s3prefetchfs.errors import UserError
from s3prefetchfs.simulation.run import GOOD_UTILISATION, Advice, EpochCost, advise
from s3prefetchfs.simulation.run import simulate as run
from s3prefetchfs.units import LARGEST_BYTES, format_duration, format_size, parse_duration, parse_rate, parse_size

EPOCHS = 5
SEED = 1

_SECTIONS = [
    (
        "Examples",
        """
        s3prefetchfs plan simulate plan.json --cache-size 500GiB --bandwidth 1GB/s \\
            --rate 2GB/s
        s3prefetchfs plan simulate plan.txt --mount /mnt/train --cache-size 200GB \\
            --bandwidth 400MB/s --rate 250MB/s --lead 10s --plot plan.svg
        """,
    ),
    (
        "Model",
        """
        What decides is the scheduler of the mount itself. The network gives each request
        its first byte after a random time, lognormal with median --first-byte and sigma
        --spread (S3 on a good day: 30ms and 0.6; loaded: 30ms and 1.15), then shares the
        bandwidth between the requests, 90 MB/s each at most. The consumer reads as many
        files at once as the plan's interleave says, a MiB of each in turn, and consumes
        at --rate while it does not wait.
        """,
    ),
    (
        "Output",
        """
        read       what the consumer reads
        fetched    what comes from S3 for that, also ahead of it
        least      the least that must come, if all of the cache keeps what is best kept
        LRU        what would come if the cache kept what was read last
        stalled    how long the consumer waits
        busy       the share of the time in which it does not
        """,
    ),
    ("Exit status", EXIT_CODES),
]


LONGEST_S = 86_400.0


class _Unit(click.ParamType[Any]):
    """A value with a unit, read by one of the parsers of `units`."""

    def __init__(self, name: str, parse: Callable[[str], float], largest: float) -> None:
        self.name = name
        self._parse = parse
        self._largest = largest

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> Any:
        try:
            number = self._parse(value) if isinstance(value, str) else value
            if number > self._largest:
                raise ValueError(f"within reason: {value} is more than {self._largest:g}")
        except ValueError as error:
            self.fail(f"{value!r} is not {error}", param, context)
        return number


_SIZE = _Unit("SIZE", parse_size, LARGEST_BYTES)
_RATE = _Unit("RATE", parse_rate, LARGEST_BYTES)
_TIME = _Unit("TIME", parse_duration, LONGEST_S)


@click.command(cls=ManualCommand, sections=_SECTIONS, short_help="Predict what a plan costs, without a network.")
@click.argument("file")
@click.option("--cache-size", type=_SIZE, required=True, help="Of the cache: 500GiB.")
@click.option("--bandwidth", type=_RATE, required=True, help="From S3, of all connections: 1GB/s.")
@click.option("--rate", type=_RATE, required=True, help="What the consumer takes while it does not wait: 2GB/s.")
@click.option("--epochs", type=click.IntRange(1), help=f"Simulate the first N.  [default: all, at most {EPOCHS}]")
@click.option("--mount", metavar="MOUNTPOINT", help="Ask this mount for sizes that the plan does not give.")
@click.option("--file-size", type=_SIZE, help="Take files to be so large whose size the plan does not give.")
@click.option(
    "--lead", type=_TIME, default="0s", show_default=True, help="How long before the first read it is declared."
)
@click.option("--first-byte", type=_TIME, default="30ms", show_default=True, help="Median time to the first byte.")
@click.option(
    "--spread", type=click.FloatRange(0, 3), default=0.6, show_default=True, help="Sigma of that time's logarithm."
)
@click.option(
    "--max-connections",
    type=click.IntRange(1, 1024),
    default=OPTIONS["max-connections"].default,
    show_default=True,
    help="As of mount.",
)
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw it, as .svg or .png.")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def simulate(
    file: str,
    cache_size: int,
    bandwidth: int,
    rate: int,
    epochs: int | None,
    mount: str | None,
    file_size: int | None,
    lead: float,
    first_byte: float,
    spread: float,
    max_connections: int,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Predict what the plan in FILE costs, epoch by epoch: bytes from S3, and waiting."""
    if math.isnan(spread):
        raise click.UsageError("--spread is not a number")
    for name, value in (("--cache-size", cache_size), ("--bandwidth", bandwidth), ("--rate", rate)):
        if value <= 0:
            raise click.UsageError(f"{name} is 0: nothing can be read that way")
    draw = _plotter(plot) if plot else None
    plan = load_plan(file)
    plan = replace(plan, epochs=plan.epochs[: epochs or EPOCHS])
    sizes = _sizes(plan, mount, file_size)
    try:
        check_bytes(plan, sizes)
    except PlanError as error:
        raise UserError(f"cannot simulate: {error}", "see also --file-size") from None
    advice = advise(plan, sizes, cache_size, bandwidth, rate)
    chance = random.Random(SEED)
    total_bytes = sum(length or sizes[number] for epoch in plan.epochs for number, _, length in entries(epoch))
    with _progress_bar(total_bytes, hidden=as_json) as advance:
        costs = run(
            plan,
            sizes,
            cache_size,
            bandwidth,
            rate,
            connections=max_connections,
            lead_s=lead,
            first_byte_s=lambda: chance.lognormvariate(math.log(max(first_byte, 1e-6)), spread),
            progress=advance,
        )
    if draw is not None:
        draw(plan, costs)
    if as_json:
        document = {"epochs": [{**asdict(cost), "utilisation": cost.utilisation} for cost in costs], **asdict(advice)}
        click.echo(json.dumps(document, indent=2))
        return
    _print(costs)
    click.echo(_sentence(advice, cache_size, bandwidth, rate, len(costs)))
    if _is_held_up(advice, bandwidth, costs):
        open_bytes = sum(sorted(sizes)[-plan.interleave :])
        click.echo(
            "Believe the table where it says less: that bound counts bytes only, not first bytes, nor the room of what"
            f" is read at once ({plan.interleave} of the files, up to {format_size(open_bytes)}) beside what is kept."
        )


def _sizes(plan: Plan, mount: str | None, file_size: int | None) -> list[int]:
    """Of the files of the plan, in bytes."""
    sizes = []
    size_on = _asking(mount) if mount is not None else None
    for file in plan.files:
        size_bytes = file.size_bytes
        if size_bytes is None and size_on is not None:
            size_bytes = size_on(file.path)
        if size_bytes is None:
            size_bytes = file_size
        if size_bytes is None or file.is_pattern:
            what = "is a pattern" if file.is_pattern else "has no size"
            raise UserError(
                f"cannot simulate: {file.path} {what} in this plan",
                "make one that has sizes with `plan make --manifest`, or say --mount MOUNTPOINT or --file-size SIZE",
            )
        sizes.append(size_bytes)
    return sizes


def _asking(mount: str) -> Callable[[str], int | None]:
    """What gives the size of a file of a plan on a mount; None if there is no such file."""
    mountpoint = absolute(mount)

    @cache
    def source() -> tuple[str, str]:
        document = json.loads(read_status(mountpoint)[1])
        return document["bucket"], document["prefix"]

    def size_on(path: str) -> int | None:
        try:
            if path.startswith(S3_SCHEME):
                path = relative_path(path, *source(), os.fspath(mountpoint))
            found = os.stat(mountpoint / path)
        except (OSError, ValueError):  # not of this mount, or a name that no file can have
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    return size_on


def _print(costs: Sequence[EpochCost]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("epoch", "read", "fetched", "least", "LRU", "stalled", "busy"):
        table.add_column(heading, justify="right")
    for number, cost in enumerate(costs):
        sizes = (cost.read_bytes, cost.fetched_bytes, cost.least_bytes, cost.lru_bytes)
        waiting = format_duration(cost.stalled_s), f"{cost.utilisation:.1%}"
        table.add_row(str(number), *map(format_size, sizes), *waiting)
    Console(highlight=False).print(table)


def _sentence(advice: Advice, cache_bytes: int, bandwidth: float, rate: float, epochs: int) -> str:
    """What to do about it."""

    def per_second(bytes_per_s: float) -> str:
        return f"{format_size(bytes_per_s)}/s"

    goal = f"To keep the accelerator at {GOOD_UTILISATION:.0%}"
    first = f"B >= {per_second(advice.first_bytes_per_s)} in the first epoch"
    if epochs == 1:
        return f"{goal} you need {first}."
    or_cache = "" if advice.cache_bytes is None else f" or C >= {format_size(advice.cache_bytes)}"
    return (
        f"{goal} you need B >= {per_second(advice.warm_bytes_per_s)}{or_cache} in later epochs, and {first}"
        f" (here B = {per_second(bandwidth)}, C = {format_size(cache_bytes)}, at {per_second(rate)})."
    )


def _is_held_up(advice: Advice, bandwidth: float, costs: Sequence[EpochCost]) -> bool:
    """Whether later epochs wait although the network could carry what they miss."""
    later = costs[1:]
    busy = min((cost.utilisation for cost in later), default=1.0)
    return busy < GOOD_UTILISATION - 0.05 and bandwidth >= advice.warm_bytes_per_s


@contextmanager
def _progress_bar(total_bytes: int, *, hidden: bool) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, for people; gives the function to call with the bytes of each step."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=hidden or not console.is_terminal) as bar:
        task = bar.add_task("simulating", total=total_bytes)
        yield lambda count_bytes: bar.advance(task, count_bytes)


def _plotter(path: Path) -> Callable[[Plan, Sequence[EpochCost]], None]:
    """How to draw into a file; tells at once if that cannot be done."""
    if path.suffix not in (".svg", ".png"):
        raise click.UsageError(f"--plot: {path} is not the name of a picture: end it in .svg or .png")
    try:
        import matplotlib
    except ImportError as error:
        raise UserError(f"--plot needs matplotlib: {error}", "pip install 's3prefetchfs[plot]'") from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    def draw(plan: Plan, costs: Sequence[EpochCost]) -> None:
        figure, (upper, lower) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 5), height_ratios=(2, 1))
        bars = {
            "least": [cost.least_bytes for cost in costs],
            "with the plan": [cost.fetched_bytes for cost in costs],
            "LRU": [cost.lru_bytes for cost in costs],
        }
        for place, (label, sizes) in enumerate(bars.items()):
            at = [number + 0.27 * (place - 1) for number in range(len(costs))]
            upper.bar(at, [size / 2**30 for size in sizes], width=0.25, label=label)
        upper.set_ylabel("GiB from S3")
        upper.set_title(plan.name, parse_math=False)
        upper.legend(loc="lower center", bbox_to_anchor=(0.5, 1.08), ncols=len(bars))
        lower.plot([100 * cost.utilisation for cost in costs], marker="o")
        lower.set_ylim(0, 105)
        lower.set_ylabel("busy, %")
        lower.set_xlabel("epoch")
        lower.set_xticks(range(len(costs)))
        figure.tight_layout()
        try:
            figure.savefig(path)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}", "give another file with --plot") from None
        pyplot.close(figure)

    return draw
