"""Servers, buckets and mounts for the tests: `mount(bucket, *options)` gives a real one, and takes it away.

What is slow to start is shared: servers by the whole session, buckets and most mounts by a module. A test that needs
options of its own mounts for itself. The stand-in's knobs and log are as new for each test.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.mount.mounted import Mounted
from tests.servers import Bucket, Moto, Rclone, Server, StandIn, StandInBucket

Mount = Callable[..., Mounted]
"""Arguments as those of `Mounted`, but for the place."""

_numbers = itertools.count(1)
_live: list[Mounted] = []
"""Every mount of the running test, for its report."""

_LOG_LINES, _LOG_COLUMNS = 60, 300
"""Of a mount's log, in the report of a test that failed."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Show the logs of the mounts where a test fails."""
    report: pytest.TestReport = yield  # type: ignore[assignment]
    if report.failed:
        for mounted in _live:
            lines = [line[:_LOG_COLUMNS] for line in mounted.log().splitlines()[-_LOG_LINES:]]
            report.sections.append((f"log of {mounted.path}", "\n".join(lines)))
    return report  # type: ignore[return-value]


@pytest.fixture(scope="session", autouse=True)
def _needs_fuse() -> None:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.fail(
            "needs /dev/fuse, which is missing or closed to this user"
            " (modprobe fuse; for a container: --device /dev/fuse --cap-add SYS_ADMIN)",
            pytrace=False,
        )


# ----------------------------------------------------------------------------------------------- servers


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    with StandIn(tmp_path_factory.mktemp("stand-in")) as server:
        yield server


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Moto]:
    with Moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rclone]:
    with Rclone(tmp_path_factory.mktemp("rclone")) as server:
        yield server


@pytest.fixture(scope="session", params=["stand_in", "moto", "rclone"])
def any_server(request: pytest.FixtureRequest) -> Server:
    """Each server in turn."""
    server: Server = request.getfixturevalue(request.param)
    return server


@pytest.fixture(autouse=True)
def _fresh_stand_in(stand_in: StandIn) -> Iterator[None]:
    stand_in.stub.clear_log()
    yield
    stand_in.stub.reset_knobs()


# ----------------------------------------------------------------------------------------------- buckets


def _bucket_name(request: pytest.FixtureRequest) -> str:
    words = re.sub(r"[^a-z0-9]+", "-", request.node.name.rpartition("/")[2].removesuffix(".py").lower())
    return f"{words.strip('-')[:40]}-{next(_numbers)}"


@pytest.fixture
def bucket(request: pytest.FixtureRequest, stand_in: StandIn) -> StandInBucket:
    """An empty bucket in the stand-in, for this test."""
    return stand_in.create_bucket(_bucket_name(request))


@pytest.fixture(scope="module")
def module_bucket(request: pytest.FixtureRequest, stand_in: StandIn) -> StandInBucket:
    """An empty bucket in the stand-in, for this module."""
    return stand_in.create_bucket(_bucket_name(request))


@pytest.fixture(scope="module")
def any_bucket(request: pytest.FixtureRequest, any_server: Server) -> Bucket:
    """An empty bucket for this module, in each server in turn."""
    return any_server.create_bucket(_bucket_name(request))


# ----------------------------------------------------------------------------------------------- mounts


def _mounting(place: Path) -> Iterator[Mount]:
    """A factory of mounts in `place`; all are closed and checked in the end."""
    made: list[Mounted] = []

    def mount(bucket: Bucket, *options: str, **how: object) -> Mounted:
        mounted = Mounted(bucket, place / f"mount-{next(_numbers)}", *options, **how)  # type: ignore[arg-type]
        made.append(mounted)
        _live.append(mounted)
        return mounted

    yield mount
    problems = []
    for mounted in reversed(made):
        try:
            mounted.close()
        except (AssertionError, OSError) as error:
            problems.append(f"{mounted.path}: {error}")
        _live.remove(mounted)
    assert not problems, "\n".join(problems)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mounts for this test: `mount(bucket, *options)`."""
    yield from _mounting(tmp_path)


@pytest.fixture(scope="module")
def module_mount(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mount]:
    """Mounts for this module: `module_mount(bucket, *options)`."""
    yield from _mounting(tmp_path_factory.mktemp("shared"))
