"""One real mount under test: the command, its mountpoint, its log, and the checks at its end.

`Mounted` runs `s3prefetchfs mount --foreground` as a user would, waits until its log says that it is mounted, and ends
it with SIGTERM. At the end it demands that nothing went wrong that a test did not ask
for: exit code 0, no handler error, no traceback and no ERROR in the log.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from s3prefetchfs.fuse import mounts
from tests.servers import Bucket

PROJECT = Path(__file__).parents[2]

COMMAND = (sys.executable, "-m", "s3prefetchfs")
"""`s3prefetchfs`, whether installed or not, when started in PROJECT."""

READY_TIMEOUT_S = 90.0
END_TIMEOUT_S = 45.0
"""Two seconds and less than one on a quiet host; tests may share theirs with anything."""

PATIENCE_S = 30.0
"""How long a test waits for what should come at once."""

T = TypeVar("T")


def forget_inodes() -> None:
    """Have the kernel drop the names and inodes that nobody uses, if we may (root)."""
    with contextlib.suppress(PermissionError):
        Path("/proc/sys/vm/drop_caches").write_text("2")


def eventually(get: Callable[[], T], accept: Callable[[T], object] = bool, timeout_s: float = PATIENCE_S) -> T:
    """The first value of `get()` that is accepted; polls, because it comes from another process."""
    deadline_s = time.monotonic() + timeout_s
    while not accept(value := get()):
        assert time.monotonic() < deadline_s, f"after {timeout_s:g} s still {value!r}"
        time.sleep(0.01)
    return value


class Mounted:
    """A mount that is ready, until `close`.

    Args:
        bucket: what to mount. place: an empty directory for mountpoint, cache and log.
        options: of the command, after the defaults below.
        source: what to mount instead of the bucket's name, such as `name/prefix`.
        cache_dir: instead of one below `place`.
        environment: changes to `bucket.server.environment()`.
        program: instead of COMMAND.

    Attributes:
        path: the mountpoint. process: the daemon. cache_dir, log_path.
        expected: texts; an ERROR line of the log that has one of them is no failure. Tests add to it.

    Raises:
        AssertionError: it does not get ready; has the log.
    """

    def __init__(
        self,
        bucket: Bucket,
        place: Path,
        *options: str,
        source: str | None = None,
        mountpoint: Path | None = None,
        cache_dir: Path | None = None,
        environment: dict[str, str] | None = None,
        program: Sequence[str] = COMMAND,
    ) -> None:
        place.mkdir(exist_ok=True)
        self.path = mountpoint or place / "mnt"
        with contextlib.suppress(FileExistsError):  # of a dead mount nothing more can be asked
            os.mkdir(self.path)
        self.cache_dir = cache_dir or place / "cache"
        self.log_path = place / "log"
        self.expected: list[str] = []
        self.closed = False
        where = ["--endpoint-url", bucket.server.endpoint_url, "--cache-dir", os.fspath(self.cache_dir)]
        command = [*program, "mount", source or bucket.name, os.fspath(self.path), "--foreground", *where]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--cache-size", "1GiB", *options],
                env=bucket.server.environment() | (environment or {}),
                cwd=PROJECT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.destroy()
            raise

    def _wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while " mounted s3://" not in self.log():
            code = self.process.poll()
            assert code is None, f"no mount, exit code {code}, and the log says\n{self.log()}"
            assert time.monotonic() < deadline_s, f"no mount in {READY_TIMEOUT_S:g} s; the log says\n{self.log()}"
            time.sleep(0.01)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def status(self) -> dict[str, Any]:
        """The status document of this moment."""
        document: dict[str, Any] = json.loads((self.path / mounts.STATUS_FILE).read_bytes())
        return document

    def log(self) -> str:
        """What the daemon and its workers logged so far."""
        return self.log_path.read_text(errors="backslashreplace")

    def workers(self) -> list[int]:
        """Pids of the daemon's children."""
        threads = Path(f"/proc/{self.process.pid}/task").iterdir()
        return [int(child) for thread in threads for child in (thread / "children").read_text().split()]

    def rss_bytes(self) -> int:
        """Resident memory of the daemon, without its workers."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def close(self) -> None:
        """Unmount by SIGTERM, wait for the daemon, and check what it leaves behind; again: nothing."""
        if self.closed:
            return
        try:
            errors = self.status()["reads"]["handler_errors"]
            self.process.send_signal(signal.SIGTERM)
            assert self.wait() == 0
            assert errors == 0, f"{errors} handler errors"
            self.check_log()
        finally:
            self.destroy()

    def wait(self) -> int:
        """The exit code of the daemon, which is about to end."""
        try:
            return self.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the daemon does not end, and the log says\n{self.log()}") from None

    def check_log(self) -> None:
        """Nothing in the log is worse than a test asked for."""
        log = self.log()
        assert "Traceback" not in log, log
        for line in log.splitlines():
            if " ERROR " in line or " CRITICAL " in line:
                assert any(text in line for text in self.expected), log

    def destroy(self) -> None:
        """Leave no process and no mount, whatever state they are in. Checks nothing."""
        self.closed = True
        self.process.kill()
        self.process.wait(END_TIMEOUT_S)
        with contextlib.suppress(OSError):
            mounts.unmount(self.path, lazy=True)


def run(bucket: Bucket, *arguments: str | os.PathLike[str], **changes: str) -> subprocess.CompletedProcess[str]:
    """Run `s3prefetchfs` with these arguments to its end, with credentials for the bucket's server.

    Args:
        changes: to the environment.
    """
    return subprocess.run(
        [*COMMAND, *arguments],
        env=bucket.server.environment() | changes,
        cwd=PROJECT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=READY_TIMEOUT_S,
    )
