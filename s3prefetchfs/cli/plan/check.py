"""`s3prefetchfs plan check`: whether a file is a plan, and whether what it names is there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import click

from s3prefetchfs.cli.manual import EXIT_CODES, ManualCommand, store_options
from s3prefetchfs.cli.plan.control import plans_directory
from s3prefetchfs.cli.plan.matching import S3_SCHEME, find_files
from s3prefetchfs.cli.plan.output import load_plan
from s3prefetchfs.cli.status import read_status
from s3prefetchfs.core.plan import Plan, PlannedFile
from s3prefetchfs.core.plan_format import PlanError, relative_path
from s3prefetchfs.core.plan_order import entries
from s3prefetchfs.core.plan_pattern import PathPattern
from s3prefetchfs.errors import UserError
from s3prefetchfs.log import printable
from s3prefetchfs.sources import parse_source

PROBLEMS_MAX = 20
"""Printed without --json."""

_SECTIONS = [
    (
        "Examples",
        """
        s3prefetchfs plan check plan.json
        s3prefetchfs plan check plan.json --against /mnt/train
        s3prefetchfs plan check plan.json --against s3://my-bucket/train --profile me
        """,
    ),
    ("Exit status", EXIT_CODES),
]


@click.command(cls=ManualCommand, sections=_SECTIONS, short_help="Find what is wrong with a plan.")
@click.argument("file")
@click.option(
    "--against",
    metavar="WHERE",
    help="Also look for its files, in the mount at this path, or in s3://BUCKET/PREFIX as it is to be mounted.",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
@store_options
def check(file: str, against: str | None, as_json: bool, **store: Any) -> None:
    """Say what is wrong with the plan in FILE: with its form, and with the files it names."""
    problems: list[str] = []
    try:
        plan = load_plan(file)
        if against is not None:
            problems = list(_problems(plan, against, store))
    except UserError as error:
        if not as_json:
            raise
        problems = [error.message]
    if as_json:
        click.echo(json.dumps({"file": file, "ok": not problems, "problems": problems}, indent=2))
    for problem in [] if as_json else problems[:PROBLEMS_MAX]:
        click.echo(printable(problem), err=True)
    if problems:
        if as_json:
            click.get_current_context().exit(1)
        raise UserError(f"{len(problems):,} things are wrong with the plan {file}", "--json lists all of them")
    if not as_json:
        total = sum(len(epoch.files) for epoch in plan.epochs)
        what = f"{len(plan.files):,} files, {len(plan.epochs):,} epochs, {total:,} entries"
        verdict = "good" if against else "well written (--against compares it with a mount or bucket)"
        click.echo(f"{file}: {verdict}: {what}")


def _problems(plan: Plan, against: str, store: dict[str, Any]) -> Iterator[str]:
    """What does not agree with what is there."""
    if against.startswith(S3_SCHEME):
        try:
            bucket, prefix = parse_source(against)
        except ValueError as error:
            raise click.UsageError(f"--against: {against} is not {error}") from None
        mountpoint, root = "/", f"{S3_SCHEME}{bucket}/{prefix}"
        relative_to = None
    else:
        root = mountpoint = relative_to = str(plans_directory(against).parents[1])
        document = json.loads(read_status(plans_directory(against).parents[1])[1])
        bucket, prefix = document["bucket"], document["prefix"]
    found = find_files([root], store, wants_sizes=True, wants_etags=True, relative_to=relative_to)
    there = {file.path.removeprefix(root) if root.startswith(S3_SCHEME) else file.path: file for file in found}
    ends: dict[int, int] = {}
    for epoch in {id(epoch): epoch for epoch in plan.epochs}.values():
        for number, offset, length in entries(epoch) if epoch.ranges is not None else ():
            ends[number] = max(ends.get(number, 0), offset + length)
    for number, file in enumerate(plan.files):
        try:
            path = relative_path(file.path, bucket, prefix, mountpoint)
        except PlanError as error:
            yield str(error)
            continue
        if file.is_pattern:
            pattern = PathPattern(path)
            if not any(map(pattern.matches, there)):
                yield f"{file.path}: matches nothing"
        elif path not in there:
            yield f"{file.path}: is not there"
        else:
            yield from _differences(file, there[path], ends.get(number, 0))


def _differences(file: PlannedFile, there: PlannedFile, end: int) -> Iterator[str]:
    if file.size_bytes not in (None, there.size_bytes):
        yield f"{file.path}: has {there.size_bytes} bytes, not {file.size_bytes}"
    elif file.etag not in (None, there.etag):
        yield f"{file.path}: is another version, {there.etag}"
    if end > (there.size_bytes or 0):
        yield f"{file.path}: a range ends at {end}, the file at {there.size_bytes}"
