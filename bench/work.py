"""What is done and measured, contender by contender. A work takes a `Job` and returns figures, in `METRICS`' names."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from bench import machine
from bench.child import BenchError
from bench.contender import FIRST_READ_BYTES, File, Files, Running, run_all
from bench.summary import Sample, percentile, utilisation
from s3prefetchfs.core.plan import Epoch, Order, Plan, PlannedFile
from tests.s3stub import S3Stub, ramp

CHECKED_PIECES = 16
CHECKED_BYTES = 4096
"""What is compared with what is in the bucket after a stream was timed; of shards, TensorFlow checks all."""

PASSES = 8
"""A warm gigabyte is read in a fraction of a second: it is read so many times."""

RANDOM_BYTES = 128 << 10
RANDOM_READS = 16_384
RANDOM_JOBS = 8
OPEN_CYCLES = 2000

HEAD_START_S = 10.0
"""What a plan is declared before the training begins."""

SETTLING_S = 5.0
"""The start of a training run in which waiting does not count as such."""


@dataclass(slots=True)
class Job:
    """One contender's turn.

    Attributes:
        stub: the S3 end. cache_bytes: what the contender may keep; None if it was not told.
        series: lists of numbers to be drawn, by name.
    """

    running: Running
    files: list[File]
    stub: S3Stub
    cache_bytes: int | None
    series: dict[str, list[float]] = field(default_factory=dict)

    @property
    def mount(self) -> Files:
        """The contender as something with files.

        Raises:
            BenchError: it is not.
        """
        if not isinstance(self.running, Files):
            raise BenchError("it shows no files")
        return self.running

    def s3_bytes(self) -> int:
        """What was sent since the log was cleared."""
        return sum(record.body_bytes for record in self.stub.log("GET"))

    def declare(self, epochs: list[list[int]], interleave: int) -> bool:
        """Tell the contender the order of whole files, epoch by epoch; whether it listens."""
        return self._declare(tuple(Epoch(memoryview(array("I", order))) for order in epochs), interleave)

    def declare_once(self, interleave: int) -> float:
        """Tell the contender that each file is read once, in this order; the seconds that took."""
        began_s = time.perf_counter()
        self.declare([list(range(len(self.files)))], interleave)
        return time.perf_counter() - began_s

    def declare_ranges(self, ranges: list[tuple[int, int, int]]) -> bool:
        """Tell the contender one epoch of (file, offset, length)."""
        numbers = memoryview(array("I", [number for number, _, _ in ranges]))
        bounds = memoryview(array("Q", [bound for _, *pair in ranges for bound in pair]))
        return self._declare((Epoch(numbers, bounds),), 1)

    def _declare(self, epochs: tuple[Epoch, ...], interleave: int) -> bool:
        planned = [PlannedFile(file.key) for file in self.files]
        return self.running.declare(Plan("bench", Order.STRICT, interleave, planned, epochs))

    def add_steps(self, answer: dict[str, Any]) -> None:
        """Note what each step of an epoch waited and took."""
        for name in ("waits_s", "computes_s"):
            self.series.setdefault(name, []).extend(answer.get(name, []))


Work = Callable[[Job], Sample]


def stream(job: Job) -> Sample:
    """Whole files of ramps, each by a sequential reader."""
    seconds = job.running.stream(job.files)
    if isinstance(job.running, Files) or job.running.root.exists():
        for file in job.files:
            with (job.running.root / file.key).open("rb") as content:
                for start in Random(0).sample(range(file.size_bytes - CHECKED_BYTES), CHECKED_PIECES):
                    content.seek(start)
                    if content.read(CHECKED_BYTES) != ramp(start, start + CHECKED_BYTES):
                        raise BenchError(f"wrong bytes at {start} of {file.key}")
    return {"seconds": seconds}


def epoch(job: Job) -> Sample:
    """One epoch of TFRecord files."""
    return _epoch(job)


def planned_epoch(job: Job) -> Sample:
    """The same; the time begins when the plan is declared, right before the reader starts."""
    declaring_s = job.declare_once(interleave=16)
    sample = _epoch(job)
    return {**sample, "seconds": sample["seconds"] + declaring_s}


def _epoch(job: Job) -> Sample:
    answer = job.running.epoch(job.files)
    job.add_steps(answer)
    first = {"first_batch_ms": 1000 * answer["first_batch_s"]} if "first_batch_s" in answer else {}
    return {"seconds": float(answer["seconds"]), **first}


def first_reads(job: Job) -> Sample:
    """Open and first bytes of files that were never read."""
    seconds = job.running.first_reads(job.files)
    quantiles = {f"p{percent}_ms": 1000 * percentile(seconds, percent / 100) for percent in (50, 99)}
    return {"seconds": sum(seconds), **quantiles}


def memory(job: Job) -> Sample:
    """Memory when all was read."""
    seconds = job.running.stream(job.files)
    assert job.running.pid is not None
    rss, pss, peak = machine.memory_bytes(job.running.pid)
    return {"seconds": seconds, "rss_mib": rss / 2**20, "pss_mib": pss / 2**20, "peak_rss_mib": peak / 2**20}


def _read_in(job: Job) -> None:
    """Have the files' pages in memory because they were read, not because they were written.

    What is written in small pieces lies in small folios, which are slower to copy; a file that a data set was
    downloaded to an hour ago has none of these.
    """
    if machine.may_drop_caches():
        machine.drop_caches()
    stream(job)


def warm_stream(job: Job) -> Sample:
    """A file that was read before, several times by dd, then by fio where there is one."""
    _read_in(job)
    seconds = sum(stream(job)["seconds"] for _ in range(PASSES))
    read_bytes = PASSES * sum(file.size_bytes for file in job.files)
    sample = {"seconds": seconds, "read_bytes": float(read_bytes)}
    if shutil.which("fio"):
        [path] = job.mount.listed(job.files)
        with tempfile.NamedTemporaryFile() as told:
            how = ["--rw=read", "--bs=1M", "--ioengine=psync", "--invalidate=0", "--readonly", f"--loops={PASSES}"]
            output = ["--output-format=json", f"--output={told.name}"]
            run_all([["fio", "--name=bench", f"--filename={path}", *how, *output]])
            fio_bytes_per_s = json.load(told)["jobs"][0]["read"]["bw_bytes"]
        sample |= {"fio_mb_per_s": fio_bytes_per_s / 1e6, "read_bytes": 2.0 * read_bytes, "dd_seconds": seconds}
        sample["mb_per_s"] = read_bytes / seconds / 1e6
    return sample


def warm_random(job: Job) -> Sample:
    """Random reads of a file that was read before, by one process and by several."""
    _read_in(job)
    [path] = job.mount.listed(job.files)
    sample, seconds = {}, 0.0
    for jobs in (1, RANDOM_JOBS):
        reads = RANDOM_READS // jobs
        took_s = job.mount.ask("random_reads", path=path, count=RANDOM_BYTES, jobs=jobs, reads=reads)["seconds"]
        sample[f"random_{jobs}_mb_per_s"] = jobs * reads * RANDOM_BYTES / took_s / 1e6
        seconds += took_s
    return {**sample, "seconds": seconds, "read_bytes": 2.0 * RANDOM_READS * RANDOM_BYTES}


def open_latency(job: Job) -> Sample:
    """Open, read and close of files that were read before."""
    paths = job.mount.listed(job.files)
    seconds = job.mount.ask("open_cycles", paths=paths, count=FIRST_READ_BYTES, cycles=OPEN_CYCLES)["seconds"]
    quantiles = {f"open_p{percent}_ms": 1000 * percentile(seconds, percent / 100) for percent in (50, 99)}
    return {"seconds": sum(seconds), **quantiles}


def many_files(job: Job) -> Sample:
    """Small files, whole, one after another in a declared order."""
    declaring_s = job.declare_once(interleave=1)
    answer = job.mount.ask("whole", paths=job.mount.listed(job.files))
    seconds = answer["seconds"] + declaring_s
    return {"seconds": seconds, "files_per_s": len(job.files) / seconds}


def orders(files: int, epochs: int, reshuffled: bool) -> list[list[int]]:
    """The order of files in each epoch: always that of the first one, or a new one."""
    numbers = list(range(files))
    return [Random(number if reshuffled else 0).sample(numbers, files) for number in range(epochs)]


def bound_bytes(dataset_bytes: int, cache_bytes: int, epochs: int) -> int:
    """What nobody can fetch less than, if every byte is read once in each epoch: D + (E - 1) (D - C)."""
    return dataset_bytes + (epochs - 1) * max(0, dataset_bytes - cache_bytes)


def epochs(count: int, *, reshuffled: bool, interleave: int = 1) -> Work:
    """Several epochs with a cache that is smaller than the dataset, by a plain reader or, interleaved, by TensorFlow.

    The page cache is dropped between them.
    """

    def work(job: Job) -> Sample:
        order = orders(len(job.files), count, reshuffled)
        job.declare(order, interleave)
        seconds, before = 0.0, job.s3_bytes()
        for numbers in order:
            machine.drop_caches()
            chosen = [job.files[number] for number in numbers]
            if interleave > 1:
                answer = job.running.epoch(chosen)
            else:
                answer = job.mount.ask("whole", paths=job.mount.listed(chosen))
            job.add_steps(answer)
            seconds += answer["seconds"]
            after = job.s3_bytes()
            job.series.setdefault("epoch_s3_mb", []).append((after - before) / 1e6)
            before = after
        dataset_bytes = sum(file.size_bytes for file in job.files)
        assert job.cache_bytes is not None
        bound = bound_bytes(dataset_bytes, job.cache_bytes, count)
        return {"seconds": seconds, "read_bytes": float(count * dataset_bytes), "of_bound": before / bound}

    return work


@dataclass(frozen=True, slots=True)
class Trainer:
    """A training job whose computation is a sleep.

    Args:
        rate: bytes per second that it consumes. parallel_reads: files that are read at once.
        batch: records in a step; 0 for whole files by plain reads in place of TensorFlow.
        record_bytes: of a record; 0 with plain reads. reshuffled: a new order in each epoch.
    """

    rate: float
    parallel_reads: int
    reshuffled: bool
    batch: int = 0
    record_bytes: int = 0

    def train(self, job: Job, files: list[File]) -> dict[str, Any]:
        """One epoch."""
        if self.batch:
            step_s = self.batch * self.record_bytes / self.rate
            how = {"work": "train", "parallel_reads": self.parallel_reads, "batch": self.batch, "step_s": step_s}
            return job.mount.epoch(files, **how)
        paths = job.mount.listed(files)
        samples = [(path, 0, file.size_bytes) for path, file in zip(paths, files, strict=True)]
        return job.mount.ask("train", samples=samples, bytes_per_s=self.rate, threads=self.parallel_reads)


def train(trainer: Trainer, first_pipe: float, warm_pipe: float, count: int = 3) -> Work:
    """Epochs of training through a narrow pipe, of another width after the first epoch; rates in bytes/s.

    The plan is declared HEAD_START_S before; contenders that take no plan begin at once.
    """

    def work(job: Job) -> Sample:
        order = orders(len(job.files), count, trainer.reshuffled)
        job.stub.configure(aggregate_rate=first_pipe)
        if job.declare(order, trainer.parallel_reads):
            time.sleep(HEAD_START_S)
        seconds, reached = 0.0, []
        for number, numbers in enumerate(order):
            machine.drop_caches()
            if number:
                job.stub.configure(aggregate_rate=warm_pipe)
            answer = trainer.train(job, [job.files[index] for index in numbers])
            job.add_steps(answer)
            seconds += answer["seconds"]
            reached.append(utilisation(answer["waits_s"], answer["computes_s"]))
        dataset_bytes = sum(file.size_bytes for file in job.files)
        return {
            "seconds": seconds,
            "read_bytes": float(count * dataset_bytes),
            "first_au": reached[0],
            "warm_au": sum(reached[1:]) / (count - 1),
        }

    return work


def segments(rate: float, count: int, low_bytes: int, high_bytes: int) -> Work:
    """Random segments of large files, in a declared order, consumed at `rate` bytes/s."""

    def work(job: Job) -> Sample:
        random = Random(0)
        ranges = []
        for _ in range(count):
            number, length = random.randrange(len(job.files)), random.randint(low_bytes, high_bytes)
            ranges.append((number, random.randrange(job.files[number].size_bytes - length), length))
        job.declare_ranges(ranges)
        paths = job.mount.listed(job.files)
        samples = [(paths[number], offset, length) for number, offset, length in ranges]
        answer = job.mount.ask("train", samples=samples, bytes_per_s=rate, threads=1)
        job.add_steps(answer)
        at_s = waited_s = 0.0
        for wait_s, compute_s in zip(answer["waits_s"], answer["computes_s"], strict=True):
            waited_s += max(0.0, min(wait_s, at_s + wait_s - SETTLING_S))
            at_s += wait_s + compute_s
        share = waited_s / (at_s - SETTLING_S)
        read_bytes = float(sum(length for _, _, length in ranges))
        return {"seconds": answer["seconds"], "read_bytes": read_bytes, "waiting_percent": 100 * share}

    return work


def accept_plan(files: int, count: int) -> Work:
    """A plan of many files in many orders: until it is in force, and what the daemon weighs then."""

    def work(job: Job) -> Sample:
        job.stub.synthesize("million/", files, 1 << 20)
        job.files = [File(f"million/{number:08d}", 1 << 20) for number in range(files)]
        order = orders(files, count, True)
        began_s = time.perf_counter()
        if not job.declare(order, 1):
            raise BenchError("it takes no plan")
        seconds = time.perf_counter() - began_s
        assert job.running.pid is not None
        rss, pss, peak = machine.memory_bytes(job.running.pid)
        sizes = {"rss_mib": rss / 2**20, "pss_mib": pss / 2**20, "peak_rss_mib": peak / 2**20}
        return {"seconds": seconds, "read_bytes": float(os.sysconf("SC_PAGE_SIZE")), "accept_s": seconds, **sizes}

    return work
