"""What tests look at an S3 server with: a boto3 client that does not hide anything, and a raw HTTP connection."""

from __future__ import annotations

import socket
import time
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from tests.s3stub import Record, S3Stub

PATIENCE_S = 20
"""How long a test waits for what should come at once."""


def boto_client(
    s3: S3Stub, access_key: str = "AKIDTEST", region: str = "us-east-1", read_timeout_s: float = PATIENCE_S
) -> Any:
    """A client that tries once."""
    config = Config(retries={"total_max_attempts": 1}, read_timeout=read_timeout_s)
    return boto3.client(
        "s3",
        endpoint_url=s3.endpoint_url,
        config=config,
        aws_access_key_id=access_key,
        aws_secret_access_key="secret",
        region_name=region,
    )


class Raw:
    """One connection of our own, to see what is really sent."""

    def __init__(self, s3: S3Stub) -> None:
        self.s3 = s3
        self.socket = socket.create_connection(
            ("127.0.0.1", int(s3.endpoint_url.rpartition(":")[2])), timeout=PATIENCE_S
        )
        self.file = self.socket.makefile("rb")

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *exception: object) -> None:
        self.file.close()
        self.socket.close()

    def ask(self, target: str, method: str = "GET", body: bytes = b"", **headers: str) -> tuple[int, dict[str, str]]:
        """Send a request (header names with _ for -); returns status and headers. The body is left to be read."""
        lines = [f"{method} /{self.s3.bucket}{target} HTTP/1.1", "Host: x"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.socket.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        status = int(self.file.readline().split()[1])
        answer = {}
        while line := self.file.readline().strip().decode():
            name, _, value = line.partition(": ")
            answer[name.lower()] = value
        return status, answer

    def get(self, target: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
        status, answer = self.ask(target, "GET", b"", **headers)
        return status, answer, self.file.read(int(answer.get("content-length", 0)))


def error_of(call: Any, **arguments: Any) -> tuple[int, str]:
    """Status and code of the error that a boto3 call ends in."""
    with pytest.raises(ClientError) as caught:
        call(**arguments)
    answer = caught.value.response
    return answer["ResponseMetadata"]["HTTPStatusCode"], answer["Error"]["Code"]


def wait_for_record(s3: S3Stub, **values: Any) -> Record:
    """The first record in the log with these values, as soon as there is one."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for record in s3.log():
            if all(getattr(record, name) == value for name, value in values.items()):
                return record
    raise AssertionError(f"no request with {values} in {s3.log()}")


def finished(s3: S3Stub, verb: str = "GET") -> Record:
    """The last record of this verb, once it is complete."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if (records := s3.log(verb)) and records[-1].end_s is not None:
            return records[-1]
    raise AssertionError(f"not finished: {s3.log()}")
