"""The pool with real worker processes: hands out, answers exactly once, replaces what dies, leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import trio

from s3prefetchfs import wire
from s3prefetchfs.core.extent import CHUNK_BYTES
from s3prefetchfs.errors import FailureKind, RequestError, UserError
from s3prefetchfs.s3 import process as process_module
from s3prefetchfs.s3.client import ClientSettings
from s3prefetchfs.s3.pool import Pool
from tests.s3.conftest import CacheFile
from tests.s3stub import S3Stub

MIB = 1 << 20
PATIENCE_S = 90.0

MakeFile = Callable[..., CacheFile]
Answer = wire.Landed | wire.Got | wire.Failed


class Running:
    """A pool that runs, and all it ever said."""

    def __init__(self, settings: ClientSettings, processes: int, connections: int) -> None:
        self.messages: list[Answer] = []
        self.on_answer: Callable[[Answer], object] = lambda answer: None
        self._came = trio.Event()
        self.pool = Pool(settings, processes=processes, connections=connections, on_message=self.take)

    def take(self, message: Answer) -> None:
        self.messages.append(message)
        self._came.set()
        self._came = trio.Event()
        self.on_answer(message)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something that a message changes is true."""
        while not condition():
            await self._came.wait()

    def landed(self, request_id: int) -> list[wire.Landed]:
        return [m for m in self.messages if m.request_id == request_id and isinstance(m, wire.Landed)]

    async def answer(self, request_id: int) -> wire.Got | wire.Failed:
        """The last message of a Get."""

        def answers() -> list[wire.Got | wire.Failed]:
            return [m for m in self.messages if m.request_id == request_id and not isinstance(m, wire.Landed)]

        await self.until(lambda: bool(answers()))
        return answers()[0]


@asynccontextmanager
async def running(settings: ClientSettings, processes: int = 1, connections: int = 2) -> AsyncIterator[Running]:
    """A pool from ready to gone, in bounded time."""
    this = Running(settings, processes, connections)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            await nursery.start(this.pool.run)
            yield this
            nursery.cancel_scope.cancel()


def run(body: Callable[[], Awaitable[None]]) -> None:
    trio.run(body)


def request(request_id: int, start: int = 0) -> wire.Get:
    """For fakes: one byte of nothing."""
    return wire.Get(request_id, "key", "etag", MIB, start, start + 1, None, 1)


async def eventually(condition: Callable[[], bool]) -> None:
    """Poll for what no message announces."""
    while not condition():  # noqa: ASYNC110
        await trio.sleep(0.01)


def exists(pid: int) -> bool:
    """Whether a process is there, a zombie included."""
    return Path(f"/proc/{pid}").exists()


