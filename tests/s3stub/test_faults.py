"""Every fault rule does what it says, to the requests it names, and to no other."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from botocore.exceptions import (
    ConnectionClosedError,
    IncompleteReadError,
    ReadTimeoutError,
    ResponseStreamingError,
)

from tests.s3stub import S3Stub, ramp
from tests.s3stub.knobs import NO_FAULT, Faults
from tests.s3stub.probe import Raw, error_of, finished, wait_for_record

MIB = 1 << 20


def picks(rule: dict[str, Any], requests: list[tuple[str, str, int, float]]) -> list[int]:
    """Which of the requests (verb, key, first byte, time) a rule set at time 100 hits."""
    faults = Faults([{**rule, "deny": True}], 100, Random(0))
    return [i for i, request in enumerate(requests) if faults.pick(*request) is not NO_FAULT]


def test_conditions_of_rules() -> None:
    """verb, key, range_start, first, every, probability and for_s each narrow a rule; all must hold."""
    requests = [
        (verb, key, start, 100.0 + start) for start in (0, 8) for key in ("a/x", "b") for verb in ("GET", "LIST")
    ]
    assert picks({}, requests) == list(range(8))
    assert picks({"verb": "LIST"}, requests) == [1, 3, 5, 7]
    assert picks({"key": "a/*"}, requests) == [0, 1, 4, 5]
    assert picks({"range_start": 8}, requests) == [4, 5, 6, 7]
    assert picks({"first": 3}, requests) == [0, 1, 2]
    assert picks({"every": 3}, requests) == [2, 5]
    assert picks({"for_s": 5}, requests) == [0, 1, 2, 3]
    assert picks({"verb": "GET", "key": "b", "first": 1}, requests) == [2]
    assert 400 < len(picks({"probability": 0.5}, requests[:1] * 1000)) < 600


def test_first_rule_that_fits_is_applied() -> None:
    """Rules are tried in order; one that is used up gives way to the next."""
    faults = Faults([{"first": 1, "status": 500}, {"status": 503}], 0, Random(0))
    assert [faults.pick("GET", "k", 0, 0).status for _ in range(3)] == [500, 503, 503]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ({"status": 500}, (500, "InternalError")),
        ({"status": 503}, (503, "SlowDown")),
        ({"status": 503, "code": "ServiceUnavailable"}, (503, "ServiceUnavailable")),
        ({"status": 404}, (404, "NoSuchKey")),
        ({"deny": True}, (403, "AccessDenied")),
        ({"archived": True}, (403, "InvalidObjectState")),
        ({"require_header": "x-amz-request-payer:requester"}, (403, "AccessDenied")),
        ({"reject_header": "x-amz-checksum-mode"}, (400, "InvalidArgument")),
    ],
)
def test_error_faults(s3: S3Stub, client: Any, fault: dict[str, Any], expected: tuple[int, str]) -> None:
    """The error comes as often as asked for, is in the log, and then the object is served."""
    s3.put("k", b"x")
    s3.configure(faults=[{**fault, "verb": "GET", "first": 2}])
    where = {"Bucket": s3.bucket, "Key": "k"}
    assert [error_of(client.get_object, **where) for _ in range(2)] == [expected] * 2
    assert client.get_object(**where)["Body"].read() == b"x"
    assert [record.status for record in s3.log()] == [expected[0]] * 2 + [200]
    assert [record.fault for record in s3.log()] == ["+".join(fault)] * 2 + [""]


def test_required_header(s3: S3Stub, client: Any) -> None:
    """A request with the header is served."""
    s3.put("k", b"x")
    s3.configure(faults=[{"require_header": "x-amz-request-payer: requester"}])
    assert client.get_object(Bucket=s3.bucket, Key="k", RequestPayer="requester")["Body"].read() == b"x"


def test_redirect_region(s3: S3Stub, client: Any) -> None:
    """Whoever signs for another region is sent there, by 301 or 400, and boto3 follows; HEAD has no body to read."""
    s3.put("k", b"x")
    with Raw(s3) as raw:
        for status, code in ((301, b"PermanentRedirect"), (400, b"AuthorizationHeaderMalformed")):
            s3.configure(faults=[{"redirect_region": "eu-west-1", "status": status}])
            assert raw.ask("/", "HEAD")[0] == status
            got, answer, body = raw.get("/k")
            assert (got, answer["x-amz-bucket-region"]) == (status, "eu-west-1")
            assert b"<Code>" + code in body
    assert client.get_object(Bucket=s3.bucket, Key="k")["Body"].read() == b"x"
    assert [record.status for record in s3.log("GET")[-2:]] == [400, 200]


def test_retry_after(s3: S3Stub) -> None:
    """An error can ask for a pause."""
    s3.configure(faults=[{"status": 503, "retry_after_s": 7}])
    with Raw(s3) as raw:
        assert raw.get("/k")[1]["retry-after"] == "7"


def test_delay_is_added_to_latency(s3: S3Stub) -> None:
    """One request in three can be slow."""
    s3.configure(faults=[{"every": 3, "delay_ms": 60}])
    with Raw(s3) as raw:
        for _ in range(3):
            raw.get("/")
    waits = [(record.first_byte_s or 0) - record.start_s for record in s3.log()]
    assert waits[2] >= 0.059
    assert [record.fault for record in s3.log()] == ["", "", "delay_ms"]


def test_reset_before(s3: S3Stub, client: Any) -> None:
    """The connection is reset in place of an answer."""
    s3.put("k", b"x")
    s3.configure(faults=[{"reset_before": True, "first": 1}])
    with Raw(s3) as raw, pytest.raises(ConnectionResetError):
        raw.ask("/k")
    assert (finished(s3).status, finished(s3).first_byte_s) == (0, None)
    s3.configure(faults=[{"reset_before": True}])
    with pytest.raises(ConnectionClosedError):
        client.get_object(Bucket=s3.bucket, Key="k")


@pytest.mark.parametrize("after", [0, 1, 1000, 3 * MIB])
def test_reset_after(s3: S3Stub, after: int) -> None:
    """Exactly so many bytes of the body arrive, then a reset; the log agrees."""
    s3.put_ramp("k", 4 * MIB)
    s3.configure(faults=[{"reset_after": after}])
    got = bytearray(after + 1)
    with Raw(s3) as raw:
        _, answer = raw.ask("/k")
        assert raw.file.readinto(memoryview(got)[:after]) == after
        with pytest.raises(ConnectionResetError):
            raw.file.read(1)
    assert answer["content-length"] == str(4 * MIB)
    assert got[:after] == ramp(0, after)
    assert finished(s3).body_bytes == after


def test_reset_after_the_end_is_no_reset(s3: S3Stub) -> None:
    """A body that is not longer than that is complete."""
    s3.put_ramp("k", 1000)
    s3.configure(faults=[{"reset_after": 1000}])
    with Raw(s3) as raw:
        assert raw.get("/k")[2] == raw.get("/k")[2] == ramp(0, 1000)


@pytest.mark.parametrize("fault", ["short_body", "chunked_short"])
def test_short_body(s3: S3Stub, client: Any, fault: str) -> None:
    """The body ends early with a clean close, under a full Content-Length or an unfinished chunk."""
    s3.put_ramp("k", 100_000)
    s3.configure(faults=[{fault: 100}])
    with Raw(s3) as raw:
        _, answer = raw.ask("/k")
        body = raw.file.read()
    assert (answer.get("content-length"), answer.get("transfer-encoding")) == (
        ("100000", None) if fault == "short_body" else (None, "chunked")
    )
    assert body == (b"" if fault == "short_body" else b"186a0\r\n") + ramp(0, 99_900)
    assert finished(s3).body_bytes == 99_900
    with pytest.raises((IncompleteReadError, ResponseStreamingError)):
        client.get_object(Bucket=s3.bucket, Key="k")["Body"].read()


def test_stall_after(s3: S3Stub, impatient: Any) -> None:
    """So much arrives and then nothing, with the connection open, until the client gives up."""
    s3.put_ramp("k", 100_000)
    s3.configure(faults=[{"stall_after": 5000}])
    body = impatient.get_object(Bucket=s3.bucket, Key="k")["Body"]
    assert body.read(5000) == ramp(0, 5000)
    assert wait_for_record(s3, body_bytes=5000).end_s is None
    with pytest.raises(ReadTimeoutError):
        body.read(1)
    body.close()
    assert finished(s3).body_bytes == 5000


def test_no_first_byte(s3: S3Stub, impatient: Any) -> None:
    """Nothing is answered, and the connection stays open."""
    s3.configure(faults=[{"no_first_byte": True}])
    with pytest.raises(ReadTimeoutError):
        impatient.get_object(Bucket=s3.bucket, Key="k")
    assert finished(s3).status == 0


def test_drip(s3: S3Stub) -> None:
    """One body is slow, whatever the other rates."""
    s3.put_ramp("k", 10_000)
    s3.configure(faults=[{"drip": 50_000, "first": 1}], rate_per_connection=1e9)
    with Raw(s3) as raw:
        for _ in range(2):
            assert raw.get("/k")[2] == ramp(0, 10_000)
    slow, fast = s3.log()
    assert (slow.fault, fast.fault) == ("drip", "")
    assert slow.end_s is not None
    assert slow.first_byte_s is not None
    assert slow.end_s - slow.first_byte_s >= 0.199


def test_lie_len(s3: S3Stub) -> None:
    """A complete answer, the connection lives on, but bytes are missing at its end."""
    s3.put_ramp("k", 1000)
    s3.configure(faults=[{"lie_len": 10, "first": 1}])
    with Raw(s3) as raw:
        status, answer, body = raw.get("/k", Range="bytes=100-199")
        assert (status, answer["content-range"], body) == (206, "bytes 100-199/1000", ramp(100, 190))
        assert raw.get("/k", Range="bytes=100-199")[2] == ramp(100, 200)


def test_faults_of_ranges(s3: S3Stub) -> None:
    """ignore_range sends everything; range_200 sends the part as if it were everything."""
    s3.put_ramp("k", 1000)
    s3.configure(faults=[{"ignore_range": True, "first": 1}, {"range_200": True, "range_start": 100}])
    with Raw(s3) as raw:
        status, answer, body = raw.get("/k", Range="bytes=100-199")
        assert (status, body, "content-range" in answer) == (200, ramp(0, 1000), False)
        status, answer, body = raw.get("/k", Range="bytes=100-199")
        assert (status, body, "content-range" in answer) == (200, ramp(100, 200), False)


@pytest.mark.parametrize("offset", [0, 5, MIB - 1, MIB, 3 * MIB - 1])
def test_corrupt(s3: S3Stub, offset: int) -> None:
    """One bit of the object is wrong, wherever the range begins; ranges without it are right."""
    s3.put_ramp("k", 3 * MIB)
    s3.configure(faults=[{"corrupt": offset}])
    wrong = bytearray(ramp(0, 3 * MIB))
    wrong[offset] ^= 1
    with Raw(s3) as raw:
        for start, stop in ((0, 3 * MIB), (offset, offset + 1), (max(0, offset - 3), min(3 * MIB, offset + 3))):
            assert raw.get("/k", Range=f"bytes={start}-{stop - 1}")[2] == wrong[start:stop]
        elsewhere = (offset + MIB) % (3 * MIB)
        assert raw.get("/k", Range=f"bytes={elsewhere}-{elsewhere}")[2] == ramp(elsewhere, elsewhere + 1)


def test_ignore_ifmatch(s3: S3Stub, client: Any) -> None:
    """The server sends the new version though the old one was asked for."""
    s3.put("k", b"new")
    s3.configure(faults=[{"ignore_ifmatch": True}])
    assert client.get_object(Bucket=s3.bucket, Key="k", IfMatch='"old"')["Body"].read() == b"new"


def test_etag_forms(s3: S3Stub) -> None:
    """ETags can be weak or without quotes, in headers and listings, and If-Match takes them back."""
    etag = s3.put("k", b"x")
    with Raw(s3) as raw:
        for form, written in (("weak", f'W/"{etag}"'), ("unquoted", etag)):
            s3.configure(faults=[{"etag": form}])
            assert raw.ask("/k", "HEAD")[1]["etag"] == written
            assert f"<ETag>{written.replace(chr(34), '&quot;')}</ETag>".encode() in raw.get("/")[2]
            assert raw.get("/k", If_Match=written)[0] == 200


def test_faults_of_listings(s3: S3Stub, client: Any) -> None:
    """A listing can fail and break like a body; the rule's key is its prefix."""
    s3.configure(faults=[{"verb": "LIST", "key": "p*", "status": 503, "first": 1}, {"verb": "LIST", "reset_after": 50}])
    assert error_of(client.list_objects_v2, Bucket=s3.bucket, Prefix="pre/") == (503, "SlowDown")
    with pytest.raises((ConnectionClosedError, ResponseStreamingError)):
        client.list_objects_v2(Bucket=s3.bucket)
    assert [record.key for record in s3.log("LIST")] == ["pre/", ""]
