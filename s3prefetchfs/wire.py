"""What the daemon and its workers say to each other, and how it is framed.

A frame is a four-byte little-endian length and a pickle of one of the messages below. Both ends are ours, of the
same version, joined by a socketpair that nobody else can reach, which is why a pickle is safe here. Object bytes
do not travel this way, except in `Got.data` when the cache has no room for them.
"""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass
from typing import Any

from s3prefetchfs.errors import FailureKind

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Get:
    """Fetch bytes of one version of an object into its cache file.

    Args:
        request_id: chosen by the daemon, repeated in every reply.
        key: of the object.
        etag: the version, without quotes; a weak one keeps its `W/`. Empty if the server gives none.
        size_bytes: of the whole object, to check the answer against.
        start, stop: half-open byte range; on chunk boundaries when `path` is given.
        path: the cache file, which exists and has its full (sparse) size; None sends the bytes back in `Got`.
        report_bytes: after this many bytes a `Landed` is due; the first chunk is always reported at once.
    """

    request_id: int
    key: str
    etag: str
    size_bytes: int
    start: int
    stop: int
    path: str | None
    report_bytes: int


@dataclass(frozen=True, slots=True)
class List:
    """One page of ListObjectsV2.

    Args:
        prefix: full key prefix. delimiter: "/" or None. token: NextContinuationToken of the page before.
    """

    request_id: int
    prefix: str
    delimiter: str | None
    token: str | None
    max_keys: int


@dataclass(frozen=True, slots=True)
class Head:
    """HeadObject, for buckets whose List is denied."""

    request_id: int
    key: str


@dataclass(frozen=True, slots=True)
class Abandon:
    """The reply to this request is no longer wanted; the worker stops it soon and still answers."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Ping:
    """Are you there? Answered by the thread that reads messages, whatever the others do."""

    number: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The first message of a worker: its client is built, and this is where it sends requests."""

    pid: int
    endpoint_url: str


@dataclass(frozen=True, slots=True)
class Pong:
    number: int


@dataclass(frozen=True, slots=True)
class Landed:
    """Whole chunks `[start, stop)` of a Get are in the cache file.

    Args:
        crc32c: one per chunk. first_byte_s: from request to first body byte, in the first Landed of each GET.
    """

    request_id: int
    start: int
    stop: int
    crc32c: tuple[int, ...]
    first_byte_s: float | None


@dataclass(frozen=True, slots=True)
class Got:
    """A Get is complete. `http_requests` counts the GETs it took, resumed ones included."""

    request_id: int
    data: bytes | None
    http_requests: int


@dataclass(frozen=True, slots=True)
class ListedObject:
    """One entry of a listing. `key` is raw bytes; `mtime_ms` since the epoch; `etag` as in `Get`."""

    key: bytes
    size_bytes: int
    mtime_ms: int
    etag: str
    storage_class: str


@dataclass(frozen=True, slots=True)
class Listed:
    """A page: objects and common prefixes in the server's order, and the token of the next page, if any."""

    request_id: int
    objects: list[tuple[bytes, int, int, str, str]]  # the fields of ListedObject; tuples pickle 5x faster
    prefixes: list[bytes]
    next_token: str | None


@dataclass(frozen=True, slots=True)
class Headed:
    request_id: int
    object: ListedObject


@dataclass(frozen=True, slots=True)
class Failed:
    """The request failed.

    Args:
        reached: of a Get: all bytes before this are in the cache file and reported. http_requests: as in Got.
    """

    request_id: int
    kind: FailureKind
    detail: str
    retry_after_s: float | None
    reached: int
    http_requests: int


Request = Get | List | Head
ToWorker = Get | List | Head | Abandon | Ping
FromWorker = Ready | Pong | Landed | Got | Listed | Headed | Failed

MAX_FRAME_BYTES = 64 * 1024 * 1024
"""A frame larger than this is a bug or garbage. The largest real one is a `Got` of one read (1 MiB)."""


def encode(message: Any) -> bytes:
    """One message as a frame."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class Decoder:
    """Bytes in, in any pieces; messages out."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Add received bytes and return the messages that are now complete.

        Raises:
            ValueError: a frame's length is beyond MAX_FRAME_BYTES.
        """
        pending = self._pending
        pending += data
        messages: list[Any] = []
        at = 0
        while len(pending) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(pending, at)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"frame of {length} bytes, more than {MAX_FRAME_BYTES}")
            if len(pending) - at - _LENGTH.size < length:
                break
            begin = at + _LENGTH.size
            messages.append(pickle.loads(memoryview(pending)[begin : begin + length]))
            at = begin + length
        del pending[:at]
        return messages
