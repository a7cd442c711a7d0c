"""The real command line with a daemon that does what a test asks: `python -m tests.cli.fake_daemon WHAT mount ...`.

Each fake leaves its pid in the cache directory, so that the test can look for it, and ends by itself in the end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

from s3prefetchfs.cli import background, main, mount
from s3prefetchfs.config import Config
from s3prefetchfs.errors import UserError

Ready = Callable[..., None]


def serve(config: Config, on_ready: Ready) -> int:
    print("printed before it is ready", flush=True)
    # A worker: it has our stdio, and lives on.
    with subprocess.Popen(["sleep", "60"], close_fds=False) as worker:
        signal.signal(signal.SIGTERM, lambda *_: worker.kill())
        on_ready()
        print(f"stdin holds {sys.stdin.read()!r}, working in {os.getcwd()}", flush=True)
    return 0


def warn(config: Config, on_ready: Ready) -> int:
    on_ready("the prefix is empty", "the disk is small")
    return 0


def refuse(config: Config, on_ready: Ready) -> int:
    raise UserError(f"no such bucket: {config.bucket}", "check its name", exit_code=7)


def crash(config: Config, on_ready: Ready) -> int:
    raise RuntimeError("a bug")


def die(config: Config, on_ready: Ready) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def leave(config: Config, on_ready: Ready) -> int:
    return 0


def hang(config: Config, on_ready: Ready) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pause()
    return 0


def run(config: Config, on_ready: Ready) -> int:
    signal.alarm(60)
    (config.cache_dir / "pid").write_text(str(os.getpid()))
    return {daemon.__name__: daemon for daemon in (serve, warn, refuse, crash, die, leave, hang)}[what](
        config, on_ready
    )


if __name__ == "__main__":
    what = sys.argv.pop(1)
    mount._daemon = run
    mount.START_SLACK_S = 20.0 if what != "hang" else 1.0
    background._TERM_GRACE_S = 0.3
    main()
