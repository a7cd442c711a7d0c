"""Processes that die, hang, crowd or are interrupted: readers, workers, and the daemon that is told to end."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from tests.mount.conftest import Mount
from tests.mount.mounted import COMMAND, PATIENCE_S, Mounted, eventually
from tests.mount.trouble import MIB, Reader, digest_of, errno_of, read, within
from tests.s3stub import ramp
from tests.servers import StandInBucket

SIZE = 3 * MIB
TIMES = ("--stall-timeout", "1s", "--retry-timeout", "10s")

DEAD = (errno.ENOTCONN, errno.ECONNABORTED)
"""What the kernel says where a daemon was."""


# ----------------------------------------------------------------------------------------------- readers


def test_readers_killed_at_any_moment(bucket: StandInBucket, mount: Mount) -> None:
    """Two hundred readers, each killed somewhere between its open and its last byte: nobody else notices."""
    for number in range(8):
        bucket.put_ramp(str(number), SIZE, number)
    mounted = mount(bucket, "--workers", "1", "--metadata-ttl", "0", "--cache-size", "16MiB", *TIMES)
    bucket.configure(latency="lognormal:5:1")
    chance = Random(4)
    with Reader(mounted / "0", repeat=10) as other:
        for _ in range(20):
            readers = [Reader(mounted / str(number % 8)) for number in range(10)]
            time.sleep(chance.uniform(0, 0.05))  # the moment is the test's subject, not a wait for something
            for reader in readers:
                with reader:
                    reader.process.kill()
                    reader.process.wait(PATIENCE_S)
        assert other.results() == [digest_of(SIZE, 0)] * 10
    for number in range(8):
        assert read(mounted / str(number)) == ramp(0, SIZE, number)


def test_a_reader_killed_while_the_server_says_nothing(bucket: StandInBucket, mount: Mount) -> None:
    """It is gone within a second, long before the time-outs, whatever it reads through."""
    bucket.put_ramp("x", SIZE)
    mounted = mount(bucket, "--workers", "1", "--retry-timeout", "60s")
    os.stat(mounted / "x")
    bucket.configure(blackhole=True)
    reader = Reader(mounted / "x")
    with reader:
        eventually(lambda: mounted.status()["reads"]["waiting"])
        with within(1):
            reader.process.kill()
            reader.process.wait(PATIENCE_S)
    bucket.configure(blackhole=False)
    assert mounted.status()["reads"]["handler_errors"] == 0


def test_signals_do_not_fail_reads(bucket: StandInBucket, mount: Mount) -> None:
    """A timer signal each millisecond, handled with SA_RESTART or without: open, list, stat and read all succeed."""
    for number in range(20):
        bucket.put_ramp(f"d/{number}", MIB + number, number)
    mounted = mount(bucket, "--workers", "1", "--metadata-ttl", "0")
    bucket.configure(latency_ms=20)
    script = """if True:
        import hashlib, os, signal, sys
        count = [0]
        def ring(*_):
            count[0] += 1
        signal.signal(signal.SIGALRM, ring)
        signal.siginterrupt(signal.SIGALRM, sys.argv[2] == "interrupt")
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        for name in sorted(os.listdir(sys.argv[1]), key=int):
            os.stat(f"{sys.argv[1]}/{name}")
            with open(f"{sys.argv[1]}/{name}", "rb") as file:
                print(name, hashlib.sha256(file.read()).hexdigest())
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert count[0] > 20, count
    """
    for how in ("restart", "interrupt"):
        done = subprocess.run(
            [sys.executable, "-c", script, mounted / "d", how], capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert (done.returncode, done.stderr) == (0, "")
        expected = [f"{number} {digest_of(MIB + number, number).split()[0]}" for number in range(20)]
        assert done.stdout.splitlines() == expected


# ----------------------------------------------------------------------------------------------- crowds


def test_five_hundred_open_files_hold_up_nobody(bucket: StandInBucket, mount: Mount) -> None:
    """With 500 files open, one block of each read and every further body stalled: ls, stat and a read within 2 s."""
    for number in range(500):
        bucket.put_ramp(f"held/{number}", 8 * MIB, number)
    bucket.put_ramp("free/file", SIZE, 999)
    mounted = mount(bucket, "--workers", "2", "--max-connections", "16", "--stall-timeout", "5s")
    os.listdir(mounted / "held")
    bucket.configure(faults=[{"verb": "GET", "key": "held/*", "stall_after": MIB}])
    with contextlib.ExitStack() as stack:
        files = []
        for number in range(500):
            file = stack.enter_context(open(mounted / f"held/{number}", "rb", buffering=0))
            files.append(file)
            if number < 300:
                assert file.read(4096) == ramp(0, 4096, number)
        with within(2):
            assert os.listdir(mounted / "free") == ["file"]
        with within(2):
            assert os.stat(mounted / "free/file").st_size == SIZE
        with within(2):
            assert read(mounted / "free/file") == ramp(0, SIZE, 999)
        bucket.configure(faults=[])
        assert files[499].read(4096) == ramp(0, 4096, 499)


def test_few_descriptors(bucket: StandInBucket, mount: Mount) -> None:
    """With a hard limit of 256 descriptors a thousand files are open, read and read again; none fails."""
    for number in range(1000):
        bucket.put_ramp(f"d/{number}", 10_000 + number, number)
    limited = ("prlimit", "--nofile=256:256", *COMMAND)
    mounted = mount(bucket, "--workers", "1", program=limited)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if limit < 1200:
        pytest.skip(f"the test itself needs 1,200 descriptors, and may have {limit}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    os.listdir(mounted / "d")
    with contextlib.ExitStack() as stack:
        fds = []
        for number in range(1000):
            fds.append(os.open(mounted / f"d/{number}", os.O_RDONLY))
            stack.callback(os.close, fds[-1])
        for _ in range(2):
            for number, fd in enumerate(fds):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                assert os.pread(fd, 20_000, 0) == ramp(0, 10_000 + number, number)
        assert len(os.listdir(f"/proc/{mounted.process.pid}/fd")) < 256


# ----------------------------------------------------------------------------------------------- workers


def test_all_workers_killed_again_and_again(bucket: StandInBucket, mount: Mount) -> None:
    """Every worker killed at once, five times, while sixteen read: all of them get all of their bytes."""
    for number in range(16):
        bucket.put_ramp(str(number), SIZE, number)
    mounted = mount(bucket, "--workers", "2", "--metadata-ttl", "0", "--cache-size", "32MiB")
    bucket.configure(aggregate_rate=30e6)
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(Reader(mounted / str(number), repeat=3)) for number in range(16)]
        for _ in range(5):
            fetched = mounted.status()["fetch"]["bytes"]
            eventually(
                lambda fetched=fetched: mounted.status()["fetch"]["bytes"], lambda now, was=fetched: now > was + MIB
            )
            for pid in mounted.workers():
                os.kill(pid, signal.SIGKILL)
        bucket.configure(aggregate_rate=0)
        for number, reader in enumerate(readers):
            assert reader.results() == [digest_of(SIZE, number)] * 3
    assert mounted.status()["workers"]["restarts"] >= 6


# ----------------------------------------------------------------------------------------------- the end


def test_told_to_end_while_readers_wait_for_nothing(bucket: StandInBucket, mount: Mount) -> None:
    """The first signal names who is in the way; after the second the daemon ends in seconds, and so do its readers."""
    for number in range(16):
        bucket.put_ramp(str(number), SIZE, number)
    mounted = mount(bucket, "--workers", "2")
    os.listdir(mounted.path)
    bucket.configure(blackhole=True)
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(Reader(mounted / str(number))) for number in range(16)]
        eventually(lambda: mounted.status()["reads"]["waiting"], lambda waiting: waiting >= 16)
        mounted.process.send_signal(signal.SIGTERM)
        eventually(lambda: "send the signal again" in mounted.log())
        assert any(f"pid {reader.process.pid}" in mounted.log() for reader in readers)
        with within(15):
            mounted.process.send_signal(signal.SIGTERM)
            assert mounted.wait() == 0
        assert {reader.result() for reader in readers} <= {f"errno {number}" for number in DEAD}
    mounted.check_log()
    mounted.destroy()


def test_the_path_is_free_after_the_end(bucket: StandInBucket, mount: Mount, tmp_path: Path) -> None:
    """A daemon killed with -9: readers get ENOTCONN or ECONNABORTED at once, and the next mount takes the path over."""
    bucket.put_ramp("x", 20 * MIB)
    mounted = mount(bucket, "--workers", "1")
    os.listdir(mounted.path)
    bucket.configure(blackhole=True)
    with Reader(mounted / "x") as reader:
        eventually(lambda: mounted.status()["reads"]["waiting"])
        mounted.process.kill()
        with within(5):
            assert int(reader.result().removeprefix("errno ")) in DEAD
    mounted.process.wait()
    mounted.closed = True
    assert errno_of(lambda: os.listdir(mounted.path)) in DEAD
    bucket.configure(blackhole=False)
    again: Mounted = mount(bucket, "--workers", "1", mountpoint=mounted.path, cache_dir=mounted.cache_dir)
    assert read(again / "x") == ramp(0, 20 * MIB)
