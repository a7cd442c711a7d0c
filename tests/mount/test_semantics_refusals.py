"""Objects and servers that refuse: the right errno, no retries where they cannot help, and the others unaffected."""

from __future__ import annotations

import errno
import gzip
import os
from pathlib import Path
from random import Random

import pytest

from tests.mount.conftest import Mount
from tests.mount.mounted import Mounted, eventually, run
from tests.s3stub import ramp
from tests.servers import StandInBucket

MIB = 1 << 20


@pytest.fixture(scope="module")
def mnt(module_bucket: StandInBucket, module_mount: Mount) -> Mounted:
    module_bucket.put_ramp("denied", MIB, 1)
    module_bucket.put_ramp("granted", MIB, 2)
    module_bucket.put_object("archived", b"cold" * 1000, storage_class="GLACIER")
    module_bucket.put_object("instant", b"cool" * 1000, storage_class="GLACIER_IR")
    return module_mount(module_bucket, "--workers", "1", "--metadata-ttl", "1s")


def test_a_denied_object(mnt: Mounted, module_bucket: StandInBucket) -> None:
    """403 for one key is EACCES for that file, and a warning for each open; it is listed, and the others are read."""
    module_bucket.configure(faults=[{"verb": "GET", "key": "denied", "deny": True}])
    assert {"denied", "granted"} <= set(os.listdir(mnt.path))
    for _ in range(2):
        with pytest.raises(PermissionError):
            (mnt / "denied").read_bytes()
    assert (mnt / "granted").read_bytes() == ramp(0, MIB, 2)
    lines = [line for line in mnt.log().splitlines() if " WARNING " in line]
    assert len(lines) == 2
    assert all("read of denied failed" in line and "AccessDenied" in line for line in lines)


def test_a_denied_object_is_not_denied_for_ever(bucket: StandInBucket, mount: Mount) -> None:
    """Once S3 grants it, it can be read, without a new mount."""
    bucket.put_ramp("x", MIB, 1)
    mnt = mount(bucket, "--workers", "1")
    bucket.configure(faults=[{"verb": "GET", "deny": True}])
    with pytest.raises(PermissionError):
        (mnt / "x").read_bytes()
    bucket.configure(faults=[])

    def content() -> bytes | None:
        try:
            return (mnt / "x").read_bytes()
        except PermissionError:
            return None

    assert eventually(content) == ramp(0, MIB, 1)


def test_a_sporadic_refusal_is_doubted(mnt: Mounted, module_bucket: StandInBucket) -> None:
    """Some stores answer 403 when they mean "slow down": one right after successes is tried once more."""
    (mnt / "granted").read_bytes()
    module_bucket.put_ramp("sporadic", MIB, 3)
    module_bucket.configure(faults=[{"verb": "GET", "key": "sporadic", "first": 1, "deny": True}])
    assert (mnt / "sporadic").read_bytes() == ramp(0, MIB, 3)


def test_an_archived_object(mnt: Mounted, module_bucket: StandInBucket) -> None:
    """InvalidObjectState is EIO after a single GET, and the log names key and storage class."""
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        (mnt / "archived").read_bytes()
    assert len(module_bucket.log("GET", "archived")) == 1
    (line,) = [line for line in mnt.log().splitlines() if " WARNING " in line and "archived" in line]
    assert "its storage class is GLACIER" in line


def test_an_instantly_retrievable_object(mnt: Mounted) -> None:
    """Not every class with GLACIER in its name is archived."""
    assert (mnt / "instant").read_bytes() == b"cool" * 1000


def test_a_restored_object(mnt: Mounted, module_bucket: StandInBucket) -> None:
    """What S3 gives is read, whatever the class in the listing says."""
    module_bucket.put_object("restored", b"warm", storage_class="DEEP_ARCHIVE")
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        (mnt / "restored").read_bytes()
    module_bucket.put_object("restored", b"warm", storage_class="STANDARD")

    def content() -> bytes | None:
        try:
            return (mnt / "restored").read_bytes()
        except OSError:
            return None

    assert eventually(content) == b"warm"


def test_a_denied_listing(bucket: StandInBucket, mount: Mount) -> None:
    """Where List is denied, files are found by HEAD and read; what only List can tell is EACCES."""
    bucket.put_ramp("closed/x", MIB, 1)
    mnt = mount(bucket, "--workers", "1")
    (mnt / "closed").stat()
    bucket.configure(faults=[{"verb": "LIST", "deny": True}])
    assert (mnt / "closed/x").read_bytes() == ramp(0, MIB, 1)
    assert not (mnt / "closed/y").exists()
    with pytest.raises(PermissionError):
        os.listdir(mnt / "closed")
    assert [record.key for record in bucket.log("HEAD")] == ["closed/x", "closed/y"]


@pytest.fixture
def paid(bucket: StandInBucket) -> StandInBucket:
    bucket.put_ramp("d/x", MIB, 1)
    bucket.configure(faults=[{"require_header": "x-amz-request-payer:requester"}])
    return bucket


def test_requester_pays(paid: StandInBucket, mount: Mount) -> None:
    """--requester-pays says so in List and GET alike."""
    mnt = mount(paid, "--workers", "1", "--requester-pays")
    assert os.listdir(mnt / "d") == ["x"]
    assert (mnt / "d/x").read_bytes() == ramp(0, MIB, 1)


def test_not_paying(paid: StandInBucket, tmp_path: Path) -> None:
    """Without it the mount is refused, and why is said."""
    (tmp_path / "mnt").mkdir()
    done = run(
        paid, "mount", paid.name, tmp_path / "mnt", "-f", "--endpoint-url", paid.server.endpoint_url,
        "--cache-dir", tmp_path / "cache",
    )  # fmt: skip
    assert done.returncode == 1
    assert "access denied" in done.stderr


def test_content_encoding(mnt: Mounted, module_bucket: StandInBucket) -> None:
    """The stored bytes exactly, by ranges too: nobody unpacks them on the way, nobody asks for packed ones."""
    stored = gzip.compress(Random(1).randbytes(2 * MIB))
    module_bucket.put_object("packed.gz", stored, headers={"content-encoding": "gzip"})
    path = mnt / "packed.gz"
    assert path.stat().st_size == len(stored)
    with open(path, "rb", buffering=0) as file:
        file.seek(len(stored) // 2)
        assert file.read(4096) == stored[len(stored) // 2 :][:4096]
    assert path.read_bytes() == stored
    module_bucket.configure(faults=[{"reject_header": "accept-encoding:gzip"}])
    module_bucket.put_object("plain", b"plain")
    assert (mnt / "plain").read_bytes() == b"plain"
