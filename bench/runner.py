"""How it is measured: rounds in alternating order, caches dropped, and the CPU time of everybody who took part."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

from bench import machine
from bench.child import BenchError
from bench.contender import File, Files, Readers, Running, Site
from bench.contenders import CONTENDERS
from bench.data import Data
from bench.scenarios import Dropped, Scenario
from bench.summary import Sample, order, throughput
from bench.work import Job
from tests.s3stub import S3Stub


@dataclass(slots=True)
class Outcome:
    """One scenario, measured.

    Attributes:
        rounds: for each, samples by contender.
        absent: contenders that could not take part, or not to the end, and why.
        series: of the last round, by contender: lists of numbers to be drawn.
    """

    scenario: Scenario
    rounds: list[dict[str, Sample]] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    series: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    @property
    def missed(self) -> bool:
        """Whether a target was not met."""
        return not all(target.met(self.rounds) for target in self.scenario.targets)


class Runner:
    """Measures scenarios.

    Args:
        site, stub, data, readers: where, the S3 end, what is in it, and who reads.
        report: told what is going on.
    """

    def __init__(self, site: Site, stub: S3Stub, data: Data, readers: Readers, report: Callable[[str], None]) -> None:
        self._site = site
        self._stub = stub
        self._data = data
        self._readers = readers
        self._report = report

    def run(self, scenario: Scenario, chosen: list[str], runs: int) -> Outcome:
        """Measure one scenario, with those of its contenders that are `chosen` and installed, in `runs` rounds."""
        outcome = Outcome(scenario)
        names = [name for name in scenario.contenders if name in chosen]
        outcome.absent = {name: why for name in names if (why := CONTENDERS[name].missing())}
        self._report(f"{scenario.name}: preparing data")
        files = scenario.files(self._data)
        cache_bytes = scenario.cache_bytes
        if scenario.cache_share:
            cache_bytes = int(scenario.cache_share * sum(file.size_bytes for file in files))
        if cache_bytes:
            for name in names:
                if not CONTENDERS[name].bounds_its_cache:
                    outcome.absent[name] = "the size of its cache cannot be set"
        runs = min(runs, scenario.max_runs or runs)
        kept: dict[str, Running] = {}
        with ExitStack() as until:
            for number in range(runs):
                samples: dict[str, Sample] = {}
                outcome.rounds.append(samples)
                for name in order(names, number):
                    if name in outcome.absent:
                        continue
                    self._report(f"{scenario.name}: round {number + 1} of {runs}: {name}")
                    try:
                        with self._session(scenario, name, files, cache_bytes, kept, until) as running:
                            job = Job(running, files, self._stub, cache_bytes)
                            samples[name] = self._sample(scenario, job)
                            outcome.series[name] = job.series
                    except (BenchError, OSError) as error:
                        outcome.absent[name] = f"failed in round {number + 1}: {error}"
        return outcome

    @contextlib.contextmanager
    def _session(
        self,
        scenario: Scenario,
        name: str,
        files: list[File],
        cache_bytes: int | None,
        kept: dict[str, Running],
        until: ExitStack,
    ) -> Iterator[Running]:
        """A contender ready for a run: a fresh one, or the kept one that did the work before."""
        self._stub.reset_knobs()
        started = CONTENDERS[name].started(self._site, self._readers, files, cache_bytes)
        if not scenario.kept:
            with started as running:
                machine.drop_caches()
                self._stub.configure(**scenario.network)
                yield running
            return
        if name not in kept:
            kept[name] = until.enter_context(started)
            kept[name].stream(files)
        self._stub.configure(**scenario.network)
        os.sync()
        if scenario.dropped is Dropped.ALL:
            machine.drop_caches()
        elif scenario.dropped is Dropped.MOUNT and isinstance(running := kept[name], Files):
            running.drop_pages(files)
        yield kept[name]

    def _sample(self, scenario: Scenario, job: Job) -> Sample:
        """Do the work once; what the scenario measures, and what it cost."""
        self._stub.clear_log()
        before = self._cpu_s(job.running)
        began_s = time.monotonic()
        sample = scenario.work(job)
        ended_s = time.monotonic()
        spent = [after - earlier for after, earlier in zip(self._cpu_s(job.running), before, strict=True)]
        own, reader, stub, busy = spent
        gets = self._stub.log("GET")
        bodies = [
            (get.first_byte_s, get.end_s or ended_s, get.body_bytes) for get in gets if get.first_byte_s is not None
        ]
        width_s, job.series["s3_mb_per_s"] = throughput(bodies, began_s, ended_s)
        job.series["s3_interval_s"] = [width_s]
        gigabytes = sample.pop("read_bytes", float(sum(file.size_bytes for file in job.files))) / 1e9
        return {
            "mb_per_s": 1000 * gigabytes / sample["seconds"],
            **sample,
            "cpu_s_per_gb": own / gigabytes,
            "daemon_cpu_s_per_gb": own / gigabytes,
            "reader_cpu_s_per_gb": reader / gigabytes,
            "stub_cpu_s_per_gb": stub / gigabytes,
            "other_cpu_s_per_gb": max(0.0, busy - own - reader - stub) / gigabytes,
            "s3_mb": sum(record.body_bytes for record in gets) / 1e6,
            "gets": float(len(gets)),
            "start_s": job.running.start_s,
        }

    def _cpu_s(self, running: Running) -> tuple[float, float, float, float]:
        """CPU seconds so far of the contender, the readers, the stand-in, and of everything on this machine."""
        own = 0.0 if running.pid is None else machine.cpu_s(running.pid)
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)  # every dd
        reader = ended.ru_utime + ended.ru_stime + sum(map(machine.cpu_s, self._readers.pids()))
        return own, reader, machine.cpu_s(self._stub.pid), machine.busy_s()
