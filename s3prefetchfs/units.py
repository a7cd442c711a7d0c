"""How people write sizes, rates and times, and what the numbers are. Pure.

Each `parse_` takes text and returns a number, or raises ValueError with what it expected, phrased to follow
"`'5 parsecs' is not ...`". `config.py` adds which option it was. Each `format_` is for people's eyes.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal

_PREFIXES = {"k": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_SIZE_UNITS = {
    "": 1,
    "B": 1,
    "KB": 1000,
    **{f"{letter}B": 1000**power for letter, power in _PREFIXES.items()},
    **{f"{letter.upper()}iB": 1024**power for letter, power in _PREFIXES.items()},
}
_SIZE_UNITS |= {unit.lower(): factor for unit, factor in _SIZE_UNITS.items()}
"""`GB` is 10^9 and `GiB` 2^30. `G` alone is either, depending on whom one asks, and `Gb` is a gigabit: both are
refused."""

LARGEST_BYTES = 2**62
"""No disk has as much, and nothing that is computed from it overflows."""

_DURATION_UNITS = {"": "1", "ms": "0.001", "s": "1", "m": "60", "min": "60", "h": "3600", "d": "86400"}

_NUMBER_AND_UNIT = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")


def parse_size(text: str) -> int:
    """Bytes from `500GiB`, `2TB`, `64 MiB`, `1.5GB` or a plain number.

    Raises:
        ValueError: what a size looks like.
    """
    match = _NUMBER_AND_UNIT.fullmatch(text.strip())
    if match is not None and f"{match[2]}iB" in _SIZE_UNITS:
        number, unit = match[1], match[2]
        raise ValueError(f"a size: write {number}{unit}iB (powers of 1024) or {number}{unit}B (of 1000)")
    if match is None or match[2] not in _SIZE_UNITS:
        raise ValueError("a size: write 500GiB, 2TB, 64MiB (MB is 10^6 bytes, MiB is 2^20) or plain bytes")
    if Decimal(match[1]) * _SIZE_UNITS[match[2]] > LARGEST_BYTES:
        raise ValueError("a size that any disk has")
    return int(Decimal(match[1]) * _SIZE_UNITS[match[2]])


def parse_rate(text: str) -> int:
    """Bytes per second from a size, with or without `/s`.

    Raises:
        ValueError: what a rate looks like.
    """
    try:
        return parse_size(text.strip().removesuffix("/s"))
    except ValueError:
        raise ValueError("a rate: write 500MB/s, 2GiB/s or plain bytes per second") from None


def parse_duration(text: str) -> float:
    """Seconds from `60s`, `5m`, `1h`, `2d`, `500ms`, a plain number, or `indefinite` (infinity).

    Raises:
        ValueError: what a duration looks like.
    """
    if text.strip() == "indefinite":
        return math.inf
    match = _NUMBER_AND_UNIT.fullmatch(text.strip())
    if match is None or match[2] not in _DURATION_UNITS:
        raise ValueError("a duration: write 60s, 5m, 1h, 500ms, plain seconds or indefinite")
    return float(Decimal(match[1]) * Decimal(_DURATION_UNITS[match[2]]))


def parse_count(text: str) -> int:
    """A whole number, not negative.

    Raises:
        ValueError: it is not one.
    """
    if re.fullmatch(r"[0-9]{1,18}", text.strip()) is None:
        raise ValueError("a whole number")
    return int(text)


def parse_mode(text: str) -> int:
    """Permission bits from octal text such as `444` or `0555`.

    Raises:
        ValueError: it is not octal.
    """
    if re.fullmatch(r"(0o?)?[0-7]{3}", text.strip()) is None:
        raise ValueError("octal permission bits: write 0444")
    return int(text, 8)


def parse_flag(text: str) -> bool:
    """A truth value.

    Raises:
        ValueError: it is not one.
    """
    match text.strip().lower():
        case "true" | "yes" | "on" | "1":
            return True
        case "false" | "no" | "off" | "0":
            return False
    raise ValueError("yes or no: write true or false")


def format_size(size_bytes: float) -> str:
    """Bytes in the largest binary unit that leaves a number of at least 1."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size_bytes < 1024:
            return f"{size_bytes:,.0f} {unit}" if unit == "B" else f"{size_bytes:,.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:,.1f} PiB"


def format_duration(seconds: float) -> str:
    """Seconds in the two largest units."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, hours, days = int(seconds) // 60, int(seconds) // 3600, int(seconds) // 86400
    if days:
        return f"{days} d {hours % 24} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min {int(seconds) % 60} s"
