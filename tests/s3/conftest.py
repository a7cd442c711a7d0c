"""A stand-in for S3 that all tests here share, and a real worker process at the end of a socket."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from awscrt.checksums import crc32c

from s3prefetchfs import wire
from s3prefetchfs.core.extent import CHUNK_BYTES
from s3prefetchfs.errors import RequestError
from s3prefetchfs.s3.client import Body, Client, ClientSettings
from tests.s3stub import S3Stub, ramp

STALL_TIMEOUT_S = 0.5
"""Long enough for a busy host to send the next byte, short enough for a test to wait for it."""

ANSWER_S = 20.0
"""No single message takes longer, the start of a process included."""


@pytest.fixture(scope="session")
def _stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Stub]:
    with S3Stub(tmp_path_factory.mktemp("s3")) as stub:
        yield stub


@pytest.fixture
def s3(_stub: S3Stub) -> Iterator[S3Stub]:
    """The stand-in, with all knobs at rest and an empty log."""
    _stub.reset_knobs()
    _stub.clear_log()
    yield _stub
    _stub.reset_knobs()


def _set_environment(patch: pytest.MonkeyPatch, directory: Path) -> None:
    """Nothing of the host's configuration; keys that the stand-in accepts."""
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy"):
        patch.delenv(name, raising=False)
    patch.setenv("AWS_CONFIG_FILE", str(directory / "no-config"))
    patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(directory / "no-credentials"))
    patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    patch.setenv("AWS_ACCESS_KEY_ID", "first")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")


@pytest.fixture(scope="session")
def _settings(_stub: S3Stub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientSettings]:
    with pytest.MonkeyPatch.context() as patch:
        _set_environment(patch, tmp_path_factory.mktemp("home"))
        yield ClientSettings(
            bucket=_stub.bucket,
            endpoint_url=_stub.endpoint_url,
            region="us-east-1",
            connections=4 + 2,
            connect_timeout_s=2.0,
            stall_timeout_s=STALL_TIMEOUT_S,
        )


@pytest.fixture
def settings(_settings: ClientSettings, s3: S3Stub) -> ClientSettings:
    """For the stand-in, with little patience; the environment has credentials and nothing else."""
    return _settings


@pytest.fixture
def make_client(settings: ClientSettings) -> Callable[..., Client]:
    """Builds a client for the stand-in; arguments are settings to change. Slow: botocore reads megabytes of JSON."""
    return lambda **changes: Client(replace(settings, **changes))


@pytest.fixture(scope="session")
def _client(_settings: ClientSettings) -> Client:
    return Client(_settings)


@pytest.fixture
def client(_client: Client, s3: S3Stub) -> Client:
    """The client that tests share which do not care about its past."""
    return _client


def read_until_it_breaks(body: Body) -> tuple[bytes, RequestError]:
    """All bytes that a body of less than 2 MiB gives, and how it ends; closes it."""
    buffer = memoryview(bytearray(2 << 20))
    at = 0
    try:
        while True:
            at += body.readinto(buffer[at:])
    except RequestError as error:
        return bytes(buffer[:at]), error
    finally:
        body.close()


class WorkerUnderTest:
    """A worker process and the daemon's end of its socket.

    Args:
        settings: its first message.
        program: what Python is to run, with the socket's descriptor as the last argument.
    """

    def __init__(self, settings: ClientSettings, program: Sequence[str] = ("-m", "s3prefetchfs.s3.worker")) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(ANSWER_S)
        with theirs:
            command = [sys.executable, *program, str(theirs.fileno())]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._decoder = wire.Decoder()
        self._messages: list[Any] = []
        self.unanswered: set[int] = set()
        self.send(settings)

    def send(self, message: Any) -> None:
        if isinstance(message, wire.Get | wire.List | wire.Head):
            self.unanswered.add(message.request_id)
        self.socket.sendall(wire.encode(message))

    def receive(self) -> Any:
        """The next message, in time or TimeoutError."""
        while not self._messages:
            data = self.socket.recv(1 << 20)
            if not data:
                raise EOFError
            self._messages += self._decoder.feed(data)
        message = self._messages.pop(0)
        if isinstance(message, wire.Got | wire.Listed | wire.Headed | wire.Failed):
            self.unanswered.discard(message.request_id)
        return message

    def get(self, request: wire.Get) -> list[Any]:
        """Send a Get and return all that comes until its answer."""
        self.send(request)
        messages = [self.receive()]
        while isinstance(messages[-1], wire.Landed):
            messages.append(self.receive())
        return messages

    def close(self) -> int:
        """Close the socket; returns the exit code of the process."""
        self.socket.close()
        try:
            return self.process.wait(ANSWER_S)
        finally:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="session")
def _workers(_settings: ClientSettings) -> Iterator[list[WorkerUnderTest]]:
    """The one worker that all tests share, or none."""
    workers: list[WorkerUnderTest] = []
    yield workers
    for worker in workers:
        assert worker.close() == 0


@pytest.fixture
def worker(_workers: list[WorkerUnderTest], settings: ClientSettings) -> Iterator[WorkerUnderTest]:
    """A worker with four threads for Gets, ready and idle."""
    if not _workers:
        _workers.append(WorkerUnderTest(settings))
        assert isinstance(_workers[0].receive(), wire.Ready)
    worker = _workers[0]
    yield worker
    if worker.unanswered:  # the test failed: the next one is not to suffer
        _workers.clear()
        worker.close()


class CacheFile:
    """A sparse file of an object's size, and what must be in it."""

    def __init__(self, path: Path, size_bytes: int, seed: int = 0) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self._seed = seed
        with path.open("wb") as file:
            file.truncate(size_bytes)

    def get(self, request_id: int, key: str, etag: str, start: int = 0, stop: int | None = None) -> wire.Get:
        """A Get of `[start, stop)`, by default of all, into this file."""
        stop = self.size_bytes if stop is None else stop
        return wire.Get(request_id, key, etag, self.size_bytes, start, stop, str(self.path), 4 * CHUNK_BYTES)

    def check(self, landed: list[wire.Landed], start: int, stop: int) -> None:
        """What was reported covers `[start, stop)` chunk by chunk, in order, and is true."""
        at = start
        for message in landed:
            assert message.start == at
            assert message.stop % CHUNK_BYTES == 0 or message.stop == self.size_bytes
            at = message.stop
            content = self.read(message.start, message.stop)
            assert content == ramp(message.start, message.stop, self._seed)
            pieces = [content[i : i + CHUNK_BYTES] for i in range(0, len(content), CHUNK_BYTES)]
            assert message.crc32c == tuple(crc32c(piece) for piece in pieces)
        assert at == stop

    def read(self, start: int, stop: int) -> bytes:
        with self.path.open("rb") as file:
            file.seek(start)
            return file.read(stop - start)


@pytest.fixture
def cache_file(tmp_path: Path) -> Callable[..., CacheFile]:
    """Makes cache files for ramps: size_bytes, seed."""

    def make(size_bytes: int, seed: int = 0) -> CacheFile:
        return CacheFile(tmp_path / f"cache-{size_bytes}-{seed}", size_bytes, seed)

    return make
