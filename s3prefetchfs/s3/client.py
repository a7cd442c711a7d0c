"""Speaks S3: one botocore client, and what we ask of it.

Runs in worker processes, where threads share one `Client`; the daemon imports this module for `ClientSettings` only.
It knows nothing of files, pipes or retry policy: a call makes one attempt and ends in an answer or a RequestError.
Two exceptions to "one attempt", because only this side can tell: refused credentials are read anew from where they
came from and tried once more, and a 403 for a GET that comes right after successes is tried once more, since some
stores say "forbidden" when they mean "slow down".

botocore is the part of boto3 that makes requests, with the same settings, files and credentials; what boto3 adds,
resources and transfers, is of no use here.

The bytes of a GET are read from http.client's buffered socket, below urllib3 and botocore: one `recv` straight into
the caller's memory per call. That saves a copy and an allocation, and it is why nothing is lost when a connection
breaks: all bytes that came are the caller's, and a new GET continues at the next one.
"""

from __future__ import annotations

import http.client
import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, NoReturn
from urllib.parse import unquote_to_bytes

from s3prefetchfs import __version__, wire
from s3prefetchfs.errors import FailureKind, RequestError
from s3prefetchfs.s3.failures import may_be_credentials, translate

log = logging.getLogger(__name__)

METADATA_THREADS = 2
"""Threads of a worker that list and look up; a lookup asks two questions at once."""

SKIP_MAX_BYTES = 64 * 1024 * 1024
"""A server that ignores Range sends the object from its start. Up to this much is read for nothing, about a second
on a fast link; beyond, such a server is of no use."""

_SCRATCH_BYTES = 256 * 1024

RENEW_INTERVAL_S = 5.0
"""Credentials that stay refused are read anew this often, not with every request."""

