"""What is measured: the work, on which data, by whom, behind which network, and what has to come out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from bench import work
from bench.contender import File
from bench.contenders import DAEMON_READS, OURS, PLANNED
from bench.data import (
    BIG_FILES,
    COSMOFLOW,
    FIRST_READS,
    PLAIN_FILES,
    RESNET,
    SHARDS,
    SMALL_FILES,
    STREAM_BYTES,
    Data,
)
from bench.summary import Target

FIRST_BYTE_MS = 30.0
"""About the median of S3 itself."""

RATE_PER_CONNECTION = 90e6
"""Bytes per second: what AWS says one connection yields."""

AGGREGATE_RATE = 400e6
"""Bytes per second, of all connections: low enough that two cores serving and reading are not the limit."""

UNLIMITED: dict[str, Any] = {"latency_ms": 0, "rate_per_connection": 0, "aggregate_rate": 0}

LOADED: dict[str, Any] = {
    "latency": "lognormal:30:1.15",
    "rate_per_connection": RATE_PER_CONNECTION,
    "faults": [
        {"verb": "GET", "probability": 0.001, "delay_ms": 3000},
        {"verb": "GET", "probability": 0.005, "reset_after": 1 << 20},
    ],
}
"""An S3 that has much to do: p95 of the first byte is 200 ms, some requests stall, some are cut off."""

TRAINER_RATE = 100e6
"""Bytes per second that the emulated accelerators consume: two cores read that with time to spare."""

CACHED = 0.5
"""Of the dataset, in epochs that are trained."""

SEGMENT_RATE = min(250e6, 0.8 * AGGREGATE_RATE)


class Dropped(Enum):
    """What a kept contender loses before each run."""

    NOTHING = "nothing"
    MOUNT = "mount"
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One table of the report.

    Args:
        name: `group/variant`, or only the group. about: what is done. files: the data for it. work: does it.
        contenders: by name, in order of the first round. reference: who is 1.0 in the column of ratios.
        metrics: columns; the first one is what ratios are formed of.
        kept: contenders are started once and have streamed the files once before; else fresh for every run, and caches
            are dropped before it. dropped: what kept ones lose before each run.
        cache_bytes, cache_share: the most that is kept, or its share of the data; None for each contender's default.
        max_runs: for what does not vary much and takes long. network: knobs of the stand-in.
    """

    name: str
    about: str
    files: Callable[[Data], list[File]]
    work: work.Work
    contenders: tuple[str, ...]
    reference: str
    metrics: tuple[str, ...]
    targets: tuple[Target, ...] = ()
    kept: bool = False
    dropped: Dropped = Dropped.NOTHING
    cache_bytes: int | None = None
    cache_share: float | None = None
    max_runs: int | None = None
    network: dict[str, Any] = field(
        default_factory=lambda: {
            "latency_ms": FIRST_BYTE_MS,
            "rate_per_connection": RATE_PER_CONNECTION,
            "aggregate_rate": AGGREGATE_RATE,
        }
    )

    @property
    def group(self) -> str:
        """What several of a kind are called together."""
        return self.name.partition("/")[0]


_PATH = ("mount-s3", "geesefs", "goofys")
"""Peers that take part where their programs are."""

_COLD = ("mb_per_s", "first_batch_ms", "s3_mb", "gets", "start_s", "cpu_s_per_gb")
_WARM = ("mb_per_s", "s3_mb", "cpu_s_per_gb")


def _at_most(contender: str, metric: str, limit: float, versus: str = "") -> Target:
    return Target(contender, metric, limit, versus=versus, at_most=True)


def _warm_epochs() -> Iterator[Scenario]:
    peers = (Target(OURS, "mb_per_s", 3.0, versus="rclone"), Target(OURS, "mb_per_s", 3.0, versus="s3fs"))
    for name, dropped, about, targets in (
        ("warm-epoch", Dropped.NOTHING, "in the page cache as the epoch before left it", peers),
        ("warm-epoch/mount-dropped", Dropped.MOUNT, "the cache's files in the page cache, the mount's own dropped", ()),
        ("warm-epoch/all-dropped", Dropped.ALL, "cached on disk only: all caches of the machine dropped before", ()),
    ):
        yield Scenario(
            name=name,
            about=f"the epoch of {SHARDS} shards once more: {about}",
            files=lambda data: data.shards,
            work=work.epoch,
            contenders=("local", OURS, DAEMON_READS, "rclone", "s3fs", "juicefs", *_PATH),
            reference="local",
            metrics=_WARM,
            targets=(Target(OURS, "mb_per_s", 0.97, versus="local"), *targets),
            kept=True,
            dropped=dropped,
        )


