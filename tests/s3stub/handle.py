"""The test's side: starts the stand-in, fills it, changes its knobs, reads its log.

Plain blocking calls over one kept-alive control connection; one thread at a time uses it.
"""

from __future__ import annotations

import http.client
import json
import os
import select
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tests.s3stub.control import PATH
from tests.s3stub.knobs import Knobs
from tests.s3stub.log import Record

_START_S = 20.0
_ANSWER_S = 60.0
_STOP_S = 5.0


class S3Stub:
    """A running stand-in; a context manager that stops it.

    Args:
        root: an existing directory on a disk with space for what is put; nothing is left in it.
        bucket: made at the start; where the methods below put things if not told otherwise.
        port: 0 chooses one.
        knobs: see `Knobs`.

    Attributes:
        endpoint_url, bucket, pid.

    Raises:
        ValueError: a knob is unknown or has a wrong value.
        RuntimeError: it did not start.
    """

    def __init__(self, root: str | os.PathLike[str], bucket: str = "bucket", port: int = 0, **knobs: Any) -> None:
        command = [sys.executable, "-m", "tests.s3stub", "--root", os.path.abspath(root), "--port", str(port)]
        repository = Path(__file__).parents[2]
        self._process = subprocess.Popen(command, cwd=repository, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._lock = threading.Lock()
        self._connection: http.client.HTTPConnection | None = None
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], _START_S)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            self.close()
            raise RuntimeError(f"the S3 stand-in did not start: {command}")
        self.pid: int = self._process.pid
        self.bucket = bucket
        started = json.loads(line)
        self.endpoint_url = f"http://127.0.0.1:{started['port']}"
        self._connection = http.client.HTTPConnection("127.0.0.1", started["port"], timeout=_ANSWER_S)
        self._command("create_bucket", bucket=bucket)
        try:
            self.configure(**knobs)
        except ValueError:
            self.close()
            raise

    def __enter__(self) -> S3Stub:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the process and wait for it."""
        if self._connection:
            self._connection.close()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def put(
        self,
        key: str,
        content: bytes | os.PathLike[str],
        *,
        headers: dict[str, str] | None = None,
        storage_class: str = "STANDARD",
        bucket: str = "",
    ) -> str:
        """Make an object of these bytes, or of this file, which is served in place and must not change.

        Args:
            headers: to be given back with the object, names in lower case, e.g. {"content-encoding": "gzip"}.
            storage_class: GLACIER and DEEP_ARCHIVE refuse to be read.

        Returns:
            The ETag without quotes: MD5 of bytes, something opaque for a file and for all the others below.
        """
        if isinstance(content, bytes):
            return str(
                self._command(
                    "put", content, key=key, headers=headers or {}, storage_class=storage_class, bucket=bucket
                )
            )
        return str(self._command("put_file", key=key, path=os.path.abspath(content), bucket=bucket))

    def put_sparse(self, key: str, size: int, *, bucket: str = "") -> str:
        """An object of `size` zero bytes, which takes no space. Returns its ETag."""
        return str(self._command("put_sparse", key=key, size=size, bucket=bucket))

    def put_ramp(self, key: str, size: int, seed: int = 0, *, bucket: str = "") -> str:
        """An object whose bytes are `ramp(0, size, seed)`, which takes no space. Returns its ETag."""
        return str(self._command("put_ramp", key=key, size=size, seed=seed, bucket=bucket))

    def synthesize(self, prefix: str, count: int, size: int, *, bucket: str = "") -> None:
        """`count` keys f"{prefix}{i:08d}" of `size` bytes each, key i being a ramp with seed i; none is stored."""
        self._command("synthesize", prefix=prefix, count=count, size=size, bucket=bucket)

    def create_bucket(self, bucket: str) -> None:
        """An empty bucket. Those that something is put into need not be created."""
        self._command("create_bucket", bucket=bucket)

    def delete(self, key: str, *, bucket: str = "") -> None:
        """Remove an object; no error if there is none. Synthetic keys stay."""
        self._command("delete", key=key, bucket=bucket)

    def configure(self, **knobs: Any) -> None:
        """Change knobs; those not named stay.

        Raises:
            ValueError: a knob is unknown or has a wrong value; none was changed.
        """
        self._command("configure", **knobs)

    def reset_knobs(self) -> None:
        """All knobs as they are by default."""
        self.configure(**asdict(Knobs()))

    def log(self, verb: str = "") -> list[Record]:
        """The requests since the last `clear_log`, in order of arrival; only those of one verb if given."""
        records = [Record.from_row(row) for row in self._command("log")]
        return [record for record in records if verb in ("", record.verb)]

    def clear_log(self) -> None:
        """Forget the log. Counters of `stats` go on."""
        self._command("clear_log")

    def stats(self) -> dict[str, Any]:
        """requests (a dict by verb), body_bytes, connections_accepted, connections_open; S3 traffic only."""
        return dict(self._command("stats"))

    def _command(self, command: str, body: bytes = b"", **arguments: Any) -> Any:
        if arguments.get("bucket") == "":
            arguments["bucket"] = self.bucket
        with self._lock:
            assert self._connection is not None
            self._connection.request("POST", f"{PATH}{command}?args={quote(json.dumps(arguments))}", body)
            response = self._connection.getresponse()
            answer = json.loads(response.read())
        if response.status != 200:
            raise ValueError(answer["error"])
        return answer
