"""Leaving a daemon behind, and being told whether it works.

    parent                                   child (its own session, stdio on the log)
    fork ----------------------------------> run(on_ready)
    wait for one message on a pipe <-------- "ready", or what went wrong
    exit 0, or print that and exit with      serve on, or exit
    its code

The parent exits 0 only when the mount is usable, and a failure reaches the caller's stderr. The fork comes before
anything that starts threads is imported, so the child begins as an ordinary single-threaded process. From its first
moment the child's stdout and stderr are the log: its worker processes inherit them, and a caller that reads
our output to its end, as `$(...)` does, must not wait for the daemon to end.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from s3prefetchfs.errors import UserError
from s3prefetchfs.fuse.mounts import wait_for_exit

Run = Callable[[Callable[..., None]], int]
"""A daemon: calls its argument once it is usable, with what its user should know, each a line of text; returns its exit
code, raises UserError before it is ready."""

START_SLACK_S = 60.0
"""What a start may take besides reaching the endpoint: opening a large cache's index on a slow disk."""

_TERM_GRACE_S = 5.0
_KILL_GRACE_S = 1.0

_logger = logging.getLogger(__name__)


def run_in_background(run: Run, log_file: Path, timeout_s: float) -> int:
    """Fork a daemon and wait until it is ready.

    Args:
        run: the daemon, called in the child.
        log_file: takes the child's stdout and stderr; named in messages.
        timeout_s: how long it may take to become ready; then it is ended.

    Returns:
        0: the child is ready and serves. Does not return in the child.

    Raises:
        UserError: what the child reported, or that it died or is not ready in time.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _be_the_child(run, log_file, writing)
    os.close(writing)
    try:
        report = _wait_for_report(reading, timeout_s)
        if report is None:
            raise UserError(f"the daemon died without a word: {_how_it_ended(pid)}", _see(log_file))
        if report["exit_code"] != 0:
            _let_end(pid)
            raise UserError(report["message"], report["hint"], report["exit_code"])
    except TimeoutError:
        _end(pid)
        raise UserError(f"the mount was not usable after {timeout_s:g} s and was given up", _see(log_file)) from None
    except KeyboardInterrupt:  # the child has a session of its own and did not get it
        _end(pid)
        raise
    finally:
        os.close(reading)
    for warning in report["warnings"]:
        click.echo(f"s3prefetchfs: warning: {warning}", err=True)
    return 0


def _see(log_file: Path) -> str:
    return f"the log may say why: {log_file}"


def _be_the_child(run: Run, log_file: Path, writing: int) -> NoReturn:
    def report(exit_code: int, message: str = "", hint: str = "", warnings: Sequence[str] = ()) -> None:
        nonlocal writing
        if writing >= 0:
            document = {"exit_code": exit_code, "message": message, "hint": hint, "warnings": warnings}
            line = json.dumps(document) + "\n"
            os.write(writing, line.encode())
            os.close(writing)
            writing = -1

    exit_code = 1
    try:
        _detach(log_file)
        exit_code = run(lambda *warnings: report(0, warnings=warnings))
        report(exit_code or 1, "the daemon ended before it was ready", _see(log_file))
    except UserError as error:
        _logger.error("%s; %s", error.message, error.hint)
        exit_code = error.exit_code
        report(exit_code, error.message, error.hint)
    except BaseException as error:
        _logger.exception("the daemon failed")
        report(1, f"internal error: {type(error).__name__}: {error}", _see(log_file))
    finally:
        logging.shutdown()
        os._exit(exit_code)  # never back into the caller's stack, which belongs to the parent


def _detach(log_file: Path) -> None:
    os.setsid()
    os.chdir("/")  # not to keep the filesystem busy that we were started from, which may be the mountpoint itself
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, target)
    os.close(null)
    os.close(log)


def _wait_for_report(reading: int, timeout_s: float) -> dict[str, Any] | None:
    """The one line that the child writes; None if it died before.

    Raises:
        TimeoutError: neither in time.
    """
    line = b""
    deadline = time.monotonic() + timeout_s
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([reading], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError
        piece = os.read(reading, 65536)
        if not piece:
            return None
        line += piece
    report: dict[str, Any] = json.loads(line)
    return report


def _let_end(pid: int) -> None:
    """The child is on its way out; do not leave before it, so that the next mount finds no lock of its."""
    if wait_for_exit(os.pidfd_open(pid), _TERM_GRACE_S):
        os.waitpid(pid, 0)
    else:
        _end(pid)


def _end(pid: int) -> None:
    """End the child and all that it started: a clean end first, so that it can unmount."""
    for number, grace_s in ((signal.SIGTERM, _TERM_GRACE_S), (signal.SIGKILL, _KILL_GRACE_S)):
        os.kill(pid, number)
        if wait_for_exit(os.pidfd_open(pid), grace_s):
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # its workers
    os.waitpid(pid, os.WNOHANG)


def _how_it_ended(pid: int) -> str:
    if not wait_for_exit(os.pidfd_open(pid), _KILL_GRACE_S):
        _end(pid)
        return "it closed its report without writing one"
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
