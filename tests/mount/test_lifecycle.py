"""From the command line to the last unmount: mounting, refusing, signals, dying, and coming back."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from s3prefetchfs.fuse import mounts
from tests.mount.conftest import Mount
from tests.mount.mounted import Mounted, eventually, run
from tests.s3stub import ramp
from tests.servers import StandInBucket

SIZE = 300_000


@pytest.fixture(scope="module")
def filled(module_bucket: StandInBucket) -> StandInBucket:
    """A bucket with one object."""
    module_bucket.put_ramp("dir/file", SIZE)
    return module_bucket


@pytest.fixture
def mountpoint(tmp_path: Path) -> Iterator[Path]:
    """An empty directory, unmounted at the end whatever is there."""
    path = tmp_path / "mnt"
    path.mkdir()
    yield path
    if (mount := mounts.mount_at(path)) is not None and mount.is_ours:
        mounts.unmount(path, lazy=True)


def where(bucket: StandInBucket, tmp_path: Path) -> list[str]:
    return [
        "--endpoint-url",
        bucket.server.endpoint_url,
        "--cache-dir",
        os.fspath(tmp_path / "cache"),
        "--workers",
        "1",
    ]


def is_running(pid: int) -> bool:
    """Whether a process is there and has not ended (one that nobody waited for is still in the table)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# ----------------------------------------------------------------------------------------------- mount, umount


def test_mount_leaves_a_daemon_and_umount_waits_for_its_end(
    filled: StandInBucket, mountpoint: Path, tmp_path: Path
) -> None:
    """mount returns 0 once the mount is usable; umount returns 0 once the daemon is gone."""
    mounting = run(filled, "mount", filled.name, mountpoint, *where(filled, tmp_path))
    assert (mounting.returncode, mounting.stderr) == (0, "")
    assert (mountpoint / "dir/file").read_bytes() == ramp(0, SIZE)
    pid = json.loads(run(filled, "status", mountpoint, "--json").stdout)["pid"]
    assert is_running(pid)
    unmounting = run(filled, "umount", mountpoint)
    assert (unmounting.returncode, unmounting.stderr) == (0, "")
    assert not is_running(pid)
    assert mounts.mount_at(mountpoint) is None
    assert list(mountpoint.iterdir()) == []


def test_systemd_is_told(filled: StandInBucket, mount: Mount, tmp_path: Path) -> None:
    """With NOTIFY_SOCKET set, READY=1 comes when the mount is usable and STOPPING=1 when it ends."""
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(os.fspath(path))
        supervisor.settimeout(30)
        mounted = mount(filled, "--workers", "1", environment={"NOTIFY_SOCKET": os.fspath(path)})
        ready = supervisor.recv(4096).decode().splitlines()
        assert ready[0] == "READY=1"
        assert ready[1].startswith("STATUS=")
        assert (mounted / "dir/file").stat().st_size == SIZE
        mounted.close()
        assert supervisor.recv(4096) == b"STOPPING=1"


def test_status_for_people_and_for_programs(filled: StandInBucket, mount: Mount) -> None:
    """status prints a table, status --json the document that is the file in the mount."""
    mounted = mount(filled, "--workers", "1")
    (mounted / "dir/file").read_bytes()
    table = run(filled, "status", mounted.path)
    assert table.returncode == 0
    assert filled.name in table.stdout
    document = mounted.status()
    sections = {
        "cache": ["capacity_bytes", "used_bytes", "objects", "complete_objects"],
        "fetch": ["requests", "bytes", "in_flight", "retries", "errors", "first_byte_ms_p50", "first_byte_ms_p99"],
        "reads": ["opens", "bytes_served", "bytes_waited_for", "wait_s"],
        "namespace": ["objects", "directories", "hidden_keys", "shadowed_keys", "lists"],
        "workers": ["processes", "connections_in_use", "connections_limit", "restarts"],
    }
    for section, names in sections.items():
        assert set(names) <= document[section].keys()
    assert document["bucket"] == filled.name
    assert document["mountpoint"] == os.fspath(mounted.path)
    assert document["pid"] == mounted.process.pid
    assert document["reads"]["bytes_served"] == document["fetch"]["bytes"] == SIZE
    assert document["cache"]["complete_objects"] == 1


