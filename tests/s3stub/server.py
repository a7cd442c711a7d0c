"""Sockets: accepts connections, reads requests, sends answers at the right time and rate, breaks them on demand.

One process, one event loop, one task for each connection, raw non-blocking sockets (asyncio's transports have no way
to say "send this much of this file now"). A body is sent by os.sendfile in pieces; between pieces the task waits for
the shaper or for the socket. Nothing else in this process does real work, so its CPU time is mostly the kernel's.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import resource
import socket
import struct
import termios
from contextlib import suppress
from dataclasses import replace
from http.client import responses
from pathlib import Path
from random import Random
from typing import Any

from tests.s3stub import control, listing
from tests.s3stub.bucket import Store
from tests.s3stub.knobs import NO_FAULT, Faults, Knobs, Rule
from tests.s3stub.log import Record, RequestLog
from tests.s3stub.service import Request, Response, S3Error, Service
from tests.s3stub.shaping import Link, Pace, TokenBucket, sleep_until

_MAX_HEAD_BYTES = 64 << 10
_RECEIVE_BYTES = 256 << 10
_BACKLOG = 4096
_NO_BODY = (204, 304)

_DELIVERY_S = 2.0
"""How long a reset waits for the client's kernel to acknowledge what was sent before. A client that does not read
would hold it up for ever."""


class Server:
    """What connections share, and the listening socket. Made inside a running event loop.

    Args:
        root: directory for the bytes of stored objects.
        port: of 127.0.0.1 to listen on; 0 chooses one.
    """

    def __init__(self, root: Path, port: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.knobs = Knobs()
        self.random = Random(self.knobs.seed)
        self.faults = Faults([], 0, self.random)
        self.log = RequestLog()
        self.link = Link()
        self.store = Store(root)
        self.service = Service(self.store, self.random)
        self.request_rate = TokenBucket()
        self.connections: set[Connection] = set()
        self.numbers = itertools.count(1)
        self._reopening: asyncio.TimerHandle | None = None
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._listener = _bound_socket(port)
        self.port: int = self._listener.getsockname()[1]
        self._listen()

    def configure(self, values: dict[str, Any]) -> None:
        """Set some knobs. Setting `faults` or `seed` starts their state anew.

        Raises:
            ValueError: nothing was changed.
        """
        self.knobs = self.knobs.changed(values)
        if "seed" in values:
            self.random.seed(self.knobs.seed)
        if "faults" in values:
            self.faults = Faults(self.knobs.faults, self.loop.time(), self.random)
        self.link.set_rate(self.knobs.aggregate_rate)
        if "refuse" in values:
            self._refuse_for(self.knobs.refuse)

    def _listen(self) -> None:
        self._listener.listen(_BACKLOG)
        self.loop.add_reader(self._listener, self._accept)
        self._reopening = None
        self.knobs = replace(self.knobs, refuse=0)

    def _accept(self) -> None:
        with suppress(BlockingIOError, ConnectionAbortedError):
            while True:
                connection, _ = self._listener.accept()
                Connection(self, connection)

    def _refuse_for(self, seconds: float) -> None:
        """Refuse connections, and cut those that exist, as if the server were down; 0 ends it now."""
        if self._reopening:
            self._reopening.cancel()
            self._listen()
        if seconds:
            # A socket that is bound but does not listen keeps the port ours and refuses connections.
            self.loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = _bound_socket(self.port)
            for connection in self.connections:
                connection.reset()
            self._reopening = self.loop.call_later(seconds, self._listen)


def _bound_socket(port: int) -> socket.socket:
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setblocking(False)
    bound.bind(("127.0.0.1", port))
    return bound


class Connection:
    """One client connection and its task."""

    def __init__(self, server: Server, connected: socket.socket) -> None:
        log = server.log
        log.connections_accepted += 1
        log.connections_open += 1
        self._server = server
        self._number = next(server.numbers)
        self._is_control = False
        self._input = bytearray()
        self._socket = connected
        self._fd = connected.fileno()
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._task = server.loop.create_task(self._run())
        server.connections.add(self)

    def reset(self) -> None:
        """Cut the connection with an RST, unless it is a test's control connection."""
        if not self._is_control:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            while await self._serve_one():
                pass
        except _ResetConnection:
            self._linger_0()
        except asyncio.CancelledError:
            self._linger_0()
            raise
        except (OSError, EOFError):
            pass  # the client is gone
        finally:
            self._socket.close()
            self._server.connections.discard(self)
            self._server.log.connections_open -= not self._is_control

    def _linger_0(self) -> None:
        """Closing sends an RST and drops what was not sent."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    # -- reading

    async def _receive(self) -> None:
        data = await self._server.loop.sock_recv(self._socket, _RECEIVE_BYTES)
        if not data:
            raise EOFError
        self._input += data

    async def _read_until(self, mark: bytes) -> bytes:
        """The input up to `mark`, which is removed too."""
        while (found := self._input.find(mark)) < 0:
            if len(self._input) > _MAX_HEAD_BYTES:
                raise EOFError
            await self._receive()
        line = bytes(self._input[:found])
        del self._input[: found + len(mark)]
        return line

    async def _read_exactly(self, count: int) -> bytes:
        while len(self._input) < count:
            await self._receive()
        data = bytes(self._input[:count])
        del self._input[:count]
        return data

    async def _read_chunked(self) -> bytes:
        """Chunks with a size line each, and trailers: HTTP's framing, and also aws-chunked's."""
        pieces = []
        while size := int((await self._read_until(b"\r\n")).partition(b";")[0], 16):
            pieces.append(await self._read_exactly(size))
            await self._read_until(b"\r\n")
        while await self._read_until(b"\r\n"):
            pass
        return b"".join(pieces)

    async def _read_request(self) -> tuple[Request, bool]:
        """The next request, and whether the connection may live on after it."""
        request_line, *lines = (await self._read_until(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, target, version = request_line.split(" ")
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        if headers.get("expect", "").lower() == "100-continue":
            self._socket.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        if headers.get("transfer-encoding", "").lower() == "chunked":
            body = await self._read_chunked()
        else:
            body = await self._read_exactly(int(headers.get("content-length", 0)))
        if headers.get("x-amz-content-sha256", "").startswith("STREAMING-"):
            self._input[:0] = body  # the second framing is inside the first
            body = await self._read_chunked()
        keep = version == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
        return Request(method, target, headers, body), keep

    # -- answering

    async def _serve_one(self) -> bool:
        """One request; returns whether the connection lives on."""
        server = self._server
        request, keep = await self._read_request()
        if request.target.startswith(control.PATH):
            if not self._is_control:
                self._is_control = True
                server.log.connections_accepted -= 1
                server.log.connections_open -= 1
            await server.loop.sock_sendall(self._socket, control.answer(server, request))
            return keep
        is_list = request.verb == "LIST"
        start, stop = request.wanted or (0, None)
        record = Record(
            verb=request.verb,
            bucket=request.bucket,
            key=request.query.get("prefix", "") if is_list else request.key,
            delimiter=request.query.get("delimiter", ""),
            token=listing.position(request.query) if is_list else "",
            range=request.wanted and (-1 if start is None else start, -1 if stop is None else stop),
            connection=self._number,
            user_agent=request.headers.get("user-agent", ""),
            start_s=server.loop.time(),
        )
        server.log.begin(record)
        try:
            return await self._exchange(request, record, keep)
        except (OSError, _ResetConnection, asyncio.CancelledError):
            record.body_bytes = max(0, record.body_bytes - self._unacknowledged())
            raise
        finally:
            server.log.finish(record, server.loop.time())

    async def _exchange(self, request: Request, record: Record, keep: bool) -> bool:
        server, knobs = self._server, self._server.knobs
        fault = server.faults.pick(request.verb, record.key, record.range[0] if record.range else 0, record.start_s)
        record.fault = fault.name
        if knobs.blackhole:
            record.fault = "blackhole"
        if knobs.blackhole or fault.no_first_byte:
            return await self._hold()
        limit = knobs.max_requests_per_s
        slow_down = limit and not server.request_rate.spend(1, limit, max(limit, 1), record.start_s)
        await sleep_until(record.start_s + knobs.latency_s(request.verb, server.random) + fault.delay_ms / 1000)
        if fault.reset_before:
            raise _ResetConnection
        if slow_down:
            record.fault = "slow_down"
            fault = NO_FAULT
            response = S3Error(503, "SlowDown", "Please reduce your request rate.").response(request)
        else:
            response = server.service.answer(request, knobs, fault)
        response.stop = max(response.start, response.stop - fault.lie_len)
        has_body = request.method != "HEAD" and response.status not in _NO_BODY and response.stop > response.start
        self._send_head(response, record, fault, has_body)
        if not has_body:
            return keep
        server.link.active += 1
        try:
            return await self._send_body(response, record, fault) and keep
        finally:
            server.link.active -= 1

    def _send_head(self, response: Response, record: Record, fault: Rule, has_body: bool) -> None:
        length = response.stop - response.start
        headers = {"Server": "s3stub", "x-amz-request-id": f"{self._number:X}-{record.start_s:.6f}", **response.headers}
        if fault.chunked_short:
            headers["Transfer-Encoding"] = "chunked"
        elif response.status not in _NO_BODY:
            headers["Content-Length"] = str(length)
        lines = [f"HTTP/1.1 {response.status} {responses.get(response.status, '')}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join([*lines, "", f"{length:x}\r\n" if fault.chunked_short and has_body else ""])
        # The head waits for the body to share a packet with, if that follows at once.
        at_once = fault is NO_FAULT and not self._server.link.rate and not self._server.knobs.rate_per_connection
        encoded = head.encode("latin-1")
        # The client has read all before it asks again, so the socket's buffer has room for a head.
        if self._socket.send(encoded, socket.MSG_MORE if has_body and at_once else 0) < len(encoded):
            raise ConnectionError("no room for a response's head")
        record.status = response.status
        record.range = response.span or record.range
        record.first_byte_s = self._server.loop.time()

    async def _send_body(self, response: Response, record: Record, fault: Rule) -> bool:
        """Send the body, or as much of it as the fault allows; returns whether the connection lives on."""
        start, stop = response.start, response.stop
        if missing := fault.short_body or fault.chunked_short:
            await self._send_bytes(response, start, max(start, stop - missing), record, fault)
            return False
        if fault.stall_after is not None and start + fault.stall_after < stop:
            await self._send_bytes(response, start, start + fault.stall_after, record, fault)
            return await self._hold()
        if fault.reset_after is not None and start + fault.reset_after < stop:
            await self._send_bytes(response, start, start + fault.reset_after, record, fault)
            give_up_at = self._server.loop.time() + _DELIVERY_S
            # Nothing tells us of an acknowledgement.
            while self._unacknowledged() and self._server.loop.time() < give_up_at:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            raise _ResetConnection
        await self._send_bytes(response, start, stop, record, fault)
        return True

    async def _send_bytes(self, response: Response, at: int, stop: int, record: Record, fault: Rule) -> None:
        """Send bytes `[at, stop)` of the response's data at the rates of the moment."""
        loop, link, data = self._server.loop, self._server.link, response.data
        pace = Pace(loop.time())
        while at < stop:
            rate = fault.drip or self._server.knobs.rate_per_connection
            piece = data.clip(at, link.piece_bytes(rate, at - response.start, stop - at))
            due_at = pace.reserve(piece, rate, loop.time()) if rate else 0
            await link.take(piece)
            await sleep_until(due_at)
            try:
                sent = data.send(self._fd, at, piece)
            except BlockingIOError:
                sent = 0
            else:
                if not sent:
                    raise ConnectionError("a file became shorter while it was served")
            at += sent
            record.body_bytes += sent
            if sent < piece:
                link.give_back(piece - sent)
                pace.give_back(piece - sent, rate)
                await self._writable()
            elif not rate and not link.rate:
                await asyncio.sleep(0)  # others come first

    async def _writable(self) -> None:
        ready = asyncio.Event()
        self._server.loop.add_writer(self._fd, ready.set)
        try:
            await ready.wait()
        finally:
            self._server.loop.remove_writer(self._fd)

    async def _hold(self) -> bool:
        """Say nothing more until the client closes the connection."""
        while await self._server.loop.sock_recv(self._socket, _RECEIVE_BYTES):
            pass
        return False

    def _unacknowledged(self) -> int:
        """Bytes handed to the kernel that the client's kernel has not acknowledged."""
        answer = fcntl.ioctl(self._fd, termios.TIOCOUTQ, b"\0\0\0\0")
        return int.from_bytes(answer, "little")


class _ResetConnection(Exception):
    """This connection is to end with an RST."""
