"""What the errors of botocore, HTTP and sockets mean: foreign exceptions in, `RequestError`s out.

Runs in worker processes, called by the client. An error that the server sent is judged by its S3 code, which says
more than the HTTP status: an expired token comes as 400 from some and as 403 from others. Answers without a body
(to HEAD) and codes that nobody knows are judged by their status, all others by their type.
"""

from __future__ import annotations

import http.client
from typing import Any

import botocore.exceptions as boto

from s3prefetchfs.errors import FailureKind, RequestError

_CODES = {
    FailureKind.NOT_FOUND: "NoSuchKey NoSuchBucket NoSuchVersion NotFound",
    FailureKind.DENIED: "AccessDenied Forbidden AllAccessDisabled AccountProblem",
    FailureKind.CHANGED: "PreconditionFailed InvalidRange",
    FailureKind.ARCHIVED: "InvalidObjectState",
    FailureKind.CREDENTIALS: "ExpiredToken ExpiredTokenException TokenRefreshRequired InvalidToken RequestExpired "
    "InvalidAccessKeyId InvalidClientTokenId InvalidSecurity SignatureDoesNotMatch RequestTimeTooSkewed AuthFailure",
    FailureKind.THROTTLED: "SlowDown SlowDownRead SlowDownWrite ServerBusy ServiceUnavailable RequestLimitExceeded "
    "RequestThrottled Throttling ThrottlingException TooManyRequests BandwidthLimitExceeded",
    FailureKind.SERVER: "InternalError OperationAborted",
    FailureKind.TIMEOUT: "RequestTimeout",
}
_KIND_OF_CODE = {code: kind for kind, codes in _CODES.items() for code in codes.split()}

_KIND_OF_STATUS = {
    401: FailureKind.CREDENTIALS,
    403: FailureKind.DENIED,
    404: FailureKind.NOT_FOUND,
    412: FailureKind.CHANGED,
    416: FailureKind.CHANGED,  # the object has become shorter than its listing said
    429: FailureKind.THROTTLED,
    503: FailureKind.THROTTLED,
}

_CREDENTIALS_ERRORS = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.MetadataRetrievalError,
    boto.NoAuthTokenError,
    boto.TokenRetrievalError,
    boto.SSOError,
    boto.ProfileNotFound,
)

_KIND_OF_TYPE: tuple[tuple[tuple[type[Exception], ...], FailureKind], ...] = (
    (_CREDENTIALS_ERRORS, FailureKind.CREDENTIALS),
    ((boto.ReadTimeoutError, boto.ConnectTimeoutError, TimeoutError), FailureKind.TIMEOUT),
    ((boto.IncompleteReadError, boto.ResponseStreamingError, http.client.HTTPException), FailureKind.BODY),
    ((boto.ConnectionError, boto.HTTPClientError, OSError), FailureKind.CONNECTION),
)
"""The first row that fits. An OSError here is one of a socket: those of the cache file are the worker's to tell."""

_REGION_CODES = (
    *("PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"),
    *("301", "307", "400"),
)
"""What the wrong region looks like when botocore could not follow by itself; numbers are answers without a body."""


def translate(error: Exception, where: str, endpoint: str) -> RequestError:
    """What an exception means.

    Args:
        where: what was asked, for people. endpoint: of whom.
    """
    if isinstance(error, RequestError):
        return error
    if isinstance(error, boto.ClientError):
        return _translate_answer(error, where, endpoint)
    for types, kind in _KIND_OF_TYPE:
        if isinstance(error, types):
            return RequestError(kind, f"{where}: {str(error) or type(error).__name__}, at {endpoint}")
    return RequestError(FailureKind.PROTOCOL, f"{where}: {error!r}, at {endpoint}")


def may_be_credentials(error: Exception) -> bool:
    """Whether newer credentials may help. Expired ones look like a bare 400 to HEAD, whose answers have no body."""
    kind = translate(error, "", "").kind
    return kind is FailureKind.CREDENTIALS or (isinstance(error, boto.ClientError) and _code(error) == "400")


def _translate_answer(error: boto.ClientError, where: str, endpoint: str) -> RequestError:
    code = _code(error)
    message = error.response.get("Error", {}).get("Message", "")
    metadata: dict[str, Any] = dict(error.response.get("ResponseMetadata", {}))
    status: int = metadata.get("HTTPStatusCode", 0)
    headers: dict[str, str] = metadata.get("HTTPHeaders", {})
    kind = _KIND_OF_CODE.get(code) or _KIND_OF_STATUS.get(status)
    if kind is None:
        kind = FailureKind.SERVER if status >= 500 else FailureKind.PROTOCOL
    detail = f"{where}: {code} (HTTP {status}) {message}".rstrip() + f", at {endpoint}"
    if storage_class := error.response.get("Error", {}).get("StorageClass"):  # of an archived object
        detail += f"; its storage class is {storage_class}"
    region = headers.get("x-amz-bucket-region")
    if region and code in _REGION_CODES:
        detail += f"; the bucket is in {region}: use --region {region}"
    retry_after = headers.get("retry-after", "")
    return RequestError(kind, detail, float(retry_after) if retry_after.isdecimal() else None)


def _code(error: boto.ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
