"""Listings: right by default, to the letter of S3's encoding, and wrong in each way that can be asked for."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.s3stub import S3Stub, ramp
from tests.s3stub.bucket import Bucket, zero_object
from tests.s3stub.knobs import NO_FAULT, Knobs
from tests.s3stub.listing import render
from tests.s3stub.probe import Raw, boto_client, error_of

ODD_KEYS = [
    "sp ace+plus%41 é?#&",
    "ctl\x01\x13\x1f",
    "tab\there",
    "cr\rlf\nboth\r\n",
    "a//b",
    "/lead",
    "../up",
    "d/./x",
    "d/../y",
    ".",
    "..",
    "dir/",
    "<&>\"'",
    "é",
    "e\u0301",
    "Case",
    "case",
    "\U0001f600",
    "\uffee",
    "~*-._()!",
    "w" * 1000,
]


@pytest.mark.parametrize("key", ODD_KEYS)
def test_odd_key(s3: S3Stub, client: Any, key: str) -> None:
    """A key of any characters can be put, listed with both versions and read back with boto3."""
    client.put_object(Bucket=s3.bucket, Key=key, Body=key.encode())
    assert [item["Key"] for item in client.list_objects_v2(Bucket=s3.bucket)["Contents"]] == [key]
    assert [item["Key"] for item in client.list_objects(Bucket=s3.bucket)["Contents"]] == [key]
    assert client.get_object(Bucket=s3.bucket, Key=key)["Body"].read() == key.encode()
    assert {record.key for record in s3.log() if record.verb != "LIST"} == {key}


def test_listing_is_in_byte_order(s3: S3Stub, client: Any) -> None:
    """All odd keys in one bucket come in the order of their UTF-8 bytes."""
    for key in ODD_KEYS:
        s3.put(key, b"")
    listed = [item["Key"] for item in client.list_objects_v2(Bucket=s3.bucket)["Contents"]]
    assert listed == sorted(ODD_KEYS, key=str.encode)


def test_encoding_is_as_s3_does_it(s3: S3Stub) -> None:
    """With encoding-type=url a space is a plus, a plus %2B, slashes stay, and the answer says EncodingType."""
    s3.put("a b+c/é%&.txt", b"")
    query = "?list-type=2&prefix=a%20b&start-after=a%20"
    with Raw(s3) as raw:
        encoded = raw.get(f"/{query}&encoding-type=url")[2]
        plain = raw.get(f"/{query}")[2]
    assert b"<Key>a+b%2Bc/%C3%A9%25%26.txt</Key>" in encoded
    assert b"<Prefix>a+b</Prefix>" in encoded
    assert b"<StartAfter>a+</StartAfter>" in encoded
    assert b"<EncodingType>url</EncodingType>" in encoded
    assert "<Key>a b+c/é%&amp;.txt</Key>".encode() in plain
    assert b"EncodingType" not in plain


def all_pages(bucket: Bucket, query: dict[str, str], knobs: Knobs, limit: int = 100) -> tuple[list[str], list[str]]:
    """Keys and common prefixes of a whole listing, page by page."""
    keys, prefixes = [], []
    version_2 = query.get("list-type") == "2"
    for _ in range(limit):
        tree = ElementTree.fromstring(render(bucket, "b", query, knobs, NO_FAULT, Random(0)).replace("xmlns=", "x="))
        page_keys = [element.text or "" for element in tree.iterfind("Contents/Key")]
        page_prefixes = [element.text or "" for element in tree.iterfind("CommonPrefixes/Prefix")]
        keys += page_keys
        prefixes += page_prefixes
        if tree.findtext("IsTruncated") == "false":
            return keys, prefixes
        if version_2:
            query = {**query, "continuation-token": tree.findtext("NextContinuationToken") or ""}
        else:
            query = {**query, "marker": tree.findtext("NextMarker") or page_keys[-1]}
    raise AssertionError("the listing does not end")


KEYS = st.sets(st.text("ab/0-", min_size=1, max_size=6), max_size=12)


@given(KEYS, st.text("ab/", max_size=3), st.sampled_from(["", "/", "ab"]), st.integers(1, 4), st.booleans())
def test_listing_agrees_with_a_naive_one(keys: set[str], prefix: str, delimiter: str, page: int, v2: bool) -> None:
    """Whatever the keys and page size, both versions list what a comprehension over all keys gives, in order."""
    bucket = Bucket()
    for key in keys:
        bucket.put(key, zero_object(1, 0))
    query = {"prefix": prefix, "delimiter": delimiter, "max-keys": str(page)} | ({"list-type": "2"} if v2 else {})
    rest = {key: key[len(prefix) :] for key in sorted(keys) if key.startswith(prefix)}
    rolled = {prefix + r[: r.index(delimiter)] + delimiter for r in rest.values() if delimiter and delimiter in r}
    plain = [key for key, r in rest.items() if not delimiter or delimiter not in r]
    assert all_pages(bucket, query, Knobs()) == (plain, sorted(rolled))


def test_paginators(s3: S3Stub, client: Any) -> None:
    """boto3 pages through both versions, with and without delimiter, in as many requests as there are pages."""
    for i in range(5):
        s3.put(f"f{i}", b"")
        s3.put(f"d{i}/x", b"")
    for operation in ("list_objects", "list_objects_v2"):
        for delimiter in ("", "/"):
            s3.clear_log()
            paginator = client.get_paginator(operation)
            pages = list(paginator.paginate(Bucket=s3.bucket, Delimiter=delimiter, PaginationConfig={"PageSize": 3}))
            names = [item["Key"] for page in pages for item in page.get("Contents", [])]
            names += [item["Prefix"] for page in pages for item in page.get("CommonPrefixes", [])]
            assert sorted(names) == sorted(
                [f"f{i}" for i in range(5)] + [f"d{i}/" if delimiter else f"d{i}/x" for i in range(5)]
            )
            records = s3.log("LIST")
            assert [record.token == "" for record in records] == [True, False, False, False]


def test_start_after_and_max_keys(s3: S3Stub, client: Any) -> None:
    """start-after is exclusive; max-keys=0 is an empty page that is not truncated; a bad max-keys is refused."""
    for key in "abc":
        s3.put(key, b"")
    listed = client.list_objects_v2(Bucket=s3.bucket, StartAfter="a", MaxKeys=1)
    assert ([item["Key"] for item in listed["Contents"]], listed["IsTruncated"]) == (["b"], True)
    assert client.list_objects_v2(Bucket=s3.bucket, MaxKeys=0)["IsTruncated"] is False
    with Raw(s3) as raw:
        assert raw.get("/?max-keys=many")[0] == 400
        assert raw.get("/?list-type=2&continuation-token=!")[0] == 400


def test_a_million_synthetic_keys(s3: S3Stub, client: Any) -> None:
    """Synthetic keys are listed among stored ones from any place, and read as ramps; strangers among them are not."""
    s3.synthesize("big/", 1_000_000, 3000)
    s3.put("big/00999998x", b"")
    listed = client.list_objects_v2(Bucket=s3.bucket, Prefix="big/", StartAfter="big/00999997")
    names = [item["Key"] for item in listed["Contents"]]
    assert names == ["big/00999998", "big/00999998x", "big/00999999"]
    first = client.list_objects_v2(Bucket=s3.bucket, Prefix="big/")
    assert (len(first["Contents"]), first["IsTruncated"]) == (1000, True)
    assert client.list_objects_v2(Bucket=s3.bucket, Delimiter="/")["CommonPrefixes"] == [{"Prefix": "big/"}]
    got = client.get_object(Bucket=s3.bucket, Key="big/00000042")
    assert (got["Body"].read(), got["ETag"]) == (ramp(0, 3000, 42), first["Contents"][42]["ETag"])
    for stranger in ("big/01000000", "big/42", "big/0000004x", "big/"):
        assert error_of(client.get_object, Bucket=s3.bucket, Key=stranger) == (404, "NoSuchKey")


def odd_listing(s3: S3Stub, **knobs: Any) -> tuple[list[list[str]], list[list[str]]]:
    """Keys and prefixes of each page under `knobs`, of a bucket made to be split badly; at most six pages."""
    for key in ("a", "a.txt", "a/b", "a-b/1", "a0", "c/1", "d"):
        s3.put(key, b"")
    s3.configure(**knobs)
    client = boto_client(s3)
    keys, prefixes = [], []
    token: dict[str, str] = {}
    for _ in range(6):
        page = client.list_objects_v2(Bucket=s3.bucket, Delimiter="/", **token)
        keys.append([item["Key"] for item in page.get("Contents", [])])
        prefixes.append([item["Prefix"] for item in page.get("CommonPrefixes", [])])
        if "NextContinuationToken" not in page:
            break
        token = {"ContinuationToken": page["NextContinuationToken"]}
    client.close()
    return keys, prefixes


def test_page_size(s3: S3Stub) -> None:
    """Pages are no longer than this, and nothing is lost between them."""
    keys, prefixes = odd_listing(s3, page_size=2)
    assert keys == [["a"], ["a.txt"], ["a0"], ["d"]]
    assert prefixes == [["a-b/"], ["a/"], ["c/"], []]


def test_list_shuffle(s3: S3Stub) -> None:
    """The same entries in another order."""
    keys, prefixes = odd_listing(s3, list_shuffle=True, seed=3)
    assert (sorted(keys[0]), sorted(prefixes[0])) == (["a", "a.txt", "a0", "d"], ["a-b/", "a/", "c/"])
    assert keys[0] != sorted(keys[0])


def test_list_prefixes_first(s3: S3Stub) -> None:
    """All prefixes come before all objects, over page borders."""
    keys, prefixes = odd_listing(s3, list_prefixes_first=True, page_size=2)
    assert keys == [[], ["a"], ["a.txt", "a0"], ["d"]]
    assert prefixes == [["a-b/", "a/"], ["c/"], [], []]


def test_list_dup(s3: S3Stub) -> None:
    """Entries repeat within a page and from one page to the next."""
    keys, prefixes = odd_listing(s3, list_dup=True, page_size=2)
    assert keys[:2] == [["a", "a"], ["a.txt", "a.txt"]]
    assert prefixes[:2] == [["a-b/"], ["a-b/", "a/"]]
    assert {name for page in keys + prefixes for name in page} == {"a", "a.txt", "a0", "d", "a-b/", "a/", "c/"}


def test_list_no_encode(s3: S3Stub) -> None:
    """encoding-type is ignored: keys are raw, control characters are references, EncodingType is missing."""
    s3.put("sp ace+%41&\x01\r", b"")
    s3.configure(list_no_encode=True)
    with Raw(s3) as raw:
        body = raw.get("/?encoding-type=url")[2]
    assert b"<Key>sp ace+%41&amp;&#x1;&#xd;</Key>" in body
    assert b"EncodingType" not in body


def test_list_repeat_token(s3: S3Stub) -> None:
    """The second page names itself as the next, for ever."""
    keys, _ = odd_listing(s3, list_repeat_token=True, page_size=2)
    assert keys == [["a"], ["a.txt"], ["a.txt"], ["a.txt"], ["a.txt"], ["a.txt"]]


def test_list_truncated_no_token(s3: S3Stub, client: Any) -> None:
    """More is promised without saying how to get it."""
    assert odd_listing(s3, list_truncated_no_token=True, page_size=2)[0] == [["a"]]
    assert client.list_objects_v2(Bucket=s3.bucket)["IsTruncated"] is True


def test_list_inject_and_hide(s3: S3Stub, client: Any) -> None:
    """Listed keys that do not exist, and keys that exist but are not listed."""
    keys, prefixes = odd_listing(s3, list_inject=["a+lf\n", "ghost/x"], list_hide=["a/*", "d"])
    assert keys == [["a", "a+lf\n", "a.txt", "a0"]]
    assert prefixes == [["a-b/", "c/", "ghost/"]]
    assert client.get_object(Bucket=s3.bucket, Key="a/b")["Body"].read() == b""
    assert error_of(client.get_object, Bucket=s3.bucket, Key="ghost/x") == (404, "NoSuchKey")
