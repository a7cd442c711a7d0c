"""Processes that get ready first and work when told to, so that nobody's start-up is in anybody's time.

A child prints a line when it is ready, then answers each line of JSON (keyword arguments) with one line of JSON (a
dict); one with the key "error" says that the work failed. It ends when its stdin does.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable
from typing import Any

READY_S = 120.0
"""What a child may take to get ready: TensorFlow is imported in 5 to 30 s."""

ANSWER_S = 600.0
"""No piece of work here takes a minute; ten mean that it hangs."""

STOP_S = 10.0


class BenchError(Exception):
    """Something could not be measured, and why."""


class Child:
    """The bench's side of a child; a context manager that ends it.

    Args:
        module: run with `python -m`. arguments: for it. environment: all of its variables.
        python: the interpreter; this one if not given.

    Raises:
        BenchError: it did not get ready.
    """

    def __init__(self, module: str, arguments: list[str], environment: dict[str, str], python: str = "") -> None:
        self._module = module
        command = [python or sys.executable, "-m", module, *arguments]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
        )
        self.pid = self._process.pid
        try:
            self._line(READY_S)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def ask(self, **work: Any) -> dict[str, Any]:
        """Let it work, and wait for the answer.

        Raises:
            BenchError: the work failed; or the child died or hangs, and is ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(work).encode() + b"\n")
            self._process.stdin.flush()
            answer: dict[str, Any] = json.loads(self._line(ANSWER_S))
        except BrokenPipeError:
            raise BenchError(f"{self._module} is dead") from None
        except BenchError:
            self._process.kill()
            raise
        if "error" in answer:
            raise BenchError(f"{self._module}: {answer['error']}")
        return answer

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    def close(self) -> None:
        """End it and wait for it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _line(self, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            raise BenchError(f"{self._module} {'died' if ready else f'said nothing for {timeout_s:g} s'}")
        return line


def serve(work: Callable[..., dict[str, Any]]) -> None:
    """The child's side: say that we are ready, then do work until stdin ends. Other output goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print("ready", file=answers)
    for line in sys.stdin:
        try:
            answer = work(**json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)
