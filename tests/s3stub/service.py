"""S3's rules: a request in, a response out. No sockets, no clock, no waiting; `server` does those.

Path-style addressing only. Known: GetObject, HeadObject, PutObject, DeleteObject, ListObjects (1 and 2), ListBuckets,
CreateBucket, HeadBucket, DeleteBucket, GetBucketLocation, GetBucketVersioning; the rest is answered NotImplemented.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from random import Random
from types import MappingProxyType
from urllib.parse import parse_qsl, unquote

from tests.s3stub import listing
from tests.s3stub.bucket import Bucket, BytesData, Corrupted, Data, Object, Store
from tests.s3stub.knobs import Knobs, Rule
from tests.s3stub.listing import NAMESPACE, etag_text, xml_text

_NOT_IMPLEMENTED = {
    *("accelerate", "acl", "analytics", "cors", "delete", "encryption", "inventory", "lifecycle", "logging"),
    *("notification", "object-lock", "policy", "replication", "restore", "select", "tagging", "torrent"),
    *("uploadId", "uploads", "versions", "website"),
}
_ARCHIVES = ("GLACIER", "DEEP_ARCHIVE")
_KEPT_HEADERS = ("content-type", "content-encoding", "content-disposition", "content-language", "cache-control")
_CODES = {
    400: "InvalidRequest",
    401: "AccessDenied",
    403: "AccessDenied",
    404: "NoSuchKey",
    409: "OperationAborted",
    412: "PreconditionFailed",
    416: "InvalidRange",
    429: "TooManyRequests",
    500: "InternalError",
    503: "SlowDown",
}


@dataclass(slots=True)
class Request:
    """A request as read from a socket. Header names are in lower case; `body` has no transfer encodings left."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes = b""
    bucket: str = field(init=False)
    key: str = field(init=False)
    query: dict[str, str] = field(init=False)
    verb: str = field(init=False)
    wanted: tuple[int | None, int | None] | None = field(init=False)

    def __post_init__(self) -> None:
        path, _, query = self.target.partition("?")
        bucket, _, key = path.removeprefix("/").partition("/")
        self.bucket = unquote(bucket)
        self.key = unquote(key, errors="surrogateescape")
        self.query = dict(parse_qsl(query, keep_blank_values=True, errors="surrogateescape"))
        self.wanted = parse_range(self.headers.get("range", ""))
        self.verb = self.method
        if self.method == "GET" and not self.key:
            is_list = self.bucket and not self.query.keys() & {"location", "versioning", *_NOT_IMPLEMENTED}
            self.verb = "LIST" if is_list else "BUCKET"
        elif not self.key and self.method != "HEAD":
            self.verb = "BUCKET"


@dataclass(slots=True)
class Response:
    """What to send: the head, and the bytes `[start, stop)` of `data` unless the request was a HEAD.

    `span` is what the log says was asked for, as far as the object bounds it.
    """

    status: int
    headers: dict[str, str]
    data: Data = field(default_factory=lambda: BytesData(b""))
    start: int = 0
    stop: int = 0
    span: tuple[int, int] | None = None


