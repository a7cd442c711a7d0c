"""What a contender is. Each turns the same pieces of work into something that can be timed.

A contender is started fresh, with nothing cached, unless the scenario keeps it running. Whatever can be got ready
before the work (a process, a client, a mount) is not in the time of the work; how long a mount took is reported.
Those that show files (local disk and mounts) are read by the same readers: `dd`, TensorFlow, or plain open and read.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.child import ANSWER_S, BenchError, Child
from s3prefetchfs.core.plan import Plan

FIRST_READ_BYTES = 4096

RECORD_FRAME_BYTES = 16
"""What TFRecord adds to a record: its length, and a CRC of the length and of the data."""

MOUNT_S = 60.0
UNMOUNT_S = 30.0
POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class File:
    """An object of the bucket; its size is known to every contender before the work begins."""

    key: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Site:
    """Where the contenders work.

    Args:
        workdir: caches, downloads and mountpoints, all on one disk.
        local: files that are also in the bucket, for who reads them in place. The stand-in serves others like them.
        warm_up: a small TFRecord file, not in the bucket.
        endpoint_url, bucket: the stand-in. environment: for every process; nothing of the user's AWS settings.
    """

    workdir: Path
    local: Path
    warm_up: Path
    endpoint_url: str
    bucket: str
    environment: dict[str, str]


class Readers:
    """The processes that read files, started when first needed, or when one has died, and kept until `close`.

    Args:
        site: where.
    """

    def __init__(self, site: Site) -> None:
        self._environment = site.environment
        self._arguments = {"bench.epoch_reader": [os.fspath(site.warm_up)], "bench.plain_reader": []}
        self._children: dict[str, Child] = {}

    def __getitem__(self, module: str) -> Child:
        if module not in self._children or not self._children[module].alive:
            self._children[module] = Child(module, self._arguments[module], self._environment)
        return self._children[module]

    def pids(self) -> list[int]:
        """Of the processes started so far."""
        return [child.pid for child in self._children.values()]

    def close(self) -> None:
        """End them all."""
        for child in self._children.values():
            child.close()
        self._children.clear()


class Running(ABC):
    """A contender at work.

    Attributes:
        root: the directory where the files are, or come to be.
        pid: of the process that, with its descendants, does the work; None if that is the kernel or the reader.
        start_s: what it took to get ready.
    """

    def __init__(self, root: Path, pid: int | None, start_s: float) -> None:
        self.root = root
        self.pid = pid
        self.start_s = start_s

    @abstractmethod
    def stream(self, files: list[File]) -> float:
        """Get files whole, each by one sequential reader, all at once; seconds."""

    @abstractmethod
    def epoch(self, files: list[File]) -> dict[str, Any]:
        """Get the shards of one epoch of training; `seconds`, and what else is known, as `epoch_reader` tells it."""

    @abstractmethod
    def first_reads(self, files: list[File]) -> list[float]:
        """Get the first bytes of files, one after another; seconds for each."""

    def declare(self, plan: Plan) -> bool:
        """Say what will be read; whether there is somebody to say it to."""
        return False


def checked_epoch(reader: Child, paths: list[str], files: list[File], **how: Any) -> dict[str, Any]:
    """One pass of TensorFlow over TFRecord files.

    Raises:
        BenchError: it did not see every byte of them.
    """
    answer = reader.ask(paths=paths, **how)
    expected_bytes = sum(file.size_bytes for file in files) - RECORD_FRAME_BYTES * answer["records"]
    if answer["record_bytes"] != expected_bytes:
        raise BenchError(f"the epoch had {answer['record_bytes']} bytes of records, not {expected_bytes}")
    return answer


class Files(Running):
    """Something that shows the bucket as files.

    Args:
        readers: who read. The others: see Running.
    """

    def __init__(self, readers: Readers, root: Path, pid: int | None = None, start_s: float = 0.0) -> None:
        super().__init__(root, pid, start_s)
        self._readers = readers

    def stream(self, files: list[File]) -> float:
        return run_all([["dd", f"if={path}", "of=/dev/null", "bs=1M", "status=none"] for path in self.listed(files)])

    def epoch(self, files: list[File], **how: Any) -> dict[str, Any]:
        return checked_epoch(self._readers["bench.epoch_reader"], self.listed(files), files, **how)

    def first_reads(self, files: list[File]) -> list[float]:
        return list(self.ask("first_reads", paths=self.listed(files), count=FIRST_READ_BYTES)["seconds"])

    def ask(self, work: str, **arguments: Any) -> dict[str, Any]:
        """Let `plain_reader` do one of its works; its answer."""
        return self._readers["bench.plain_reader"].ask(work=work, **arguments)

    def drop_pages(self, files: list[File]) -> None:
        """Drop the pages that the kernel keeps for the mount, not those of the files behind it.

        What the kernel reads by itself has no pages of its own. Of files without a mount nothing is dropped.
        """
        for path in self.listed(files) if self.pid is not None else []:
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def listed(self, files: list[File]) -> list[str]:
        """Paths of the files, whose directories were listed: this is how a reader comes to know of them."""
        paths = [self.root / file.key for file in files]
        found = {os.path.join(parent, name) for parent in {p.parent for p in paths} for name in os.listdir(parent)}
        if lost := [path for path in map(os.fspath, paths) if path not in found]:
            raise BenchError(f"{lost[0]} is not there")
        return [os.fspath(path) for path in paths]


def run_all(commands: list[list[str]]) -> float:
    """Run commands at once, and wait for all; seconds.

    Raises:
        BenchError: one failed or hangs.
    """
    began_s = time.perf_counter()
    running = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in commands]
    try:
        failed = [command for one, command in zip(running, commands, strict=True) if one.wait(ANSWER_S) != 0]
    except subprocess.TimeoutExpired:
        raise BenchError(f"{commands[0][0]} still reads after {ANSWER_S:g} s") from None
    finally:
        for one in running:
            one.kill()  # does nothing to those that have ended
    seconds = time.perf_counter() - began_s
    if failed:
        raise BenchError(f"failed: {' '.join(failed[0])}")
    return seconds


class Contender(ABC):
    """One way to get at the data; `about` says which, for the report."""

    name: str
    about: str
    bounds_its_cache = True
    """Whether `cache_bytes` means something to it."""

    def missing(self) -> str:
        """What this machine lacks for it; empty if nothing. May install it, which takes minutes the first time."""
        return ""

    @abstractmethod
    def started(
        self, site: Site, readers: Readers, files: list[File], cache_bytes: int | None
    ) -> contextlib.AbstractContextManager[Running]:
        """Start it, and afterwards stop it and remove what it stored.

        Args:
            files: what will be read. cache_bytes: what it may keep, if it has a cache; None for its own default.

        Raises:
            BenchError: it does not start.
        """


class Mount(Contender):
    """A filesystem served by a process that stays in the foreground.

    Args:
        name, about: see Contender.
    """

    def __init__(self, name: str, about: str) -> None:
        self.name = name
        self.about = about

    @abstractmethod
    def command(self, site: Site, mountpoint: Path, cache: Path, cache_bytes: int | None) -> list[str]:
        """What mounts the bucket at `mountpoint`, caching up to so many bytes in `cache`."""

    def prepare(self, site: Site, files: list[File]) -> None:
        """Make ready what takes long, once."""

    def root(self, mountpoint: Path) -> Path:
        """Where the keys of the bucket begin."""
        return mountpoint

    def running(self, readers: Readers, root: Path, pid: int, start_s: float) -> Running:
        """What is at work once it is mounted."""
        return Files(readers, root, pid, start_s)

    @contextlib.contextmanager
    def started(self, site: Site, readers: Readers, files: list[File], cache_bytes: int | None) -> Iterator[Running]:
        self.prepare(site, files)
        with place(site) as own:
            mountpoint, cache = own / "mnt", own / "cache"
            cache.mkdir()
            began_s = time.perf_counter()
            command = self.command(site, mountpoint, cache, cache_bytes)
            with mounted(self.name, command, mountpoint, site.environment, own / "log") as pid:
                os.listdir(mountpoint)
                yield self.running(readers, self.root(mountpoint), pid, time.perf_counter() - began_s)


@contextlib.contextmanager
def mounted(
    name: str, command: list[str], mountpoint: Path, environment: dict[str, str], log_path: Path
) -> Iterator[int]:
    """Run what mounts and stays in the foreground, until afterwards neither mount nor process is left; its pid.

    Raises:
        BenchError: it does not mount.
    """
    mountpoint.mkdir()
    with log_path.open("wb") as log:
        daemon = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
        )
    deadline_s = time.perf_counter() + MOUNT_S
    try:
        while not os.path.ismount(mountpoint):
            if daemon.poll() is not None or time.perf_counter() > deadline_s:
                said = log_path.read_text(errors="replace")[-500:].strip()
                raise BenchError(f"{name} does not mount: {said or 'and does not say why'}")
            time.sleep(POLL_S)
        yield daemon.pid
    finally:
        _unmount(mountpoint, daemon)


@contextlib.contextmanager
def place(site: Site) -> Iterator[Path]:
    """A directory of one contender, on the disk that all use; removed afterwards unless something is mounted in it."""
    own = Path(tempfile.mkdtemp(dir=site.workdir))
    try:
        yield own
    finally:
        if not os.path.ismount(own / "mnt"):
            shutil.rmtree(own, ignore_errors=True)


def _unmount(mountpoint: Path, daemon: subprocess.Popen[bytes]) -> None:
    """End a mount: ask its daemon, then insist. At the end neither the mount nor the process is there."""
    daemon.send_signal(signal.SIGTERM)
    try:
        daemon.wait(UNMOUNT_S)
    except subprocess.TimeoutExpired:
        subprocess.run(["umount", "--lazy", os.fspath(mountpoint)], stderr=subprocess.DEVNULL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(daemon.pid, signal.SIGKILL)
        daemon.wait()
    if os.path.ismount(mountpoint):
        subprocess.run(["umount", "--lazy", os.fspath(mountpoint)], stderr=subprocess.DEVNULL)
