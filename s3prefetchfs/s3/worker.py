"""A worker process: takes requests from the daemon, and puts the bytes of objects straight into cache files.

    python -m s3prefetchfs.s3.worker FD

FD is one end of a socketpair whose other end is the pool's, in the daemon. The first frame is the `ClientSettings`;
the answer to it is `Ready`, or a `Failed` for request 0 if the client cannot be built. Then requests come in any
number and are answered in any order, each with exactly one `Got`, `Listed`, `Headed` or `Failed`, after any number
of `Landed`. End of file on the socket means that the daemon is gone: the process ends at once.

The main thread only reads messages, so a Ping is answered whatever the others do. Threads for Gets each own a
buffer; threads for List and Head are separate, so metadata never waits behind data. A Get goes

    socket --readinto--> buffer --pwrite--> cache file (page cache), CRC32C, `Landed`

and `Landed` is sent for the first chunk as soon as it is there, because a reader may wait for just that one. When
the body breaks, a new GET continues at the next byte, as long as each one brings at least something; waiting and
trying again is the daemon's decision.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import NoReturn

from awscrt.checksums import crc32c

from s3prefetchfs import wire
from s3prefetchfs.core.extent import CHUNK_BYTES
from s3prefetchfs.errors import FailureKind, RequestError
from s3prefetchfs.log import start as start_log
from s3prefetchfs.s3.client import METADATA_THREADS, Client, ClientSettings

log = logging.getLogger(__name__)

BUFFER_BYTES = 1024 * 1024
"""Of each thread for Gets: a few chunks. Larger reads and writes are not faster."""

REPORT_INTERVAL_S = 0.02
"""On a slow connection chunks are reported this late at most: 50 messages a second each, and a reader does not
notice. On a fast one `report_bytes` comes first."""

SLOWEST_CHUNK_S = 60.0
"""A chunk that takes longer, 2 KB/s, is as good as a stalled one: it would hold its connection for hours."""

HTTP_REQUESTS_MAX = 100
"""For one Get, all but the first to resume it. More breaks than this within one extent are no accident."""

_BROKEN_BODY = (FailureKind.BODY, FailureKind.CONNECTION, FailureKind.TIMEOUT)

_RECEIVE_BYTES = 64 * 1024

Send = Callable[[wire.FromWorker], None]


@dataclass(slots=True, eq=False)
class _Job:
    """A Get that is not answered yet."""

    request: wire.Get
    abandoned: bool = False


class _File:
    """Where the bytes of a Get go: the cache file, by way of a buffer.

    Invariants: bytes before `reported` are in the file and reported; those of `[reported, at)` are in the buffer,
    whose first byte is the object's byte `base`; `base <= reported <= at`; `base` and `reported` are chunk borders.

    Args:
        request: the Get. send: takes `Landed`. buffer: BUFFER_BYTES, free until this is done.

    Raises:
        RequestError: the file cannot be opened.
    """

    def __init__(self, request: wire.Get, send: Send, buffer: memoryview) -> None:
        self._request = request
        self._send = send
        self._buffer = buffer
        self._report_bytes = min(BUFFER_BYTES, max(CHUNK_BYTES, request.report_bytes // CHUNK_BYTES * CHUNK_BYTES))
        self.at = self._base = self.reported = request.start
        self._due = min(request.start + CHUNK_BYTES, request.stop)
        self.reported_s = time.monotonic()
        self._first_byte_s: float | None = None
        assert request.path is not None
        try:
            self._fd = os.open(request.path, os.O_WRONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _cache_failure(error, request.path) from error

    def room(self) -> memoryview:
        """Where the next bytes belong; never empty before the end."""
        return self._buffer[self.at - self._base : self._due - self._base]

    def took(self, count: int, first_byte_s: float | None = None) -> None:
        """The first `count` bytes of `room()` are filled; reports what is due.

        Args:
            first_byte_s: how long these took to come, if they are the first of a GET.

        Raises:
            RequestError: the file cannot be written.
        """
        self.at += count
        if first_byte_s is not None:
            self._first_byte_s = first_byte_s
        if self.at == self._due:
            self.flush()
            self._base = self.at
            self._due = min(self.at + self._report_bytes, self._request.stop)
        elif self.at - self.reported >= CHUNK_BYTES and time.monotonic() - self.reported_s > REPORT_INTERVAL_S:
            self.flush()

    def flush(self) -> None:
        """Write and report the whole chunks that are in the buffer.

        Raises:
            RequestError: the file cannot be written.
        """
        begin = self.reported - self._base
        size = self.at - self.reported
        if self.at < self._request.stop:
            size -= size % CHUNK_BYTES
        if size == 0:
            return
        chunks = [self._buffer[i : min(i + CHUNK_BYTES, begin + size)] for i in range(begin, begin + size, CHUNK_BYTES)]
        self._write(self._buffer[begin : begin + size], self.reported)
        stop = self.reported + size
        landed = tuple(crc32c(chunk) for chunk in chunks)
        self._send(wire.Landed(self._request.request_id, self.reported, stop, landed, self._first_byte_s))
        self.reported = stop
        self.reported_s = time.monotonic()
        self._first_byte_s = None

    def _write(self, data: memoryview, offset: int) -> None:
        try:
            while data:
                written = os.pwrite(self._fd, data, offset)
                data = data[written:]
                offset += written
        except OSError as error:
            raise _cache_failure(error, str(self._request.path)) from error

    def close(self) -> None:
        os.close(self._fd)

    def data(self) -> None:
        """The bytes are in the file."""


class _Memory:
    """Where the bytes of a Get go that has no cache file: back to the daemon, when all are here."""

    def __init__(self, request: wire.Get) -> None:
        self._start = self.at = self.reported = request.start
        self._bytes = bytearray(request.stop - request.start)
        self.reported_s = time.monotonic()

    def room(self) -> memoryview:
        return memoryview(self._bytes)[self.at - self._start :]

    def took(self, count: int, first_byte_s: float | None = None) -> None:
        self.at += count

    def flush(self) -> None:
        """Nothing is reported before the end."""

    def close(self) -> None:
        """Nothing is open."""

    def data(self) -> bytes:
        return bytes(self._bytes)


class Worker:
    """The threads, and the socket they share.

    Args:
        connection: to the daemon.
        client: to S3.
        data_threads: Gets at once.
    """

    def __init__(self, connection: socket.socket, client: Client, data_threads: int) -> None:
        self._connection = connection
        self._client = client
        self._sending = threading.Lock()
        self._jobs: dict[int, _Job] = {}
        self._gets: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._questions: queue.SimpleQueue[wire.List | wire.Head] = queue.SimpleQueue()
        for number in range(data_threads):
            threading.Thread(target=self._serve_gets, name=f"get-{number}", daemon=True).start()
        for number in range(METADATA_THREADS):
            threading.Thread(target=self._serve_questions, name=f"metadata-{number}", daemon=True).start()

    def run(self) -> NoReturn:
        """Take messages until the daemon closes the socket, which ends the process."""
        decoder = wire.Decoder()
        while True:
            for message in decoder.feed(_receive(self._connection)):
                self._take(message)

    def _take(self, message: wire.ToWorker) -> None:
        match message:
            case wire.Ping():
                self._send(wire.Pong(message.number))
            case wire.Get():
                job = self._jobs[message.request_id] = _Job(message)
                self._gets.put(job)
            case wire.List() | wire.Head():
                self._questions.put(message)
            case wire.Abandon():
                if (unwanted := self._jobs.get(message.request_id)) is not None:
                    unwanted.abandoned = True

    def _send(self, message: wire.FromWorker) -> None:
        frame = wire.encode(message)
        with self._sending:
            _send(self._connection, frame)

    # ------------------------------------------------------------------------------------- metadata

    def _serve_questions(self) -> None:
        while True:
            request = self._questions.get()
            answer: wire.Listed | wire.Headed | wire.Failed
            try:
                answer = self._ask(request)
            except Exception as error:
                answer = _failed(request.request_id, error, 0, 1)
            self._send(answer)

    def _ask(self, request: wire.List | wire.Head) -> wire.Listed | wire.Headed:
        if isinstance(request, wire.Head):
            return wire.Headed(request.request_id, self._client.head(request.key))
        page = self._client.list_page(request.prefix, request.delimiter, request.token, request.max_keys)
        return wire.Listed(request.request_id, *page)

    # ------------------------------------------------------------------------------------- data

    def _serve_gets(self) -> None:
        buffer = memoryview(mmap.mmap(-1, BUFFER_BYTES))  # unlike a bytearray's, its unused part takes no memory
        while True:
            job = self._gets.get()
            request = job.request
            answer: wire.Got | wire.Failed
            try:
                with closing(_Memory(request) if request.path is None else _File(request, self._send, buffer)) as sink:
                    answer = self._get(job, sink)
            except Exception as error:
                answer = _failed(request.request_id, error, request.start, 0)
            del self._jobs[request.request_id]
            self._send(answer)

    def _get(self, job: _Job, sink: _File | _Memory) -> wire.Got | wire.Failed:
        request = job.request
        requests = 0
        while sink.at < request.stop:
            began_at = sink.at
            try:
                _stop_if_abandoned(job)
                requests += 1
                self._stream(job, sink)
            except Exception as error:
                broken = isinstance(error, RequestError) and error.kind in _BROKEN_BODY
                if broken and sink.at > began_at and requests < HTTP_REQUESTS_MAX:
                    continue
                return _failed(request.request_id, _last_flush(sink, error), sink.reported, requests)
        return wire.Got(request.request_id, sink.data(), requests)

    def _stream(self, job: _Job, sink: _File | _Memory) -> None:
        """One HTTP request, from where the sink is to the end, or to where it breaks."""
        request = job.request
        asked_s = time.monotonic()
        with closing(
            self._client.open_range(request.key, request.etag, request.size_bytes, sink.at, request.stop)
        ) as body:
            sink.took(body.readinto(sink.room()), time.monotonic() - asked_s)
            while sink.at < request.stop:
                _stop_if_abandoned(job)
                sink.took(body.readinto(sink.room()))
                if time.monotonic() - max(asked_s, sink.reported_s) > SLOWEST_CHUNK_S:
                    raise RequestError(FailureKind.TIMEOUT, f"GET {request.key!r}: no chunk in {SLOWEST_CHUNK_S:.0f} s")


def _stop_if_abandoned(job: _Job) -> None:
    if job.abandoned:
        raise RequestError(FailureKind.CONNECTION, "abandoned")


def _last_flush(sink: _File | _Memory, error: Exception) -> Exception:
    """Save the whole chunks that came before a failure; returns the failure to report."""
    try:
        sink.flush()
    except RequestError as disk_error:
        return disk_error
    return error


def _failed(request_id: int, error: Exception, reached: int, http_requests: int) -> wire.Failed:
    if not isinstance(error, RequestError):
        log.error("request %d failed", request_id, exc_info=error)
        error = RequestError(FailureKind.PROTOCOL, repr(error))
    return wire.Failed(request_id, error.kind, error.detail, error.retry_after_s, reached, http_requests)


def _cache_failure(error: OSError, path: str) -> RequestError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return RequestError(FailureKind.NO_SPACE if full else FailureKind.CACHE_IO, f"{path}: {error.strerror}")


def _send(connection: socket.socket, frame: bytes) -> None:
    try:
        connection.sendall(frame)
    except OSError:
        _end()


def _receive(connection: socket.socket) -> bytes:
    try:
        data = connection.recv(_RECEIVE_BYTES)
    except OSError:
        data = b""
    return data or _end()


def _end() -> NoReturn:
    """The daemon is gone: end at once, whatever the threads are doing."""
    os._exit(0)


def main(fd: int) -> NoReturn:
    """Be a worker on this socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C reaches the whole group; what it means is the daemon's business
    start_log("warning", None)  # to stderr, which is the daemon's
    connection = socket.socket(fileno=fd)
    connection.set_inheritable(False)  # a credential_process must not keep it open
    decoder = wire.Decoder()
    messages: list[ClientSettings] = []
    while not messages:
        messages = decoder.feed(_receive(connection))
    (settings,) = messages  # the pool says no more before Ready
    try:
        client = Client(settings)
    except RequestError as error:
        _send(connection, wire.encode(_failed(0, error, 0, 0)))
        _end()
    worker = Worker(connection, client, settings.connections - METADATA_THREADS)
    _send(connection, wire.encode(wire.Ready(os.getpid(), client.endpoint_url)))
    worker.run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