class S3Error(Exception):
    """An error in S3's form. `details` is XML to stand in it, and `headers` go with it."""

    def __init__(self, status: int, code: str, message: str, details: str = "", **headers: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.details = details
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    def response(self, request: Request) -> Response:
        resource = xml_text(f"/{request.bucket}/{request.key}")
        return _xml(
            f"<Error><Code>{self.code}</Code><Message>{xml_text(str(self))}</Message>{self.details}"
            f"<Resource>{resource}</Resource></Error>",
            self.status,
            self.headers,
        )


class Service:
    """Answers requests from a store.

    Args:
        random: for list_shuffle.
    """

    def __init__(self, store: Store, random: Random) -> None:
        self.store = store
        self.random = random

    def answer(self, request: Request, knobs: Knobs, fault: Rule) -> Response:
        """The response to a request, errors included."""
        try:
            _refuse(request, knobs, fault)
            return self._handler(request)(request, knobs, fault)
        except S3Error as error:
            return error.response(request)

    def _handler(self, request: Request) -> Callable[[Request, Knobs, Rule], Response]:
        unknown = request.query.keys() & _NOT_IMPLEMENTED
        if not unknown and "x-amz-copy-source" not in request.headers:
            if request.verb == "LIST":
                return self._list
            handlers = {
                ("GET", True): self._get,
                ("HEAD", True): self._get,
                ("PUT", True): self._put,
                ("DELETE", True): self._delete,
                ("GET", False): self._about_bucket if request.bucket else self._list_buckets,
                ("HEAD", False): self._about_bucket,
                ("PUT", False): self._create_bucket,
                ("DELETE", False): self._delete_bucket,
            }
            if handler := handlers.get((request.method, bool(request.key))):
                return handler
        raise S3Error(501, "NotImplemented", f"{request.method} {' '.join(sorted(unknown))} is not implemented")

    def _bucket(self, request: Request) -> Bucket:
        try:
            return self.store.buckets[request.bucket]
        except KeyError:
            raise S3Error(404, "NoSuchBucket", "The specified bucket does not exist") from None

    # -- objects

    def _get(self, request: Request, knobs: Knobs, fault: Rule) -> Response:
        found = self._bucket(request).get(request.key)
        if found is None:
            raise S3Error(404, "NoSuchKey", "The specified key does not exist.")
        start, stop = 0, found.size
        if request.wanted:
            start, stop = resolve_range(request.wanted, found.size)
        span = (start, stop) if request.wanted else None
        headers = {
            "ETag": etag_text(found.etag, fault),
            "Last-Modified": formatdate(found.mtime_s, usegmt=True),
            "Accept-Ranges": "bytes",
            "content-type": "binary/octet-stream",
            **found.headers,
        }
        if found.storage_class != "STANDARD":
            headers["x-amz-storage-class"] = found.storage_class
        if not fault.ignore_ifmatch and not _matches(request.headers.get("if-match", "*"), found):
            raise S3Error(412, "PreconditionFailed", "At least one of the preconditions you specified did not hold.")
        if _matches(request.headers.get("if-none-match", ""), found):
            return Response(304, headers, span=span)
        if request.method == "GET" and (fault.archived or found.storage_class in _ARCHIVES):
            storage_class = found.storage_class if found.storage_class in _ARCHIVES else "GLACIER"
            raise S3Error(
                403,
                "InvalidObjectState",
                "The operation is not valid for the object's storage class",
                f"<StorageClass>{storage_class}</StorageClass>",
            )
        status = 200
        if request.wanted and not fault.ignore_range:
            if start >= stop:
                message = "The requested range is not satisfiable"
                raise S3Error(416, "InvalidRange", message, Content_Range=f"bytes */{found.size}")
            if not fault.range_200:
                status = 206
                headers["Content-Range"] = f"bytes {start}-{stop - 1}/{found.size}"
        else:
            start, stop = 0, found.size
        data = found.data if fault.corrupt is None else Corrupted(found.data, fault.corrupt)
        return Response(status, headers, data, start, stop, span)

    def _put(self, request: Request, knobs: Knobs, fault: Rule) -> Response:
        kept = {n: v for n, v in request.headers.items() if n in _KEPT_HEADERS or n.startswith("x-amz-meta-")}
        encodings = [e.strip() for e in kept.pop("content-encoding", "").split(",")]
        if encodings := [e for e in encodings if e not in ("", "aws-chunked")]:
            kept["content-encoding"] = ",".join(encodings)
        storage_class = request.headers.get("x-amz-storage-class", "STANDARD")
        stored = self.store.add(request.body, kept, storage_class)
        self.store.bucket(request.bucket).put(request.key, stored)
        return Response(200, {"ETag": etag_text(stored.etag, fault)})

    def _delete(self, request: Request, knobs: Knobs, fault: Rule) -> Response:
        self._bucket(request).delete(request.key)
        return Response(204, {})

    # -- buckets

    def _list_buckets(self, request: Request, knobs: Knobs, fault: Rule) -> Response:
        names = "".join(
            f"<Bucket><Name>{xml_text(name)}</Name><CreationDate>2024-01-01T00:00:00.000Z</CreationDate></Bucket>"
            for name in sorted(self.store.buckets)
        )
        owner = "<Owner><ID>s3stub</ID><DisplayName>s3stub</DisplayName></Owner>"
        return _xml(f"<ListAllMyBucketsResult {NAMESPACE}>{owner}<Buckets>{names}</Buckets></ListAllMyBucketsResult>")

    def _about_bucket(self, request: Request, knobs: Knobs, fault: Rule) -> Response:
        self._bucket(request)
        if request.method == "HEAD":
            return Response(200, {"x-amz-bucket-region": "us-east-1"})
        if "location" in request.query:
            return _xml(f"<LocationConstraint {NAMESPACE}/>")
        return _xml(f"<VersioningConfiguration {NAMESPACE}/>")

    def _create_bucket(self, request: Request, knobs: Knobs, fault: Rule) -> Response:
        self.store.bucket(request.bucket)
        return Response(200, {"Location": f"/{request.bucket}"})

    def _delete_bucket(self, request: Request, knobs: Knobs, fault: Rule) -> Response:
        if next(self._bucket(request).keys_from("", []), None) is not None:
            raise S3Error(409, "BucketNotEmpty", "The bucket you tried to delete is not empty")
        del self.store.buckets[request.bucket]
        return Response(204, {})

    def _list(self, request: Request, knobs: Knobs, fault: Rule) -> Response:
        bucket = self._bucket(request)
        try:
            return _xml(listing.render(bucket, request.bucket, request.query, knobs, fault, self.random))
        except ValueError:
            raise S3Error(400, "InvalidArgument", "max-keys or continuation-token is not valid") from None


def parse_range(header: str) -> tuple[int | None, int | None] | None:
    """A Range header as half-open (start, stop); stop None is the object's end; (None, n) is its last n bytes.

    None if there is no header, or one that S3 would not understand and so ignore.
    """
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", header.strip())
    if not match or not any(match.groups()):
        return None
    first, last = match.groups()
    if not first:
        return None, int(last)
    if last and int(last) < int(first):
        return None
    return int(first), int(last) + 1 if last else None


def resolve_range(wanted: tuple[int | None, int | None], size: int) -> tuple[int, int]:
    """The half-open part of an object that a parsed Range asks for; empty if it cannot be satisfied."""
    start, stop = wanted
    if start is None:
        return max(0, size - (stop or 0)), size
    return start, size if stop is None else min(stop, size)


def _refuse(request: Request, knobs: Knobs, fault: Rule) -> None:
    """Raise what stands in the way of an otherwise good request: credentials, and faults that are errors."""
    headers = request.headers
    signed = re.search(r"Credential=([^/]*)/[^/]*/([^/]*)/", headers.get("authorization", ""))
    access_key, region = signed.groups() if signed else ("", "")
    if knobs.require_access_key and access_key != knobs.require_access_key:
        if knobs.expired_status:
            raise S3Error(knobs.expired_status, "ExpiredToken", "The provided token has expired.")
        raise S3Error(403, "InvalidAccessKeyId", "The AWS access key Id you provided does not exist in our records.")
    if fault.require_header:
        name, _, value = fault.require_header.partition(":")
        if headers.get(name.strip().lower()) != value.strip():
            raise S3Error(403, "AccessDenied", "Access Denied")
    if fault.reject_header and fault.reject_header.lower() in headers:
        raise S3Error(400, "InvalidArgument", f"Unsupported header: {fault.reject_header}")
    if fault.redirect_region:
        if region == fault.redirect_region:
            return
        where = {"x_amz_bucket_region": fault.redirect_region}
        if fault.status == 400:
            details = f"<Region>{xml_text(fault.redirect_region)}</Region>"
            raise S3Error(400, "AuthorizationHeaderMalformed", "The region is wrong.", details, **where)
        message = "The bucket must be addressed using another endpoint."
        raise S3Error(301, "PermanentRedirect", message, **where)
    if fault.deny:
        raise S3Error(403, "AccessDenied", "Access Denied")
    if fault.status:
        headers = {} if fault.retry_after_s is None else {"Retry_After": str(fault.retry_after_s)}
        code = fault.code or _CODES.get(fault.status, "InternalError")
        raise S3Error(fault.status, code, "injected fault", **headers)


def _matches(condition: str, found: Object) -> bool:
    """Whether an If-Match or If-None-Match list names this version; quotes and W/ do not matter."""
    tags = [tag.strip().removeprefix("W/").strip('"') for tag in condition.split(",")]
    return "*" in tags or found.etag in tags


def _xml(body: str, status: int = 200, headers: Mapping[str, str] = MappingProxyType({})) -> Response:
    content = ('<?xml version="1.0" encoding="UTF-8"?>\n' + body).encode(errors="surrogateescape")
    return Response(status, {"Content-Type": "application/xml", **headers}, BytesData(content), 0, len(content))
