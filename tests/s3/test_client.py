"""What the client asks of S3, and what it makes of good answers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from s3prefetchfs.errors import FailureKind, RequestError
from s3prefetchfs.s3.client import Client, ClientSettings, _parse_timestamp, http_range, normalise_etag
from tests.s3.conftest import read_until_it_breaks
from tests.s3stub import S3Stub, ramp

MIB = 1 << 20

ODD_KEYS = [
    *("a b", "a+b", "a%20b", "a%2Bb", "%", "100%", "a=b&c=d", "a?b#c", "~tilde", "*", "quote\"'", "<&>;", "a\\b"),
    *(
        "NFC-\u00e9",
        "NFD-e\u0301",
        "日本語",
        "😀",
        "a\nb",
        "a\rb",
        "a\tb",
        "\x01\x7f",
        "dir/./x",
        "dir//x",
        "dir/../x",
        "/x",
    ),
    *("trailing ", " leading", "dir/", "x" * 1024),
]


def read(client: Client, key: str, etag: str, size_bytes: int, start: int, stop: int) -> bytes:
    """All bytes of a range, received in the largest pieces."""
    body = client.open_range(key, etag, size_bytes, start, stop)
    data = bytearray(stop - start)
    at = 0
    while at < len(data):
        at += body.readinto(memoryview(data)[at:])
    body.close()
    return bytes(data)


# ----------------------------------------------------------------------------------------- pure parts


@pytest.mark.parametrize(("start", "stop", "header"), [(0, 1, "bytes=0-0"), (5, 10, "bytes=5-9")])
def test_http_ranges_include_their_last_byte(start: int, stop: int, header: str) -> None:
    """The one place where half-open becomes inclusive."""
    assert http_range(start, stop) == header


@pytest.mark.parametrize(
    "text",
    ["2024-02-03T04:05:06.000Z", "2024-02-03T04:05:06", "Sat, 03 Feb 2024 04:05:06 GMT", "1706933106", 1706933106],
)
def test_timestamps(text: str | int) -> None:
    """All forms that servers use mean the same moment, without a time zone UTC."""
    assert _parse_timestamp(text).timestamp() == 1706933106


@pytest.mark.parametrize(
    ("text", "etag"), [('"abc-2"', "abc-2"), ("abc", "abc"), ('W/"abc"', "W/abc"), ("", ""), (' "a" ', "a")]
)
def test_etags_lose_their_quotes(text: str, etag: str) -> None:
    """Quoted or not, they compare equal; a weak one stays weak."""
    assert normalise_etag(text) == etag


# ----------------------------------------------------------------------------------------- listings


def test_a_listing_page(s3: S3Stub, client: Client) -> None:
    """Objects with all their attributes, common prefixes, and no token when there is no more."""
    before_ms = datetime.now(UTC).timestamp() * 1000 - 1000
    etag = s3.put("page/file", b"12345", storage_class="GLACIER")
    s3.put("page/dir/x", b"")
    objects, prefixes, token = client.list_page("page/", "/", None, 1000)
    ((key, size_bytes, mtime_ms, listed_etag, storage_class),) = objects
    assert (key, size_bytes, listed_etag, storage_class) == (b"page/file", 5, etag, "GLACIER")
    assert before_ms < mtime_ms < before_ms + 60_000
    assert prefixes == [b"page/dir/"]
    assert token is None


def test_pages_follow_each_other(s3: S3Stub, client: Client) -> None:
    """Each page's token leads to the next, and max_keys is obeyed."""
    s3.synthesize("many/", 25, 1)
    keys: list[bytes] = []
    token, pages = None, 0
    while token is not None or pages == 0:
        objects, _, token = client.list_page("many/", None, token, 10)
        keys += [key for key, *_ in objects]
        pages += 1
    assert keys == [b"many/%08d" % number for number in range(25)]
    assert pages == 3


