"""`s3prefetchfs plan VERB ...`: what is declared to a mount, one module per verb, loaded when it is used."""

from __future__ import annotations

import click

from s3prefetchfs.cli.manual import VerbGroup

VERBS = ("make", "check", "show", "simulate", "record", "submit", "list", "cancel")
"""In the order of the help. Each is a module of this package that holds a command of the same name."""


@click.group(cls=VerbGroup, package=__name__, verbs=VERBS, short_help="Declare what will be read, in order.")
def plan() -> None:
    """Declare to a mount what will be read, in which order, for all epochs."""
