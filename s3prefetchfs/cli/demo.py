"""`s3prefetchfs demo`: the whole path on one machine, in a minute, without an account.

It starts an S3 server (moto) on loopback, uploads a small TFRecord dataset, mounts the bucket with the same command
a user would type, and reads it with a tf.data pipeline that knows nothing of S3. What it started it stops, and what
it wrote it removes, however it ends. moto and TensorFlow are the `demo` extra; mounting never needs them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from s3prefetchfs.errors import UserError

BUCKET = "demo"
SHARDS = 16
RECORDS_PER_SHARD = 64
RECORD_BYTES = 128 * 1024
BATCH = 16
EPOCHS = 2
START_TIMEOUT_S = 30.0
"""What the S3 server gets to start: moto imports for a few seconds."""


@dataclass(frozen=True, slots=True)
class _Epoch:
    """What one pass over the dataset took, in bytes and seconds."""

    read_bytes: int
    from_s3_bytes: int
    seconds: float
    first_batch_s: float


@click.command()
def demo() -> None:
    """Try it: serve, mount and train from a small bucket on this machine.

    Starts an S3 server on loopback, uploads a TFRecord dataset of 128 MiB, mounts it, reads it twice with an
    unmodified tf.data pipeline and shows where the bytes came from. Leaves nothing behind. Needs TensorFlow and
    moto: pip install 's3prefetchfs[demo]'.
    """
    missing = [name for name in ("tensorflow", "moto") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"the demo needs {' and '.join(missing)}", "pip install 's3prefetchfs[demo]'")
    # Before TensorFlow is imported, which otherwise greets its user with a page of notes on the CPU.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    console = Console()
    place = Path(tempfile.mkdtemp(prefix="s3prefetchfs-demo-"))
    # Nothing of the user's own configuration may send the demo anywhere but to loopback.
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("AWS_", "S3PREFETCHFS_"))}
    environment |= {"AWS_ACCESS_KEY_ID": "demo", "AWS_SECRET_ACCESS_KEY": "demo", "AWS_DEFAULT_REGION": "us-east-1"}
    environment |= {"AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull, "NO_PROXY": "127.0.0.1"}
    try:
        with _s3_server(place, environment) as endpoint_url:
            console.print(f"S3 server (moto) on {endpoint_url}")
            _upload(place, endpoint_url, environment, console)
            with _mounted(place, endpoint_url, environment) as mountpoint:
                console.print(f"s3://{BUCKET} mounted on {mountpoint}")
                epochs = [_read_epoch(mountpoint, number, console) for number in range(EPOCHS)]
        console.print(_table(epochs))
    finally:
        shutil.rmtree(place, ignore_errors=True)


@contextlib.contextmanager
def _s3_server(place: Path, environment: dict[str, str]) -> Iterator[str]:
    """An S3 server with an empty bucket, as the URL of its endpoint."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log_path = place / "s3-server.log"
    with log_path.open("wb") as log_file:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=log_file,
        )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            if server.poll() is not None or time.monotonic() > deadline:
                raise UserError("the demo's S3 server does not start", log_path.read_text()[-2000:])
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def _upload(place: Path, endpoint_url: str, environment: dict[str, str], console: Console) -> None:
    """Write the TFRecord shards and put them into the bucket."""
    import boto3
    import tensorflow as tf

    client = boto3.client(
        "s3",
        endpoint_url=endpoint_url,
        region_name=environment["AWS_DEFAULT_REGION"],
        aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
    )
    client.create_bucket(Bucket=BUCKET)
    shard = place / "shard.tfrecord"
    with _progress(console) as progress:
        for number in progress.track(range(SHARDS), description="uploading shards"):
            with tf.io.TFRecordWriter(os.fspath(shard)) as writer:
                for _ in range(RECORDS_PER_SHARD):
                    writer.write(os.urandom(RECORD_BYTES))
            client.upload_file(os.fspath(shard), BUCKET, f"train/shard-{number:05d}.tfrecord")
    shard.unlink()
    client.close()


@contextlib.contextmanager
def _mounted(place: Path, endpoint_url: str, environment: dict[str, str]) -> Iterator[Path]:
    """The bucket, mounted as a user would mount it."""
    command = [sys.executable, "-m", "s3prefetchfs"]
    mountpoint = place / "mnt"
    mountpoint.mkdir()
    options = ["--endpoint-url", endpoint_url, "--cache-dir", os.fspath(place / "cache")]
    mounting = [*command, "mount", BUCKET, os.fspath(mountpoint), *options]
    if subprocess.run(mounting, env=environment).returncode != 0:
        raise UserError("the demo cannot mount", "the lines above say why")
    try:
        yield mountpoint
    finally:
        unmounting = [*command, "umount", os.fspath(mountpoint)]
        if subprocess.run(unmounting, env=environment).returncode != 0:
            subprocess.run([*unmounting, "--lazy"], env=environment)


def _read_epoch(mountpoint: Path, number: int, console: Console) -> _Epoch:
    """One pass with plain TensorFlow. The mount is only a directory here."""
    import tensorflow as tf

    before_bytes = _fetched_bytes(mountpoint)
    started_s = time.monotonic()
    dataset = (
        tf.data.Dataset.list_files(os.fspath(mountpoint / "train/*.tfrecord"), shuffle=True, seed=number)
        .interleave(tf.data.TFRecordDataset, cycle_length=8, num_parallel_calls=4)
        .batch(BATCH)
        .prefetch(2)
    )
    read_bytes = 0
    first_batch_s = 0.0
    with _progress(console) as progress:
        task = progress.add_task(f"epoch {number + 1}", total=SHARDS * RECORDS_PER_SHARD)
        for batch in dataset:
            first_batch_s = first_batch_s or time.monotonic() - started_s
            read_bytes += sum(len(record) for record in batch.numpy())
            progress.advance(task, len(batch))
    seconds = time.monotonic() - started_s
    return _Epoch(read_bytes, _fetched_bytes(mountpoint) - before_bytes, seconds, first_batch_s)


def _fetched_bytes(mountpoint: Path) -> int:
    status: dict[str, Any] = json.loads((mountpoint / ".s3prefetchfs/status.json").read_bytes())
    fetched_bytes: int = status["fetch"]["bytes"]
    return fetched_bytes


def _progress(console: Console) -> Progress:
    columns = TextColumn("{task.description:18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=console)


def _table(epochs: list[_Epoch]) -> Table:
    table = Table(title="tf.data.TFRecordDataset over the mount")
    for heading in ("epoch", "from S3", "from cache", "MB/s", "first batch"):
        table.add_column(heading, justify="right")
    for number, epoch in enumerate(epochs, start=1):
        table.add_row(
            str(number),
            decimal(epoch.from_s3_bytes),
            decimal(max(0, epoch.read_bytes - epoch.from_s3_bytes)),
            f"{epoch.read_bytes / epoch.seconds / 1e6:.0f}",
            f"{epoch.first_batch_s * 1000:.0f} ms",
        )
    return table
