"""`s3prefetchfs plan record`: what a mount has seen opened, as a plan."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from s3prefetchfs.cli.manual import EXIT_CODES, ManualCommand
from s3prefetchfs.cli.plan.control import cannot, plans_directory
from s3prefetchfs.cli.plan.output import load_plan, write_plan
from s3prefetchfs.core.plan import Plan
from s3prefetchfs.core.plan_format import parse
from s3prefetchfs.core.plan_order import merged
from s3prefetchfs.errors import UserError

_SECTIONS = [
    (
        "Examples",
        """
        Record one run, and replay it in the next:
          s3prefetchfs plan record /mnt/train -o run.json
          s3prefetchfs plan submit /mnt/train run.json
        The ranks of a run, recorded on several hosts, as one plan:
          s3prefetchfs plan record --merge beside rank0.json rank1.json -o all.json
        """,
    ),
    (
        "Merging",
        """
        after   the epochs of each source follow those of the one before: runs
        beside  epoch by epoch, entries in turn from each source: ranks
        """,
    ),
    ("Files", "MOUNTPOINT/.s3prefetchfs/opens is the recording since the mount was made."),
    ("Exit status", EXIT_CODES),
]


@click.command(cls=ManualCommand, sections=_SECTIONS, short_help="Write down what a mount has seen opened.")
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option("-o", "--output", metavar="FILE", default="-", help="Write it there.  [default: stdout]")
@click.option(
    "--merge",
    type=click.Choice(["after", "beside"]),
    default="after",
    metavar="after|beside",
    help="How several sources become one plan, see below.  [default: after]",
)
@click.option("--name", default="recorded", help="A note in the plan.  [default: recorded]")
def record(sources: tuple[str, ...], output: str, merge: str, name: str) -> None:
    """Write what was opened through a mount as a plan, in the order in which it was opened.

    A SOURCE is a mountpoint, or a plan recorded earlier. An epoch ends where a file is opened again.
    """
    plans = [_recorded(source) if os.path.isdir(source) else load_plan(source) for source in sources]
    write_plan(merged(name, plans, beside=merge == "beside"), output)


def _recorded(mountpoint: str) -> Plan:
    opens = plans_directory(mountpoint).parent / "opens"
    try:
        content = Path(opens).read_bytes()
    except OSError as error:
        raise cannot("tell what was opened", error) from None
    recording = json.loads(content)
    if not recording["files"]:
        raise UserError(f"nothing was opened on {mountpoint} yet", "run the job first, on this mount, and record then")
    if recording["truncated"]:
        click.echo(f"s3prefetchfs: the recording of {mountpoint} is at its limit: later opens are missing", err=True)
    return parse(content, "opens")
