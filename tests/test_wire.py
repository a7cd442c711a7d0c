"""Messages survive the trip in any pieces, and what is no message is refused."""

from __future__ import annotations

import pickle
import struct
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3prefetchfs import wire
from s3prefetchfs.errors import FailureKind

KEY = "train/ü +%2F\n.tfrecord"

MESSAGES: list[Any] = [
    wire.Get(1, KEY, 'W/"abc"', 5 << 30, 0, 8 << 20, "/var/cache/x", 512 << 10),
    wire.Get(2, KEY, "", 0, 0, 0, None, 1),
    wire.List(-1, "train/", "/", "token", 1000),
    wire.List(-2, "", None, None, 1),
    wire.Head(-3, KEY),
    wire.Abandon(7),
    wire.Ping(8),
    wire.Ready(4711, "http://[::1]:9000"),
    wire.Pong(8),
    wire.Landed(1, 0, 256 << 10, (0, 0xFFFFFFFF), 0.025),
    wire.Landed(1, 0, 100, (1,), None),
    wire.Got(1, None, 1),
    wire.Got(2, b"\x00\xff" * 1000, 2),
    wire.Listed(-1, [(b"a\xff", 1, 2, "etag", "STANDARD")], [b"train/"], "token"),
    wire.Headed(-3, wire.ListedObject(b"key", 1, 2, "etag", "GLACIER")),
    wire.Failed(1, FailureKind.THROTTLED, "SlowDown", 1.5, 128 << 10, 3),
]


def test_every_message_is_tried_here() -> None:
    """The list above leaves none out."""
    named = {*wire.ToWorker.__args__, *wire.FromWorker.__args__}
    assert named == {type(message) for message in MESSAGES}


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message: Any) -> None:
    """What is decoded equals what was encoded, field by field, with the same types."""
    (decoded,) = wire.Decoder().feed(wire.encode(message))
    assert decoded == message
    assert type(decoded) is type(message)
    for field in fields(message):
        assert type(getattr(decoded, field.name)) is type(getattr(message, field.name))


@given(st.lists(st.sampled_from(MESSAGES), max_size=6), st.data())
def test_any_split(messages: list[Any], data: st.DataObject) -> None:
    """However the stream is cut, the same messages come out in the same order, each as soon as it is complete."""
    frames = [wire.encode(message) for message in messages]
    stream = b"".join(frames)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8).map(sorted))
    decoder = wire.Decoder()
    decoded: list[Any] = []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        decoded += decoder.feed(stream[begin:end])
        complete = sum(end >= sum(map(len, frames[: count + 1])) for count in range(len(frames)))
        assert len(decoded) == complete
    assert decoded == messages


def test_byte_by_byte() -> None:
    """The worst split of all."""
    decoder = wire.Decoder()
    stream = b"".join(map(wire.encode, MESSAGES))
    assert [message for byte in stream for message in decoder.feed(bytes([byte]))] == MESSAGES


def test_input_is_not_kept() -> None:
    """Data handed out does not change when the decoder reads on."""
    decoder = wire.Decoder()
    (first,) = decoder.feed(wire.encode(wire.Got(1, b"a" * 5000, 1)))
    decoder.feed(wire.encode(wire.Got(2, b"b" * 5000, 1)))
    assert first.data == b"a" * 5000


@pytest.mark.parametrize("length", [wire.MAX_FRAME_BYTES + 1, 0xFFFFFFFF])
def test_an_absurd_length_is_refused(length: int) -> None:
    """At once, before its bytes are waited for."""
    with pytest.raises(ValueError, match="frame of"):
        wire.Decoder().feed(struct.pack("<I", length))


def test_the_largest_frame_is_waited_for() -> None:
    """A length at the limit is no error."""
    assert wire.Decoder().feed(struct.pack("<I", wire.MAX_FRAME_BYTES) + b"x" * 100) == []


@pytest.mark.parametrize(
    "body",
    [b"", b"GET / HTTP/1.1\r\n", b"\x80\x05", pickle.dumps(wire.Ping(1))[:-1], b"\x80\x05cno_such_module\nX\n."],
)
def test_a_frame_that_is_no_pickle_is_an_error(body: bytes) -> None:
    """It raises something; it does not become a message."""
    with pytest.raises(Exception):  # noqa: B017, PT011
        wire.Decoder().feed(struct.pack("<I", len(body)) + body)
