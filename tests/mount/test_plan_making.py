"""Plans made for a mount and by one: found there or in the bucket, in the order of TensorFlow, recorded, checked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from s3prefetchfs.cli import main
from tests.mount.conftest import Mount
from tests.mount.mounted import Mounted, run
from tests.servers import StandInBucket

SHARDS = 13


PIPELINE = """if True:
    import sys
    import tensorflow as tf

    pattern, files = sys.argv[1], int(sys.argv[2])

    def read(names):
        for _ in names.interleave(tf.data.TFRecordDataset, cycle_length=4):
            pass

    again = tf.data.Dataset.list_files(pattern, seed=11)
    for _ in range(3):
        read(again)
    read(tf.data.Dataset.list_files(pattern, seed=11).repeat(3))
    for _ in range(3):
        read(tf.data.Dataset.list_files(pattern, seed=11))
    names = tf.data.Dataset.list_files(pattern, shuffle=False)
    fixed = names.shuffle(files, seed=11, reshuffle_each_iteration=False)
    for _ in range(3):
        read(fixed)
    tf.random.set_seed(5)
    read(tf.data.Dataset.list_files(pattern, seed=11).repeat(3))
    tf.random.set_seed(5)
    read(tf.data.Dataset.list_files(pattern).shard(3, 1).repeat(3))
"""
"""Three epochs, in each of the ways in which pipelines come to them."""

PLANS = [
    ["--seed", "11"],
    ["--seed", "11", "--tf-epochs", "reshuffled"],
    ["--seed", "11", "--tf-epochs", "anew"],
    ["--seed", "11", "--tf-epochs", "fixed"],
    ["--seed", "11", "--tf-global-seed", "5"],
    ["--tf-global-seed", "5", "--shard", "1/3"],
]
"""The plans for it."""


@pytest.fixture(scope="module")
def filled(module_bucket: StandInBucket, tmp_path_factory: pytest.TempPathFactory) -> StandInBucket:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import tensorflow as tf
    path = tmp_path_factory.mktemp("records") / "records"
    for number in range(SHARDS):
        with tf.io.TFRecordWriter(os.fspath(path)) as writer:
            writer.write(b"x" * (100 + number))
        module_bucket.put(f"data/train/s{number:02d}.tfrecord", path.read_bytes())
    module_bucket.put_ramp("data/train/deep/er", 10, 1)
    module_bucket.put_ramp("data/odd[1] \u00e9.bin", 10, 2)
    return module_bucket


@pytest.fixture
def mnt(filled: StandInBucket, mount: Mount) -> Mounted:
    """A mount that has seen nothing opened."""
    return mount(filled, "--workers", "1", source=f"{filled.name}/data")


def make(bucket: StandInBucket, *arguments: str | os.PathLike[str]) -> dict[str, Any]:
    done = run(bucket, "plan", "make", *arguments)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def orders(document: dict[str, Any]) -> list[list[str]]:
    return [[document["files"][number] for number in epoch] for epoch in document["epochs"]]


def test_the_order_of_list_files(filled: StandInBucket, mnt: Mounted) -> None:
    """The daemon sees real pipelines open files in the order of the plans, whichever way they come to an epoch."""
    pattern = os.fspath(mnt / "train/*.tfrecord")
    planned = []
    for options in PLANS:
        arguments = ["plan", "make", pattern, "--tf-list-files", "--epochs", "3", *options]
        if "--tf-global-seed" in options:  # stays set in the process that asks
            document = make(filled, *arguments[2:])
        else:
            done = CliRunner().invoke(main, arguments)
            assert done.exit_code == 0, done.output
            document = json.loads(done.stdout)
        planned.append(orders(document))
    command = [sys.executable, "-c", PIPELINE, pattern, str(SHARDS)]
    subprocess.run(command, check=True, timeout=120, env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"})
    document = json.loads((mnt / ".s3prefetchfs/opens").read_bytes())
    seen = [document["files"][number] for epoch in document["epochs"] for number in epoch]
    assert seen == [path for epochs in planned for epoch in epochs for path in epoch]
    assert [len({tuple(epoch) for epoch in epochs}) for epochs in planned] == [3, 3, 1, 1, 3, 3]
    assert planned[0] == planned[1]


def test_a_mount_and_its_bucket_give_the_same(filled: StandInBucket, mnt: Mounted) -> None:
    """Paths relative to the mountpoint, or s3://; with --manifest, both have sizes and ETags."""
    endpoint = ("--endpoint-url", filled.server.endpoint_url)
    base = f"s3://{filled.name}/data/"
    for source, count in (("**", SHARDS + 2), ("train/*.tfrecord", SHARDS), ("train/*", SHARDS), ("o*1]*", 1)):
        here = make(filled, f"{mnt.path}/{source}", "--manifest")
        there = make(filled, base + source, "--manifest", *endpoint)
        assert [file | {"path": base + file["path"]} for file in here["files"]] == there["files"]
        assert len(here["files"]) == count
    whole = make(filled, base, *endpoint)["files"]
    assert whole == [base + path for path in make(filled, mnt.path)["files"]]
    assert make(filled, base + "odd[1] \u00e9.bin", *endpoint)["files"] == [base + "odd[1] \u00e9.bin"]
    for source in (base + "absent*", f"{mnt.path}/absent", "s3://no-such-bucket/x"):
        done = run(filled, "plan", "make", source, *endpoint)
        assert (done.returncode, done.stdout) == (1, "")


