"""`s3prefetchfs plan make`, `check`, `show`, `record` without a mount; with one: `tests/mount/test_plan_making.py`."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from s3prefetchfs.cli import main

NAMES = ["a-b", "a/x", "b[1].bin", "c.bin", "d.bin"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A directory with these files, the n-th of n * 100 bytes."""
    for number, name in enumerate(NAMES):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(100 * number))
    return tmp_path / "data"


def plan(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["plan", *map(str, arguments)])


def made(data: Path, *arguments: object) -> list[list[str]]:
    """The paths that each epoch of a plan of `data` reads."""
    done = plan("make", data / "**", "--relative-to", data, *arguments)
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    epochs = document["epochs"]
    if isinstance(epochs, int):
        epochs = [range(len(document["files"]))] * epochs
    return [[document["files"][number] for number in epoch] for epoch in epochs]


def test_sources(data: Path) -> None:
    """Name order by bytes; a directory is all below it, a name that exists is no pattern, `**` goes deep."""
    assert made(data) == [NAMES]
    for sources, names in [
        ([data], NAMES),
        ([data / "b[1].bin"], ["b[1].bin"]),
        ([data / "*.bin", data / "c.bin"], ["b[1].bin", "c.bin", "d.bin"]),
        ([data / "*/x"], ["a/x"]),
        ([data / "[cd].bin"], ["c.bin", "d.bin"]),
    ]:
        done = plan("make", *sources)
        assert json.loads(done.stdout)["files"] == [f"{data}/{name}" for name in names], done.output


def test_orders(data: Path) -> None:
    """Shuffled anew for each epoch, or once; the seed decides; shards part what was ordered."""
    epochs = made(data, "--shuffle", "--epochs", 4, "--seed", 1)
    assert [sorted(epoch) for epoch in epochs] == [NAMES] * 4
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert made(data, "--shuffle", "--epochs", 4, "--seed", 1) == epochs
    assert made(data, "--shuffle", "--epochs", 4, "--seed", 2) != epochs
    assert made(data, "--shuffle", "--epochs", 2, "--seed", 1, "--same-order") == [epochs[0]] * 2
    assert made(data, "--shuffle", "--epochs", 4, "--seed", 1, "--shard", "1/2") == [epoch[1::2] for epoch in epochs]


def test_a_function_orders(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function in a module of the working directory; whatever is wrong with it is said."""
    monkeypatch.chdir(data)
    module = f"loader_{random.randrange(10**9)}"
    (data.parent / f"{module}.py").write_text(
        "def order(epoch, files):\n    return files[epoch:] + files[:epoch]\n"
        "def fails(epoch, files):\n    raise RuntimeError('no such luck')\n"
        "def strange(epoch, files):\n    return ['elsewhere']\n"
        "def empty(epoch, files):\n    return []\n"
        "def text(epoch, files):\n    return 'a'\n"
        "def ends(epoch, files):\n    raise SystemExit(0)\n"
        "def talks(epoch, files):\n    print('no part of the plan')\n    return tuple(files)\n"
        "number = 3\n"
    )
    monkeypatch.chdir(data.parent)
    assert made(data, "--order-from", f"{module}:order", "--epochs", 2) == [NAMES, NAMES[1:] + NAMES[:1]]
    assert made(data, "--order-from", f"{module}:talks") == [NAMES]
    for name, said in [
        (f"{module}:fails", "no such luck"),
        (f"{module}:ends", "SystemExit"),
        (f"{module}:strange", "elsewhere"),
        (f"{module}:empty", "no files"),
        (f"{module}:text", "not a list"),
        (f"{module}:number", "not a function"),
        (f"{module}:absent", "absent"),
        ("absent_module:order", "absent_module"),
        ("order", "MODULE:FUNCTION"),
    ]:
        done = plan("make", data, "--order-from", name)
        assert (done.exit_code, said in done.stderr) == (1, True), (name, done.stderr)
        assert done.stdout == ""


def test_wrong_requests(data: Path) -> None:
    """What contradicts itself, or cannot be done, is refused with what to do."""
    for code, said, arguments in [
        (2, "only one of", ["--shuffle", "--order", "any"]),
        (2, "--tf-global-seed", ["--tf-list-files"]),
        (2, "--same-order goes with", ["--same-order"]),
        (2, "--seed goes with", ["--seed", "3"]),
        (2, "a SOURCE is empty", [""]),
        (2, "0/8", ["--shard", "2/2"]),
        (2, "16MB", ["--segments", "5-"]),
        (1, "fewer shards", ["--shard", "7/8"]),
        (1, "ETag", ["--manifest"]),
        (2, "mixed", ["s3://bucket/x"]),
        (1, "nothing matches", [data / "absent*"]),
    ]:
        done = plan("make", data, *arguments)
        assert (done.exit_code, said in done.stderr) == (code, True), (arguments, done.stderr)


def test_segments_check_and_show(data: Path, tmp_path: Path) -> None:
    """Segments of all files shuffled together; `show` tells figures and order, `check` finds what is wrong."""
    file = tmp_path / "plan.json"
    done = plan("make", data, "--relative-to", data, "--segments", "100-150", "--shuffle", "-o", file)
    assert done.exit_code == 0, done.output
    assert plan("check", file).exit_code == 0
    (epoch,) = json.loads(plan("show", file, "--json").stdout)["epochs"]
    assert (epoch["files"], epoch["bytes"], epoch["seen_files"]) == (5, 1000, 0)
    lines = plan("show", file, "--epoch", 0).stdout.splitlines()
    assert len(lines) == epoch["entries"] > 8
    assert sum(int(line.split("\t")[2]) for line in lines if "\t" in line) == 900  # but one file of 100 is read whole
    assert "5 files" in plan("show", file).stdout
    assert plan("show", file, "--epoch", 1).exit_code == 2
    file.write_text('{"version": 1, "files": ["a"], "epochs": [[0, 1]]}')
    for verb in ("check", "show"):
        done = plan(verb, file)
        assert (done.exit_code, "epoch 0, entry 1" in done.stderr) == (1, True)
    done = plan("check", file, "--json")
    assert (done.exit_code, json.loads(done.stdout)["ok"]) == (1, False)


def test_recordings_merge(tmp_path: Path) -> None:
    """Two recordings become one plan, after or beside one another."""
    for name in ("a", "b"):
        (tmp_path / name).write_text(json.dumps({"version": 1, "files": [name, "both"], "truncated": False}))
    for merge, epochs in (("after", [[0, 1], [2, 1]]), ("beside", [[0, 2, 1, 1]])):
        done = plan("record", tmp_path / "a", tmp_path / "b", "--merge", merge)
        assert json.loads(done.stdout)["epochs"] == epochs
