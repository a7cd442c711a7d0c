"""What errors mean: the table itself, and the client in front of servers and networks that fail."""

from __future__ import annotations

import http.client
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import botocore.exceptions as boto
import pytest

from s3prefetchfs.errors import FailureKind, RequestError
from s3prefetchfs.s3.client import Client
from s3prefetchfs.s3.failures import may_be_credentials, translate
from tests.s3.conftest import read_until_it_breaks
from tests.s3stub import S3Stub, ramp

K = FailureKind


def answered(code: str, status: int, headers: dict[str, str] | None = None) -> boto.ClientError:
    """The exception that boto3 raises for such an answer."""
    metadata: Any = {"HTTPStatusCode": status, "HTTPHeaders": headers or {}}
    return boto.ClientError({"Error": {"Code": code, "Message": "why"}, "ResponseMetadata": metadata}, "GetObject")


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("NoSuchKey", 404, K.NOT_FOUND),
        ("NoSuchBucket", 404, K.NOT_FOUND),
        ("404", 404, K.NOT_FOUND),
        ("AccessDenied", 403, K.DENIED),
        ("403", 403, K.DENIED),
        ("InvalidObjectState", 403, K.ARCHIVED),
        ("PreconditionFailed", 412, K.CHANGED),
        ("412", 412, K.CHANGED),
        ("InvalidRange", 416, K.CHANGED),
        ("ExpiredToken", 403, K.CREDENTIALS),
        ("ExpiredToken", 400, K.CREDENTIALS),
        ("InvalidToken", 400, K.CREDENTIALS),
        ("InvalidAccessKeyId", 403, K.CREDENTIALS),
        ("SignatureDoesNotMatch", 403, K.CREDENTIALS),
        ("RequestTimeTooSkewed", 403, K.CREDENTIALS),
        ("Unauthorized", 401, K.CREDENTIALS),
        ("SlowDown", 503, K.THROTTLED),
        ("503", 503, K.THROTTLED),
        ("TooManyRequests", 429, K.THROTTLED),
        ("RequestLimitExceeded", 400, K.THROTTLED),
        ("InternalError", 500, K.SERVER),
        ("502", 502, K.SERVER),
        ("SomethingNew", 504, K.SERVER),
        ("RequestTimeout", 400, K.TIMEOUT),
        ("PermanentRedirect", 301, K.PROTOCOL),
        ("SomethingNew", 400, K.PROTOCOL),
        ("", 0, K.PROTOCOL),
    ],
)
def test_what_the_server_says(code: str, status: int, kind: FailureKind) -> None:
    """The S3 code decides, then the status; code, status, message and place are in the text."""
    failure = translate(answered(code, status), "GET 'key'", "http://there")
    assert failure.kind is kind
    for part in ("GET 'key'", code, str(status), "why", "http://there"):
        assert part in failure.detail


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (boto.NoCredentialsError(), K.CREDENTIALS),
        (boto.PartialCredentialsError(provider="env", cred_var="x"), K.CREDENTIALS),
        (boto.ProfileNotFound(profile="mine"), K.CREDENTIALS),
        (boto.UnauthorizedSSOTokenError(), K.CREDENTIALS),
        (boto.CredentialRetrievalError(provider="process", error_msg="no"), K.CREDENTIALS),
        (boto.ReadTimeoutError(endpoint_url="http://there"), K.TIMEOUT),
        (boto.ConnectTimeoutError(endpoint_url="http://there"), K.TIMEOUT),
        (TimeoutError("timed out"), K.TIMEOUT),
        (boto.EndpointConnectionError(endpoint_url="http://there"), K.CONNECTION),
        (boto.ConnectionClosedError(endpoint_url="http://there"), K.CONNECTION),
        (boto.SSLError(endpoint_url="http://there", error="no"), K.CONNECTION),
        (boto.HTTPClientError(error="unknown"), K.CONNECTION),
        (ConnectionResetError(104, "reset by peer"), K.CONNECTION),
        (ssl.SSLEOFError(8, "EOF"), K.CONNECTION),
        (boto.IncompleteReadError(actual_bytes=1, expected_bytes=2), K.BODY),
        (boto.ResponseStreamingError(error="no"), K.BODY),
        (http.client.IncompleteRead(b"", 5), K.BODY),
        (ValueError("what is this"), K.PROTOCOL),
        (KeyError("Key"), K.PROTOCOL),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_exceptions_mean(error: Exception, kind: FailureKind) -> None:
    """Each has a kind, and says who failed at what."""
    failure = translate(error, "GET 'key'", "http://there")
    assert failure.kind is kind
    assert "GET 'key'" in failure.detail
    assert "http://there" in failure.detail


