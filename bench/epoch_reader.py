"""A process that reads as a training job does, with plain tf.data. python -m bench.epoch_reader WARM_UP_FILE [MODULE]

TensorFlow is imported, and has read a local file, before it says that it is ready. Records are counted inside the
graph, so that Python touches one number per record and not its bytes; TFRecordDataset checks the CRC of every one.
A MODULE is imported for what it adds to TensorFlow: `tensorflow_io` has a filesystem for s3://.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import tensorflow as tf

from bench.child import serve

CYCLE_LENGTH = 16
PARALLEL_CALLS = 16
"""As many as are interleaved: reads of a network filesystem wait, so the number of cores says nothing."""

BATCH = 32
PIECE_BYTES = 1 << 20

TRANSFER_BYTES = 262_144
"""TFRecordDataset's buffer in DLIO, the loader that MLPerf Storage is made of."""


def epoch(paths: list[str]) -> dict[str, Any]:
    """One pass over TFRecord files; the time is from the first batch asked for to the last one received.

    What comes after that is not reading: with autotuning, tf.data ends an iterator at the next wake-up of its model
    thread, which sleeps 10 ms, then twice as long each time: after 1.28 s, 2.56 s, 5.12 s.
    """
    records = (
        tf.data.Dataset.from_tensor_slices(paths)
        .interleave(tf.data.TFRecordDataset, cycle_length=CYCLE_LENGTH, num_parallel_calls=PARALLEL_CALLS)
    )  # fmt: skip
    return _consumed(records, BATCH, 0.0)


def train(paths: list[str], parallel_reads: int, batch: int, step_s: float) -> dict[str, Any]:
    """The same as DLIO reads: records of `parallel_reads` files in turn, and a sleep of `step_s` for each batch.

    Returns:
        As `epoch`, and for each step what it waited, and its computation, in seconds.
    """
    records = tf.data.TFRecordDataset(paths, buffer_size=TRANSFER_BYTES, num_parallel_reads=parallel_reads)
    return _consumed(records, batch, step_s)


def _consumed(dataset: tf.data.Dataset, batch: int, step_s: float) -> dict[str, Any]:
    records = record_bytes = 0
    waits_s, computes_s = [], []
    began_s = asked_s = time.perf_counter()
    for lengths in dataset.map(lambda record: tf.strings.length(record)).batch(batch).prefetch(2):
        had_s = time.perf_counter()
        records += len(lengths)
        record_bytes += int(tf.reduce_sum(lengths))
        if step_s:
            time.sleep(step_s)
        waits_s.append(had_s - asked_s)
        asked_s = time.perf_counter()
        computes_s.append(asked_s - had_s)
    return {
        "seconds": asked_s - began_s,
        "first_batch_s": waits_s[0],
        "records": records,
        "record_bytes": record_bytes,
        "waits_s": waits_s,
        "computes_s": computes_s,
    }


def stream(paths: list[str]) -> dict[str, Any]:
    """Read files whole through tf.io.gfile, all at once."""
    began_s = time.perf_counter()
    with ThreadPoolExecutor(len(paths)) as threads:
        list(threads.map(_read, paths))
    return {"seconds": time.perf_counter() - began_s}


def _read(path: str) -> None:
    with tf.io.gfile.GFile(path, "rb") as file:
        while file.read(PIECE_BYTES):
            pass


def first_reads(paths: list[str], count: int) -> dict[str, Any]:
    """Seconds to open each file and read its first bytes, through tf.io.gfile."""
    seconds = []
    for path in paths:
        began_s = time.perf_counter()
        with tf.io.gfile.GFile(path, "rb") as file:
            file.read(count)
            seconds.append(time.perf_counter() - began_s)
    return {"seconds": seconds}


_WORKS: dict[str, Callable[..., dict[str, Any]]] = {work.__name__: work for work in (epoch, train, stream, first_reads)}

if __name__ == "__main__":
    if sys.argv[2:]:
        importlib.import_module(sys.argv[2])
    epoch([sys.argv[1]])
    serve(lambda work="epoch", **arguments: _WORKS[work](**arguments))