@pytest.fixture
def fake_worker(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """From now on, workers are fakes of this kind."""

    def make(how: str) -> None:
        monkeypatch.setattr(process_module, "WORKER_MODULE", "tests.s3.fake_worker")
        monkeypatch.setenv("FAKE_WORKER", how)

    return make


# ----------------------------------------------------------------------------------------- good days


def test_a_good_day(s3: S3Stub, settings: ClientSettings, cache_file: MakeFile) -> None:
    """Gets of all processes land and are answered; metadata too; the figures add up; nothing is left behind."""

    async def main() -> None:
        async with running(settings, processes=2, connections=4) as this:
            pool = this.pool
            pids = pool.statistics().pids
            files = {}
            for request_id in range(1, 9):
                etag = s3.put_ramp(f"good-{request_id}", 2 * MIB, request_id)
                files[request_id] = cache_file(2 * MIB, request_id)
                pool.get(files[request_id].get(request_id, f"good-{request_id}", etag))
            figures = pool.statistics()
            assert (figures.processes, figures.connections_limit, figures.connections_in_use) == (2, 4, 4)
            assert len(set(pids)) == 2
            for request_id, file in files.items():
                assert await this.answer(request_id) == wire.Got(request_id, None, 1)
                file.check(this.landed(request_id), 0, 2 * MIB)
            listed = await pool.list("good-", None, None, 3)
            assert [key for key, *_ in listed.objects] == [b"good-1", b"good-2", b"good-3"]
            assert (await pool.list("good-", None, listed.next_token, 100)).next_token is None
            assert (await pool.head("good-1")).object.size_bytes == 2 * MIB
            figures = pool.statistics()
            assert (figures.connections_in_use, figures.restarts) == (0, 0)
            assert len({record.connection for record in s3.log("GET")}) == 4
        assert not any(exists(pid) for pid in pids)

    run(main)


def test_gets_wait_in_order(s3: S3Stub, settings: ClientSettings) -> None:
    """With one connection one Get is under way at a time, first come first served; a listing does not wait."""
    etag = s3.put_ramp("queue", MIB)
    s3.configure(faults=[{"verb": "GET", "delay_ms": 100}])

    async def main() -> None:
        async with running(settings, processes=1, connections=1) as this:
            for request_id in range(1, 6):
                this.pool.get(wire.Get(request_id, "queue", etag, MIB, request_id, request_id + 1, None, 1))
            await this.pool.list("queue", None, None, 1)
            assert len(this.messages) < 5
            await this.answer(5)
            assert [message.request_id for message in this.messages] == [1, 2, 3, 4, 5]

    run(main)
    gets = s3.log("GET")
    assert [record.range for record in gets] == [(number, number + 1) for number in range(1, 6)]
    for before, after in pairwise(gets):
        assert before.end_s is not None
        assert before.end_s <= after.start_s


def test_an_answer_may_lead_to_the_next_request(settings: ClientSettings, fake_worker: Callable[[str], None]) -> None:
    """`get` can be called from `on_message`."""
    fake_worker("echo")

    async def main() -> None:
        async with running(settings) as this:
            this.on_answer = lambda answer: answer.request_id < 20 and this.pool.get(request(answer.request_id + 1))
            this.pool.get(request(1))
            assert await this.answer(20) == wire.Got(20, b"\0", 1)
            assert [message.request_id for message in this.messages] == list(range(1, 21))

    run(main)


def test_failures_come_through(s3: S3Stub, settings: ClientSettings) -> None:
    """What the worker says is what the caller gets, for Gets and for questions."""
    etag = s3.put_ramp("failing", MIB)
    s3.configure(faults=[{"status": 503, "retry_after_s": 2}])

    async def main() -> None:
        async with running(settings) as this:
            this.pool.get(wire.Get(1, "failing", etag, MIB, 0, 1, None, 1))
            answer = await this.answer(1)
            assert isinstance(answer, wire.Failed)
            assert (answer.kind, answer.retry_after_s) == (FailureKind.THROTTLED, 2.0)
            for ask in (this.pool.list("x", None, None, 1), this.pool.head("x")):
                with pytest.raises(RequestError) as caught:
                    await ask
                assert (caught.value.kind, caught.value.retry_after_s) == (FailureKind.THROTTLED, 2.0)

    run(main)


def test_abandoning(s3: S3Stub, settings: ClientSettings, cache_file: MakeFile) -> None:
    """Under way or still waiting, an abandoned Get is answered, once, and not from within `abandon`."""
    etag = s3.put_ramp("abandoned", 8 * MIB)
    s3.configure(faults=[{"drip": 1_000_000}])

    async def main() -> None:
        async with running(settings, processes=1, connections=1) as this:
            this.pool.get(cache_file(8 * MIB).get(1, "abandoned", etag))
            this.pool.get(cache_file(8 * MIB).get(2, "abandoned", etag))
            await this.until(lambda: bool(this.landed(1)))
            before = len(this.messages)
            this.pool.abandon(2)
            this.pool.abandon(1)
            this.pool.abandon(3)
            assert len(this.messages) == before
            for request_id in (1, 2):
                answer = await this.answer(request_id)
                assert isinstance(answer, wire.Failed)
                assert answer.detail == "abandoned"
            assert not this.landed(2)

    run(main)


# ----------------------------------------------------------------------------------------- lost workers


def test_a_killed_worker(s3: S3Stub, settings: ClientSettings, cache_file: MakeFile) -> None:
    """Its Get fails with what had landed, its neighbour goes on, and another takes its place."""
    etag = s3.put_ramp("killed", 4 * MIB)
    s3.configure(faults=[{"drip": 1_500_000, "first": 2}])

    async def main() -> None:
        async with running(settings, processes=2, connections=2) as this:
            first, second = cache_file(4 * MIB), CacheFile(cache_file(0).path, 4 * MIB)
            this.pool.get(first.get(1, "killed", etag))
            this.pool.get(second.get(2, "killed", etag))
            await this.until(lambda: len(this.landed(1)) >= 2 and bool(this.landed(2)))
            victim = this.pool.statistics().pids[0]
            os.kill(victim, signal.SIGKILL)
            failed = await this.answer(1)
            assert isinstance(failed, wire.Failed)
            assert failed.kind is FailureKind.WORKER_LOST
            assert failed.reached == this.landed(1)[-1].stop >= 2 * CHUNK_BYTES
            assert not exists(victim), "it is reaped before its requests are answered"
            first.check(this.landed(1), 0, failed.reached)
            this.pool.get(first.get(3, "killed", etag, failed.reached))
            assert isinstance(await this.answer(3), wire.Got)
            first.check(this.landed(1) + this.landed(3), 0, 4 * MIB)
            assert isinstance(await this.answer(2), wire.Got)
            second.check(this.landed(2), 0, 4 * MIB)
            await eventually(lambda: this.pool.statistics().processes == 2)
            assert this.pool.statistics().restarts == 1
            assert [m for m in this.messages if m.request_id == 1][-1] is failed

    run(main)


def test_a_hung_worker(
    settings: ClientSettings, fake_worker: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is alive but answers no ping: killed, and replaced like a dead one. A listing does not hang either."""
    fake_worker("half")
    monkeypatch.setattr(process_module, "PING_INTERVAL_S", 0.5)

    async def main() -> None:
        async with running(replace(settings, stall_timeout_s=60.0)) as this:
            this.pool.get(request(1, start=7))
            await this.until(lambda: bool(this.landed(1)))
            (victim,) = this.pool.statistics().pids
            os.kill(victim, signal.SIGSTOP)
            fake_worker("echo")
            with pytest.raises(RequestError, match="pings") as caught:
                await this.pool.list("key", None, None, 1)
            assert caught.value.kind is FailureKind.WORKER_LOST
            failed = await this.answer(1)
            assert isinstance(failed, wire.Failed)
            assert (failed.kind, failed.reached) == (FailureKind.WORKER_LOST, 8)
            assert not exists(victim)
            this.pool.get(request(2))  # there is no worker: it waits for the next one
            assert isinstance(await this.answer(2), wire.Got)

    run(main)


def test_a_question_is_not_waited_for_without_end(settings: ClientSettings, fake_worker: Callable[[str], None]) -> None:
    """A worker that says nothing costs the asker twice connecting and stalling, even if it answers pings."""
    fake_worker("stuck")

    async def main() -> None:
        async with running(replace(settings, connect_timeout_s=0.1, stall_timeout_s=0.1)) as this:
            with pytest.raises(RequestError, match=r"0\.4 s") as caught:
                await this.pool.list("x", None, None, 1)
            assert caught.value.kind is FailureKind.TIMEOUT

    run(main)


@pytest.mark.parametrize("how", ["garbage", "nonsense"])
def test_garbage(
    settings: ClientSettings, fake_worker: Callable[[str], None], caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """A worker that says what is no message is lost; the next one does better."""
    fake_worker(how)

    async def main() -> None:
        async with running(settings) as this:
            fake_worker("echo")
            this.pool.get(request(1, start=7))
            failed = await this.answer(1)
            assert isinstance(failed, wire.Failed)
            assert (failed.kind, failed.reached) == (FailureKind.WORKER_LOST, 7)
            this.pool.get(request(2))
            assert isinstance(await this.answer(2), wire.Got)

    run(main)
    assert "worker process lost: it sent" in caplog.text


def test_one_answer_each(settings: ClientSettings, fake_worker: Callable[[str], None]) -> None:
    """Whatever a worker says after it has answered is not passed on."""
    fake_worker("talkative")

    async def main() -> None:
        async with running(settings) as this:
            for request_id in (1, 2):
                this.pool.get(request(request_id))
                await this.answer(request_id)
            assert [type(message) for message in this.messages] == [wire.Landed, wire.Failed] * 2

    run(main)


def test_nobody_left(settings: ClientSettings, fake_worker: Callable[[str], None]) -> None:
    """If the last worker cannot be replaced, what waits is answered; once one can, all goes on."""
    fake_worker("echo")

    async def main() -> None:
        async with running(settings) as this:
            fake_worker("exits")
            os.kill(this.pool.statistics().pids[0], signal.SIGKILL)
            await eventually(lambda: this.pool.statistics().processes == 0)
            this.pool.get(request(1, start=7))
            failed = await this.answer(1)
            assert isinstance(failed, wire.Failed)
            assert (failed.kind, failed.reached) == (FailureKind.WORKER_LOST, 7)
            with pytest.raises(RequestError, match="exit code 3") as caught:
                await this.pool.list("x", None, None, 1)
            assert caught.value.kind is FailureKind.WORKER_LOST
            fake_worker("echo")
            this.pool.get(request(2))
            await this.until(lambda: this.messages[-1].request_id == 2)

    run(main)


# ----------------------------------------------------------------------------------------- start and stop


def start_failure(settings: ClientSettings) -> UserError:
    """What a pool that cannot start says."""

    async def main() -> None:
        with trio.fail_after(PATIENCE_S):
            await Pool(settings, processes=2, connections=4, on_message=lambda message: None).run()

    with pytest.raises(UserError) as caught:
        trio.run(main)
    return caught.value


def test_a_client_that_cannot_be_built(settings: ClientSettings) -> None:
    """The pool does not start, and says why."""
    assert "no-such-profile" in str(start_failure(replace(settings, profile="no-such-profile")))


def test_a_process_that_does_not_start(
    settings: ClientSettings, fake_worker: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it exits or hangs before it is ready."""
    fake_worker("exits")
    assert "exit code 3" in str(start_failure(settings))
    fake_worker("silent")
    monkeypatch.setattr(process_module, "START_TIMEOUT_S", 1.0)
    assert "not ready after 1 s" in str(start_failure(settings))
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert "No such file" in str(start_failure(settings))


def test_stopping_with_everything_stuck(settings: ClientSettings, fake_worker: Callable[[str], None]) -> None:
    """It takes a moment; a stopped process is killed; whoever asked gets an error, not silence."""
    fake_worker("stuck")
    errors: list[RequestError] = []

    async def ask(pool: Pool) -> None:
        try:
            await pool.head("key")
        except RequestError as error:
            errors.append(error)

    async def main() -> None:
        async with trio.open_nursery() as askers, running(replace(settings, stall_timeout_s=60.0), processes=2) as this:
            pids = this.pool.statistics().pids
            for request_id in (1, 2, 3):
                this.pool.get(request(request_id))
            askers.start_soon(ask, this.pool)
            await eventually(lambda: this.pool.statistics().connections_in_use == 3)
            os.kill(pids[0], signal.SIGSTOP)
            began_s = trio.current_time()
        assert trio.current_time() - began_s < 20
        assert not any(exists(pid) for pid in pids)
        assert not this.messages

    run(main)
    assert [error.kind for error in errors] == [FailureKind.WORKER_LOST]


def test_what_a_worker_inherits(settings: ClientSettings, tmp_path: Path, fake_worker: Callable[[str], None]) -> None:
    """Its socket and stderr; no locks of the daemon's, nor its stdin."""
    fake_worker("talkative")
    lock = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)
    os.set_inheritable(lock, True)

    async def main() -> None:
        async with running(settings) as this:
            (pid,) = this.pool.statistics().pids
            open_files = {int(fd): os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
            assert open_files[0] == os.devnull
            assert str(tmp_path / "lock") not in open_files.values()
            assert sum(name.startswith("socket:") for number, name in open_files.items() if number > 2) == 1

    try:
        run(main)
    finally:
        os.close(lock)


def test_the_daemon_stays_light() -> None:
    """Importing the pool does not import what takes 20 MB and a second."""
    program = "import sys, s3prefetchfs.s3.pool; print({'boto3', 'botocore.session', 'awscrt'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"
