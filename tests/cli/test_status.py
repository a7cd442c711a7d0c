"""`s3prefetchfs status`, asked of mounts that answer, are dead, or hang."""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from s3prefetchfs.cli import main
from s3prefetchfs.fuse import mounts
from s3prefetchfs.units import format_duration, format_size
from tests.cli import fake_mount as fake
from tests.cli.conftest import FakeMount


def test_json_is_passed_on_unchanged(fake_mount: FakeMount) -> None:
    """What the daemon writes is what --json prints, byte for byte."""
    mountpoint, process = fake_mount()
    done = CliRunner().invoke(main, ["status", str(mountpoint), "--json"])
    assert done.exit_code == 0
    document = json.loads(done.stdout)
    assert document["pid"] == process.pid
    assert done.stdout == json.dumps(document, indent=2) + "\n"


def test_table(fake_mount: FakeMount) -> None:
    """Numbers with units and shares, unknown sections too, in 80 columns and without colour."""
    mountpoint, process = fake_mount()
    done = CliRunner().invoke(main, ["status", str(mountpoint)])
    assert done.exit_code == 0
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    table = " ".join(done.stdout.split())
    for row in [
        "mount version 9.9.9 bucket my-bucket prefix train/",
        f"pid {process.pid}",
        "uptime 1 d 2 h",
        "cache capacity 4.0 GiB",
        "used 1.0 GiB (25.0%)",
        "objects 1,234 complete objects 617 (50.0%)",
        "fetch requests 12 bytes 3.0 MiB",
        "first byte p50 27.4 ms first byte p99 -",
        "connections in use 3 (9.4%)",
        "something new rate 5.0 MiB/s inner wait 0.25 s names a, b on yes",
    ]:
        assert row in table


def test_dead_mount(fake_mount: FakeMount) -> None:
    """A daemon that was killed is named as dead, with what to do."""
    mountpoint, process = fake_mount()
    process.kill()
    process.wait()
    done = CliRunner().invoke(main, ["status", str(mountpoint)])
    assert done.exit_code == 1
    assert f"the daemon of {mountpoint} is dead" in done.stderr


def test_hung_mount(fake_mount: FakeMount, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that never answers costs the limit, no more; the asking process is left behind."""
    mountpoint, _ = fake_mount("mnt", "silent")
    monkeypatch.setattr(mounts, "read_file", functools.partial(mounts.read_file, timeout_s=0.3))
    begun = time.monotonic()
    done = CliRunner().invoke(main, ["status", str(mountpoint)])
    assert time.monotonic() - begun < mounts.PROBE_TIMEOUT_S
    assert done.exit_code == 1
    assert "does not answer" in done.stderr


def test_not_ours(tmp_path: Path) -> None:
    """A directory, something missing, and another filesystem have no status of ours."""
    for path in (tmp_path, tmp_path / "missing", Path("/proc")):
        done = CliRunner().invoke(main, ["status", str(path)])
        assert done.exit_code == 1
        assert f"no s3prefetchfs is mounted at {path}" in done.stderr


def test_nonsense(fake_mount: FakeMount, monkeypatch: pytest.MonkeyPatch) -> None:
    """A status that is not ours to understand is an error, not a traceback."""
    mountpoint, _ = fake_mount()
    for answer in (b"", b"{", b"[1]", b"\xff"):
        monkeypatch.setattr(mounts, "read_file", lambda path, answer=answer: answer)
        done = CliRunner().invoke(main, ["status", str(mountpoint)])
        assert (done.exit_code, "makes no sense" in done.stderr) == (1, True)


def test_numbers_for_people() -> None:
    """Each at the edges of its unit."""
    assert [format_size(number) for number in (0, 1023, 1024, 1536, 2**40, 2**60)] == [
        "0 B",
        "1,023 B",
        "1.0 KiB",
        "1.5 KiB",
        "1.0 TiB",
        "1,024.0 PiB",
    ]
    assert [format_duration(seconds) for seconds in (0, 0.1234, 59.9, 60, 3599, 3600, 86400)] == [
        "0 s",
        "0.123 s",
        "59.9 s",
        "1 min 0 s",
        "59 min 59 s",
        "1 h 0 min",
        "1 d 0 h",
    ]


def test_the_fake_is_like_the_real_thing() -> None:
    """It has the names that the daemon promises, as far as they are shown in a way of their own."""
    assert {"version", "bucket", "prefix", "mountpoint", "pid", "uptime_s", "cache", "fetch", "workers"} <= set(
        fake.STATUS
    )
