"""How tests speak to the server: POST /_stub/COMMAND?args=JSON, the body being data if the command takes any.

The answer is JSON, with status 400 and {"error": text} if the command made no sense. Control requests are not
delayed, throttled, faulted or logged, and a connection that carried one is not counted or cut. `handle` is the client.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.s3stub.bucket import Object, Synthetic, file_object, ramp_object, zero_object
from tests.s3stub.service import Request

if TYPE_CHECKING:
    from tests.s3stub.server import Server

PATH = "/_stub/"


def answer(server: Server, request: Request) -> bytes:
    """Perform a command and return the whole HTTP response."""
    command = request.key
    try:
        arguments = json.loads(request.query.get("args") or "{}")
        result = _COMMANDS[command](server, request.body, **arguments)
        status = "200 OK"
    except (ValueError, TypeError, KeyError, OSError) as error:
        result = {"error": str(error)}
        status = "400 Bad Request"
    body = json.dumps(result).encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def _configure(server: Server, body: bytes, **knobs: Any) -> None:
    server.configure(knobs)


def _create_bucket(server: Server, body: bytes, bucket: str) -> None:
    server.store.bucket(bucket)


def _put(server: Server, body: bytes, bucket: str, key: str, headers: dict[str, str], storage_class: str) -> str:
    return _keep(server, bucket, key, server.store.add(body, headers, storage_class))


def _put_file(server: Server, body: bytes, bucket: str, key: str, path: str) -> str:
    return _keep(server, bucket, key, file_object(Path(path), time.time()))


def _put_sparse(server: Server, body: bytes, bucket: str, key: str, size: int) -> str:
    return _keep(server, bucket, key, zero_object(size, time.time()))


def _put_ramp(server: Server, body: bytes, bucket: str, key: str, size: int, seed: int) -> str:
    return _keep(server, bucket, key, ramp_object(size, seed, time.time()))


def _keep(server: Server, bucket: str, key: str, item: Object) -> str:
    server.store.bucket(bucket).put(key, item)
    return item.etag


def _synthesize(server: Server, body: bytes, bucket: str, prefix: str, count: int, size: int) -> None:
    server.store.bucket(bucket).synthesize(Synthetic(prefix, count, size, time.time()))


def _delete(server: Server, body: bytes, bucket: str, key: str) -> None:
    server.store.bucket(bucket).delete(key)


def _log(server: Server, body: bytes) -> list[list[object]]:
    return [record.to_row() for record in server.log.records]


def _clear_log(server: Server, body: bytes) -> None:
    server.log.records.clear()


def _stats(server: Server, body: bytes) -> dict[str, object]:
    return server.log.stats()


_COMMANDS: dict[str, Callable[..., Any]] = {
    command.__name__.removeprefix("_"): command
    for command in (
        _configure,
        _create_bucket,
        _put,
        _put_file,
        _put_sparse,
        _put_ramp,
        _synthesize,
        _delete,
        _log,
        _clear_log,
        _stats,
    )
}