def test_options_from_a_file_and_from_fstab(filled: StandInBucket, mountpoint: Path, tmp_path: Path) -> None:
    """A mount made of --config and -o alone, in the background, is found again by umount --config."""
    file = tmp_path / "mount.toml"
    file.write_text(
        f'bucket = "s3://{filled.name}/dir"\nmountpoint = "{mountpoint}"\nworkers = 1\n'
        f'endpoint-url = "{filled.server.endpoint_url}"\ncache-dir = "cache"\n'
    )
    mounting = run(filled, "mount", "--config", file, "-o", "ro,_netdev,file_mode=0440,cache_size=64MiB")
    assert (mounting.returncode, mounting.stderr) == (0, "")
    assert (mountpoint / "file").stat().st_mode & 0o777 == 0o440
    assert (tmp_path / "cache").is_dir()
    unmounting = run(filled, "umount", "--config", file)
    assert (unmounting.returncode, unmounting.stderr) == (0, "")


# ----------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "exit_code", "says"),
    [
        (["BUCKET", "PLACE/absent"], 1, "does not exist"),
        (["BUCKET", "PLACE/file"], 1, "is not a directory"),
        (["BUCKET", "PLACE/full"], 1, "is not empty"),
        (["BUCKET", "PLACE/mnt", "--cache-size", "5G"], 2, "--cache-size: '5G' is not a size"),
        (["BUCKET", "PLACE/mnt", "--metadata-ttl", "soon"], 2, "--metadata-ttl: 'soon' is not a duration"),
        (["BUCKET", "PLACE/mnt", "-o", "cache_sise=1GiB"], 2, "the nearest valid name is cache_size"),
        (["http://BUCKET", "PLACE/mnt"], 2, "s3://BUCKET"),
    ],
)
def test_wrong_arguments(
    filled: StandInBucket, mountpoint: Path, tmp_path: Path, arguments: list[str], exit_code: int, says: str
) -> None:
    """What is wrong, and what to do, on stderr; nothing is asked of S3 and nothing is mounted."""
    (tmp_path / "file").touch()
    (tmp_path / "full/x").mkdir(parents=True)
    words = [word.replace("BUCKET", filled.name).replace("PLACE", os.fspath(tmp_path)) for word in arguments]
    refused = run(filled, "mount", *words, *where(filled, tmp_path))
    assert refused.returncode == exit_code
    assert says in refused.stderr
    assert "Traceback" not in refused.stderr
    assert mounts.mount_at(mountpoint) is None
    assert not filled.log()


@pytest.mark.parametrize(
    ("what", "says", "background"),
    [
        ("bucket", "not found", False),
        ("bucket", "not found", True),
        ("denied", "access denied", False),
        ("credentials", "credentials", False),
        ("credentials", "credentials", True),
        ("endpoint", "cannot connect", False),
        ("cache", "cache", False),
        ("cache", "cache", True),
    ],
)
def test_what_cannot_work_is_not_mounted(
    filled: StandInBucket, mountpoint: Path, tmp_path: Path, what: str, says: str, background: bool
) -> None:
    """A mount that cannot work says why on stderr and exits non-zero, before anything is mounted."""
    options = where(filled, tmp_path)
    name = filled.name
    environment = {}
    if what == "bucket":
        name = "no-such-bucket"
    elif what == "denied":
        filled.configure(faults=[{"verb": "LIST", "deny": True}])
    elif what == "credentials":
        environment = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    elif what == "endpoint":
        options += ["--endpoint-url", "http://127.0.0.1:1", "--mount-timeout", "1s"]
    elif what == "cache":
        (tmp_path / "cache").write_text("a file")
    if not background:
        options.append("--foreground")
    refused = run(filled, "mount", name, mountpoint, *options, **environment)
    assert refused.returncode == 1
    assert says in refused.stderr
    assert "Traceback" not in refused.stderr
    assert mounts.mount_at(mountpoint) is None


def test_a_cache_in_use_is_refused(filled: StandInBucket, mount: Mount, mountpoint: Path) -> None:
    """A second mount of the same source with the same cache directory is refused and names the first."""
    first = mount(filled, "--workers", "1")
    options = ["--endpoint-url", filled.server.endpoint_url, "--cache-dir", os.fspath(first.cache_dir)]
    refused = run(filled, "mount", filled.name, mountpoint, *options, "--foreground")
    assert refused.returncode == 1
    assert f"pid {first.process.pid}" in refused.stderr
    assert mounts.mount_at(mountpoint) is None


def test_a_mountpoint_in_use_is_refused(filled: StandInBucket, mount: Mount, tmp_path: Path) -> None:
    """Mounting where we are mounted already is refused, and leaves the first mount as it is."""
    first = mount(filled, "--workers", "1")
    refused = run(filled, "mount", filled.name, first.path, *where(filled, tmp_path))
    assert refused.returncode == 1
    assert "mounted" in refused.stderr
    assert (first / "dir/file").stat().st_size == SIZE


