"""`s3prefetchfs plan simulate`; what it computes: `tests/simulation/`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from s3prefetchfs.cli import main

MIB = 1024 * 1024
NETWORK = ["--cache-size", "32MiB", "--bandwidth", "100MB/s", "--rate", "50MB/s"]


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    """64 files of 1 MiB, three epochs, with sizes."""
    files = [{"path": f"{number}.tfrecord", "size": MIB, "etag": "x"} for number in range(64)]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"version": 1, "files": files, "epochs": 3}))
    return path


def simulate(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["plan", "simulate", *map(str, arguments)])


def test_for_people(plan_file: Path) -> None:
    """A row for each epoch, and what to do about it."""
    done = simulate(plan_file, *NETWORK, "--bandwidth", "40MB/s", "--epochs", 2)
    assert done.exit_code == 0, done.output
    heading, *rows, advice = done.stdout.splitlines()
    assert heading.split() == ["epoch", "read", "fetched", "least", "LRU", "stalled", "busy"]
    assert [row.split()[:3] for row in rows] == [["0", "64.0", "MiB"], ["1", "64.0", "MiB"]]
    assert advice.startswith("To keep the accelerator at 90% you need B >= ")
    assert " or C >= " in advice


def test_a_bound_that_is_met_and_not_enough(plan_file: Path) -> None:
    """The figures of the advice are those of bytes alone; where they promise more than the table has, that is said."""
    short = ["--bandwidth", "300MB/s", "--rate", "2GB/s"]
    assert simulate(plan_file, *NETWORK, *short).stdout.splitlines()[-1].startswith("To keep the accelerator at 90%")
    slow = ["--bandwidth", "3GB/s", "--rate", "2GB/s", "--first-byte", "1s", "--spread", "0"]
    *_, caution = simulate(plan_file, *NETWORK, *slow).stdout.splitlines()
    assert caution.startswith("Believe the table where it says less")


def test_no_cache_is_asked_for_where_none_is_needed(plan_file: Path) -> None:
    """The bandwidth carries every byte of every epoch anew."""
    advice = simulate(plan_file, *NETWORK, "--epochs", 2).stdout.splitlines()[3]
    assert advice.startswith("To keep the accelerator at 90% you need B >= ")
    assert " or C >= " not in advice


def test_for_programs(plan_file: Path) -> None:
    """JSON has the same figures, and no bar or advice in words."""
    document = json.loads(simulate(plan_file, *NETWORK, "--json").stdout)
    assert len(document["epochs"]) == 3
    assert document["epochs"][0]["least_bytes"] == 64 * MIB
    assert document["epochs"][1]["lru_bytes"] == 64 * MIB
    assert document["epochs"][1]["least_bytes"] == 32 * MIB
    assert sum(epoch["fetched_bytes"] for epoch in document["epochs"]) < 150 * MIB
    assert document["first_bytes_per_s"] == pytest.approx(45e6)
    assert document["warm_bytes_per_s"] < 30e6


def test_the_same_again(plan_file: Path) -> None:
    """Chance has a seed."""
    assert simulate(plan_file, *NETWORK).stdout == simulate(plan_file, *NETWORK).stdout


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_pictures(plan_file: Path, tmp_path: Path, suffix: str) -> None:
    """A picture is drawn beside the table."""
    pytest.importorskip("matplotlib")
    picture = tmp_path / f"plan.{suffix}"
    assert simulate(plan_file, *NETWORK, "--plot", picture).exit_code == 0
    assert picture.stat().st_size > 1000


def test_where_sizes_come_from(tmp_path: Path) -> None:
    """From a mount, or from the user; without either there is no guess."""
    (tmp_path / "mnt").mkdir()
    (tmp_path / "mnt" / "a").write_bytes(bytes(MIB))
    text = tmp_path / "plan.txt"
    text.write_text("a\nb\n")
    done = simulate(text, *NETWORK, "--mount", tmp_path / "mnt")
    assert done.exit_code == 1
    assert "cannot simulate: b has no size in this plan" in done.stderr
    assert simulate(text, *NETWORK, "--mount", tmp_path / "mnt", "--file-size", "2MiB").stdout.count("3.0 MiB") >= 1
    text.write_text("*.tfrecord\n")
    assert "*.tfrecord is a pattern in this plan" in simulate(text, *NETWORK, "--file-size", "1MiB").stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rate", "0"], "--rate is 0"),
        (["--bandwidth", "fast"], "is not a rate"),
        (["--cache-size", "big"], "is not a size"),
        (["--lead", "indefinite"], "is not within reason"),
        (["--plot", "plan.pdf"], "end it in .svg or .png"),
        (["--epochs", "0"], "0 is not in the range"),
    ],
)
def test_flags_that_make_no_sense(plan_file: Path, flags: list[str], message: str) -> None:
    """Each is told by its name, before anything is simulated."""
    done = simulate(plan_file, *NETWORK, *flags)
    assert done.exit_code == 2
    assert message in done.stderr


def test_a_picture_that_cannot_be_written(plan_file: Path, tmp_path: Path) -> None:
    """Is an error with a message."""
    pytest.importorskip("matplotlib")
    done = simulate(plan_file, *NETWORK, "--plot", tmp_path / "none" / "plan.svg")
    assert done.exit_code == 1
    assert "cannot write" in done.stderr
