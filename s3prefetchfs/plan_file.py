"""A plan in a file, on its way into a mount: for `plan submit` and for `mount --plan`, which refuse the same things."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from s3prefetchfs.core.plan_name import is_scratch, plan_name
from s3prefetchfs.errors import UserError

PLAN_MAX_BYTES = 256 * 1024 * 1024
"""The largest file that is taken: 100,000 files in 90 epochs, 9 million entries, are a quarter of it."""


def take(source: BinaryIO, where: object) -> bytes:
    """The bytes of a plan. Blocking.

    Args:
        where: they come from, for people.

    Raises:
        UserError: there are more than a mount takes.
    """
    content = source.read(PLAN_MAX_BYTES + 1)
    if len(content) > PLAN_MAX_BYTES:
        reason = f"it is larger than {PLAN_MAX_BYTES >> 20} MiB"
        raise UserError(f"the plan {where} is refused: {reason}", "split it into several plans")
    return content


def read_plan_file(path: Path, name: str | None = None) -> tuple[str, bytes]:
    """Name and content of a plan. Blocking.

    Args:
        name: of the plan, instead of the file's.

    Raises:
        UserError: it cannot be one.
    """
    name = name or path.name
    try:
        plan_name(os.fsencode(name))
        if is_scratch(name):
            raise ValueError("kept for files that are not plans yet")
    except ValueError as error:
        raise UserError(f"the plan {path} has a name that is {error}", "give it another one (--name)") from None
    try:
        with path.open("rb") as file:
            content = take(file, path)
    except OSError as error:
        raise UserError(f"cannot read the plan {path}: {error.strerror}", "give a file that exists") from None
    if not content:
        raise UserError(f"the plan {path} is empty", "write one path a line; see docs/plan.md")
    return name, content