def test_record_and_replay(filled: StandInBucket, mnt: Mounted, tmp_path: Path) -> None:
    """Nothing is recorded, then what was opened; the recording is taken as a plan."""
    done = run(filled, "plan", "record", mnt.path)
    assert done.returncode == 1
    assert "nothing was opened" in done.stderr
    names = ["train/s03.tfrecord", "train/s01.tfrecord", "train/deep/er"]
    for name in (*names, *reversed(names)):
        (mnt / name).read_bytes()
    done = run(filled, "plan", "record", mnt.path, "-o", tmp_path / "run.json")
    assert done.returncode == 0, done.stderr
    assert orders(json.loads((tmp_path / "run.json").read_bytes())) == [names, names[::-1]]
    assert run(filled, "plan", "submit", mnt.path, tmp_path / "run.json").returncode == 0
    (plan,) = mnt.status()["plans"]
    assert (plan["epochs"], plan["entries"], plan["missing_files"]) == (2, 3, 0)


def test_check_against_what_is_there(filled: StandInBucket, mnt: Mounted, tmp_path: Path) -> None:
    """Missing files, other sizes and versions, and ranges beyond the end are found, on the mount and in the bucket."""
    file = tmp_path / "plan.json"
    where = [str(mnt.path)], [f"s3://{filled.name}/data", "--endpoint-url", filled.server.endpoint_url]
    files = [
        "train/absent", {"path": "train/s01.tfrecord", "size": 1}, {"path": "train/s02.tfrecord", "etag": "x"},
        "train/deep/er", f"s3://{filled.name}/elsewhere", "train/s03.tfrecord",
    ]  # fmt: skip
    file.write_text(json.dumps({"version": 1, "files": files, "epochs": [[0, 1, 2, [3, 5, 6], 4, 5]]}))
    for against in where:
        done = run(filled, "plan", "check", file, "--json", "--against", *against)
        said = json.loads(done.stdout)["problems"]
        assert done.returncode == 1
        words = ["absent: is not there", "bytes, not 1", "another version", "ends at 11", "elsewhere is not below"]
        assert [any(word in text for text in said) for word in words] == [True] * 5, said
        assert len(said) == 5
    file.write_text("train/*.tfrecord\nodd*\n")
    for against in where:
        done = run(filled, "plan", "check", file, "--against", *against)
        assert done.returncode == 0, done.stderr
