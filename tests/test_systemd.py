"""The shipped unit and its example."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

from s3prefetchfs.cli import main
from s3prefetchfs.sources import USAGE_EXIT_CODE, resolve

DIRECTORY = Path(__file__).parents[1] / "systemd"
UNIT = (DIRECTORY / "s3prefetchfs@.service").read_text()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs the package systemd")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """`systemd-analyze verify` has nothing to say once the command is where it looks for it."""
    installed = re.sub(r"^(Exec\w+)=s3prefetchfs ", rf"\1={sys.executable} -m s3prefetchfs ", UNIT, flags=re.MULTILINE)
    assert installed != UNIT
    (tmp_path / "s3prefetchfs@.service").write_text(installed)
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / "s3prefetchfs@train.service")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_its_commands_exist() -> None:
    """Every command line in the unit is one that the program takes."""
    lines = re.findall(r"^Exec\w+=s3prefetchfs (\w+) (.*)$", UNIT, flags=re.MULTILINE)
    assert {verb for verb, _ in lines} == {"mount", "umount"}
    for verb, arguments in lines:
        command = main.get_command(click.Context(main), verb)
        assert command is not None
        context = command.make_context(verb, arguments.replace("%i", "train").split())
        assert context.params["config"] == "/etc/s3prefetchfs/train.toml"


def test_wrong_configuration_is_not_tried_again() -> None:
    """The unit's exit code is ours."""
    assert f"RestartPreventExitStatus={USAGE_EXIT_CODE}\n" in UNIT


def test_the_mount_is_seen_by_all() -> None:
    """No setting gives the service a mount namespace, in which the mount would stay."""
    settings = set(re.findall(r"^(\w+)=", UNIT, flags=re.MULTILINE))
    assert not settings & {
        "PrivateMounts", "PrivateTmp", "PrivateDevices", "ProtectSystem", "ProtectHome", "ReadWritePaths",
        "ReadOnlyPaths", "InaccessiblePaths", "BindPaths", "TemporaryFileSystem", "ProtectKernelTunables",
        "ProtectControlGroups", "DynamicUser", "RootDirectory", "MountFlags",
    }  # fmt: skip


def test_the_example_is_a_configuration(tmp_path: Path) -> None:
    """As it stands, and with every line that is commented out."""
    text = (DIRECTORY / "example.toml").read_text()
    assert resolve({"config": str(DIRECTORY / "example.toml")}).prefix == "train/"
    everything = re.sub(r"^# (?=[a-z-]+ = )", "", text, flags=re.MULTILINE)
    assert len(tomllib.loads(everything)) > len(tomllib.loads(text))
    (tmp_path / "all.toml").write_text(everything)
    assert resolve({"config": str(tmp_path / "all.toml")}).endpoint_url == "http://minio:9000"
