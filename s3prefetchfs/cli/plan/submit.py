"""`s3prefetchfs plan submit`: put a file into the plans of a mount, and say how it was taken."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import click

from s3prefetchfs.cli.manual import EXIT_CODES, ManualCommand
from s3prefetchfs.cli.plan.control import cannot, plans_directory, read_plan
from s3prefetchfs.errors import UserError
from s3prefetchfs.log import printable
from s3prefetchfs.plan_file import read_plan_file

_SECTIONS = [
    (
        "Examples",
        """
        s3prefetchfs plan submit /mnt/train epochs.json
        s3prefetchfs plan submit /mnt/train epochs.json --name rank-0 --strict
        """,
    ),
    ("Files", "`cp FILE MOUNTPOINT/.s3prefetchfs/plans/NAME` does the same."),
    ("Exit status", EXIT_CODES),
]

_POLL_S = 0.2

_RESOLVING_TIMEOUT_S = 600.0
"""What a plan over many directories may take; the close that submits it waits a minute of it."""


@click.command(cls=ManualCommand, sections=_SECTIONS, short_help="Give a plan to a mount.")
@click.argument("mountpoint")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--name", metavar="NAME", help="Name of the plan.  [default: the file's]")
@click.option("--strict", is_flag=True, help="Files missing from the bucket are an error, and cancel the plan.")
@click.option("--wait", is_flag=True, help="Return when the plan is finished.")
def submit(mountpoint: str, file: Path, name: str | None, strict: bool, wait: bool) -> None:
    """Give the plan in FILE to the mount at MOUNTPOINT, in the place of one of the same name.

    Returns when the plan is in force. Files that the bucket does not have are named.
    """
    if os.path.isfile(mountpoint):
        raise click.UsageError(f"{mountpoint} is a file: the mountpoint comes first, then the file of the plan")
    directory = plans_directory(mountpoint)
    name, content = read_plan_file(file, name)
    path = directory / name
    try:
        path.write_bytes(content)
    except OSError as error:
        if error.errno != errno.EINVAL:  # refused at close: its file tells why
            raise cannot(f"submit {file} as {path}", error) from None
    deadline_s = time.monotonic() + _RESOLVING_TIMEOUT_S
    while (told := _read(path))["state"] == "resolving":
        if time.monotonic() > deadline_s:
            raise UserError(
                f"the plan {path.name} is not in force after {_RESOLVING_TIMEOUT_S:g} s",
                "the endpoint may be slow to list: see the daemon's log, and `s3prefetchfs plan list`",
            )
        time.sleep(_POLL_S)
    if told["error"]:
        reason = printable(told["error"])
        raise UserError(f"the plan {file} is refused: {reason}", "see docs/plan.md, or give another file")
    for warning in told["warnings"]:
        click.echo(f"s3prefetchfs: plan {path.name}: {printable(warning)}", err=True)
    if strict and told["warnings"]:
        os.unlink(path)
        raise UserError(
            f"files of the plan {file} are not in the bucket",
            "the plan was cancelled; mend it, or submit it without --strict",
        )
    while wait and told["state"] != "finished":
        time.sleep(1.0)
        told = _read(path)


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_plan(path)
    except FileNotFoundError:
        raise UserError(f"the plan {path.name} was cancelled by somebody", "submit it again") from None
    except OSError as error:
        raise cannot(f"read {path}", error) from None
