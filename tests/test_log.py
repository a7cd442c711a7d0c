"""What a log line looks like, and where it goes."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from s3prefetchfs import log
from s3prefetchfs.log import fields

logger = logging.getLogger("s3prefetchfs.test")


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("s3prefetchfs")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    root.handlers[:] = []
    yield
    for handler in root.handlers:
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
    logging.captureWarnings(False)


def test_fields() -> None:
    """Values that would break the line or the pair are quoted and escaped."""
    pairs = fields(n=1, key=b"a b", odd='x"y', line="a\nb", sign="a=b", empty="", none=None, path=Path("/mnt"))
    assert str(pairs) == r'n=1 key="a b" odd="x\"y" line="a\nb" sign="a=b" empty="" none=None path=/mnt'
    assert str(fields(key=b"\xff\x1b")) == r'key="\udcff\x1b"'


def test_fields_are_rendered_only_if_logged(tmp_path: Path) -> None:
    """A record below the level costs no rendering."""

    class Explosive:
        def __str__(self) -> str:
            raise AssertionError("rendered")

    log.start("info", tmp_path / "log")
    logger.debug("event %s", fields(value=Explosive()))


def test_one_event_is_one_line(tmp_path: Path) -> None:
    """Time, level, place, message; control characters of a key cannot forge a second line."""
    file = tmp_path / "log"
    log.start("info", file)
    logger.debug("too fine")
    logger.warning("hidden key %s", "a\n2025-01-01T00:00:00.000Z ERROR forged\x1b[2J")
    (line,) = file.read_text().splitlines()
    moment, rest = line.split(" ", 1)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", moment)
    assert rest == ("WARNING s3prefetchfs.test: hidden key " + r"a\n2025-01-01T00:00:00.000Z ERROR forged\x1b[2J")


def test_a_traceback_follows_its_event(tmp_path: Path) -> None:
    """Its lines are indented, so that an event is still found by its line."""
    file = tmp_path / "log"
    log.start("info", file)
    try:
        raise RuntimeError("first\nsecond")
    except RuntimeError:
        logger.exception("it failed")
    first, *others = file.read_text().splitlines()
    assert first.endswith("ERROR s3prefetchfs.test: it failed")
    assert others
    assert all(line.startswith("    ") for line in others)


def test_libraries_log_only_what_is_wrong(tmp_path: Path) -> None:
    """--log-level debug is about this package: boto3's debug lines would hold credentials."""
    file = tmp_path / "log"
    log.start("debug", file)
    logger.debug("ours")
    logging.getLogger("botocore.auth").debug("theirs")
    logging.getLogger("botocore.auth").warning("theirs, wrong")
    text = file.read_text()
    assert "ours" in text
    assert "botocore.auth: theirs, wrong" in text
    assert text.count("\n") == 2


def test_the_log_is_rotated(tmp_path: Path) -> None:
    """It never takes more than four files of 10 MB."""
    file = tmp_path / "log"
    log.start("info", file)
    for _ in range(60):
        logger.info("x" * 1_000_000)
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == ["log", "log.1", "log.2", "log.3"]
    assert all(path.stat().st_size <= 10_000_000 for path in files)


def test_an_unwritable_file_is_an_error(tmp_path: Path) -> None:
    """The caller learns of it; there is no log to tell."""
    with pytest.raises(IsADirectoryError):
        log.start("info", tmp_path)


def _stderr_of_a_process(tmp_path: Path, journal: bool) -> str:
    program = (
        "import logging; from s3prefetchfs import log; log.start('info', None);"
        "logging.getLogger('s3prefetchfs').error('bad'); logging.getLogger('s3prefetchfs').info('good')"
    )
    with (tmp_path / "stderr").open("w+") as file:
        stream = os.fstat(file.fileno())
        number = stream.st_ino if journal else stream.st_ino + 1
        environment = {**os.environ, "JOURNAL_STREAM": f"{stream.st_dev}:{number}"}
        subprocess.run([sys.executable, "-c", program], env=environment, stderr=file, check=True, timeout=60)
        file.seek(0)
        return file.read()


def test_journald_gets_levels_and_no_time(tmp_path: Path) -> None:
    """If stderr is the journal, each line starts with its priority."""
    assert _stderr_of_a_process(tmp_path, journal=True) == "<3>s3prefetchfs: bad\n<6>s3prefetchfs: good\n"


def test_a_redirected_stderr_is_not_the_journal(tmp_path: Path) -> None:
    """JOURNAL_STREAM is inherited: it counts only while stderr still is that stream."""
    assert "Z ERROR s3prefetchfs: bad\n" in _stderr_of_a_process(tmp_path, journal=False)
