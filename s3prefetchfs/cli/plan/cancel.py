"""`s3prefetchfs plan cancel`: remove a plan of a mount."""

from __future__ import annotations

import os

import click

from s3prefetchfs.cli.manual import EXIT_CODES, ManualCommand
from s3prefetchfs.cli.plan.control import cannot, plans_directory
from s3prefetchfs.errors import UserError

_SECTIONS = [
    ("Files", "`rm MOUNTPOINT/.s3prefetchfs/plans/NAME` does the same."),
    ("Exit status", EXIT_CODES),
]


@click.command(cls=ManualCommand, sections=_SECTIONS, short_help="Take a plan back.")
@click.argument("mountpoint")
@click.argument("name")
def cancel(mountpoint: str, name: str) -> None:
    """Take the plan NAME of the mount at MOUNTPOINT back. What it has fetched stays in the cache."""
    directory = plans_directory(mountpoint)
    if "/" in name:
        raise UserError(f"there is no plan {name}", f"`s3prefetchfs plan list {mountpoint}` shows the plans there are")
    try:
        os.unlink(directory / name)
    except FileNotFoundError:
        raise UserError(
            f"there is no plan {name}", f"`s3prefetchfs plan list {mountpoint}` shows the plans there are"
        ) from None
    except OSError as error:
        raise cannot(f"cancel the plan {name}", error) from None
