"""Where log records go and what a line looks like.

One event is one line: a message for people, then `key=value` pairs for machines:

    2025-06-01T12:00:00.123Z WARNING s3prefetchfs.s3.pool: worker died pid=4711 signal=9

Modules use the standard library: `logging.getLogger(__name__)` and `fields()` for the pairs. `start` is called once
in each process that logs. Under systemd (JOURNAL_STREAM names our stderr) journald adds the time, and a `<3>` prefix
gives it the level.
"""

from __future__ import annotations

import logging
import logging.handlers
import os
import re
import sys
import time
from pathlib import Path

_ROTATE_BYTES = 10_000_000
_OLD_FILES = 3

_JOURNAL_PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}


class fields:
    """`key=value` pairs for the end of a message, rendered only if the record is.

        logger.warning("worker died %s", fields(pid=4711, signal=9))

    A value with spaces, quotes, `=` or control characters is quoted and escaped: one event stays one line.
    """

    __slots__ = ("_pairs",)

    def __init__(self, **pairs: object) -> None:
        self._pairs = pairs

    def __str__(self) -> str:
        return " ".join(f"{key}={_quoted(value)}" for key, value in self._pairs.items())


def _quoted(value: object) -> str:
    text = os.fsdecode(value) if isinstance(value, bytes) else str(value)
    plain = text.isprintable() and re.search(r'[\s"=]', text) is None
    return text if text and plain else printable('"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"')


def printable(text: str) -> str:
    """`text` without line ends, control characters or lone surrogates (bytes of a key that are not UTF-8)."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class _Formatter(logging.Formatter):
    """One line an event; the lines of a traceback follow, indented, each with the same prefix."""

    def __init__(self, journal: bool) -> None:
        super().__init__()
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        where = f"{record.name}: {printable(record.getMessage())}"
        if self._journal:
            prefix, line = f"<{_JOURNAL_PRIORITIES.get(record.levelno, 6)}>", where
        else:
            moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            prefix, line = "", f"{moment}.{int(record.msecs):03d}Z {record.levelname} {where}"
        lines = [line]
        if record.exc_info:
            lines += [f"    {text}" for text in self.formatException(record.exc_info).splitlines()]
        return "\n".join(prefix + text for text in lines)


def _stderr_is_journal() -> bool:
    try:
        stream = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):  # closed, or replaced by something without a descriptor
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{stream.st_dev}:{stream.st_ino}"


def start(level: str, file: Path | None) -> None:
    """Send this process's log records to `file`, or to stderr if None. A second call replaces the first.

    Args:
        level: the least level to log, as in --log-level.

    Raises:
        OSError: the file cannot be written.
    """
    handler: logging.Handler
    if file is None:
        handler = logging.StreamHandler()
        handler.setFormatter(_Formatter(_stderr_is_journal()))
    else:
        # A key that is not UTF-8 must not lose its line.
        handler = logging.handlers.RotatingFileHandler(
            file, maxBytes=_ROTATE_BYTES, backupCount=_OLD_FILES, encoding="utf-8", errors="backslashreplace"
        )
        handler.setFormatter(_Formatter(journal=False))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)  # libraries: only what is wrong
    logging.getLogger("s3prefetchfs").setLevel(level.upper())
    logging.captureWarnings(True)
