"""The command itself: its manual and its errors."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import s3prefetchfs
from s3prefetchfs.cli import main
from s3prefetchfs.cli.plan import VERBS as PLAN_VERBS
from s3prefetchfs.config import OPTIONS


def help_of(*arguments: str) -> str:
    done = CliRunner().invoke(main, [*arguments, "--help"], prog_name="s3prefetchfs")
    assert done.exit_code == 0
    return done.output


def test_version() -> None:
    """The program, the package and the project are of one version."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert s3prefetchfs.__version__ == project["version"]
    assert CliRunner().invoke(main, ["--version"]).output == f"s3prefetchfs, version {project['version']}\n"


def test_the_manual_of_mount() -> None:
    """Each option under its heading with its default; then examples, sources of options, exit codes."""
    words = " ".join(help_of("mount").split())
    headings = ["Options:", "S3:", "Cache:", "Attributes:", "Network:", "Logging:", "Examples:", "Configuration:"]
    places = [words.index(heading) for heading in [*headings, "Credentials and region:", "Exit status:"]]
    assert places == sorted(places)
    for option in OPTIONS.values():
        assert f"--{option.name}" in words
        assert option.help in words
        if option.kind.metavar:
            assert f"[default: {option.default}]" in words


@pytest.mark.parametrize("verb", ["mount", "umount", "status", *(f"plan {verb}" for verb in PLAN_VERBS)])
def test_manuals_fit_a_terminal(verb: str) -> None:
    """No line of a manual is longer than 88 columns, and each tells its exit codes."""
    text = help_of(*verb.split())
    assert max(map(len, text.splitlines())) <= 88
    assert "Exit status:\n  0  done\n" in text
    assert text.endswith("\n")


def test_the_examples_of_the_manual_work(tmp_path: Path) -> None:
    """Every command line in the help of `mount` is one that it would take."""
    text = help_of("mount").replace("\\\n", " ")
    examples = [line.split() for line in text.splitlines() if line.strip().startswith("s3prefetchfs mount ")]
    assert len(examples) == 3
    for _, verb, *arguments in examples:
        command = main.get_command(click.Context(main), verb)
        assert command is not None
        command.make_context(verb, arguments)


def test_wrong_command_lines_exit_with_2() -> None:
    """Unknown verbs, flags and values: the nearest name, or what to write, and exit code 2."""
    runner = CliRunner()
    for arguments, said in [
        (["mout"], "No such command 'mout'. Did you mean 'mount'?"),
        (["plan", "sumbit"], "No such command 'sumbit'. Did you mean 'submit'?"),
        (["xyz"], "No such command 'xyz'"),
        (["status", ""], "MOUNTPOINT is empty"),
        (["umount", ""], "MOUNTPOINT is empty"),
        (["plan", "list", ""], "MOUNTPOINT is empty"),
        (["mount", "--cache-siz", "1GiB", "b", "/mnt"], "--cache-size"),
        (["mount", "--cache-size", "5G", "my-bucket", "/mnt"], "--cache-size: '5G' is not a size"),
        (["mount", "my-bucket", "/mnt", "-o", "cache_sise=1GiB"], "the nearest valid name is cache_size"),
        (["mount", "my-bucket"], "no mountpoint given"),
        (["umount"], "MOUNTPOINT"),
        (["status"], "MOUNTPOINT"),
    ]:
        done = runner.invoke(main, arguments)
        assert (done.exit_code, said in done.stderr) == (2, True), (arguments, done.stderr)
        assert done.stdout == ""


def test_what_cannot_be_printed() -> None:
    """On a full disk: one line, and no traceback, not even when Python ends."""
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "s3prefetchfs", "status", "--help"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == "s3prefetchfs: cannot write the output: No space left on device"
    assert "Traceback" not in done.stderr


def test_mount_takes_the_form_of_mount8() -> None:
    """mount(8) runs `s3prefetchfs SOURCE DIRECTORY -o OPTIONS` for an fstab line: it means `mount`."""
    done = CliRunner().invoke(main, ["my-bucket", "/mnt", "-o", "rw,dev,suid"])
    assert "-o rw: the filesystem is read-only" in done.stderr
