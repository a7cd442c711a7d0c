"""`s3prefetchfs plan list`: the plans of a mount and how far each has come."""

from __future__ import annotations

import contextlib
import json
import os

import click

from s3prefetchfs.cli.manual import EXIT_CODES, ManualCommand
from s3prefetchfs.cli.plan.control import cannot, plans_directory, read_plan
from s3prefetchfs.cli.plan.table import plan_table
from s3prefetchfs.core.plan_name import is_scratch
from s3prefetchfs.log import printable

_SECTIONS = [
    (
        "Columns",
        """
        state       waiting (nothing read yet), running, distrusted (the readers do
                    something else, and the plan is not followed), finished, resolving
                    (its files are being looked up), or refused
        epoch       the one that is being read, of how many
        position    the first entry of it that is not finished, of how many
        ahead       planned bytes beyond the readers that are there or on their way
        deviations  opens that were not where the plan has them, and entries skipped
        confidence  how far ahead the plan is followed: 100 % is the whole cache
        stall       how long readers will wait for what cannot be there in time
        """,
    ),
    ("Files", "The same is told by the files in MOUNTPOINT/.s3prefetchfs/plans/."),
    ("Exit status", EXIT_CODES),
]


@click.command("list", cls=ManualCommand, sections=_SECTIONS, short_help="Show the plans of a mount.")
@click.argument("mountpoint")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of what the plans' files say.")
def list_plans(mountpoint: str, as_json: bool) -> None:
    """Show the plans of the mount at MOUNTPOINT, in the order of their submission."""
    directory = plans_directory(mountpoint)
    plans = []
    try:
        for name in os.listdir(directory):
            with contextlib.suppress(FileNotFoundError):  # cancelled since
                if not is_scratch(name):
                    plans.append(read_plan(directory / name))
    except OSError as error:
        raise cannot(f"read the plans of {mountpoint}", error) from None
    if as_json:
        click.echo(json.dumps(plans, indent=2))
        return
    from rich.console import Console

    Console(highlight=False).print(plan_table(plans))
    for plan in plans:
        for text in filter(None, [plan["error"], *plan["warnings"]]):
            click.echo(f"{plan['name']}: {printable(text)}")


list = list_plans  # the name by which the group finds it
