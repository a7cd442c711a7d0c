"""`s3prefetchfs plan show`: what is in a plan."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from s3prefetchfs.cli.manual import EXIT_CODES, ManualCommand
from s3prefetchfs.cli.plan.output import load_plan
from s3prefetchfs.core.plan import Plan
from s3prefetchfs.core.plan_order import EpochSummary, entries, summarise
from s3prefetchfs.units import format_size

ROWS_MAX = 20

_SECTIONS = [
    (
        "Examples",
        """
        s3prefetchfs plan show plan.json
        s3prefetchfs plan show plan.json --epoch 0 | head
        """,
    ),
    ("Output", "With --epoch, a path a line; of a byte range also offset and length, after tabs."),
    ("Exit status", EXIT_CODES),
]


@click.command(cls=ManualCommand, sections=_SECTIONS, short_help="Show what is in a plan.")
@click.argument("file")
@click.option("--epoch", metavar="N", type=click.IntRange(0), help="Print what this epoch reads, in order; from 0.")
@click.option("--json", "as_json", is_flag=True, help="Print figures of all epochs as JSON.")
def show(file: str, epoch: int | None, as_json: bool) -> None:
    """Show what the plan in FILE reads, epoch by epoch."""
    plan = load_plan(file)
    if epoch is not None:
        if epoch >= len(plan.epochs):
            raise click.UsageError(f"there is no epoch {epoch}: they are numbered from 0 to {len(plan.epochs) - 1}")
        for number, offset, length in entries(plan.epochs[epoch]):
            path = plan.files[number].path
            click.echo(f"{path}\t{offset}\t{length}" if length else path)
        return
    summaries = summarise(plan)
    if as_json:
        head = {"order": plan.order.value, "interleave": plan.interleave, "files": len(plan.files)}
        click.echo(json.dumps({"name": plan.name, **head, "epochs": list(map(asdict, summaries))}, indent=2))
    else:
        _print(plan, summaries)


def _print(plan: Plan, summaries: list[EpochSummary]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    manifest = sum(file.etag is not None and file.size_bytes is not None for file in plan.files)
    total = sum(summary.entries for summary in summaries)
    click.echo(
        f"{plan.name}: {plan.order.value} order, interleave {plan.interleave}, {len(plan.files):,} files"
        f" ({manifest:,} with size and ETag), {len(summaries):,} epochs, {total:,} entries"
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("epoch", "entries", "files", "read before", "bytes", "first"):
        table.add_column(heading, no_wrap=True, overflow="ignore")
    for number, summary in enumerate(summaries[:ROWS_MAX]):
        first, _, _ = next(iter(entries(plan.epochs[number])))
        cells = [
            str(number),
            f"{summary.entries:,}",
            f"{summary.files:,}",
            f"{summary.seen_files / summary.files:.0%}",
            "-" if summary.bytes is None else format_size(summary.bytes),
            plan.files[first].path,
        ]
        table.add_row(*map(Text, cells))
    Console(highlight=False).print(table, crop=False)
    if len(summaries) > ROWS_MAX:
        click.echo(f"and {len(summaries) - ROWS_MAX:,} more epochs: see --json")
