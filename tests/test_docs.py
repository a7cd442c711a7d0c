"""What the documents say is what the program does: options, commands, files, fields, figures and messages."""

from __future__ import annotations

import ast
import errno
import importlib
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from s3prefetchfs import units
from s3prefetchfs.catalog import Catalog
from s3prefetchfs.cli import main
from s3prefetchfs.cli.manual import typed
from s3prefetchfs.config import OPTIONS, Config
from s3prefetchfs.control import Status
from s3prefetchfs.core.namespace import Namespace
from s3prefetchfs.core.scheduler import Scheduler
from s3prefetchfs.engine import Engine
from s3prefetchfs.errors import FailureKind
from s3prefetchfs.metrics import Metrics
from s3prefetchfs.s3.client import ClientSettings
from s3prefetchfs.s3.pool import Pool
from s3prefetchfs.sources import ENVIRONMENT_PREFIX, resolve
from s3prefetchfs.store.store import Store

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCUMENTS = [README, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
ARCHITECTURE = ROOT / "docs/architecture.md"
STATUS = ROOT / "docs/status.md"
TROUBLESHOOTING = ROOT / "docs/troubleshooting.md"


def blocks(document: Path, *languages: str) -> Iterator[str]:
    """The fenced code blocks in one of these languages."""
    for language, body in re.findall(r"^```(\w*)\n(.*?)^```$", document.read_text(), flags=re.MULTILINE | re.DOTALL):
        if language in languages:
            yield body


def table(document: Path, heading: str) -> list[list[str]]:
    """The rows, without the head, of the first table below a heading; a cell that is all code loses its backticks."""
    section = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", document.read_text(), re.MULTILINE | re.DOTALL)
    assert section is not None, f"{document.name} has no section {heading!r}"
    found = re.search(r"(?:^\|.*\|\n)+", section[1], re.MULTILINE)
    assert found is not None, f"section {heading!r} of {document.name} has no table"
    lines = found[0].replace("\\|", "\0").splitlines()[2:]
    rows = [[cell.strip().replace("\0", "|") for cell in line.strip("|").split("|")] for line in lines]
    return [[re.sub(r"^`([^`]*)`$", r"\1", cell) for cell in row] for row in rows]


def commands(document: Path) -> Iterator[list[str]]:
    """Every `s3prefetchfs ...` in the document's shell blocks, as arguments, up to a pipe or a comment."""
    for block in blocks(document, "sh", "console"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ ").removeprefix("sudo "), comments=True)
            if words[:1] == ["s3prefetchfs"]:
                yield words[1 : words.index("|") if "|" in words else None]


COMMANDS = [words for document in DOCUMENTS for words in commands(document)]


# ------------------------------------------------------------------------------------------------ README


def test_the_option_table_is_the_table_of_options() -> None:
    """Names, variables, defaults and help are those of `config.OPTIONS`, in its order."""
    expected = [
        [
            f"--{option.name} {option.kind.metavar}".strip(),
            ENVIRONMENT_PREFIX + option.name.upper().replace("-", "_"),
            option.default,
            option.help,
        ]
        for option in OPTIONS.values()
    ]
    assert table(README, "Options") == expected


def test_the_variables_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variable that the documents name is one that is read; others are refused."""
    named = {name for document in DOCUMENTS for name in re.findall(r"\bS3PREFETCHFS_[A-Z_]+\b", document.read_text())}
    assert len(named) > len(OPTIONS)
    for name in named:
        monkeypatch.setenv(name, "")
    resolve({"bucket": "my-bucket", "mountpoint": "/mnt/train"})


def test_there_are_commands() -> None:
    """The test below is about something: the README shows every verb for daily use."""
    assert {words[0] for words in commands(README)} >= {"mount", "umount", "status"}


@pytest.mark.parametrize("words", COMMANDS, ids=shlex.join)
def test_commands_are_taken(words: list[str]) -> None:
    """Every command line parses, down to the values of its options; nothing is run."""
    verb, *arguments = words
    command = main.get_command(click.Context(main), verb)
    assert command is not None, f"no such verb: {verb}"
    if isinstance(command, click.Group):  # `plan VERB`
        verb, *arguments = arguments
        command = command.get_command(click.Context(command), verb)
        assert command is not None, f"no such verb: {verb}"
    parameters = command.make_context(verb, arguments).params
    if verb == "mount" and parameters["config"] is None:
        given = {"bucket": parameters["bucket"], "mountpoint": parameters["mountpoint"]}
        resolve(given | typed(parameters), parameters["mount_options"])


def test_make_knows_the_targets() -> None:
    """Every `make ...` of the documents is a target."""
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    lines = [
        line for document in DOCUMENTS for block in blocks(document, "sh", "console") for line in block.splitlines()
    ]
    named = {found[1] for line in lines if (found := re.match(r"(?:\$ )?make (\w+)", line))}
    assert {"demo", "test"} <= named <= set(phony[1].split())


def test_fstab_lines_are_taken() -> None:
    """Source, mountpoint and options, as mount(8) hands them over."""
    lines = [line for document in DOCUMENTS for block in blocks(document, "fstab") for line in block.splitlines()]
    assert lines
    for line in lines:
        bucket, mountpoint, fs_type, options, _, _ = line.split()
        assert fs_type == "fuse.s3prefetchfs"
        resolve({"bucket": bucket, "mountpoint": mountpoint}, [options])


def test_configuration_files_are_taken(tmp_path: Path) -> None:
    """Every TOML block is a configuration."""
    files = [block for document in DOCUMENTS for block in blocks(document, "toml")]
    assert files
    for text in files:
        (tmp_path / "mount.toml").write_text(text)
        resolve({"config": str(tmp_path / "mount.toml")})


def test_python_is_python() -> None:
    """Every Python block compiles."""
    files = [block for document in DOCUMENTS for block in blocks(document, "python")]
    assert files
    for text in files:
        compile(text, "block", "exec")


# ----------------------------------------------------------------------------------------- links and names


def _anchors(document: Path) -> set[str]:
    """The fragments that GitHub makes of a document's headings."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.M | re.S), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    """Relative links name files that exist, and headings in them."""
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", document.read_text()):
        path, _, anchor = target.partition("#")
        file = document.parent / path if path else document
        assert file.exists(), f"{document.name} links to {target}"
        assert not anchor or anchor in _anchors(file), f"{document.name} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_files_exist(document: Path) -> None:
    """So do the files of this repository that are named in code marks."""
    for name in re.findall(r"`((?:s3prefetchfs|tests|bench|docs|systemd)/[\w./@-]*)`", document.read_text()):
        assert (ROOT / name).exists(), f"{document.name} names {name}"


# ------------------------------------------------------------------------------------------------- status


def _leaves(document: dict[str, Any], outer: str = "") -> Iterator[str]:
    for name, value in document.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{outer}{name}.")
        else:
            yield outer + name


def _status(tmp_path: Path) -> dict[str, Any]:
    """The document of a mount that has all its parts and has done nothing."""
    config = Config(bucket="my-bucket", mountpoint=tmp_path / "mnt", cache_dir=tmp_path / "cache")
    metrics = Metrics()
    settings = ClientSettings(bucket=config.bucket)
    pool = Pool(settings, processes=1, connections=1, on_message=lambda message: None)
    catalog = Catalog(Namespace(b"", 60.0), pool, 120.0, metrics, lambda ino, name: None)
    scheduler = Scheduler(capacity_bytes=1 << 30, max_connections=1, retry_timeout_s=120.0)
    store = Store(config.cache_dir)
    try:
        engine = Engine(store, scheduler, pool.get, catalog.version_gone, metrics)
        return Status(config, metrics, engine, catalog, pool).document()
    finally:
        store.close()


def test_every_status_field_is_explained(tmp_path: Path) -> None:
    """docs/status.md and the document have the same fields in the same order."""
    assert [row[0] for row in table(STATUS, "Fields")] == list(_leaves(_status(tmp_path)))


# ------------------------------------------------------------------------------------------- architecture


def test_the_failure_table_is_complete() -> None:
    """docs/architecture.md has each kind of failure, with its errno and whether it is tried again."""
    expected = [[kind.name, errno.errorcode[kind.errno], "yes" if kind.retryable else "no"] for kind in FailureKind]
    assert [row[:3] for row in table(ARCHITECTURE, "Failures")] == expected


def _constant(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(f"s3prefetchfs.{module}"), attribute)


def _figure(text: str) -> float:
    """What `128 KiB`, `5 s` or `1,000` stands for."""
    text = text.replace(",", "")
    return units.parse_size(text) if text.endswith("B") else units.parse_duration(text)


@pytest.mark.parametrize("row", table(ARCHITECTURE, "Constants"), ids=lambda row: row[0])
def test_the_constants_are_right(row: list[str]) -> None:
    """The figures of docs/architecture.md are those in the code."""
    name, figure, why = row
    value = _constant(name)
    assert isinstance(value, int | float)
    assert _figure(figure) == value
    assert why


# ---------------------------------------------------------------------------------------- troubleshooting


def _text(node: ast.AST) -> str:
    """The first line of a literal, with NUL for whatever is filled in; empty for anything else."""
    text = ""
    if isinstance(node, ast.JoinedStr):
        text = "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = re.sub(r"%[\d.]*[sdrf]", "\0", node.value)
    return text.partition("\n")[0]


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, text.split("\0"))))


