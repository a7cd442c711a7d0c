"""A declared access plan: which files, or byte ranges of files, will be read, in which order, epoch by epoch.

A plan is a value: nothing here knows a bucket, a reader or a clock. 100,000 files in 90 epochs are nine million
entries, so an epoch is a buffer of file numbers, four bytes each, and plans whose epochs are all alike share one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Order(Enum):
    """Whether the order within an epoch is known, or only that each file is read once."""

    STRICT = "strict"
    ANY = "any"


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file of a plan.

    Args:
        path: as the plan says it: relative to the mountpoint, absolute, or `s3://bucket/key`.
        size_bytes, etag: of the version that was there when the plan was made; with both, the plan is a manifest.
        is_pattern: the path is a glob, which stands for the files it matches, in name order (text plans only).
    """

    path: str
    size_bytes: int | None = None
    etag: str | None = None
    is_pattern: bool = False


@dataclass(frozen=True, slots=True)
class Epoch:
    """The entries of one epoch, in reading order.

    Args:
        files: numbers in `Plan.files`, as unsigned 32-bit integers (a memoryview of format "I").
        ranges: offset and length of each entry, two unsigned 64-bit integers (format "Q"); a length of 0 means the
            whole file. None if all entries are whole files.
    """

    files: memoryview
    ranges: memoryview | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """See the module's docstring.

    Args:
        name: of the plan; a file name.
        interleave: how many files are read at once (tf.data's `cycle_length` or `num_parallel_reads`), at least 1.
        files: each once.
        epochs: at least one, each with at least one entry.
    """

    name: str
    order: Order
    interleave: int
    files: list[PlannedFile]
    epochs: tuple[Epoch, ...]


@dataclass(frozen=True, slots=True)
class PlanProgress:
    """How far a plan has come, for people and programs.

    Attributes:
        state: "waiting" (nothing read yet), "running", "distrusted" (readers do something else), or "finished".
        epochs, epoch: how many there are, and the number of the current one, from 0.
        entries, position: how many the current epoch has, and the first that is not finished.
        missing_files: files of the plan that the bucket does not have.
        bytes_ahead: planned bytes beyond the reader that are in the cache or on their way, without a gap.
        consumed_bytes_per_s: the readers' rate while they do not wait for us; None before it is known.
        deviations: opens that were not where the plan has them, and entries that were skipped.
        confidence: in (0, 1], how far the plan is trusted: the share of the cache used for reading ahead of it.
        predicted_stall_s: how long readers will wait, at the present rates, for what cannot be there in time.
    """

    name: str
    state: str
    order: str
    interleave: int
    epochs: int
    epoch: int
    entries: int
    position: int
    missing_files: int
    bytes_ahead: int
    consumed_bytes_per_s: float | None
    deviations: int
    confidence: float
    predicted_stall_s: float
