"""One worker process as the pool sees it: what it has under way, and whether it is still worth anything.

Runs in the daemon's event loop, owned by the pool. Three tasks send, receive and ping; the first of them that finds
the worker dead, hung or talking nonsense ends all three. What then becomes of its requests is the pool's business.
"""

from __future__ import annotations

import math
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import trio

import s3prefetchfs
from s3prefetchfs import wire
from s3prefetchfs.s3.client import ClientSettings

START_TIMEOUT_S = 30.0
"""From exec to Ready. One second on a quiet host, nearly all of it botocore's imports; ten on a crowded one."""

PING_INTERVAL_S = 5.0
PINGS_LOST_MAX = 3
"""A worker that owes this many answers when the next ping is due is lost: 15 s. Pings are counted, not seconds, so
that a daemon that was itself stopped for a while does not kill workers whose answers it has not read yet."""

STOP_TIMEOUT_S = 2.0
"""A worker ends by itself when its socket closes; after this it is killed."""

_RECEIVE_BYTES = 256 * 1024

WORKER_MODULE = "s3prefetchfs.s3.worker"

_PACKAGE_PARENT = Path(s3prefetchfs.__file__).parents[1]
"""Where `python -m` finds the same code that runs here, installed or not."""

OnAnswer = Callable[[wire.Landed | wire.Got | wire.Failed], None]


@dataclass(slots=True, eq=False)
class Question:
    """A List or Head, and whoever waits for its answer."""

    request: wire.List | wire.Head
    answered: trio.Event = field(default_factory=trio.Event)
    answer: wire.Listed | wire.Headed | wire.Failed | None = None

    def resolve(self, answer: wire.Listed | wire.Headed | wire.Failed) -> None:
        self.answer = answer
        self.answered.set()


class _LostError(Exception):
    """What a worker said makes it useless; the text says why."""


class WorkerProcess:
    """One process, from its start to its end.

    Args:
        process: just started.
        socket_: our end of the pair.
        on_answer: takes the answers to Gets; the last one after the Get has left `gets`.

    Attributes:
        gets: under way by request id, each with the byte before which all has landed.
        questions: the same for List and Head.
    """

    def __init__(self, process: trio.Process, socket_: socket.socket, on_answer: OnAnswer) -> None:
        self.pid = process.pid
        self.endpoint_url = ""  # known when it is ready
        self.gets: dict[int, int] = {}
        self.questions: dict[int, Question] = {}
        self._process = process
        self._stream = trio.SocketStream(trio.socket.from_stdlib_socket(socket_))
        self._on_answer = on_answer
        self._outbox, self._frames = trio.open_memory_channel[bytes](math.inf)
        self._ready = trio.Event()
        self._pings = self._pongs = 0
        self._scope = trio.CancelScope()
        self._why = ""

    @classmethod
    async def start(cls, on_answer: OnAnswer) -> WorkerProcess:
        """Start a process; see `__init__`.

        Raises:
            OSError: the system has no process or descriptor to give.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await trio.lowlevel.open_process(
                    [sys.executable, "-m", WORKER_MODULE, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,  # stderr is shared: a worker logs as we do
                    cwd=_PACKAGE_PARENT,
                )
            except BaseException:
                ours.close()
                raise
        return cls(process, ours, on_answer)

    def get(self, request: wire.Get) -> None:
        """Send a Get; never blocks."""
        self.gets[request.request_id] = request.start
        self._say(request)

    def ask(self, question: Question) -> None:
        """Send a List or Head; never blocks."""
        self.questions[question.request.request_id] = question
        self._say(question.request)

    def abandon(self, request_id: int) -> None:
        """Send an Abandon; never blocks."""
        self._say(wire.Abandon(request_id))

    async def run(self, settings: ClientSettings, on_ready: Callable[[], None]) -> str:
        """Talk to the process until it is lost.

        Args:
            on_ready: called when it can take requests.

        Returns:
            Why it is lost.
        """
        self._outbox.send_nowait(wire.encode(settings))
        with self._scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send)
                nursery.start_soon(self._receive)
                with trio.move_on_after(START_TIMEOUT_S):
                    await self._ready.wait()
                if self._ready.is_set():
                    on_ready()
                    await self._ping()
                else:
                    self._lose(f"not ready after {START_TIMEOUT_S:.0f} s")
        return self._why

    async def end(self) -> None:
        """Close the socket, wait for the process to end, kill it if it does not, and reap it."""
        with trio.CancelScope(shield=True):
            await self._stream.aclose()
            with trio.move_on_after(STOP_TIMEOUT_S):
                await self._process.wait()
            self._process.kill()
            with trio.move_on_after(STOP_TIMEOUT_S):  # a process in the middle of disk I/O may not die at once
                await self._process.wait()

    @property
    def ended_well(self) -> bool:
        """After `end`: it ended by itself, and of what there is nothing more to say."""
        return self._process.returncode == 0

    def how_it_ended(self) -> str:
        """For people, after `end`."""
        code = self._process.returncode
        if code is None:
            return "it does not die"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _say(self, message: wire.ToWorker) -> None:
        self._outbox.send_nowait(wire.encode(message))

    def _lose(self, why: str) -> None:
        self._why = why
        self._scope.cancel()

    async def _send(self) -> None:
        async for frame in self._frames:
            try:
                await self._stream.send_all(frame)
            except trio.BrokenResourceError:
                return  # `_receive` sees it too

    async def _receive(self) -> None:
        decoder = wire.Decoder()
        while True:
            try:
                data = await self._stream.receive_some(_RECEIVE_BYTES)
            except trio.BrokenResourceError:
                data = b""
            if not data:
                return self._lose("it closed its socket")
            try:
                messages = decoder.feed(data)
            except Exception as error:  # a broken pickle can raise anything
                return self._lose(f"it sent garbage: {error!r}")
            for message in messages:
                try:
                    self._take(message)
                except _LostError as error:
                    return self._lose(str(error))

    async def _ping(self) -> None:
        while True:
            await trio.sleep(PING_INTERVAL_S)
            if self._pings - self._pongs >= PINGS_LOST_MAX:
                return self._lose("it does not answer pings")
            self._pings += 1
            self._say(wire.Ping(self._pings))

    def _take(self, message: wire.FromWorker) -> None:
        match message:
            case wire.Landed():
                if message.request_id in self.gets:
                    self.gets[message.request_id] = message.stop
                    self._on_answer(message)
            case wire.Got() | wire.Failed() if message.request_id > 0:
                if self.gets.pop(message.request_id, None) is not None:
                    self._on_answer(message)
            case wire.Listed() | wire.Headed() | wire.Failed() if message.request_id < 0:
                if (question := self.questions.pop(message.request_id, None)) is not None:
                    question.resolve(message)
            case wire.Pong():
                self._pongs = message.number
            case wire.Ready():
                self.endpoint_url = message.endpoint_url
                self._ready.set()
            case wire.Failed():
                raise _LostError(message.detail)
            case _:
                raise _LostError(f"it sent a {type(message).__name__}")
