"""Who asks, and by which way: credentials that change, regions, bucket names, proxies, endpoints that come and go."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from tests.mount.conftest import Mount
from tests.mount.mounted import eventually, run
from tests.s3stub import ramp
from tests.servers import Rclone, StandIn, StandInBucket

MIB = 1 << 20

NO_KEYS = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
"""An environment that gives no credentials."""


@pytest.fixture
def filled(bucket: StandInBucket) -> StandInBucket:
    for name in ("one", "two", "three"):
        bucket.put_ramp(name, MIB)
    return bucket


def test_credentials_that_are_rotated_in_a_file(filled: StandInBucket, mount: Mount, tmp_path: Path) -> None:
    """Keys that are replaced in the shared credentials file are found when the old ones are refused."""
    file = tmp_path / "credentials"

    def write(access_key: str) -> None:
        file.write_text(f"[default]\naws_access_key_id={access_key}\naws_secret_access_key=secret\n")

    write("AKIDOLD")
    filled.configure(require_access_key="AKIDOLD")
    mnt = mount(filled, "--workers", "1", environment=NO_KEYS | {"AWS_SHARED_CREDENTIALS_FILE": os.fspath(file)})
    assert (mnt / "one").read_bytes() == ramp(0, MIB)
    filled.configure(require_access_key="AKIDNEW")
    write("AKIDNEW")
    assert (mnt / "two").read_bytes() == ramp(0, MIB)
    assert sorted(os.listdir(mnt.path)) == ["one", "three", "two"]


@pytest.mark.parametrize("status", [400, 403])
def test_temporary_credentials_that_expire(filled: StandInBucket, mount: Mount, tmp_path: Path, status: int) -> None:
    """ExpiredToken, as 400 or 403, in the middle of a listing and of reads: renewed, and no reader sees it."""
    current = tmp_path / "current"
    current.write_text("AKIDOLD")
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {sys.executable} {tmp_path}/process.py\n")
    script = "import json\nprint(json.dumps({'Version': 1, 'AccessKeyId': open(%r).read(), 'SecretAccessKey': 's'}))\n"
    (tmp_path / "process.py").write_text(script % os.fspath(current))
    filled.configure(require_access_key="AKIDOLD", expired_status=status)
    mnt = mount(
        filled, "--workers", "1", "--metadata-ttl", "0",
        environment=NO_KEYS | {"AWS_CONFIG_FILE": os.fspath(tmp_path / "config")},
    )  # fmt: skip
    assert (mnt / "one").read_bytes() == ramp(0, MIB)
    with open(mnt / "two", "rb", buffering=0) as file, os.scandir(mnt.path) as entries:
        current.write_text("AKIDNEW")
        filled.configure(require_access_key="AKIDNEW")
        assert file.read(MIB) == ramp(0, MIB)
        assert sorted(entry.name for entry in entries) == ["one", "three", "two"]
    assert (mnt / "three").read_bytes() == ramp(0, MIB)


def test_anonymous_requests(filled: StandInBucket, mount: Mount) -> None:
    """--no-sign-request needs no credentials."""
    mnt = mount(filled, "--workers", "1", "--no-sign-request", environment=NO_KEYS)
    assert (mnt / "one").read_bytes() == ramp(0, MIB)


def test_a_wrong_secret(rclone: Rclone, tmp_path: Path) -> None:
    """A signature that the server refuses is told as such, and nothing is mounted."""
    bucket = rclone.create_bucket("wrong-secret")
    (tmp_path / "mnt").mkdir()
    done = run(
        bucket, "mount", bucket.name, tmp_path / "mnt", "-f", "--endpoint-url", rclone.endpoint_url,
        "--cache-dir", tmp_path / "cache", "--mount-timeout", "1s", AWS_SECRET_ACCESS_KEY="wrong",
    )  # fmt: skip
    assert done.returncode == 1
    assert "SignatureDoesNotMatch" in done.stderr
    assert "AWS_PROFILE" in done.stderr


@pytest.mark.parametrize("status", [301, 400])
def test_a_bucket_in_another_region(filled: StandInBucket, mount: Mount, status: int) -> None:
    """The server's hint is followed, whichever of S3's two forms it has."""
    rule = {"redirect_region": "eu-west-1"} | ({"status": 400} if status == 400 else {})
    filled.configure(faults=[rule])
    mnt = mount(filled, "--workers", "1")
    assert (mnt / "one").read_bytes() == ramp(0, MIB)
    assert sorted(os.listdir(mnt.path)) == ["one", "three", "two"]


def test_a_bucket_name_with_dots(stand_in: StandIn, mount: Mount) -> None:
    """Such names are asked for in the path."""
    bucket = stand_in.create_bucket("a.b.c")
    bucket.put_ramp("one", MIB)
    assert (mount(bucket, "--workers", "1") / "one").read_bytes() == ramp(0, MIB)


def test_a_proxy_is_not_asked_for_what_it_is_not_for(filled: StandInBucket, mount: Mount) -> None:
    """NO_PROXY is heeded: the proxy does not exist."""
    proxies = {"HTTP_PROXY": "http://127.0.0.1:1", "http_proxy": "http://127.0.0.1:1"}
    mnt = mount(filled, "--workers", "1", environment=proxies | {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"})
    assert (mnt / "one").read_bytes() == ramp(0, MIB)


def test_a_proxy_that_is_down(filled: StandInBucket, tmp_path: Path) -> None:
    """The error names the proxy."""
    (tmp_path / "mnt").mkdir()
    done = run(
        filled, "mount", filled.name, tmp_path / "mnt", "-f", "--endpoint-url", filled.server.endpoint_url,
        "--cache-dir", tmp_path / "cache", "--mount-timeout", "0",
        NO_PROXY="", no_proxy="", HTTP_PROXY="http://127.0.0.1:1", http_proxy="http://127.0.0.1:1",
    )  # fmt: skip
    assert done.returncode == 1
    assert "proxy" in done.stderr.lower()
    assert "127.0.0.1:1" in done.stderr


def test_an_endpoint_that_comes_late(filled: StandInBucket, mount: Mount) -> None:
    """A mount waits --mount-timeout for its endpoint, as after a boot."""
    filled.configure(refuse=60)
    comes = threading.Timer(4, lambda: filled.configure(refuse=0))
    comes.start()
    try:
        mnt = mount(filled, "--workers", "1", "--mount-timeout", "60s")
        assert (mnt / "one").read_bytes() == ramp(0, MIB)
        assert "metadata request failed, again in" in mnt.log()
    finally:
        comes.join()


def test_an_endpoint_that_goes_and_comes(filled: StandInBucket, mount: Mount) -> None:
    """What is cached is read on; what is not waits, and goes on by itself when the endpoint is back."""
    mnt = mount(filled, "--workers", "1")
    assert sorted(os.listdir(mnt.path)) == ["one", "three", "two"]
    assert (mnt / "one").read_bytes() == ramp(0, MIB)
    filled.configure(refuse=60)
    with open(mnt / "one", "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert file.read(MIB) == ramp(0, MIB)
    content: list[bytes] = []
    reader = threading.Thread(target=lambda: content.append((mnt / "two").read_bytes()))
    reader.start()
    eventually(lambda: mnt.status()["fetch"]["errors"])
    assert not content
    filled.configure(refuse=0)
    reader.join()
    assert content == [ramp(0, MIB)]
    assert mnt.status()["reads"]["failed"] == 0
