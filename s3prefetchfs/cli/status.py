"""`s3prefetchfs status`: what the daemon says of itself, for people or as it is.

The daemon's JSON decides what is shown: each object in it becomes a section, each name a row, and the unit at the end
of a name (`_bytes`, `_s`, `_ms_p99`) how the number is written. A new section needs no change here. Plans are a list,
and become a table of their own.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from s3prefetchfs.cli.manual import EXIT_CODES, ManualCommand
from s3prefetchfs.cli.plan.table import plan_table
from s3prefetchfs.errors import UserError
from s3prefetchfs.fuse import mounts
from s3prefetchfs.units import format_duration, format_size

_SECTIONS = [
    (
        "Examples",
        """
        s3prefetchfs status /mnt/train
        s3prefetchfs status /mnt/train --json | jq .cache.used_bytes
        """,
    ),
    ("Files", "The same JSON is the content of MOUNTPOINT/.s3prefetchfs/status.json."),
    ("Exit status", EXIT_CODES),
]

_SHARE_OF = {
    "used_bytes": "capacity_bytes",
    "complete_objects": "objects",
    "bytes_waited_for": "bytes_served",
    "connections_in_use": "connections_limit",
}
"""Numbers that mean more as a share of another one of their section."""


@click.command(cls=ManualCommand, sections=_SECTIONS, short_help="Show how a mount is doing.")
@click.argument("mountpoint")
@click.option("--json", "as_json", is_flag=True, help="Print the daemon's JSON, unchanged.")
def status(mountpoint: str, as_json: bool) -> None:
    """Show how the s3prefetchfs at MOUNTPOINT is doing.

    A mount that is dead or does not answer is reported as such within seconds.
    """
    path = absolute(mountpoint)
    _, text = read_status(path)
    if as_json:
        click.echo(text, nl=not text.endswith(b"\n"))
        return
    try:
        document = json.loads(text)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise UserError(f"the daemon of {path} gives a status that makes no sense", "see it with --json")
    _print(document)


def absolute(mountpoint: str) -> Path:
    """The path of a MOUNTPOINT as it was typed.

    Raises:
        UsageError: it is empty, which is no way to say the working directory.
    """
    if not mountpoint:
        raise click.UsageError("MOUNTPOINT is empty: is a variable not set?")
    return Path(os.path.abspath(mountpoint))


def read_status(path: Path) -> tuple[Path, bytes]:
    """The mountpoint and the status of the s3prefetchfs at an absolute path.

    Raises:
        UserError: there is none, it is dead, or it does not answer within seconds.
    """
    mount = mounts.mount_at(path)
    if mount is None or not mount.is_ours:
        raise UserError(
            f"no s3prefetchfs is mounted at {path}", "`findmnt -t fuse.s3prefetchfs` lists the mounts there are"
        )
    where = mount.mountpoint
    try:
        return where, mounts.read_file(where / mounts.STATUS_FILE)
    except TimeoutError:
        raise UserError(
            f"the daemon of {where} does not answer within {mounts.PROBE_TIMEOUT_S:g} s",
            f"its log may say why; `s3prefetchfs umount --lazy {where}` detaches the mount",
        ) from None
    except OSError as error:
        if error.errno in mounts.DEAD_ERRNOS:
            raise UserError(
                f"the daemon of {where} is dead", "mount it again: that clears the dead mount first"
            ) from None
        if error.errno == errno.EACCES:
            raise UserError(
                f"{where} was mounted by another user, and for that user only",
                "ask as that user, or mount with --allow-other",
            ) from None
        raise UserError(f"cannot read the status of {where}: {error.strerror}", "its log may say more") from None


def _print(document: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    sections = {name: value for name, value in document.items() if isinstance(value, dict)}
    plans = document.get("plans") or []
    plain = {name: value for name, value in document.items() if name not in sections and name != "plans"}
    plain["pid"] = str(plain.get("pid"))  # a name, not a number
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for heading, section in {"mount": plain, **sections}.items():
        for number, (label, value) in enumerate(_rows(section)):
            table.add_row("" if number else heading.replace("_", " "), label, Text(value))
        table.add_section()
    console = Console(highlight=False)
    console.print(table)
    if plans:
        console.print()
        console.print(plan_table(plans))


def _rows(section: Mapping[str, Any], outer: str = "") -> Iterator[tuple[str, str]]:
    """Label and value of each number; objects inside objects are flattened."""
    for name, value in section.items():
        label, unit = _label_and_unit(name)
        label = outer + label
        if isinstance(value, dict):
            yield from _rows(value, f"{label} ")
            continue
        text = _human(value, unit)
        whole = section.get(_SHARE_OF.get(name, ""))
        if isinstance(value, int | float) and isinstance(whole, int | float) and whole > 0:
            text += f"  ({value / whole:.1%})"
        yield label, text


def _label_and_unit(name: str) -> tuple[str, str]:
    """`first_byte_ms_p99` is a `first byte p99` in `ms`."""
    match = re.fullmatch(r"(.+?)_(bytes_per_s|bytes|ms|s)(_p[0-9]+)?", name)
    if match is not None:
        label, unit = match[1] + (match[3] or ""), match[2]
    else:
        label, unit = name, "bytes" if name.startswith("bytes") else ""
    return label.replace("_", " "), unit


def _human(value: object, unit: str) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case list():
            return ", ".join(map(str, value)) or "-"
        case int() | float():
            return _number(value, unit)
    return str(value)


def _number(value: float, unit: str) -> str:
    match unit:
        case "bytes":
            return format_size(value)
        case "bytes_per_s":
            return f"{format_size(value)}/s"
        case "ms":
            return f"{value:,.1f} ms"
        case "s":
            return format_duration(value)
    return f"{value:,}"