TREES = {path: ast.parse(path.read_text()) for path in sorted((ROOT / "s3prefetchfs").rglob("*.py"))}

MESSAGES = [
    _pattern(text)
    for text in {text for tree in TREES.values() for text in map(_text, ast.walk(tree))}
    if len(text.replace("\0", "").strip()) >= 10  # enough of its own to tell it from others
]

REFUSALS = {
    _text(node.args[0])
    for path, tree in TREES.items()
    if path.name not in ("sources.py", "demo.py")
    for node in ast.walk(tree)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "UserError"
} - {""}
"""What the commands say, except about options, where the message itself names the place, and in the demo."""

HEADINGS = [text for _, text in re.findall(r"^### (`+) ?(.*?) ?\1$", TROUBLESHOOTING.read_text(), re.MULTILINE)]
"""Messages, with words in capitals where the program fills something in."""


@pytest.mark.parametrize("heading", HEADINGS)
def test_messages_exist(heading: str) -> None:
    """What docs/troubleshooting.md is indexed by is printed by the program, by make, or by the kernel's errors."""
    if heading.startswith("make: "):
        assert heading.removeprefix("make: ") in (ROOT / "Makefile").read_text()
    elif heading not in map(os.strerror, errno.errorcode):
        assert any(pattern.fullmatch(heading) for pattern in MESSAGES)


@pytest.mark.parametrize("message", sorted(REFUSALS))
def test_refusals_are_explained(message: str) -> None:
    """Every error that the commands end with has its place on that page."""
    assert any(map(_pattern(message).fullmatch, HEADINGS))


def test_reasons_are_explained() -> None:
    """So has every kind of failure, which fills in for REASON."""
    assert [row[0] for row in table(TROUBLESHOOTING, "`cannot read s3://BUCKET/PREFIX: REASON`")] == [
        kind.text for kind in FailureKind
    ]
