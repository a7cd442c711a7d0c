"""Commands whose `--help` is a manual page, and flags made from the table of options.

`ManualCommand` prints its options under their headings and ends with named sections. `config_options` gives a
command one flag for each row of `config.OPTIONS`, and `typed` collects the texts for `sources.resolve` to read.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click

from s3prefetchfs.config import OPTIONS, PATHS, Option

_C = TypeVar("_C", bound=Callable[..., Any])

EXIT_CODES = """\
0  done
1  it failed; the reason is on stderr
2  the command line, the environment or the configuration file is wrong"""


class VerbGroup(click.Group):
    """A command with verbs, each a module of `package` that holds a command of its name, loaded when it is used.

    Args:
        package: dotted name. verbs: in the order of the help.
    """

    def __init__(self, *arguments: Any, package: str, verbs: Sequence[str], **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._package = package
        self._verbs = verbs

    def list_commands(self, context: click.Context) -> list[str]:
        return list(self._verbs)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in self._verbs:
            nearest = difflib.get_close_matches(name, self._verbs, n=1)
            if nearest:
                context.fail(f"No such command {name!r}. Did you mean {nearest[0]!r}?")
            return None
        command: click.Command = getattr(importlib.import_module(f"{self._package}.{name}"), name)
        return command


class _TableFlag(click.Option):
    """The flag of one row. It hands over text, so that every source of a value is read by the same parser."""

    def __init__(self, option: Option) -> None:
        self.option = option
        shown = f"{option.help}  [default: {option.default}]" if option.kind.metavar else option.help
        names = [option.field, f"--{option.name}", *([f"-{option.short}"] if option.short else [])]
        if option.kind.metavar:
            super().__init__(names, metavar=option.kind.metavar, help=shown, multiple=option.kind is PATHS)
        else:
            opposite = option.name.removeprefix("no-") if option.name.startswith("no-") else f"no-{option.name}"
            names[1] += f"/--{opposite}"
            super().__init__(names, is_flag=True, default=None, help=shown)


def config_options(command: _C) -> _C:
    """Decorate a command with a flag for each option of a mount; its value is a keyword argument, by field."""
    return _with_flags(command, list(OPTIONS.values()))


def store_options(command: _C) -> _C:
    """The same with only the options that say where a bucket is and how to ask for it."""
    return _with_flags(command, [option for option in OPTIONS.values() if option.group == "S3"])


def _with_flags(command: _C, options: Sequence[Option]) -> _C:
    flags = [_TableFlag(option) for option in options]
    command.__dict__.setdefault("__click_params__", []).extend(reversed(flags))
    return command


def typed(values: Mapping[str, Any]) -> dict[str, str]:
    """The texts of the flags that were given, by option name.

    Args:
        values: the keyword arguments that `config_options` or `store_options` added; None where a flag is absent.
    """
    texts = {}
    for option in OPTIONS.values():
        value = values.get(option.field)
        if isinstance(value, tuple):
            value = os.pathsep.join(value) or None
        if value is not None:
            texts[option.name] = str(value).lower() if isinstance(value, bool) else value
    return texts


class ManualCommand(click.Command):
    """A command with a manual: grouped options and sections.

    Args:
        sections: heading and text, printed as written, after the options.
    """

    def __init__(self, *arguments: Any, sections: Sequence[tuple[str, str]] = (), **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._sections = sections

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(context):
            heading = parameter.option.group if isinstance(parameter, _TableFlag) else "Options"
            record = parameter.get_help_record(context) if isinstance(parameter, click.Option) else None
            if record is not None:
                groups.setdefault(heading, []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, text in self._sections:
            with formatter.section(heading):
                formatter.write(textwrap.indent(inspect.cleandoc(text), " " * formatter.current_indent) + "\n")
