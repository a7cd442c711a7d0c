"""The stand-in is S3: objects, ranges, conditions, buckets, and the data that it makes up."""

from __future__ import annotations

import hashlib
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.s3stub import S3Stub, ramp
from tests.s3stub.bucket import BLOCK_BYTES
from tests.s3stub.probe import Raw, error_of, finished

MIB = 1 << 20


def test_put_get_head_delete(s3: S3Stub, client: Any) -> None:
    """An object comes back with its bytes, MD5 ETag, metadata and content headers until it is deleted."""
    where = {"Bucket": s3.bucket, "Key": "dir/name"}
    put = client.put_object(**where, Body=b"hello", Metadata={"m": "1"}, ContentEncoding="gzip", ContentType="a/b")
    assert put["ETag"] == f'"{hashlib.md5(b"hello").hexdigest()}"'
    got = client.get_object(**where)
    assert (got["Body"].read(), got["Metadata"], got["ETag"]) == (b"hello", {"m": "1"}, put["ETag"])
    head = client.head_object(**where)
    assert (head["ContentLength"], head["ContentEncoding"], head["ContentType"]) == (5, "gzip", "a/b")
    client.delete_object(**where)
    assert error_of(client.get_object, **where) == (404, "NoSuchKey")
    assert error_of(client.head_object, **where) == (404, "404")


def test_put_understands_both_chunked_framings(s3: S3Stub) -> None:
    """aws-chunked with trailers inside of HTTP's chunks is taken apart, wherever the pieces end."""
    aws = b"3;chunk-signature=x\r\nabc\r\n8\r\ndefgh\r\ni\r\n0\r\nx-amz-checksum-crc32:AAAAAA==\r\n\r\n"
    body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (aws[:10], aws[10:31], aws[31:])) + b"0\r\n\r\n"
    headers = {
        "Transfer_Encoding": "chunked",
        "Content_Encoding": "aws-chunked",
        "x_amz_content_sha256": "STREAMING-UNSIGNED-PAYLOAD-TRAILER",
    }
    with Raw(s3) as raw:
        assert raw.ask("/k", "PUT", body, **headers)[0] == 200
        status, answer, content = raw.get("/k")
    assert (status, content) == (200, b"abcdefgh\r\ni"[:11])
    assert "content-encoding" not in answer


@pytest.mark.parametrize(
    ("header", "start", "stop"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=10-19", 10, 20),
        ("bytes=90-", 90, 100),
        ("bytes=90-1000", 90, 100),
        ("bytes=-7", 93, 100),
        ("bytes=-1000", 0, 100),
    ],
)
def test_range(s3: S3Stub, header: str, start: int, stop: int) -> None:
    """A range gives 206 with exactly its bytes, cut at the object's end, and is logged half-open."""
    s3.put_ramp("k", 100)
    with Raw(s3) as raw:
        status, answer, content = raw.get("/k", Range=header)
    assert (status, content) == (206, ramp(start, stop))
    assert answer["content-range"] == f"bytes {start}-{stop - 1}/100"
    assert finished(s3).range == (start, stop)


@pytest.mark.parametrize("header", ["bytes=5-4", "bytes=a-b", "bytes=-", "bytes=0-1,4-5", "lines=0-1"])
def test_range_that_is_not_understood_is_ignored(s3: S3Stub, header: str) -> None:
    """S3 answers such a Range with the whole object."""
    s3.put_ramp("k", 100)
    with Raw(s3) as raw:
        assert raw.get("/k", Range=header)[::2] == (200, ramp(0, 100))


@pytest.mark.parametrize(("size", "header"), [(100, "bytes=100-"), (0, "bytes=0-0"), (100, "bytes=-0")])
def test_range_beyond_the_end(s3: S3Stub, client: Any, size: int, header: str) -> None:
    """Nothing of the range exists: 416 InvalidRange."""
    s3.put_ramp("k", size)
    assert error_of(client.get_object, Bucket=s3.bucket, Key="k", Range=header) == (416, "InvalidRange")


def test_conditions(s3: S3Stub, client: Any) -> None:
    """If-Match of another version is 412, If-None-Match of this one 304; quotes, W/ and lists do not matter."""
    etag = s3.put("k", b"v1")
    where = {"Bucket": s3.bucket, "Key": "k"}
    for good in (etag, f'"{etag}"', f'W/"{etag}"', f'"x", "{etag}"', "*"):
        assert client.get_object(**where, IfMatch=good)["Body"].read() == b"v1"
    assert error_of(client.get_object, **where, IfMatch='"x"') == (412, "PreconditionFailed")
    assert error_of(client.head_object, **where, IfMatch='"x"')[0] == 412
    assert error_of(client.get_object, **where, IfNoneMatch=f'"{etag}"')[0] == 304
    assert client.get_object(**where, IfNoneMatch='"x"')["Body"].read() == b"v1"