def test_our_own_errors_pass() -> None:
    """Translating twice changes nothing."""
    error = RequestError(K.CHANGED, "text")
    assert translate(error, "x", "y") is error


@pytest.mark.parametrize(("header", "wait_s"), [("7", 7.0), ("", None), ("Fri, 31 Dec 1999 23:59:59 GMT", None)])
def test_retry_after(header: str, wait_s: float | None) -> None:
    """Seconds are obeyed; a date is not worth a parser."""
    assert translate(answered("SlowDown", 503, {"retry-after": header}), "", "").retry_after_s == wait_s


@pytest.mark.parametrize("code", ["PermanentRedirect", "AuthorizationHeaderMalformed", "301", "400"])
def test_the_wrong_region_names_the_right_one(code: str) -> None:
    """The text says what to do."""
    detail = translate(answered(code, 301, {"x-amz-bucket-region": "eu-west-1"}), "", "").detail
    assert detail.endswith("use --region eu-west-1")


def test_a_bare_400_may_be_expired_credentials() -> None:
    """An answer to HEAD has no body to say so; other 400s say what they are."""
    assert may_be_credentials(answered("400", 400))
    assert may_be_credentials(answered("ExpiredToken", 400))
    assert not may_be_credentials(answered("InvalidRequest", 400))
    assert not may_be_credentials(ValueError())


# ----------------------------------------------------------------------------------------- on the wire


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ({"status": 404}, K.NOT_FOUND),
        ({"deny": True}, K.DENIED),
        ({"archived": True}, K.ARCHIVED),
        ({"status": 412}, K.CHANGED),
        ({"status": 503}, K.THROTTLED),
        ({"status": 503, "code": "ServiceUnavailable"}, K.THROTTLED),
        ({"status": 429}, K.THROTTLED),
        ({"status": 500}, K.SERVER),
        ({"status": 502, "code": "BadGateway"}, K.SERVER),
        ({"status": 400}, K.PROTOCOL),
        ({"status": 400, "code": "RequestTimeout"}, K.TIMEOUT),
        ({"reset_before": True}, K.CONNECTION),
        ({"no_first_byte": True}, K.TIMEOUT),
    ],
    ids=str,
)
def test_a_failing_get(s3: S3Stub, client: Client, fault: dict[str, Any], kind: FailureKind) -> None:
    """One request, one error: trying again is for others to decide. (For a doubtful 403 see below.)"""
    etag = s3.put("failing", b"x")
    client.head("failing")
    s3.configure(faults=[fault])
    with pytest.raises(RequestError) as caught:
        client.open_range("failing", etag, 1, 0, 1)
    assert caught.value.kind is kind
    doubted = 1 if kind is K.DENIED else 0
    assert len(s3.log("GET")) == 1 + doubted


@pytest.mark.parametrize(
    ("fault", "kind", "reached"),
    [
        ({"reset_after": 100_000}, K.CONNECTION, 100_000),
        ({"short_body": 1000}, K.BODY, (1 << 20) - 1000),
        ({"lie_len": 1000}, K.BODY, (1 << 20) - 1000),
        ({"stall_after": 100_000}, K.TIMEOUT, 100_000),
    ],
    ids=str,
)
def test_a_failing_body(s3: S3Stub, client: Client, fault: dict[str, Any], kind: FailureKind, reached: int) -> None:
    """Every byte that came before it broke is the caller's."""
    etag = s3.put_ramp("body", 1 << 20)
    s3.configure(faults=[fault])
    body = client.open_range("body", etag, 1 << 20, 0, 1 << 20)
    data, error = read_until_it_breaks(body)
    assert error.kind is kind
    assert data == ramp(0, reached)


def test_retry_after_arrives(s3: S3Stub, client: Client) -> None:
    """What the server asks for reaches the caller."""
    s3.configure(faults=[{"status": 503, "retry_after_s": 3}])
    with pytest.raises(RequestError) as caught:
        client.list_page("", None, None, 1)
    assert caught.value.retry_after_s == 3.0


def test_no_such_bucket(s3: S3Stub, make_client: Callable[..., Client]) -> None:
    """It is not found, rather than empty."""
    with pytest.raises(RequestError, match="NoSuchBucket") as caught:
        make_client(bucket="not-there").list_page("", None, None, 1)
    assert caught.value.kind is K.NOT_FOUND


@pytest.mark.parametrize("status", [None, 400])
def test_the_wrong_region_is_followed(s3: S3Stub, make_client: Callable[..., Client], status: int | None) -> None:
    """botocore follows a redirect to the bucket's region; HEAD, whose answer has no body, too."""
    s3.put("far-away", b"x")
    s3.configure(faults=[{"redirect_region": "eu-west-1", "status": status}])
    assert len(make_client().list_page("far-away", None, None, 1)[0]) == 1
    assert make_client().head("far-away").size_bytes == 1


