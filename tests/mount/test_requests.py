"""What names and listings cost: requests, by the stand-in's log, and memory."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.mount.conftest import Mount
from tests.mount.mounted import Mounted, eventually, forget_inodes
from tests.s3stub import Record, ramp
from tests.servers import StandInBucket

MILLION = 1_000_000
MIB = 1 << 20


@pytest.fixture(scope="module")
def mnt(module_bucket: StandInBucket, module_mount: Mount) -> Mounted:
    module_bucket.synthesize("wide/k", 100_000, 1)
    module_bucket.synthesize("vast/k", MILLION, 4096)
    module_bucket.synthesize("pages/k", 20_000, 1)
    module_bucket.synthesize("shared/k", 10_000, 1)
    for number in range(10):
        module_bucket.put(f"deep-{number}/two/three/four", b"4")
        module_bucket.put(f"alone-{number}/x", b"x")
    return module_mount(module_bucket, "--metadata-ttl", "indefinite")


def lines_of(*command: str | Path) -> int:
    """How many lines a command prints."""
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return done.stdout.count(b"\n")


def overlap(one: Record, other: Record) -> bool:
    """Whether both requests were under way at some moment."""
    assert one.end_s is not None
    assert other.end_s is not None
    return one.start_s < other.end_s and other.start_s < one.end_s


def test_a_hundred_thousand_entries(mnt: Mounted, module_bucket: StandInBucket) -> None:
    """`ls -l` is one List for a thousand entries and nothing for each; `find`, `du` and stats then ask no more."""
    assert lines_of("ls", "-l", mnt / "wide") == 100_001
    assert len(module_bucket.directory_lists("wide/")) == 100
    assert not module_bucket.log("HEAD")
    assert not module_bucket.log("GET")
    module_bucket.clear_log()
    assert lines_of("find", mnt / "wide", "-type", "f", "-size", "-2") == 100_000
    assert sum(entry.stat().st_size for entry in os.scandir(mnt / "wide")) == 100_000
    assert not (mnt / "wide/absent").exists()
    assert not module_bucket.log()


def test_a_lookup_does_not_list(mnt: Mounted, module_bucket: StandInBucket) -> None:
    """Of a name in an unlisted directory of a million keys: two small Lists, at the same time."""
    (mnt / "vast").stat()
    module_bucket.configure(list_latency_ms=100)
    module_bucket.clear_log()
    assert (mnt / "vast/k00777777").stat().st_size == 4096
    probes = module_bucket.log()
    assert sorted((record.verb, record.key) for record in probes) == [
        ("LIST", "vast/k00777777"),
        ("LIST", "vast/k00777777/"),
    ]
    assert not any(record.delimiter for record in probes)
    assert all(record.body_bytes < 1000 for record in probes)
    assert overlap(*probes)


def test_reading_a_known_path_does_not_list(mnt: Mounted, module_bucket: StandInBucket) -> None:
    """One file of a million costs the lookup and a GET, and a second time nothing."""
    (mnt / "vast").stat()
    for expected in ({"LIST": 2, "GET": 1}, {}):
        module_bucket.clear_log()
        assert (mnt / "vast/k00654321").read_bytes() == ramp(0, 4096, 654321)
        verbs = [record.verb for record in module_bucket.log()]
        assert {verb: verbs.count(verb) for verb in verbs} == expected


def test_an_absent_name_does_not_list(mnt: Mounted, module_bucket: StandInBucket) -> None:
    """Absence costs as much as presence, once."""
    (mnt / "vast").stat()
    module_bucket.clear_log()
    for _ in range(3):
        assert not (mnt / "vast/absent").exists()
    assert len(module_bucket.log()) == 2


def test_entries_come_while_the_listing_goes_on(mnt: Mounted, module_bucket: StandInBucket) -> None:
    """The first entries of a big directory come out with its first page, not with its last."""
    (mnt / "pages").stat()
    module_bucket.configure(list_latency_ms=100)
    module_bucket.clear_log()
    with os.scandir(mnt / "pages") as entries:
        first = next(entries).name
        assert len(module_bucket.directory_lists("pages/")) <= 3
        names = [first, *(entry.name for entry in entries)]
    assert len(names) == len(set(names)) == 20_000
    assert len(module_bucket.directory_lists("pages/")) == 20


def test_a_deep_path(mnt: Mounted, module_bucket: StandInBucket) -> None:
    """A cold stat of four levels is two small Lists a level; ten more cost nothing."""
    path = mnt / "deep-1/two/three/four"
    assert path.stat().st_size == 1
    assert len(module_bucket.log()) == 2 * 4
    assert not module_bucket.directory_lists()
    module_bucket.clear_log()
    for _ in range(10):
        path.stat()
    assert not module_bucket.log()


def test_a_listing_answers_for_its_names(mnt: Mounted, module_bucket: StandInBucket) -> None:
    """After a directory was listed, no name in it costs a request, whether the kernel still knows it or not."""
    (mnt / "deep-2").stat()
    assert os.listdir(mnt / "deep-2/two/three") == ["four"]
    module_bucket.clear_log()
    forget_inodes()
    assert (mnt / "deep-2/two/three/four").stat().st_size == 1
    assert not (mnt / "deep-2/two/three/five").exists()
    assert not module_bucket.log("LIST", "deep-2/two/three/four")


def test_askers_share_a_lookup(mnt: Mounted, module_bucket: StandInBucket) -> None:
    """Sixteen at once for one path cost what one does."""
    module_bucket.configure(list_latency_ms=100)
    with ThreadPoolExecutor(16) as threads:
        sizes = list(threads.map(lambda _: os.stat(mnt / "deep-3/two/three/four").st_size, range(16)))
    assert sizes == [1] * 16
    assert len(module_bucket.log()) == 2 * 4


def test_askers_do_not_queue(bucket: StandInBucket, mount: Mount) -> None:
    """Where nothing may be believed, sixteen at once do not wait for each other in a row."""
    bucket.put("x", b"x")
    mnt = mount(bucket, "--metadata-ttl", "0")
    bucket.configure(list_latency_ms=200)
    bucket.clear_log()
    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(lambda _: os.stat(mnt / "x").st_size, range(16))) == [1] * 16
    probes = bucket.log("LIST", "x")
    assert max(probe.start_s for probe in probes) - min(probe.start_s for probe in probes) < 0.2 * 12


def test_readers_share_a_listing(mnt: Mounted, module_bucket: StandInBucket) -> None:
    """Eight at once that list one directory cost what one does, and each gets all of it."""
    (mnt / "shared").stat()
    module_bucket.configure(list_latency_ms=20)
    module_bucket.clear_log()
    with ThreadPoolExecutor(8) as threads:
        counts = list(threads.map(lambda _: len(os.listdir(mnt / "shared")), range(8)))
    assert counts == [10_000] * 8
    assert len(module_bucket.log()) == 10


def test_lookups_go_on_while_a_directory_is_listed(mnt: Mounted, module_bucket: StandInBucket) -> None:
    """They do not wait for its end."""
    module_bucket.synthesize("slow/k", 40_000, 1)
    (mnt / "slow").stat()
    module_bucket.configure(list_latency_ms=50)
    module_bucket.clear_log()
    with os.scandir(mnt / "slow") as entries:
        next(entries)
        assert (mnt / "alone-1/x").stat().st_size == 1
        assert len(module_bucket.directory_lists("slow/")) < 40


# --------------------------------------------------------------------------------------------------- memory


@pytest.mark.slow
def test_memory_of_a_key(bucket: StandInBucket, mount: Mount) -> None:
    """A key that is cached, and known to the kernel, costs the daemon at most 400 bytes."""
    count = 200_000
    bucket.synthesize("d/shard-of-a-data-set-", count, 1)
    mnt = mount(bucket, "--workers", "1", "--metadata-ttl", "indefinite")
    os.listdir(mnt.path)
    base_bytes = mnt.rss_bytes()
    assert lines_of("find", mnt / "d") == count + 1
    assert mnt.status()["namespace"]["objects"] == count
    assert (mnt.rss_bytes() - base_bytes) / count <= 400


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make the kernel forget")
def test_inodes_go_when_the_kernel_forgets(bucket: StandInBucket, mount: Mount) -> None:
    """Names that nobody uses any more are dropped, and their memory is used for others."""
    count = 10_000
    mnt = mount(bucket, "--workers", "1", "--metadata-ttl", "0")
    sizes = []
    for number in range(4):
        bucket.synthesize(f"d{number}/shard-of-a-data-set-", count, 1)
        assert lines_of("find", mnt / f"d{number}") == count + 1
        assert mnt.status()["namespace"]["inodes"] >= count
        forget_inodes()
        eventually(lambda: mnt.status()["namespace"]["inodes"], lambda inodes: inodes < count / 10)
        sizes.append(mnt.rss_bytes())
    assert sizes[-1] - sizes[0] < 200 * count, f"grows: {sizes}"
