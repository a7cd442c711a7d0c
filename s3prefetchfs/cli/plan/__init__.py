"""`s3prefetchfs plan VERB ...`: what is declared to a mount, one module per verb, loaded when it is used."""

from __future__ import annotations

import importlib

import click

VERBS = ("submit", "list", "cancel")
"""In the order of the help. Each is a module of this package that holds a command of the same name."""


class _Verbs(click.Group):
    def list_commands(self, context: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        command: click.Command = getattr(importlib.import_module(f"{__name__}.{name}"), name)
        return command


@click.group(cls=_Verbs, short_help="Declare what will be read, in order.")
def plan() -> None:
    """Declare to a mount what will be read, in which order, for all epochs."""
