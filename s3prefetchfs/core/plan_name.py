"""What a plan may be called, and which files beside plans are not plans. Pure; for the commands and the daemon."""

from __future__ import annotations

NAME_MAX_BYTES = 80
"""Percent-encoded at worst and with a suffix, it is still a file name (255 bytes)."""

SCRATCH_SUFFIXES = ("~", ".tmp", ".swp")


def plan_name(name: bytes) -> str:
    """The name of a plan, or of a scratch file, from that of a file.

    Raises:
        ValueError: what is wrong with it, to follow "a name that is".
    """
    try:
        text = name.decode()
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    if len(name) > NAME_MAX_BYTES:
        raise ValueError(f"longer than {NAME_MAX_BYTES} bytes")
    if not text.isprintable() or "/" in text or text in ("", ".", ".."):
        raise ValueError("empty, dots, or has control characters or a slash")
    return text


def is_scratch(name: str) -> bool:
    """Whether editors and `rsync` give such names to a file on the way to another one."""
    return name.startswith(".") or name.endswith(SCRATCH_SUFFIXES)
