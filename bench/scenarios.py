"""What is measured: the work, on which data, behind which network, and what has to come out.

The data is made once, and only what the chosen scenarios need. Streams, small and huge objects are computed by the
stand-in; the shards are real TFRecord files on the disk under test, served from there by the stand-in and read in
place by the contender `local`.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from random import Random

from awscrt.checksums import crc32c

from bench import machine
from bench.child import BenchError
from bench.contenders import File, Running
from bench.summary import Sample, Target, percentile
from tests.s3stub import S3Stub, ramp

FIRST_BYTE_MS = 30.0
"""About the median of S3 itself."""

RATE_PER_CONNECTION = 90e6
"""Bytes per second: what AWS says one connection yields."""

AGGREGATE_RATE = 400e6
"""Bytes per second, of all connections: low enough that two cores serving and reading are not the limit."""

STREAM_BYTES = 256_000_000
SHARDS = 32
RECORDS_PER_SHARD = 125
RECORD_BYTES = 256_000
SMALL_FILES = 400
SMALL_BYTES = 1 << 20
FIRST_READS = 100
BIG_FILES = 16
BIG_BYTES = (10 << 30) // BIG_FILES

CHECKED_PIECES = 16
CHECKED_BYTES = 4096
"""What is compared with what is in the bucket after a stream was timed; of shards, TensorFlow checks all."""


class Data:
    """The bucket's content by kind, each made when first asked for.

    Args:
        stub: gets the objects. local: a directory for those that are files. until: keeps them in memory.
    """

    def __init__(self, stub: S3Stub, local: Path, until: ExitStack) -> None:
        self._stub = stub
        self._local = local
        self._until = until

    @cached_property
    def stream(self) -> list[File]:
        """One object."""
        self._stub.put_ramp("stream/object", STREAM_BYTES)
        return [File("stream/object", STREAM_BYTES)]

    @cached_property
    def shards(self) -> list[File]:
        """TFRecord files with random records."""
        (self._local / "shards").mkdir()
        files = []
        for number in range(SHARDS):
            key = f"shards/shard-{number:05d}.tfrecord"
            path = self._local / key
            write_tfrecords(path, Random(number))
            machine.lock_in_memory(path, self._until)
            self._stub.put(key, path)
            files.append(File(key, path.stat().st_size))
        return files

    @cached_property
    def small(self) -> list[File]:
        """Some of many files in one directory, in an order that no read-ahead can guess."""
        self._stub.synthesize("small/", SMALL_FILES, SMALL_BYTES)
        chosen = Random(0).sample(range(SMALL_FILES), FIRST_READS)
        return [File(f"small/{number:08d}", SMALL_BYTES) for number in chosen]

    @cached_property
    def big(self) -> list[File]:
        """Zeros, 10 GiB of them."""
        for number in range(BIG_FILES):
            self._stub.put_sparse(f"big/{number:02d}", BIG_BYTES)
        return [File(f"big/{number:02d}", BIG_BYTES) for number in range(BIG_FILES)]


def write_tfrecords(path: Path, random: Random) -> None:
    """A TFRecord file: for each record its length, masked CRC32C of that, the data, masked CRC32C of that."""
    with path.open("wb") as file:
        for _ in range(RECORDS_PER_SHARD):
            record = random.randbytes(RECORD_BYTES)
            length = struct.pack("<Q", len(record))
            file.write(length + _masked_crc(length) + record + _masked_crc(record))
        file.flush()
        os.fsync(file.fileno())


def _masked_crc(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One table of the report.

    Args:
        about: what is done. files: the data for it. measure: do it, and return what only it measures.
        contenders: by name, in order of the first round. reference: who is 1.0 in the column of ratios.
        metrics: columns; the first one is what ratios are formed of.
        kept: contenders are started once and have done the work once before; else fresh for every run, and caches
            are dropped before it.
        cache_bytes: the most that is kept; None for each contender's default.
        max_runs: for what does not vary much and takes long. network: knobs of the stand-in.
    """

    name: str
    about: str
    files: Callable[[Data], list[File]]
    measure: Callable[[Running, list[File]], Sample]
    contenders: tuple[str, ...]
    reference: str
    metrics: tuple[str, ...]
    targets: tuple[Target, ...] = ()
    kept: bool = False
    cache_bytes: int | None = None
    max_runs: int | None = None
    network: dict[str, float] = field(
        default_factory=lambda: {
            "latency_ms": FIRST_BYTE_MS,
            "rate_per_connection": RATE_PER_CONNECTION,
            "aggregate_rate": AGGREGATE_RATE,
        }
    )


