"""What is read from the kernel's INIT, and what is written into libfuse's reply: bytes of <linux/fuse.h>, by hand."""

from __future__ import annotations

import errno
import struct

import pytest

from s3prefetchfs.fuse.handmount import InitSettings, offers_passthrough, rewritten_init

INIT, READ = 26, 15
EXT, PASSTHROUGH_HIGH = 1 << 30, 1 << 5
SETTINGS = InitSettings(max_background=512, congestion_threshold=384, max_stack_depth=2)


def request(flags: int, flags2: int, *, opcode: int = INIT, size: int = 104) -> bytes:
    """INIT of protocol 7.40, cut to `size` bytes: 56 is how long it was before Linux 5.17."""
    header = struct.pack("=IIQQIIIHH", size, opcode, 2, 0, 0, 0, 0, 0, 0)
    return (header + struct.pack("=IIIII44x", 7, 40, 131072, flags, flags2))[:size]


def reply(size: int = 80, *, error: int = 0, length: int | None = None) -> bytes:
    """libfuse's answer: each field has a value of its own."""
    header = struct.pack("=IiQ", size if length is None else length, error, 2)
    body = struct.pack("=IIIIHHIIHHII", 7, 38, 131072, 0x1005, 12, 9, 1 << 20, 1, 256, 3, 0x2, 0)
    return (header + body + b"reserve " * 3)[:size]


@pytest.mark.parametrize(
    ("flags", "flags2", "offered"),
    [
        (EXT, PASSTHROUGH_HIGH, True),
        (EXT | 0xFF, PASSTHROUGH_HIGH | 0x81, True),
        (EXT, 0, False),
        (EXT, ~PASSTHROUGH_HIGH & 0xFFFFFFFF, False),
        (0, PASSTHROUGH_HIGH, False),  # without the flag for it the second word means nothing
    ],
)
def test_offer(flags: int, flags2: int, offered: bool) -> None:
    assert offers_passthrough(request(flags, flags2)) is offered


def test_an_old_kernel_offers_nothing() -> None:
    """Its INIT ends before the word with the flag; what comes after the message is not looked at."""
    assert not offers_passthrough(request(EXT, PASSTHROUGH_HIGH, size=56))


def test_another_message_is_refused() -> None:
    with pytest.raises(ValueError, match="opcode 15"):
        offers_passthrough(request(EXT, PASSTHROUGH_HIGH, opcode=READ))


def test_settings_are_written() -> None:
    changed = rewritten_init(reply(), SETTINGS)
    expected = struct.pack(
        "=IIIIHHIIHHII", 7, 38, 131072, 0x1005 | EXT, 512, 384, 1 << 20, 1, 256, 3, 0x2 | PASSTHROUGH_HIGH, 2
    )
    assert changed[16:56] == expected
    assert (changed[:16], changed[56:]) == (reply()[:16], reply()[56:])


def test_without_passthrough_only_the_limits_change() -> None:
    changed = bytearray(rewritten_init(reply(), InitSettings(512, 384, 0)))
    assert changed[32:36] == struct.pack("=HH", 512, 384)
    changed[32:36] = reply()[32:36]
    assert changed == reply()


def test_an_error_passes_as_it_is() -> None:
    refusal = reply(16, error=-errno.EPROTO)
    assert rewritten_init(refusal, SETTINGS) == refusal


@pytest.mark.parametrize("bad", [reply(40), reply(length=79), reply(length=160), reply()[:55], reply(55)])
def test_a_reply_that_is_not_understood_is_refused(bad: bytes) -> None:
    with pytest.raises(ValueError, match="a reply to INIT of"):
        rewritten_init(bad, SETTINGS)
