"""Owns the worker processes: starts them, hands out requests, passes on answers, replaces what dies.

Runs in the daemon's event loop and never touches object bytes, except those of a Get without a file. To its callers
the pool is one thing that answers every request exactly once: a worker that dies, talks garbage or leaves pings
unanswered is killed, what it had under way is answered with WORKER_LOST, and another takes its place. It is dead
before that answer is given, so nobody else is writing to the same file when the request is made again.

A `get` goes to the process with the fewest Gets under way; when all threads of all processes have one, Gets wait
here in their order. List and Head have threads of their own and never wait for Gets. While no process is ready
everything waits, but not for ever: an attempt to start one that fails answers all of it with WORKER_LOST.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import trio

from s3prefetchfs import wire
from s3prefetchfs.errors import FailureKind, RequestError, UserError
from s3prefetchfs.log import fields
from s3prefetchfs.s3.client import METADATA_THREADS, ClientSettings
from s3prefetchfs.s3.process import Question, WorkerProcess

log = logging.getLogger(__name__)

RESTART_MIN_S = 0.1
RESTART_MAX_S = 5.0
"""Pause before a worker is replaced: doubled each time, and small again once one has lived for the longest pause."""

OnMessage = Callable[[wire.Landed | wire.Got | wire.Failed], None]


@dataclass(frozen=True, slots=True)
class Statistics:
    """Figures of the moment.

    Attributes:
        processes: workers that are ready; `pids` are theirs.
        connections_limit: as configured. connections_in_use: requests that workers have.
        restarts: workers that were lost since the start.
    """

    processes: int
    connections_limit: int
    connections_in_use: int
    restarts: int
    pids: tuple[int, ...]


class Pool:
    """See the module's docstring.

    Args:
        settings: of every worker's client; `connections` in it is set here.
        processes: how many workers.
        connections: to S3 for object bytes, over all workers; rounded up to the same number for each.
        on_message: takes the answers to Gets. May call `get`, is never called by `get` or `abandon`.

    Attributes:
        endpoint_url: where requests go, known once `run` has started.
    """

    def __init__(self, settings: ClientSettings, *, processes: int, connections: int, on_message: OnMessage) -> None:
        self._threads = -(-connections // processes)
        self._settings = replace(settings, connections=self._threads + METADATA_THREADS)
        self._processes = processes
        self._connections = connections
        self._on_message = on_message
        self._question_timeout_s = 2 * (settings.connect_timeout_s + settings.stall_timeout_s)
        self._ids = itertools.count(-1, -1)  # Gets have positive ids, chosen by the caller
        self._workers: list[WorkerProcess] = []  # the ready ones
        self._gets: deque[wire.Get] = deque()  # waiting
        self._questions: deque[Question] = deque()  # waiting
        self.endpoint_url = ""
        self._restarts = 0
        self._nursery: trio.Nursery | None = None

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the workers running until cancelled; `started` when all are ready. None is left behind.

        Raises:
            UserError: a worker cannot be started.
        """
        failures: set[UserError] = set()
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                async with trio.open_nursery() as starting:
                    for _ in range(self._processes):
                        starting.start_soon(self._start_one, nursery, failures)
                if failures:
                    nursery.cancel_scope.cancel()
                else:
                    task_status.started()
        finally:
            self._nursery = None
            for question in self._questions:
                question.resolve(_lost(question.request.request_id, 0, "the pool is closed"))
        if failures:
            raise failures.pop()

    def get(self, request: wire.Get) -> None:
        """Have a Get done; answers go to `on_message`. Never blocks.

        Args:
            request: its id is positive and not under way.
        """
        self._gets.append(request)
        self._hand_out()

    def abandon(self, request_id: int) -> None:
        """The answer to this Get is no longer wanted; it comes all the same, as Failed or Got. Never blocks."""
        for worker in self._workers:
            if request_id in worker.gets:
                worker.abandon(request_id)
        for request in self._gets:
            if request.request_id == request_id:
                self._gets.remove(request)
                assert self._nursery is not None
                self._nursery.start_soon(self._answer_abandoned, request)
                break

    async def list(self, prefix: str, delimiter: str | None, token: str | None, max_keys: int) -> wire.Listed:
        """One page of a listing; arguments as in wire.List.

        Raises:
            RequestError: in one attempt.
        """
        answer = await self._ask(wire.List(next(self._ids), prefix, delimiter, token, max_keys))
        assert isinstance(answer, wire.Listed)
        return answer

    async def head(self, key: str) -> wire.Headed:
        """The attributes of one object.

        Raises:
            RequestError: in one attempt.
        """
        answer = await self._ask(wire.Head(next(self._ids), key))
        assert isinstance(answer, wire.Headed)
        return answer

    def statistics(self) -> Statistics:
        """The figures of this moment."""
        return Statistics(
            processes=len(self._workers),
            connections_limit=self._connections,
            connections_in_use=sum(len(worker.gets) + len(worker.questions) for worker in self._workers),
            restarts=self._restarts,
            pids=tuple(worker.pid for worker in self._workers),
        )

    # ------------------------------------------------------------------------------------- requests

    def _hand_out(self) -> None:
        """Give waiting requests to workers that can take them."""
        while self._questions and self._workers:
            least_busy = min(self._workers, key=lambda worker: len(worker.questions))
            least_busy.ask(self._questions.popleft())
        while self._gets and (free := [worker for worker in self._workers if len(worker.gets) < self._threads]):
            min(free, key=lambda worker: len(worker.gets)).get(self._gets.popleft())

    async def _ask(self, request: wire.List | wire.Head) -> wire.Listed | wire.Headed:
        question = Question(request)
        self._questions.append(question)
        self._hand_out()
        try:
            with trio.move_on_after(self._question_timeout_s):
                await question.answered.wait()
        finally:
            if question in self._questions:
                self._questions.remove(question)
        if question.answer is None:
            raise RequestError(FailureKind.TIMEOUT, f"no answer in {self._question_timeout_s:g} s: {request}")
        if isinstance(question.answer, wire.Failed):
            raise RequestError(question.answer.kind, question.answer.detail, question.answer.retry_after_s)
        return question.answer

    def _answer(self, message: wire.Landed | wire.Got | wire.Failed) -> None:
        if not isinstance(message, wire.Landed):
            self._hand_out()
        self._on_message(message)

    async def _answer_abandoned(self, request: wire.Get) -> None:
        self._on_message(wire.Failed(request.request_id, FailureKind.CONNECTION, "abandoned", None, request.start, 0))

    # ------------------------------------------------------------------------------------- processes

    async def _start_one(self, nursery: trio.Nursery, failures: set[UserError]) -> None:
        try:
            await nursery.start(self._keep_running)
        except UserError as error:
            failures.add(error)

    async def _keep_running(self, task_status: trio.TaskStatus[None]) -> None:
        """One worker after the other, until cancelled; `started` when the first is ready.

        Raises:
            UserError: the first never is.
        """
        pause_s = RESTART_MIN_S
        on_ready: Callable[[], None] | None = task_status.started
        while True:
            why, lived_s = await self._run_worker(on_ready)
            if lived_s == 0 and on_ready is not None:
                raise UserError(f"cannot talk to S3: {why}", "check --profile, --region and ~/.aws/config")
            if lived_s == 0 and not self._workers:
                self._give_up_waiting(why)
            if lived_s > RESTART_MAX_S:
                pause_s = RESTART_MIN_S
            on_ready = None
            self._restarts += 1
            log.warning("worker process lost: %s %s", why, fields(restart_in_s=pause_s))
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, RESTART_MAX_S)

    async def _run_worker(self, on_ready: Callable[[], None] | None) -> tuple[str, float]:
        """One worker from start to end, after which its requests are answered.

        Returns:
            Why it ended, and for how many seconds it was ready, 0 if never.
        """
        try:
            worker = await WorkerProcess.start(self._answer)
        except OSError as error:
            return str(error), 0.0
        ready_s: float | None = None

        def join() -> None:
            nonlocal ready_s
            ready_s = trio.current_time()
            self.endpoint_url = worker.endpoint_url
            self._workers.append(worker)
            self._hand_out()
            if on_ready is not None:
                on_ready()

        why = ""
        try:
            why = await worker.run(self._settings, join)
        finally:
            if worker in self._workers:
                self._workers.remove(worker)
            await worker.end()
            for request_id, question in worker.questions.items():
                question.resolve(_lost(request_id, 0, why or "the pool is closed"))
        # Only now, and not if the pool itself is cancelled: then nobody listens any more.
        for request_id, reached in worker.gets.items():
            self._on_message(_lost(request_id, reached, why))
        lived_s = 0.0 if ready_s is None else trio.current_time() - ready_s
        return why if why and worker.ended_well else f"{why} ({worker.how_it_ended()})", lived_s

    def _give_up_waiting(self, why: str) -> None:
        gets, self._gets = self._gets, deque()
        questions, self._questions = self._questions, deque()
        for question in questions:
            question.resolve(_lost(question.request.request_id, 0, why))
        for request in gets:
            self._on_message(_lost(request.request_id, request.start, why))


def _lost(request_id: int, reached: int, why: str) -> wire.Failed:
    return wire.Failed(request_id, FailureKind.WORKER_LOST, why, None, reached, 0)
