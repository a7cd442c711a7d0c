"""One stand-in for each test module, with default knobs and an empty bucket for each test."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tests.s3stub import S3Stub
from tests.s3stub.probe import boto_client

_numbers = itertools.count()


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Stub]:
    with S3Stub(tmp_path_factory.mktemp("s3stub")) as stub:
        yield stub


@pytest.fixture
def s3(process: S3Stub) -> S3Stub:
    """The stand-in with default knobs, an empty log and an empty bucket."""
    process.reset_knobs()
    process.clear_log()
    process.bucket = f"bucket-{next(_numbers)}"
    process.create_bucket(process.bucket)
    return process


@pytest.fixture(scope="module")
def client(process: S3Stub) -> Iterator[Any]:
    client = boto_client(process)
    yield client
    client.close()


@pytest.fixture(scope="module")
def impatient(process: S3Stub) -> Iterator[Any]:
    """A client for answers that never come."""
    client = boto_client(process, read_timeout_s=0.2)
    yield client
    client.close()