def test_a_redirect_that_leads_nowhere(s3: S3Stub, make_client: Callable[..., Client]) -> None:
    """It ends in a text that names the region, and is never taken for a missing key."""
    client = make_client()
    s3.configure(faults=[{"first": 1, "redirect_region": "eu-west-1"}, {"redirect_region": "eu-west-2"}])
    with pytest.raises(RequestError, match="--region eu-west-2") as caught:
        client.list_page("", None, None, 1)
    assert caught.value.kind is K.PROTOCOL


def test_nobody_listens(make_client: Callable[..., Client]) -> None:
    """Connection refused, naming the address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(RequestError, match=f"127.0.0.1:{port}") as caught:
        make_client(endpoint_url=f"http://127.0.0.1:{port}").list_page("", None, None, 1)
    assert caught.value.kind is K.CONNECTION


def test_the_proxy_is_named(s3: S3Stub, make_client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead proxy is what the text complains of; NO_PROXY goes around it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("HTTP_PROXY", f"http://user:secret@127.0.0.1:{port}")
    with pytest.raises(RequestError, match=f"proxy.*127.0.0.1:{port}") as caught:
        make_client().list_page("", None, None, 1)
    assert caught.value.kind is K.CONNECTION
    assert "secret" not in caught.value.detail
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    make_client().list_page("nothing-here", None, None, 1)


# ----------------------------------------------------------------------------------------- refused credentials


def test_no_credentials(make_client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch) -> None:
    """None to be found is an error of its own."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(RequestError, match="credentials") as caught:
        make_client().list_page("", None, None, 1)
    assert caught.value.kind is K.CREDENTIALS


def test_no_such_profile(make_client: Callable[..., Client]) -> None:
    """Said at once, not with the first request."""
    with pytest.raises(RequestError, match="mine") as caught:
        make_client(profile="mine")
    assert caught.value.kind is K.CREDENTIALS


def test_a_malformed_endpoint(make_client: Callable[..., Client]) -> None:
    """Said at once, too."""
    with pytest.raises(RequestError, match="not-a-url"):
        make_client(endpoint_url="not-a-url")


@pytest.mark.parametrize("expired_status", [0, 400, 403])
def test_rotated_credentials(
    s3: S3Stub,
    make_client: Callable[..., Client],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    expired_status: int,
) -> None:
    """Keys that were changed in the file are picked up by the request that the old ones fail."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    credentials = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    etag = s3.put("rotated", b"x")

    def rotate(key: str) -> None:
        credentials.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = s\n")
        s3.configure(require_access_key=key, expired_status=expired_status)

    rotate("old")
    getter, lister, header = make_client(), make_client(), make_client()
    for client in (getter, lister, header):
        client.head("rotated")
    rotate("new")
    getter.open_range("rotated", etag, 1, 0, 1).close()
    assert len(lister.list_page("rotated", None, None, 1)[0]) == 1
    if expired_status == 400:  # the answer to a HEAD has no body: these 403s look like any other
        assert header.head("rotated").size_bytes == 1


def test_credentials_that_stay_refused(s3: S3Stub, make_client: Callable[..., Client]) -> None:
    """They are read anew once, not with every request."""
    client = make_client()
    s3.configure(require_access_key="another")
    for requests in (2, 3, 4):
        with pytest.raises(RequestError) as caught:
            client.list_page("", None, None, 1)
        assert caught.value.kind is K.CREDENTIALS
        assert len(s3.log("LIST")) == requests


def test_a_403_among_successes_is_doubted(s3: S3Stub, client: Client) -> None:
    """Some stores say "forbidden" when they mean "slow down": one more try, after a success."""
    etag = s3.put("sporadic", b"x")
    client.open_range("sporadic", etag, 1, 0, 1).close()
    s3.configure(faults=[{"first": 1, "deny": True}])
    client.open_range("sporadic", etag, 1, 0, 1).close()
    assert [record.status for record in s3.log("GET")] == [206, 403, 206]


def test_a_403_that_stays(s3: S3Stub, make_client: Callable[..., Client]) -> None:
    """One more try, no more; and none where nothing ever worked."""
    client = make_client()
    etag = s3.put("forbidden", b"x")
    s3.configure(faults=[{"verb": "GET", "deny": True}])
    for requests in (1, 3):
        with pytest.raises(RequestError) as caught:
            client.open_range("forbidden", etag, 1, 0, 1)
        assert caught.value.kind is K.DENIED
        assert len(s3.log("GET")) == requests
        client.head("forbidden")
