"""Bugs of our own: an exception that nobody foresaw costs one request, never the session."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.mount.broken_daemon import EXCEPTIONS
from tests.mount.conftest import Mount
from tests.mount.mounted import Mounted, eventually, forget_inodes
from tests.mount.trouble import errno_of, read
from tests.s3stub import ramp
from tests.servers import StandInBucket

SIZE = 3_000_000


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that says what is broken; see `tests.mount.broken_daemon`."""
    return tmp_path_factory.mktemp("order") / "order"


@pytest.fixture(scope="module")
def mnt(module_bucket: StandInBucket, module_mount: Mount, order: Path) -> Iterator[Mounted]:
    """It believes nothing, so that everything reaches the handlers."""
    module_bucket.put_ramp("d/file", SIZE)
    mounted = module_mount(
        module_bucket,
        *("--workers", "1", "--metadata-ttl", "0"),
        environment={"BROKEN_BY": os.fspath(order)},
        program=(sys.executable, "-m", "tests.mount.broken_daemon"),
    )
    yield mounted
    # It ends in good order; that it logged tracebacks and counted errors is what it was for.
    mounted.process.terminate()
    assert mounted.wait() == 0
    mounted.destroy()


ACTIONS: dict[str, Callable[[Path], object]] = {
    "Catalog.lookup": lambda top: os.stat(top / "d/file"),
    "Catalog.entry": lambda top: os.stat(top / "d"),
    "Catalog.remember": lambda top: os.stat(top / "d"),
    "Catalog.open_directory": lambda top: os.listdir(top / "d"),
    "Catalog.entries": lambda top: os.listdir(top / "d"),
    "Engine.open": lambda top: os.close(os.open(top / "d/file", os.O_RDONLY)),
    "Engine.read": lambda top: read(top / "d/file"),
}
"""What a program does that meets the call."""


@pytest.mark.parametrize("exception", EXCEPTIONS)
@pytest.mark.parametrize("call", ACTIONS)
def test_an_unforeseen_exception_is_eio(mnt: Mounted, order: Path, call: str, exception: str) -> None:
    """Whatever a handler meets, its caller gets EIO, the log has the exception, and the next request is served."""
    counted = mnt.status()["reads"]["handler_errors"]
    order.write_text(f"{exception} {call}")
    try:
        found = errno_of(lambda: ACTIONS[call](mnt.path))
    finally:
        order.unlink()
    assert found == errno.EIO
    assert mnt.status()["reads"]["handler_errors"] > counted
    assert "broken on purpose" in mnt.log()
    assert os.listdir(mnt / "d") == ["file"]
    assert read(mnt / "d/file") == ramp(0, SIZE)


@pytest.mark.parametrize("exception", EXCEPTIONS)
@pytest.mark.parametrize("call", ["Catalog.forget", "Engine.close"])
def test_where_no_reply_could_carry_an_error(mnt: Mounted, order: Path, call: str, exception: str) -> None:
    """forget and release, whose failures nobody hears of, do not end the session either."""
    counted = mnt.status()["reads"]["handler_errors"]
    order.write_text(f"{exception} {call}")
    try:
        with (mnt / "d/file").open("rb") as file:
            file.read(10)
        forget_inodes()
        eventually(lambda: mnt.status()["reads"]["handler_errors"], lambda count: count > counted)
    finally:
        order.unlink()
    assert read(mnt / "d/file") == ramp(0, SIZE)


def test_a_request_that_was_taken_back(mnt: Mounted, order: Path) -> None:
    """/dev/fuse that turns out to be empty when it is read, as when a reader was killed: the session goes on."""
    for _ in range(5):
        order.write_text("EAGAIN")
        eventually(lambda: os.listdir(mnt / "d") and not order.exists())
    assert read(mnt / "d/file") == ramp(0, SIZE)
