"""A process that reads epochs as a training job does, with plain tf.data. python -m bench.epoch_reader WARM_UP_FILE

TensorFlow is imported, and has read a local file, before it says that it is ready. Records are counted inside the
graph, so that Python touches one number per record and not its bytes; TFRecordDataset checks the CRC of every one.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import tensorflow as tf

from bench.child import serve

CYCLE_LENGTH = 16
PARALLEL_CALLS = 16
"""As many as are interleaved: reads of a network filesystem wait, so the number of cores says nothing."""

BATCH = 32


def epoch(paths: list[str]) -> dict[str, Any]:
    """One pass over TFRecord files; the time is from the first batch asked for to the last one received.

    What comes after that is not reading: with autotuning, tf.data ends an iterator at the next wake-up of its model
    thread, which sleeps 10 ms, then twice as long each time: after 1.28 s, 2.56 s, 5.12 s.
    """
    dataset = (
        tf.data.Dataset.from_tensor_slices(paths)
        .interleave(tf.data.TFRecordDataset, cycle_length=CYCLE_LENGTH, num_parallel_calls=PARALLEL_CALLS)
        .map(lambda record: tf.strings.length(record))
        .batch(BATCH)
        .prefetch(2)
    )
    records = record_bytes = 0
    first_s = seconds = 0.0
    began_s = time.perf_counter()
    for lengths in dataset:
        records += len(lengths)
        record_bytes += int(tf.reduce_sum(lengths))
        seconds = time.perf_counter() - began_s
        first_s = first_s or seconds
    return {"seconds": seconds, "first_batch_s": first_s, "records": records, "record_bytes": record_bytes}


if __name__ == "__main__":
    epoch([sys.argv[1]])
    serve(epoch)