def _stream(running: Running, files: list[File]) -> Sample:
    seconds = running.stream(files)
    for file in files:
        with (running.root / file.key).open("rb") as content:
            for start in Random(0).sample(range(file.size_bytes - CHECKED_BYTES), CHECKED_PIECES):
                content.seek(start)
                if content.read(CHECKED_BYTES) != ramp(start, start + CHECKED_BYTES):
                    raise BenchError(f"wrong bytes at {start} of {file.key}")
    return {"seconds": seconds}


def _epoch(running: Running, files: list[File]) -> Sample:
    return {"seconds": running.epoch(files)}


def _first_reads(running: Running, files: list[File]) -> Sample:
    seconds = running.first_reads(files)
    quantiles = {f"p{percent}_ms": 1000 * percentile(seconds, percent / 100) for percent in (50, 99)}
    return {"seconds": sum(seconds), **quantiles}


def _memory(running: Running, files: list[File]) -> Sample:
    seconds = running.stream(files)
    assert running.pid is not None
    rss, pss, peak = machine.memory_bytes(running.pid)
    return {"seconds": seconds, "rss_mib": rss / 2**20, "pss_mib": pss / 2**20, "peak_rss_mib": peak / 2**20}


_OURS = "s3prefetchfs"

SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            name="cold-stream",
            about=f"one object of {STREAM_BYTES // 1_000_000} MB, nothing cached; mounts are read by dd bs=1M",
            files=lambda data: data.stream,
            measure=_stream,
            contenders=("downloader", _OURS, "rclone"),
            reference="downloader",
            metrics=("mb_per_s", "s3_mb", "gets", "start_s", "cpu_s_per_gb"),
            targets=(Target(_OURS, "mb_per_s", 0.85, versus="downloader"),),
        ),
        Scenario(
            name="cold-epoch",
            about=f"{SHARDS} TFRecord shards of 32 MB, nothing cached; mounts are read by TFRecordDataset, "
            "interleave(cycle_length=16), and the downloader fetches them, no more",
            files=lambda data: data.shards,
            measure=_epoch,
            contenders=("downloader", _OURS, "rclone"),
            reference="downloader",
            metrics=("mb_per_s", "s3_mb", "gets", "start_s", "cpu_s_per_gb"),
            targets=(Target(_OURS, "mb_per_s", 0.80, versus="downloader"),),
        ),
        Scenario(
            name="warm-epoch",
            about="the same epoch once more: cached on disk, and in the page cache as the epoch before left it",
            files=lambda data: data.shards,
            measure=_epoch,
            contenders=("rclone", _OURS, "local"),
            reference="rclone",
            metrics=("mb_per_s", "s3_mb", "gets", "cpu_s_per_gb"),
            targets=(Target(_OURS, "mb_per_s", 1.5, versus="rclone"),),
            kept=True,
        ),
        Scenario(
            name="first-read",
            about=f"open and read of 4096 bytes, {FIRST_READS} files one after another in random order; their "
            f"directory was listed; the stand-in's first byte takes {FIRST_BYTE_MS:g} ms of it",
            files=lambda data: data.small,
            measure=_first_reads,
            contenders=("downloader", _OURS, "rclone"),
            reference="downloader",
            metrics=("p50_ms", "p99_ms", "s3_mb", "gets"),
            targets=(Target(_OURS, "p50_ms", FIRST_BYTE_MS + 15, at_most=True),),
        ),
        Scenario(
            name="memory",
            about=f"10 GiB in {BIG_FILES} files, all read at once by as many dd; the network is not limited; "
            "caches hold 4 GiB; memory is the sum over the daemon and its workers, when all is read",
            files=lambda data: data.big,
            measure=_memory,
            contenders=("downloader", _OURS),
            reference="downloader",
            metrics=("rss_mib", "peak_rss_mib", "pss_mib", "mb_per_s", "s3_mb", "cpu_s_per_gb"),
            targets=(Target(_OURS, "rss_mib", 500, at_most=True),),
            cache_bytes=4 << 30,
            max_runs=3,
            network={"latency_ms": 0, "rate_per_connection": 0, "aggregate_rate": 0},
        ),
    )
}