@pytest.mark.parametrize("key", ODD_KEYS)
def test_odd_keys(s3: S3Stub, client: Client, key: str) -> None:
    """A key comes out of a listing as the bytes it is, can be asked for, and gives its own content."""
    content = f"content of {key!r}".encode()
    etag = s3.put(key, content, bucket=s3.bucket)
    ((listed, size_bytes, _, listed_etag, _),) = client.list_page(key, None, None, 1)[0]
    assert listed == key.encode()
    assert (size_bytes, listed_etag) == (len(content), etag)
    assert client.head(key).key == listed
    assert read(client, key, etag, len(content), 0, len(content)) == content
    s3.delete(key)


def test_odd_prefixes(s3: S3Stub, client: Client) -> None:
    """Common prefixes are decoded like keys."""
    s3.put("p/a+b c%2F\u00e9/x", b"")
    assert client.list_page("p/", "/", None, 10)[1] == ["p/a+b c%2F\u00e9/".encode()]


def test_a_server_that_does_not_encode(s3: S3Stub, client: Client) -> None:
    """Without the EncodingType element keys are taken as they are: a plus is a plus."""
    s3.put("raw/a+b%20c é", b"")
    s3.configure(list_no_encode=True)
    assert [key for key, *_ in client.list_page("raw/", None, None, 10)[0]] == ["raw/a+b%20c é".encode()]


def test_more_without_a_token_is_an_error(s3: S3Stub, client: Client) -> None:
    """A listing that cannot be continued is not taken for a complete one."""
    s3.synthesize("cut/", 5, 1)
    s3.configure(page_size=2, list_truncated_no_token=True)
    with pytest.raises(RequestError, match="no continuation token") as caught:
        client.list_page("cut/", None, None, 1000)
    assert caught.value.kind is FailureKind.PROTOCOL


def test_a_single_key_needs_no_token(s3: S3Stub, client: Client) -> None:
    """Whether there is any key at all can be told by servers that give no token, too."""
    s3.synthesize("cut/", 5, 1)
    s3.configure(list_truncated_no_token=True)
    objects, _, next_token = client.list_page("cut/", None, None, 1)
    assert (len(objects), next_token) == (1, None)


def test_head(s3: S3Stub, client: Client) -> None:
    """HEAD gives what a listing gives."""
    s3.put("head", b"12345")
    found = client.head("head")
    ((key, size_bytes, mtime_ms, etag, storage_class),) = client.list_page("head", None, None, 1)[0]
    assert (found.key, found.size_bytes, found.etag, found.storage_class) == (key, size_bytes, etag, storage_class)
    assert abs(found.mtime_ms - mtime_ms) < 1000  # HTTP dates have no milliseconds


# ----------------------------------------------------------------------------------------- ranges


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 1), (0, 3 * MIB + 5), (1, 2), (MIB - 1, MIB + 1), (3 * MIB, 3 * MIB + 5)]
)
def test_ranges(s3: S3Stub, client: Client, start: int, stop: int) -> None:
    """Exactly the bytes that were asked for, in one request for exactly these."""
    size_bytes = 3 * MIB + 5
    etag = s3.put_ramp("ranges", size_bytes)
    assert read(client, "ranges", etag, size_bytes, start, stop) == ramp(start, stop)
    assert [record.range for record in s3.log("GET")] == [(start, stop)]


def test_bytes_are_given_as_they_come(s3: S3Stub, client: Client) -> None:
    """A large buffer does not wait until it is full: the first bytes of a slow body are there early."""
    etag = s3.put_ramp("slow", MIB)
    s3.configure(faults=[{"stall_after": 4096}])
    body = client.open_range("slow", etag, MIB, 0, MIB)
    data, error = read_until_it_breaks(body)
    assert error.kind is FailureKind.TIMEOUT
    assert data == ramp(0, 4096)


def test_connections_are_used_again(s3: S3Stub, client: Client) -> None:
    """GETs, missing keys, listings and HEADs one after the other need one connection."""
    etag = s3.put_ramp("again", MIB)
    accepted = s3.stats()["connections_accepted"]
    for _ in range(10):
        read(client, "again", etag, MIB, 0, MIB)
        client.list_page("again", None, None, 1)
        client.head("again")
        with pytest.raises(RequestError):
            client.head("missing")
        with pytest.raises(RequestError):
            client.open_range("missing", etag, MIB, 0, MIB)
    assert s3.stats()["connections_accepted"] == accepted + 1