def _planned_epochs() -> Iterator[Scenario]:
    for reshuffled in (False, True):
        for share in (0.25, 0.5, 0.8):
            kind = "reshuffled" if reshuffled else "fixed"
            yield Scenario(
                name=f"planned-epochs/{kind}-{100 * share:.0f}",
                about=f"5 epochs of {PLAIN_FILES} files of 8 MiB in {kind} order, read one after another, with a cache "
                f"of {share:g} of them; the least possible is D + (E - 1) (D - C); page cache dropped between epochs",
                files=lambda data: data.plain,
                work=work.epochs(5, reshuffled=reshuffled),
                contenders=(PLANNED, OURS, "rclone", "s3fs"),
                reference=PLANNED,
                metrics=("s3_mb", "of_bound", "mb_per_s", "gets"),
                targets=(_at_most(PLANNED, "of_bound", 1.10),),
                cache_share=share,
                max_runs=1,
            )


def _utilisation() -> Iterator[Scenario]:
    resnet = work.Trainer(TRAINER_RATE, 4, False, batch=32, record_bytes=RESNET[2])
    cosmoflow = work.Trainer(TRAINER_RATE, 4, True, batch=1, record_bytes=COSMOFLOW[2])
    unet = work.Trainer(TRAINER_RATE, 4, True)
    usual = {"latency_ms": FIRST_BYTE_MS, "rate_per_connection": RATE_PER_CONNECTION}
    for name, trainer, files, network, limit in (
        ("resnet50-mini", resnet, lambda data: data.resnet, usual, 0.95),
        ("cosmoflow-mini", cosmoflow, lambda data: data.cosmoflow, usual, 0.95),
        ("unet3d-mini", unet, lambda data: data.unet, usual, 0.95),
        ("resnet50-mini-loaded", resnet, lambda data: data.resnet, LOADED, 0.90),
    ):
        yield Scenario(
            name=f"utilisation/{name}",
            about=f"3 epochs of training in the style of MLPerf Storage ({name}), {TRAINER_RATE / 1e6:g} MB/s, a cache "
            f"of {CACHED:g} of the data, a plan declared {work.HEAD_START_S:g} s before; the pipe carries 1.1 times "
            f"the rate in the first epoch, then {1.05 * (1 - CACHED):g} times",
            files=files,
            work=work.train(trainer, 1.1 * TRAINER_RATE, 1.05 * (1 - CACHED) * TRAINER_RATE),
            contenders=(PLANNED, OURS, "rclone"),
            reference=PLANNED,
            metrics=("warm_au", "first_au", "s3_mb", "gets", "cpu_s_per_gb"),
            targets=(Target(PLANNED, "warm_au", limit), Target(PLANNED, "first_au", limit)),
            cache_share=CACHED,
            max_runs=3,
            network=network,
        )


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            name="cold-stream",
            about=f"one object of {STREAM_BYTES // 1_000_000} MB, nothing cached; mounts are read by dd bs=1M",
            files=lambda data: data.stream,
            work=work.stream,
            contenders=("downloader", OURS, "rclone", "s3fs", "tf-gfile", *_PATH),
            reference="downloader",
            metrics=("mb_per_s", "s3_mb", "gets", "start_s", "cpu_s_per_gb"),
            targets=(Target(OURS, "mb_per_s", 0.85, versus="downloader"),),
        ),
        Scenario(
            name="cold-epoch",
            about=f"{SHARDS} TFRecord shards of 32 MB, nothing cached; mounts are read by TFRecordDataset, "
            "interleave(cycle_length=16), and the downloader fetches them, no more",
            files=lambda data: data.shards,
            work=work.epoch,
            contenders=("downloader", OURS, "rclone", "s3fs", "juicefs", "tf-gfile", *_PATH),
            reference="downloader",
            metrics=_COLD,
            targets=(Target(OURS, "mb_per_s", 0.80, versus="downloader"),),
        ),
        Scenario(
            name="cold-planned-epoch",
            about="the same, with a plan declared as the reader starts",
            files=lambda data: data.shards,
            work=work.planned_epoch,
            contenders=("downloader", PLANNED, OURS),
            reference="downloader",
            metrics=_COLD,
            targets=(
                Target(PLANNED, "mb_per_s", 0.95, versus="downloader"),
                _at_most(PLANNED, "daemon_cpu_s_per_gb", 1.05, OURS),
            ),
        ),
        *_warm_epochs(),
        Scenario(
            name="warm-stream",
            about="one file of 1 GiB, in the page cache, by dd bs=1M and by fio",
            files=lambda data: data.large,
            work=work.warm_stream,
            contenders=("local", OURS, "rclone", "s3fs"),
            reference="local",
            metrics=("mb_per_s", "fio_mb_per_s", "daemon_cpu_s_per_gb", "s3_mb"),
            targets=(
                Target(OURS, "mb_per_s", 0.97, versus="local"),
                Target(OURS, "fio_mb_per_s", 0.97, versus="local"),
                _at_most(OURS, "daemon_cpu_s_per_gb", 0.01),
            ),
            kept=True,
        ),
        Scenario(
            name="warm-random",
            about=f"random reads of 128 KiB of that file, by 1 and by {work.RANDOM_JOBS} processes",
            files=lambda data: data.large,
            work=work.warm_random,
            contenders=("local", OURS, "rclone", "s3fs"),
            reference="local",
            metrics=("random_1_mb_per_s", "random_8_mb_per_s", "daemon_cpu_s_per_gb"),
            targets=(
                Target(OURS, "random_1_mb_per_s", 0.95, versus="local"),
                Target(OURS, "random_8_mb_per_s", 0.95, versus="local"),
            ),
            kept=True,
        ),
        Scenario(
            name="normal-path",
            about="the file of 1 GiB through the daemon, by dd bs=1M: the mount's pages dropped, the cache's not",
            files=lambda data: data.large,
            work=work.stream,
            contenders=("local", DAEMON_READS, "rclone", "s3fs"),
            reference="local",
            metrics=("mb_per_s", "cpu_s_per_gb"),
            targets=(Target(DAEMON_READS, "mb_per_s", 0.12, versus="local", enough=2500.0),),
            kept=True,
            dropped=Dropped.MOUNT,
        ),
        Scenario(
            name="open-latency",
            about=f"open, read of 4096 bytes and close of files in the cache, {work.OPEN_CYCLES} times",
            files=lambda data: data.shards,
            work=work.open_latency,
            contenders=("local", OURS, "rclone", "s3fs"),
            reference="local",
            metrics=("open_p50_ms", "open_p99_ms"),
            targets=(
                _at_most(OURS, "open_p50_ms", 0.1),
                _at_most(OURS, "open_p99_ms", 0.5),
                _at_most(OURS, "open_p50_ms", 1.0, "rclone"),
            ),
            kept=True,
        ),
        Scenario(
            name="first-read",
            about=f"open and read of 4096 bytes, {FIRST_READS} files one after another in random order; their "
            f"directory was listed; the stand-in's first byte takes {FIRST_BYTE_MS:g} ms of it",
            files=lambda data: data.small,
            work=work.first_reads,
            contenders=("downloader", OURS, "rclone", "s3fs", "tf-gfile"),
            reference="downloader",
            metrics=("p50_ms", "p99_ms", "s3_mb", "gets"),
            targets=(_at_most(OURS, "p50_ms", FIRST_BYTE_MS + 15),),
        ),
        Scenario(
            name="many-files",
            about=f"{SMALL_FILES} files of 1 MiB in random order, one after another, nothing cached; the plan is "
            "declared as the reader starts",
            files=lambda data: data.many,
            work=work.many_files,
            contenders=(PLANNED, OURS, "rclone", "s3fs"),
            reference="rclone",
            metrics=("files_per_s", "mb_per_s", "gets", "cpu_s_per_gb"),
        ),
        Scenario(
            name="half-cache",
            about=f"3 epochs of {SHARDS} shards in fixed order by TFRecordDataset, 16 interleaved, a cache of half "
            "of them; page cache dropped between epochs",
            files=lambda data: data.shards,
            work=work.epochs(3, reshuffled=False, interleave=16),
            contenders=(PLANNED, OURS, "rclone", "juicefs"),
            reference="rclone",
            metrics=("mb_per_s", "s3_mb", "of_bound", "gets", "cpu_s_per_gb"),
            cache_share=0.5,
            max_runs=3,
        ),
        *_planned_epochs(),
        *_utilisation(),
        Scenario(
            name="segments",
            about=f"240 segments of 5-30 MB, in declared random order, out of raw files three times larger than the "
            f"cache, consumed at {SEGMENT_RATE / 1e6:g} MB/s; waiting after the first {work.SETTLING_S:g} s",
            files=lambda data: data.raw,
            work=work.segments(SEGMENT_RATE, 240, 5_000_000, 30_000_000),
            contenders=(PLANNED, OURS, "rclone"),
            reference=PLANNED,
            metrics=("waiting_percent", "mb_per_s", "s3_mb", "gets", "cpu_s_per_gb"),
            targets=(_at_most(PLANNED, "waiting_percent", 1.0),),
            cache_share=1 / 3,
            max_runs=3,
        ),
        Scenario(
            name="plan-cost",
            about="a plan of 100,000 files in 90 orders: seconds until it is in force, and the memory of the daemon",
            files=lambda data: data.small,
            work=work.accept_plan(100_000, 90),
            contenders=(PLANNED,),
            reference=PLANNED,
            metrics=("accept_s", "peak_rss_mib", "rss_mib"),
            targets=(_at_most(PLANNED, "accept_s", 20.0), _at_most(PLANNED, "peak_rss_mib", 1024.0)),
            max_runs=1,
            network=UNLIMITED,
        ),
        Scenario(
            name="memory",
            about=f"10 GiB in {BIG_FILES} files, all read at once by as many dd; the network is not limited; "
            "caches hold 4 GiB; memory is the sum over the daemon and its workers, when all is read",
            files=lambda data: data.big,
            work=work.memory,
            contenders=("downloader", OURS),
            reference="downloader",
            metrics=("rss_mib", "peak_rss_mib", "pss_mib", "mb_per_s", "s3_mb", "cpu_s_per_gb"),
            targets=(_at_most(OURS, "rss_mib", 500),),
            cache_bytes=4 << 30,
            max_runs=3,
            network=UNLIMITED,
        ),
    )
}
