"""Worker processes that need no S3 and start quickly: python -m tests.s3.fake_worker FD, with FAKE_WORKER saying how.

echo        answers a Get at once, with zeros
stuck       answers pings and nothing else
exits       before it is ready, with code 3
silent      is never ready
garbage     answers a Get with bytes that are no frame
nonsense    answers a Get with a message that only the daemon sends
talkative   answers a Get twice, and goes on reporting after that
"""

from __future__ import annotations

import os
import socket
import sys

from s3prefetchfs import wire
from s3prefetchfs.errors import FailureKind


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    how = os.environ["FAKE_WORKER"]
    if how == "exits":
        sys.exit(3)
    if how != "silent":
        connection.sendall(wire.encode(wire.Ready(os.getpid(), "http://nowhere")))
    decoder = wire.Decoder()
    while data := connection.recv(65536):
        for message in decoder.feed(data):
            if isinstance(message, wire.Ping):
                connection.sendall(wire.encode(wire.Pong(message.number)))
            if isinstance(message, wire.Get) and how != "stuck":
                connection.sendall(answer(how, message))


def answer(how: str, request: wire.Get) -> bytes:
    """What it says to a Get."""
    if how == "echo":
        return wire.encode(wire.Got(request.request_id, bytes(request.stop - request.start), 1))
    landed = wire.encode(wire.Landed(request.request_id, request.start, request.start + 1, (0,), None))
    if how == "half":
        return landed
    if how == "garbage":
        return b"HTTP/1.1 400 Bad Request\r\n\r\n"
    if how == "nonsense":
        return wire.encode(wire.Ping(1))
    failed = wire.encode(wire.Failed(request.request_id, FailureKind.BODY, "bad", None, request.stop, 1))
    return landed + failed + landed + wire.encode(wire.Got(request.request_id, None, 1)) + failed


if __name__ == "__main__":
    main()