FORBIDDEN_PAUSE_S = 0.2
FORBIDDEN_DOUBT_S = 60.0
"""How long before the second try after a 403, and how recent a success makes a 403 doubtful."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """What a client is built from. The rest, credentials first of all, comes from boto3's chain of places.

    Args:
        bucket: its name.
        endpoint_url, region, profile: None leaves the choice to boto3.
        sign_requests: False sends anonymous requests.
        requester_pays: agree to pay, in every request.
        addressing_style: "path", "virtual", or "auto": botocore's choice, which is path style for custom endpoints
            and for dotted bucket names.
        connections: requests that can be under way at once in one process.
        connect_timeout_s: for each address that the endpoint has.
        stall_timeout_s: no byte for this long ends a request.
    """

    bucket: str
    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    sign_requests: bool = True
    requester_pays: bool = False
    addressing_style: str = "auto"
    connections: int = 16 + METADATA_THREADS
    connect_timeout_s: float = 5.0
    stall_timeout_s: float = 10.0


class Body:
    """The bytes of one ranged GET, in order. Close it in any case.

    Args:
        response: botocore's answer to get_object, checked.
        skip_bytes: at its beginning, that nobody asked for.
        size_bytes: wanted, after those.
        fail: raises what an exception means.
    """

    def __init__(
        self, response: dict[str, Any], skip_bytes: int, size_bytes: int, fail: Callable[[Exception], NoReturn]
    ) -> None:
        # Private names, but the same in all of urllib3's life; botocore reaches through them to set timeouts.
        self._raw = response["Body"]._raw_stream
        self._http: http.client.HTTPResponse = self._raw._fp
        # Chunked transfer, which S3 does not use but proxies do, needs http.client's decoder. What that has read when
        # the connection breaks is lost, so it is right, too, but resumes earlier.
        self._buffered = None if self._http.chunked else self._http.fp
        self._ahead_bytes: int | None = None  # in `_buffered`, read together with the headers
        self._unread_bytes = self._http.length
        self._skip_bytes = skip_bytes
        self._wanted_bytes = size_bytes
        self._fail = fail

    def readinto(self, target: memoryview) -> int:
        """Receive bytes into `target`, which is not empty: what is there, at least one, at most what is wanted.

        Raises:
            RequestError: the body broke (BODY, CONNECTION) or stalled (TIMEOUT).
        """
        if self._skip_bytes:
            scratch = memoryview(bytearray(min(self._skip_bytes, _SCRATCH_BYTES)))
            while self._skip_bytes:
                self._skip_bytes -= self._read(scratch[: self._skip_bytes])
        count = self._read(target[: self._wanted_bytes])
        self._wanted_bytes -= count
        return count

    def _read(self, target: memoryview) -> int:
        try:
            count = self._receive(target)
            if count == 0:
                raise http.client.IncompleteRead(b"", self._wanted_bytes)
        except Exception as error:
            self._fail(error)
        if self._unread_bytes is not None:
            self._unread_bytes -= count
        return count

    def _receive(self, target: memoryview) -> int:
        if self._buffered is None:
            return int(self._http.readinto(target))
        if self._unread_bytes is not None:  # what comes after belongs to the next answer
            target = target[: self._unread_bytes]
        if self._ahead_bytes is None:
            self._ahead_bytes = len(self._buffered.peek())
        if self._ahead_bytes:
            # Not beyond: it would be copied first, and be lost if the `recv` for the rest failed.
            target = target[: self._ahead_bytes]
            self._ahead_bytes -= len(target)
        return int(self._buffered.readinto1(target))

    def close(self) -> None:
        """Give the connection back if the body was read to its end, else close it."""
        if self._unread_bytes == 0:
            self._http.close()  # http.client has not seen us reading, and must know that the body is over
        else:
            self._raw.close()  # the connection with it: a next answer on it would begin with our rest
        self._raw.release_conn()


class Client:
    """One botocore client and what it is asked; safe to share between threads.

    Attributes:
        endpoint_url: where it sends requests.

    Raises:
        RequestError: it cannot be built: no such profile, a malformed endpoint or configuration file.
    """

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._payer = {"RequestPayer": "requester"} if settings.requester_pays else {}
        self._renewing = threading.Lock()
        self._renewed_s = float("-inf")
        self._succeeded_s = float("-inf")
        self.endpoint_url = settings.endpoint_url or "S3"
        self._client = self._connect()
        self.endpoint_url = self._client.meta.endpoint_url

    def list_page(
        self, prefix: str, delimiter: str | None, token: str | None, max_keys: int
    ) -> tuple[list[tuple[bytes, int, int, str, str]], list[bytes], str | None]:
        """One page of a listing: objects (fields of wire.ListedObject), common prefixes, and the next page's token.

        Raises:
            RequestError: see `failures`.
        """
        where = f"listing of {prefix!r}"
        optional = {"Delimiter": delimiter, "ContinuationToken": token}
        answer = self._call(
            "list_objects_v2",
            where,
            Prefix=prefix,
            MaxKeys=max_keys,
            EncodingType="url",  # said by us, so that botocore leaves the decoding to us
            **{name: value for name, value in optional.items() if value is not None},
        )
        decode = _decode_url if answer.get("EncodingType") == "url" else str.encode
        objects = [
            (
                decode(entry["Key"]),
                entry["Size"],
                _mtime_ms(entry),
                normalise_etag(entry.get("ETag", "")),
                entry.get("StorageClass", "STANDARD"),
            )
            for entry in answer.get("Contents", [])
        ]
        prefixes = [decode(entry["Prefix"]) for entry in answer.get("CommonPrefixes", [])]
        next_token = answer.get("NextContinuationToken") if answer.get("IsTruncated") else None
        if answer.get("IsTruncated") and not next_token and max_keys > 1:  # of one key nobody wants the next
            raise self._nonsense(where, "the server promises more but gives no continuation token")
        return objects, prefixes, next_token

    def head(self, key: str) -> wire.ListedObject:
        """The attributes of one object.

        Raises:
            RequestError: see `failures`.
        """
        answer = self._call("head_object", f"HEAD {key!r}", Key=key)
        return wire.ListedObject(
            key=key.encode(),
            size_bytes=answer["ContentLength"],
            mtime_ms=_mtime_ms(answer),
            etag=normalise_etag(answer.get("ETag", "")),
            storage_class=answer.get("StorageClass", "STANDARD"),
        )

    def open_range(self, key: str, etag: str, size_bytes: int, start: int, stop: int) -> Body:
        """Ask for the bytes `[start, stop)`, not empty, of one version of an object.

        Args:
            etag, size_bytes: of that version; nothing is asked or checked of an empty ETag.

        Raises:
            RequestError: CHANGED if the object is not that version (any more), PROTOCOL if the answer is not what
                was asked for; else see `failures`.
        """
        where = f"GET {key!r} [{start}, {stop})"
        # If-Match compares strongly: a weak ETag would never match, so only the answer's is compared.
        match = {"IfMatch": f'"{etag}"'} if etag and not etag.startswith("W/") else {}
        answer = self._call("get_object", where, Key=key, Range=http_range(start, stop), **match)
        try:
            skip_bytes = self._check_answer(answer, where, etag, size_bytes, start, stop)
        except RequestError:
            answer["Body"].close()
            raise
        return Body(answer, skip_bytes, stop - start, lambda error: self._fail(error, where))

    def _check_answer(
        self, answer: dict[str, Any], where: str, etag: str, size_bytes: int, start: int, stop: int
    ) -> int:
        """How many bytes come before those that were asked for; an error if the right ones do not come."""
        if etag:
            got = normalise_etag(answer.get("ETag", ""))
            if not got:
                raise self._nonsense(where, "the answer has no ETag")
            if got.removeprefix("W/") != etag.removeprefix("W/"):
                raise RequestError(FailureKind.CHANGED, f"{where}: ETag {got}, not {etag}")
        status = answer["ResponseMetadata"]["HTTPStatusCode"]
        length_bytes, content_range = answer.get("ContentLength"), answer.get("ContentRange", "")
        if status == 206 or content_range:  # some servers (rclone) send the range, and say so, but with a 200
            found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", content_range)
            if found is None:
                raise self._nonsense(where, f"Content-Range is {content_range!r}")
            first, last, total = found.groups()
            if total not in ("*", str(size_bytes)):
                raise RequestError(FailureKind.CHANGED, f"{where}: {total} bytes long, not {size_bytes}")
            if (int(first), int(last)) != (start, stop - 1):
                raise self._nonsense(where, f"the server sends {content_range}")
            return 0
        if status != 200 or length_bytes != size_bytes:
            raise self._nonsense(where, f"HTTP {status} with {length_bytes} bytes in answer to a Range")
        if start > SKIP_MAX_BYTES:
            raise self._nonsense(where, "the server ignores Range, and these bytes are too far in")
        return start

    def _call(self, operation: str, where: str, **parameters: Any) -> dict[str, Any]:
        renewed = doubted = False
        while True:
            client = self._client
            try:
                answer = getattr(client, operation)(Bucket=self._settings.bucket, **parameters, **self._payer)
            except Exception as error:
                failure = translate(error, where, self.endpoint_url)
                if may_be_credentials(error) and not renewed and self._renew(client):
                    renewed = True
                    continue
                doubtful = operation == "get_object" and failure.kind is FailureKind.DENIED and not doubted
                if doubtful and time.monotonic() - self._succeeded_s < FORBIDDEN_DOUBT_S:
                    doubted = True
                    time.sleep(FORBIDDEN_PAUSE_S)
                    continue
                raise failure from error
            self._succeeded_s = time.monotonic()
            return answer  # type: ignore[no-any-return]

    def _renew(self, refused: Any) -> bool:
        """Replace a client whose credentials were refused; whether there is a newer one now."""
        with self._renewing:
            if self._client is not refused:
                return True
            if time.monotonic() - self._renewed_s < RENEW_INTERVAL_S:
                return False
            self._renewed_s = time.monotonic()
            log.warning("credentials refused: reading them anew")
            self._client = self._connect()
            return True

    def _connect(self) -> Any:
        # Imported here for the daemon's sake, which imports this module and has no use for botocore's 20 MB.
        import botocore.session
        from botocore import UNSIGNED
        from botocore.config import Config

        settings = self._settings
        s3: Any = {"addressing_style": settings.addressing_style}
        config = Config(
            retries={"total_max_attempts": 1},  # retrying is for the daemon to decide
            connect_timeout=settings.connect_timeout_s,
            read_timeout=settings.stall_timeout_s,
            max_pool_connections=settings.connections,
            tcp_keepalive=True,
            # Some S3-compatible stores refuse the checksum headers that boto3 sends since 1.36.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3=s3,
            user_agent_extra=f"s3prefetchfs/{__version__}",
            **({} if settings.sign_requests else {"signature_version": UNSIGNED}),
        )
        try:
            session = botocore.session.Session(profile=settings.profile)
            parsers = session.get_component("response_parser_factory")
            parsers.set_parser_defaults(timestamp_parser=_parse_timestamp)
            return session.create_client(
                "s3", region_name=settings.region, endpoint_url=settings.endpoint_url, config=config
            )
        except Exception as error:
            raise RequestError(translate(error, "", "").kind, f"cannot build an S3 client: {error}") from error

    def _fail(self, error: Exception, where: str) -> NoReturn:
        raise translate(error, where, self.endpoint_url) from error

    def _nonsense(self, where: str, what: str) -> RequestError:
        return RequestError(FailureKind.PROTOCOL, f"{where}: {what}, from {self.endpoint_url}")


def http_range(start: int, stop: int) -> str:
    """The half-open `[start, stop)`, not empty, as a Range header: HTTP includes the last byte."""
    assert start < stop
    return f"bytes={start}-{stop - 1}"


def normalise_etag(text: str) -> str:
    """An ETag as we keep it: without quotes, `W/` kept."""
    return text.replace('"', "").strip()


def _decode_url(text: str) -> bytes:
    """The key behind a URL-encoded one. S3 and MinIO write a space as `+`, others as `%20`; all write `+` as `%2B`."""
    return unquote_to_bytes(text.replace("+", " "))


def _mtime_ms(entry: dict[str, Any]) -> int:
    modified = entry.get("LastModified")
    return round(modified.timestamp() * 1000) if modified else 0


def _parse_timestamp(text: Any) -> datetime:
    """As botocore, whose own parser takes three quarters of the time of a page with a thousand keys."""
    for parse in (datetime.fromisoformat, parsedate_to_datetime):
        try:
            moment = parse(text)
        except (AttributeError, TypeError, ValueError):
            continue
        return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    from botocore.utils import parse_timestamp

    parsed: datetime = parse_timestamp(text)
    return parsed
