"""The data: made once, and only what the chosen scenarios need.

Most objects are computed by the stand-in. TFRecord files are real ones on the disk under test, served from there and
locked in memory, so that the stand-in's disk is nobody's limit; the contender `local` reads copies, which are not.
"""

from __future__ import annotations

import os
import shutil
import struct
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from random import Random

from awscrt.checksums import crc32c

from bench import machine
from bench.contender import File
from tests.s3stub import S3Stub, ramp

STREAM_BYTES = 256_000_000
LARGE_BYTES = 1 << 30
SHARDS = 32
RECORDS_PER_SHARD = 125
RECORD_BYTES = 256_000
SMALL_FILES = 400
SMALL_BYTES = 1 << 20
FIRST_READS = 100
BIG_FILES = 16
BIG_BYTES = (10 << 30) // BIG_FILES
PLAIN_FILES = 128
PLAIN_BYTES = 8 << 20
RAW_FILES = 4
RAW_BYTES = 384 << 20

RESNET = (128, 146, 114_660)
COSMOFLOW = (512, 1, 2_828_486)
"""Files, records of each, and bytes of a record: the workloads of MLPerf Storage, with fewer and shorter files."""

UNET_FILES = 128
UNET_BYTES = (14_700_000, 6_800_000)
"""Mean and deviation: a tenth of unet3d's."""


class Data:
    """The bucket's content by kind, each made when first asked for.

    Args:
        stub: gets the objects. served, local: directories for those that are files. until: keeps them in memory.
    """

    def __init__(self, stub: S3Stub, served: Path, local: Path, until: ExitStack) -> None:
        self._stub = stub
        self._served = served
        self._local = local
        self._until = until

    @cached_property
    def stream(self) -> list[File]:
        """One object."""
        return [self._ramp("stream/object", STREAM_BYTES)]

    @cached_property
    def large(self) -> list[File]:
        """One object that is also a local file."""
        self._stub.put_ramp("large/object", LARGE_BYTES)
        (self._local / "large").mkdir()
        with (self._local / "large/object").open("wb") as file:
            for start in range(0, LARGE_BYTES, 64 << 20):
                file.write(ramp(start, min(LARGE_BYTES, start + (64 << 20))))
        return [File("large/object", LARGE_BYTES)]

    @cached_property
    def shards(self) -> list[File]:
        """TFRecord files, also on the local disk."""
        files = self._tfrecords("shards", SHARDS, RECORDS_PER_SHARD, RECORD_BYTES)
        shutil.copytree(self._served / "shards", self._local / "shards")
        return files

    @cached_property
    def resnet(self) -> list[File]:
        """Shards of small records."""
        return self._tfrecords("resnet", *RESNET)

    @cached_property
    def cosmoflow(self) -> list[File]:
        """Files of one record each."""
        return self._tfrecords("cosmoflow", *COSMOFLOW)

    @cached_property
    def unet(self) -> list[File]:
        """Files that are one sample each, of very different sizes."""
        random = Random(0)
        sizes = [max(1 << 20, int(random.gauss(*UNET_BYTES))) for _ in range(UNET_FILES)]
        return [self._ramp(f"unet/{number:03d}.npz", size) for number, size in enumerate(sizes)]

    @cached_property
    def raw(self) -> list[File]:
        """A few files that are read in segments."""
        return [self._ramp(f"raw/{number}.bin", RAW_BYTES) for number in range(RAW_FILES)]

    @cached_property
    def plain(self) -> list[File]:
        """Files of one size."""
        return [self._ramp(f"plain/{number:03d}.bin", PLAIN_BYTES) for number in range(PLAIN_FILES)]

    @cached_property
    def small(self) -> list[File]:
        """Some of many files in one directory, in an order that no read-ahead can guess."""
        self._stub.synthesize("small/", SMALL_FILES, SMALL_BYTES)
        chosen = Random(0).sample(range(SMALL_FILES), FIRST_READS)
        return [File(f"small/{number:08d}", SMALL_BYTES) for number in chosen]

    @cached_property
    def many(self) -> list[File]:
        """All of many files, in one order that is not that of their names."""
        assert self.small
        numbers = Random(1).sample(range(SMALL_FILES), SMALL_FILES)
        return [File(f"small/{number:08d}", SMALL_BYTES) for number in numbers]

    @cached_property
    def big(self) -> list[File]:
        """Zeros, 10 GiB of them."""
        for number in range(BIG_FILES):
            self._stub.put_sparse(f"big/{number:02d}", BIG_BYTES)
        return [File(f"big/{number:02d}", BIG_BYTES) for number in range(BIG_FILES)]

    def _ramp(self, key: str, size_bytes: int) -> File:
        self._stub.put_ramp(key, size_bytes)
        return File(key, size_bytes)

    def _tfrecords(self, kind: str, shards: int, records: int, record_bytes: int) -> list[File]:
        (self._served / kind).mkdir()
        files = []
        for number in range(shards):
            key = f"{kind}/shard-{number:05d}.tfrecord"
            path = self._served / key
            write_tfrecords(path, Random(number), records, record_bytes)
            machine.lock_in_memory(path, self._until)
            self._stub.put(key, path)
            files.append(File(key, path.stat().st_size))
        return files


def write_tfrecords(
    path: Path, random: Random, records: int = RECORDS_PER_SHARD, record_bytes: int = RECORD_BYTES
) -> None:
    """A TFRecord file: for each record its length, masked CRC32C of that, the data, masked CRC32C of that."""
    with path.open("wb") as file:
        for _ in range(records):
            record = random.randbytes(record_bytes)
            length = struct.pack("<Q", len(record))
            file.write(length + _masked_crc(length) + record + _masked_crc(record))
        file.flush()
        os.fsync(file.fileno())


def _masked_crc(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