# ----------------------------------------------------------------------------------------------- the end


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_unmounts(filled: StandInBucket, mount: Mount, number: signal.Signals) -> None:
    """What ends a process unmounts cleanly, with exit code 0; other signals do nothing."""
    mounted = mount(filled, "--workers", "1")
    mounted.process.send_signal(signal.SIGUSR1)
    assert (mounted / "dir/file").read_bytes() == ramp(0, SIZE)
    mounted.process.send_signal(number)
    assert mounted.wait() == 0
    assert mounts.mount_at(mounted.path) is None
    mounted.check_log()
    mounted.destroy()


def test_a_signal_does_not_wait_for_s3(bucket: StandInBucket, mount: Mount) -> None:
    """With GETs under way that nobody answers, an idle mount is taken down at once."""
    bucket.put_ramp("x", 64 << 20)
    mounted = mount(bucket, "--workers", "1", "--stall-timeout", "1h")
    (mounted / "x").stat()
    bucket.configure(faults=[{"verb": "GET", "stall_after": 200_000}])
    with open(mounted / "x", "rb", buffering=0) as file:
        file.read(4096)
    assert eventually(lambda: mounted.status()["fetch"]["in_flight"])
    began_s = time.monotonic()
    mounted.close()
    assert time.monotonic() - began_s < 15


def test_a_busy_mount_says_who_holds_it(filled: StandInBucket, mount: Mount) -> None:
    """A signal to a mount in use names the holder and what to do, and serves on; umount likewise."""
    mounted = mount(filled, "--workers", "1")
    with subprocess.Popen(["sleep", "60"], cwd=mounted / "dir") as holder:
        try:
            mounted.process.send_signal(signal.SIGTERM)
            eventually(lambda: f"pid {holder.pid}" in mounted.log() and "send the signal again" in mounted.log())
            assert (mounted / "dir/file").read_bytes() == ramp(0, SIZE)
            refused = run(filled, "umount", mounted.path)
            assert refused.returncode != 0
            assert f"pid {holder.pid}" in refused.stderr
        finally:
            holder.kill()
    assert run(filled, "umount", mounted.path).returncode == 0
    assert mounted.wait() == 0
    mounted.destroy()


def test_a_second_signal_detaches(filled: StandInBucket, mount: Mount) -> None:
    """The second signal takes a busy mount away, and the daemon ends although somebody still holds it."""
    mounted = mount(filled, "--workers", "1")
    with subprocess.Popen(["sleep", "60"], cwd=mounted / "dir") as holder:
        try:
            mounted.process.send_signal(signal.SIGTERM)
            eventually(lambda: "send the signal again" in mounted.log())
            mounted.process.send_signal(signal.SIGTERM)
            assert mounted.wait() == 0
        finally:
            holder.kill()
    assert mounts.mount_at(mounted.path) is None
    mounted.destroy()


def test_umount_lazy_detaches(filled: StandInBucket, mount: Mount) -> None:
    """umount --lazy detaches a busy mount at once; the daemon ends with its last user."""
    mounted = mount(filled, "--workers", "1")
    with subprocess.Popen(["sleep", "60"], cwd=mounted / "dir") as holder:
        try:
            run(filled, "umount", "--lazy", mounted.path)
            assert mounts.mount_at(mounted.path) is None
        finally:
            holder.kill()
    assert mounted.wait() == 0
    mounted.destroy()


def test_a_dead_mount_is_told_and_cleared(filled: StandInBucket, mount: Mount) -> None:
    """After kill -9 status says so, and umount clears the mountpoint."""
    mounted = mount(filled, "--workers", "1")
    mounted.process.kill()
    mounted.process.wait()
    mounted.closed = True
    told = run(filled, "status", mounted.path)
    assert told.returncode == 1
    assert "is dead" in told.stderr
    assert run(filled, "umount", mounted.path).returncode == 0
    assert mounts.mount_at(mounted.path) is None
    assert list(mounted.path.iterdir()) == []


def test_a_dead_mount_is_replaced(filled: StandInBucket, mount: Mount) -> None:
    """After kill -9, what was open fails at once, and mounting again over the dead mountpoint just works."""
    mounted = mount(filled, "--workers", "1")
    fd = os.open(mounted / "dir/file", os.O_RDONLY)
    mounted.process.kill()
    mounted.process.wait()
    mounted.closed = True
    with pytest.raises(OSError, match=r"not connected|Software caused"):
        os.pread(fd, 100, 0)
    with contextlib.suppress(OSError):  # close(2) asks the daemon, which is dead
        os.close(fd)
    again: Mounted = mount(filled, "--workers", "1", mountpoint=mounted.path, cache_dir=mounted.cache_dir)
    assert (again / "dir/file").read_bytes() == ramp(0, SIZE)