def test_archived_storage_class(s3: S3Stub, client: Any) -> None:
    """An object in GLACIER is listed and has a HEAD, and refuses to be read."""
    s3.put("k", b"cold", storage_class="GLACIER")
    where = {"Bucket": s3.bucket, "Key": "k"}
    assert client.list_objects_v2(Bucket=s3.bucket)["Contents"][0]["StorageClass"] == "GLACIER"
    assert client.head_object(**where)["StorageClass"] == "GLACIER"
    assert error_of(client.get_object, **where) == (403, "InvalidObjectState")


def test_a_get_under_way_keeps_its_version(s3: S3Stub) -> None:
    """Replacing and deleting an object does not change the bytes of an answer that has begun."""
    old, new = Random(1).randbytes(200_000), Random(2).randbytes(200_000)
    s3.put("k", old)
    s3.configure(faults=[{"first": 1, "drip": 1_000_000}])
    with Raw(s3) as raw, Raw(s3) as other:
        _, answer = raw.ask("/k")
        begin = raw.file.read(1000)
        s3.put("k", new)
        assert other.get("/k")[2] == new
        s3.delete("k")
        assert begin + raw.file.read(int(answer["content-length"]) - 1000) == old


def test_file_in_place(s3: S3Stub, client: Any, tmp_path: Path) -> None:
    """A file given by its path is served from where it is."""
    (tmp_path / "f").write_bytes(ramp(0, 3 * MIB, 9))
    s3.put("k", tmp_path / "f")
    got = client.get_object(Bucket=s3.bucket, Key="k", Range="bytes=1000000-2999999")
    assert got["Body"].read() == ramp(1_000_000, 3_000_000, 9)


def test_sparse_object(s3: S3Stub, client: Any) -> None:
    """An object of 6 GiB costs nothing and is zeros to its last byte."""
    size = 6 << 30
    s3.put_sparse("k", size)
    assert client.head_object(Bucket=s3.bucket, Key="k")["ContentLength"] == size
    got = client.get_object(Bucket=s3.bucket, Key="k", Range=f"bytes={size - 3 * MIB - 5}-")
    assert got["Body"].read() == bytes(3 * MIB + 5)


def test_ramp_object(s3: S3Stub, client: Any) -> None:
    """A ramp is served as `ramp` computes it, over block boundaries, far out, and with its seed."""
    size = (1 << 40) + 12345
    s3.put_ramp("k", size, 7)
    for start, stop in ((0, 1), (MIB - 3, 3 * MIB + 5), (size - 2 * MIB, size)):
        got = client.get_object(Bucket=s3.bucket, Key="k", Range=f"bytes={start}-{stop - 1}")
        assert got["Body"].read() == ramp(start, stop, 7)


@settings(deadline=None)
@given(st.integers(0, 1 << 40), st.integers(1, 3 * BLOCK_BYTES), st.integers(0, 1 << 40), st.integers(0, 9))
def test_ramp_betrays_its_offset(start: int, count: int, elsewhere: int, seed: int) -> None:
    """Any part of a ramp is a part of the whole, and 64 bytes from elsewhere or of another seed differ."""
    middle = start + count // 2
    assert ramp(start, start + count, seed) == ramp(start, middle, seed) + ramp(middle, start + count, seed)
    if elsewhere != start:
        assert ramp(start, start + 64, seed) != ramp(elsewhere, elsewhere + 64, seed)
    assert ramp(start, start + 64, seed) != ramp(start, start + 64, seed + 1)


def test_buckets(s3: S3Stub, client: Any) -> None:
    """Buckets are listed, found, located, made and removed; what does not exist is NoSuchBucket."""
    name = f"{s3.bucket}.new"
    client.create_bucket(Bucket=name)
    assert name in [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]
    assert client.head_bucket(Bucket=name)["ResponseMetadata"]["HTTPStatusCode"] == 200
    assert client.get_bucket_location(Bucket=name)["LocationConstraint"] is None
    assert "Status" not in client.get_bucket_versioning(Bucket=name)
    client.put_object(Bucket=name, Key="k", Body=b"")
    assert error_of(client.delete_bucket, Bucket=name) == (409, "BucketNotEmpty")
    client.delete_object(Bucket=name, Key="k")
    client.delete_bucket(Bucket=name)
    assert error_of(client.head_bucket, Bucket=name)[0] == 404
    assert error_of(client.list_objects_v2, Bucket=name) == (404, "NoSuchBucket")
    assert error_of(client.get_object, Bucket=name, Key="k") == (404, "NoSuchBucket")


def test_what_is_not_implemented_says_so(s3: S3Stub, client: Any) -> None:
    """Multipart uploads, copies and subresources are answered 501, not mistaken for something else."""
    where = {"Bucket": s3.bucket, "Key": "k"}
    assert error_of(client.create_multipart_upload, **where) == (501, "NotImplemented")
    assert error_of(client.copy_object, **where, CopySource=f"{s3.bucket}/x") == (501, "NotImplemented")
    assert error_of(client.get_bucket_acl, Bucket=s3.bucket) == (501, "NotImplemented")
    assert s3.log("PUT")[0].status == 501
