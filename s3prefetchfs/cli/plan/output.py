"""Plans in files: written and read by the commands that make, merge and show them."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import click

from s3prefetchfs.core.plan import Plan
from s3prefetchfs.core.plan_format import PlanError, parse, to_json
from s3prefetchfs.errors import UserError
from s3prefetchfs.plan_file import PLAN_MAX_BYTES, take


def write_plan(plan: Plan, output: str) -> None:
    """Write a plan to a file, or to stdout for `-`; to a person at a terminal, say what was written.

    Raises:
        UserError: it cannot be said in a file, is larger than a mount takes, or cannot be written.
    """
    try:
        content = to_json(plan)
    except PlanError as error:
        raise UserError(f"no plan is made: {error}", "see docs/plan.md") from None
    if len(content) > PLAN_MAX_BYTES:
        raise UserError(
            f"no plan is made: it would have {len(content) >> 20} MiB, a mount takes {PLAN_MAX_BYTES >> 20}",
            "write fewer epochs or larger segments, or a plan for each shard",
        )
    if output == "-":
        sys.stdout.buffer.write(content)
        return
    try:
        Path(output).write_bytes(content)
    except OSError as error:
        raise UserError(f"cannot write the plan {output}: {error.strerror}", "give another file with -o") from None
    entries = sum(len(epoch.files) for epoch in plan.epochs)
    click.echo(f"{output}: {len(plan.files):,} files, {len(plan.epochs):,} epochs, {entries:,} entries", err=True)


def load_plan(file: str) -> Plan:
    """The plan in a file, or from stdin for `-`.

    Raises:
        UserError: it cannot be read, or is no plan: names the line or entry.
    """
    try:
        with nullcontext(sys.stdin.buffer) if file == "-" else Path(file).open("rb") as source:
            content = take(source, file)
    except OSError as error:
        raise UserError(f"cannot read the plan {file}: {error.strerror}", "give a file that exists") from None
    try:
        return parse(content, Path(file).name)
    except PlanError as error:
        raise UserError(f"the plan {file} is refused: {error}", "see docs/plan.md") from None