def test_an_unread_body_spoils_nothing(s3: S3Stub, client: Client) -> None:
    """A body closed in the middle takes its connection with it: the next answer is its own."""
    etag = s3.put_ramp("unread", 8 * MIB)
    for start in (0, MIB, 5 * MIB):
        body = client.open_range("unread", etag, 8 * MIB, start, start + 2 * MIB)
        body.readinto(memoryview(bytearray(1000)))
        body.close()
        assert read(client, "unread", etag, 8 * MIB, start, start + 1000) == ramp(start, start + 1000)


def test_gzip_is_not_unpacked(s3: S3Stub, client: Client) -> None:
    """Content-Encoding is the reader's business: stored bytes are what a file holds."""
    content = bytes.fromhex("1f8b0800000000000003") + b"not even gzip"
    etag = s3.put("packed.gz", content, headers={"content-encoding": "gzip"})
    assert read(client, "packed.gz", etag, len(content), 3, len(content)) == content[3:]


def test_chunked_bodies(s3: S3Stub, client: Client) -> None:
    """A proxy that sends chunks is read right, up to where it breaks off."""
    etag = s3.put_ramp("chunked", MIB)
    s3.configure(faults=[{"chunked_short": 1000}])
    body = client.open_range("chunked", etag, MIB, 0, MIB)
    buffer = memoryview(bytearray(100))
    for at in range(0, MIB // 2, 100):
        assert body.readinto(buffer) == 100
        assert buffer == ramp(at, at + 100)
    body.close()
    body = client.open_range("chunked", etag, MIB, 0, MIB)
    assert read_until_it_breaks(body)[1].kind is FailureKind.BODY


# ----------------------------------------------------------------------------------------- versions


@pytest.mark.parametrize("fault", [{}, {"ignore_ifmatch": True}], ids=["412", "If-Match ignored"])
def test_another_version_is_refused(s3: S3Stub, client: Client, fault: dict[str, bool]) -> None:
    """Whether or not the server looks at If-Match, no byte of a replaced object is taken."""
    etag = s3.put("replaced", b"old!")
    s3.put("replaced", b"new!")
    s3.configure(faults=[fault])
    with pytest.raises(RequestError, match="replaced") as caught:
        client.open_range("replaced", etag, 4, 0, 4)
    assert caught.value.kind is FailureKind.CHANGED


@pytest.mark.parametrize("size_bytes", [50, 150])
def test_another_size_is_refused(s3: S3Stub, client: Client, size_bytes: int) -> None:
    """Without an ETag to go by, a changed size gives the other version away."""
    s3.put("resized", bytes(100))
    with pytest.raises(RequestError) as caught:
        client.open_range("resized", "", size_bytes, 0, 10)
    assert caught.value.kind is FailureKind.CHANGED


def test_a_range_behind_the_end(s3: S3Stub, client: Client) -> None:
    """416: the object has become shorter."""
    s3.put("shrunk", bytes(100))
    with pytest.raises(RequestError) as caught:
        client.open_range("shrunk", "", 1000, 500, 600)
    assert caught.value.kind is FailureKind.CHANGED


@pytest.mark.parametrize("style", ["weak", "unquoted"])
def test_strange_etags(s3: S3Stub, client: Client, style: str) -> None:
    """Servers that write ETags in their own way, in listings and answers alike, are understood."""
    s3.put_ramp("strange", MIB)
    s3.configure(faults=[{"etag": style}])
    ((_, _, _, etag, _),) = client.list_page("strange", None, None, 1)[0]
    assert read(client, "strange", etag, MIB, 5, 500) == ramp(5, 500)


@pytest.mark.parametrize("etag", ["", "W/"], ids=["none", "weak"])
def test_no_if_match(s3: S3Stub, client: Client, etag: str) -> None:
    """A weak ETag never matches strongly, and none cannot match: If-Match is left out for both."""
    strong = s3.put_ramp("unconditional", MIB)
    s3.configure(faults=[{"verb": "GET", "reject_header": "if-match"}])
    assert read(client, "unconditional", etag and etag + strong, MIB, 5, 500) == ramp(5, 500)
    with pytest.raises(RequestError):
        client.open_range("unconditional", strong, MIB, 5, 500)


# ----------------------------------------------------------------------------------------- servers without ranges


@pytest.mark.parametrize(("start", "stop"), [(0, 8 * MIB), (0, MIB), (5 * MIB, 6 * MIB), (8 * MIB - 1, 8 * MIB)])
def test_range_ignored(s3: S3Stub, client: Client, start: int, stop: int) -> None:
    """A whole object in answer to a range is read up to the place, and no further."""
    etag = s3.put_ramp("whole", 8 * MIB)
    s3.configure(faults=[{"ignore_range": True}])
    assert read(client, "whole", etag, 8 * MIB, start, stop) == ramp(start, stop)


def test_range_ignored_too_far_in(s3: S3Stub, client: Client) -> None:
    """Beyond 64 MiB of waste such a server is refused."""
    etag = s3.put_sparse("far", 200 * MIB)
    s3.configure(faults=[{"ignore_range": True}])
    with pytest.raises(RequestError, match="ignores Range") as caught:
        client.open_range("far", etag, 200 * MIB, 65 * MIB, 66 * MIB)
    assert caught.value.kind is FailureKind.PROTOCOL


def test_part_of_an_object_as_200(s3: S3Stub, client: Client) -> None:
    """200 with something that is not the whole object could be any part of it: refused."""
    etag = s3.put_ramp("part", 8 * MIB)
    s3.configure(faults=[{"range_200": True}])
    with pytest.raises(RequestError) as caught:
        client.open_range("part", etag, 8 * MIB, 5, MIB)
    assert caught.value.kind is FailureKind.PROTOCOL


class Parrot:
    """A server that says `answer` to every request, whatever it is."""

    def __init__(self, listener: socket.socket) -> None:
        self.answer = b""
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._listener = listener
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):  # shut down
            while True:
                threading.Thread(target=self._talk, args=self._listener.accept()[:1], daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while connection.recv(1 << 16):
                connection.sendall(self.answer)


@pytest.fixture(scope="module")
def parrot() -> Iterator[Parrot]:
    """The server of the tests below."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Parrot(listener)
        listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def parrot_client(parrot: Parrot, _settings: ClientSettings) -> Client:
    """Its client."""
    return Client(replace(_settings, endpoint_url=parrot.url))


@pytest.mark.parametrize(
    ("head", "outcome"),
    [
        ("206 Partial Content|ETag: e|Content-Length: 4|Content-Range: bytes 2-5/10", b"2345"),
        ("200 OK|ETag: e|Content-Length: 4|Content-Range: bytes 2-5/10", b"2345"),  # rclone serve s3
        ("206 Partial Content|ETag: e|Content-Length: 4|Content-Range: bytes 2-5/*", b"2345"),
        ("206 Partial Content|ETag: e|Content-Range: bytes 2-5/10", b"2345"),
        ("206 Partial Content|ETag: e|Content-Length: 9|Content-Range: bytes 2-5/10", b"2345"),
        ("206 Partial Content|ETag: e|Content-Length: 4|Content-Range: bytes 3-6/10", FailureKind.PROTOCOL),
        ("206 Partial Content|ETag: e|Content-Length: 4|Content-Range: bytes 2-9/10", FailureKind.PROTOCOL),
        ("206 Partial Content|ETag: e|Content-Length: 4|Content-Range: bytes 2-5/11", FailureKind.CHANGED),
        ("206 Partial Content|ETag: e|Content-Length: 4", FailureKind.PROTOCOL),
        ("206 Partial Content|Content-Length: 4|Content-Range: bytes 2-5/10", FailureKind.PROTOCOL),
        ("206 Partial Content|ETag: f|Content-Length: 4|Content-Range: bytes 2-5/10", FailureKind.CHANGED),
        ("200 OK|ETag: e|Content-Length: 4", FailureKind.PROTOCOL),
        ("200 OK|ETag: e", FailureKind.PROTOCOL),
        ("204 No Content|ETag: e", FailureKind.PROTOCOL),
    ],
)
def test_odd_answers(parrot: Parrot, parrot_client: Client, head: str, outcome: bytes | FailureKind) -> None:
    """What says plainly that it is the bytes 2 to 6 of a version of 10 bytes is taken; all else is refused."""
    parrot.answer = f"HTTP/1.1 {head}||2345....".replace("|", "\r\n").encode()
    if isinstance(outcome, bytes):
        assert read(parrot_client, "key", "e", 10, 2, 6) == outcome
    else:
        with pytest.raises(RequestError) as caught:
            parrot_client.open_range("key", "e", 10, 2, 6)
        assert caught.value.kind is outcome


# ----------------------------------------------------------------------------------------- what is sent


def test_no_checksum_headers(s3: S3Stub, client: Client) -> None:
    """Some S3-compatible stores refuse them."""
    etag = s3.put_ramp("plain", 1000)
    s3.configure(faults=[{"reject_header": "x-amz-checksum-mode"}])
    assert read(client, "plain", etag, 1000, 0, 1000) == ramp(0, 1000)


def test_requester_pays(s3: S3Stub, make_client: Callable[..., Client]) -> None:
    """Every request says so, if told to; without it the refusal is a clear one."""
    etag = s3.put_ramp("paid", 1000)
    s3.configure(faults=[{"require_header": "x-amz-request-payer:requester"}])
    payer = make_client(requester_pays=True)
    assert len(payer.list_page("paid", None, None, 1)[0]) == 1
    assert payer.head("paid").size_bytes == 1000
    assert read(payer, "paid", etag, 1000, 0, 1000) == ramp(0, 1000)
    with pytest.raises(RequestError) as caught:
        make_client().list_page("paid", None, None, 1)
    assert caught.value.kind is FailureKind.DENIED


def test_unsigned_requests(s3: S3Stub, make_client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch) -> None:
    """Public buckets need no credentials, and none are sent."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    etag = s3.put_ramp("public", 1000)
    s3.configure(faults=[{"reject_header": "authorization"}])
    assert read(make_client(sign_requests=False), "public", etag, 1000, 0, 1000) == ramp(0, 1000)


def test_dotted_bucket_names(s3: S3Stub, make_client: Callable[..., Client]) -> None:
    """They go into the path."""
    etag = s3.put_ramp("key", 1000, bucket="a.b.c")
    assert read(make_client(bucket="a.b.c"), "key", etag, 1000, 0, 1000) == ramp(0, 1000)


def test_endpoint_from_the_environment(
    s3: S3Stub, make_client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """AWS_ENDPOINT_URL_S3 works as --endpoint-url does, path style included."""
    etag = s3.put_ramp("env", 1000)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3.endpoint_url)
    assert read(make_client(endpoint_url=None), "env", etag, 1000, 0, 1000) == ramp(0, 1000)


def test_no_region(s3: S3Stub, make_client: Callable[..., Client]) -> None:
    """A custom endpoint needs no region."""
    assert make_client(region=None).list_page("nothing-here", None, None, 1) == ([], [], None)


def test_settings_of_a_profile(
    s3: S3Stub, make_client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """--profile takes credentials and endpoint from the configuration files."""
    config = tmp_path / "config"
    config.write_text(
        f"[profile mine]\nendpoint_url = {s3.endpoint_url}\naws_access_key_id = mine\naws_secret_access_key = s\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    s3.configure(require_access_key="mine")
    client = make_client(endpoint_url=None, profile="mine")
    assert client.list_page("nothing-here", None, None, 1) == ([], [], None)
