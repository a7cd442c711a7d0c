"""The notify protocol, with a real socket in the supervisor's place."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from s3prefetchfs.notify import notify


def _supervisor(address: str) -> socket.socket:
    receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    receiver.settimeout(10)
    receiver.bind(address)
    return receiver


def test_a_socket_in_the_filesystem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Several assignments travel in one datagram, a line each."""
    address = str(tmp_path / "notify")
    with _supervisor(address) as receiver:
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        assert notify("READY=1", "STATUS=serving données")
        assert receiver.recv(4096) == "READY=1\nSTATUS=serving données".encode()
        assert notify("STOPPING=1")
        assert receiver.recv(4096) == b"STOPPING=1"


def test_an_abstract_socket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`@name` stands for a NUL and the name."""
    name = f"s3prefetchfs-test{tmp_path}"[-90:]
    with _supervisor("\0" + name) as receiver:
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name)
        assert notify("READY=1")
        assert receiver.recv(4096) == b"READY=1"


@pytest.mark.parametrize("address", [None, "", "relative/path", "vsock:2:1234"])
def test_nobody_to_tell(monkeypatch: pytest.MonkeyPatch, address: str | None) -> None:
    """Without a socket that we know how to reach, nothing is sent and nothing fails."""
    if address is None:
        monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    else:
        monkeypatch.setenv("NOTIFY_SOCKET", address)
    assert not notify("READY=1")


def test_a_supervisor_that_is_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A dead socket is logged and does not stop the filesystem."""
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    assert not notify("READY=1")
    assert "cannot notify the supervisor" in caplog.text


def test_a_supervisor_that_does_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A full queue costs a bounded time."""
    monkeypatch.setattr("s3prefetchfs.notify._SEND_TIMEOUT_S", 0.01)
    address = str(tmp_path / "notify")
    with _supervisor(address):
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        assert any(not notify("STATUS=" + "x" * 1000) for _ in range(10_000))
