"""Unmodified TensorFlow reads the mount: tf.io.gfile for names and files, tf.data for records, from every server."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.mount.conftest import Mount
from tests.mount.mounted import Mounted
from tests.s3stub import ramp
from tests.servers import Bucket, StandInBucket

SHARDS = 4
RECORDS = 50
RECORD_BYTES = 30_000
"""Records of one shard are 1.5 MB: a few chunks, none of them on a record's border."""


@pytest.fixture(scope="module")
def tf() -> Any:
    """TensorFlow, imported once: it takes seconds."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import tensorflow
    return tensorflow


@dataclass(frozen=True)
class Dataset:
    """A mount with TFRecord shards below train/, and the records that were put there, by shard."""

    mounted: Mounted
    records: dict[str, list[bytes]]
    files: dict[str, bytes]

    @property
    def pattern(self) -> str:
        return os.fspath(self.mounted / "train" / "shard-*.tfrecord")

    def path(self, name: str) -> str:
        return os.fspath(self.mounted / name)


@pytest.fixture(scope="module")
def dataset(tf: Any, any_bucket: Bucket, module_mount: Mount, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    shard_path = tmp_path_factory.mktemp("shards") / "shard"
    records: dict[str, list[bytes]] = {}
    files: dict[str, bytes] = {}
    for shard in range(SHARDS):
        name = f"shard-{shard:05d}.tfrecord"
        # What a record is, and from which shard, can be told from any of its bytes.
        records[name] = [
            ramp(at, at + RECORD_BYTES, seed=shard) for at in range(0, RECORDS * RECORD_BYTES, RECORD_BYTES)
        ]
        with tf.io.TFRecordWriter(os.fspath(shard_path)) as writer:
            for record in records[name]:
                writer.write(record)
        files[f"train/{name}"] = shard_path.read_bytes()
    files["train/nested/notes.txt"] = b"first line\nsecond line\n"
    for key, content in files.items():
        any_bucket.put(key, content)
    return Dataset(module_mount(any_bucket, "--workers", "1"), records, files)


def test_glob_finds_the_shards(tf: Any, dataset: Dataset) -> None:
    """tf.io.gfile.glob gives the shards, and nothing for a pattern that nothing matches."""
    assert sorted(tf.io.gfile.glob(dataset.pattern)) == [
        dataset.path(f"train/{name}") for name in sorted(dataset.records)
    ]
    assert tf.io.gfile.glob(dataset.path("train/*.csv")) == []


def test_glob_costs_a_listing(tf: Any, module_bucket: StandInBucket, module_mount: Mount) -> None:
    """tf.io.gfile.glob over 100,000 keys is 100 Lists for them, and none the second time; never a HEAD or GET."""
    module_bucket.synthesize("train/shard-", 100_000, 1)
    mounted = module_mount(module_bucket, "--workers", "1", "--metadata-ttl", "indefinite")
    (mounted / "train").stat()
    module_bucket.clear_log()
    for requests in (100, 0):
        assert len(tf.io.gfile.glob(os.fspath(mounted / "train/shard-*"))) == 100_000
        assert [(record.verb, record.key) for record in module_bucket.log()] == [("LIST", "train/")] * requests
        module_bucket.clear_log()


def test_walk_and_listdir_see_the_tree(tf: Any, dataset: Dataset) -> None:
    """tf.io.gfile.walk and listdir see every directory and file once."""
    walked = [(top, sorted(below), sorted(files)) for top, below, files in tf.io.gfile.walk(dataset.path("train"))]
    assert [(Path(top), below, files) for top, below, files in walked] == [
        (dataset.mounted / "train", ["nested"], sorted(dataset.records)),
        (dataset.mounted / "train/nested", [], ["notes.txt"]),
    ]
    names = [name.rstrip("/") for name in tf.io.gfile.listdir(dataset.path("train"))]
    assert sorted(names) == ["nested", *sorted(dataset.records)]


def test_stat_exists_and_isdir(tf: Any, dataset: Dataset) -> None:
    """tf.io.gfile.stat, exists and isdir say what is there and what is not."""
    for key, content in dataset.files.items():
        assert tf.io.gfile.exists(dataset.path(key))
        assert not tf.io.gfile.isdir(dataset.path(key))
        assert tf.io.gfile.stat(dataset.path(key)).length == len(content)
    assert tf.io.gfile.isdir(dataset.path("train/nested"))
    assert not tf.io.gfile.exists(dataset.path("train/absent"))
    with pytest.raises(tf.errors.NotFoundError):
        tf.io.gfile.stat(dataset.path("train/absent"))


def test_gfile_reads_and_seeks(tf: Any, dataset: Dataset) -> None:
    """GFile reads lines, seeks to anywhere, and reads to the end."""
    with tf.io.gfile.GFile(dataset.path("train/nested/notes.txt")) as notes:
        assert notes.readline() == "first line\n"
        assert notes.read() == "second line\n"
    key, content = next(iter(dataset.files.items()))
    with tf.io.gfile.GFile(dataset.path(key), "rb") as shard:
        for at in (1_000_003, 5, len(content) - 10):
            shard.seek(at)
            assert shard.tell() == at
            assert shard.read(1000) == content[at : at + 1000]


def test_gfile_copies_out(tf: Any, dataset: Dataset, tmp_path: Path) -> None:
    """tf.io.gfile.copy makes an equal local file."""
    key, content = next(iter(dataset.files.items()))
    tf.io.gfile.copy(dataset.path(key), os.fspath(tmp_path / "copy"))
    assert (tmp_path / "copy").read_bytes() == content


def test_gfile_cannot_write(tf: Any, dataset: Dataset) -> None:
    """Writing through tf.io.gfile fails, and says so."""
    with pytest.raises(tf.errors.OpError), tf.io.gfile.GFile(dataset.path("train/new"), "w") as new:
        new.write("x")


def test_records_in_order(tf: Any, dataset: Dataset) -> None:
    """TFRecordDataset over the files in order gives exactly the records that were written, in order."""
    paths = [dataset.path(f"train/{name}") for name in dataset.records]
    read = [record.numpy() for record in tf.data.TFRecordDataset(paths)]
    assert read == [record for records in dataset.records.values() for record in records]


@pytest.mark.parametrize("way", ["parallel reads", "interleave"])
def test_records_from_many_files_at_once(tf: Any, dataset: Dataset, way: str) -> None:
    """num_parallel_reads and interleave over shuffled files give every record of every shard once."""
    paths = tf.data.Dataset.list_files(dataset.pattern, shuffle=True, seed=7)
    if way == "parallel reads":
        records = tf.data.TFRecordDataset(paths, num_parallel_reads=SHARDS)
    else:
        records = paths.interleave(tf.data.TFRecordDataset, cycle_length=SHARDS, num_parallel_calls=2)
    read = sorted(_read_epochs(records, epochs=2))
    assert read == sorted(2 * [record for records in dataset.records.values() for record in records])


def _read_epochs(records: Any, epochs: int) -> Iterator[bytes]:
    for batch in records.repeat(epochs).batch(16).prefetch(2):
        yield from batch.numpy()
