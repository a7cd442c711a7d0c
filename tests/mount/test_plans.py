"""Plans over a real mount: submitted as files, refused, cancelled, kept over a restart, and what they cost S3."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.mount.conftest import Mount
from tests.mount.mounted import Mounted, eventually, run
from tests.s3stub import ramp
from tests.servers import StandInBucket

MIB = 1 << 20
FILES = 12
PATHS = [f"train/k{number:08d}" for number in range(FILES)]
PLAN = "".join(f"{path}\n" for path in PATHS).encode()


@pytest.fixture(scope="module")
def filled(module_bucket: StandInBucket) -> StandInBucket:
    module_bucket.synthesize("train/k", FILES, 100_000)
    module_bucket.synthesize("other/k", 3, 1000)
    return module_bucket


@pytest.fixture(scope="module")
def shared(filled: StandInBucket, module_mount: Mount) -> Mounted:
    return module_mount(filled, "--workers", "1")


@pytest.fixture
def mnt(shared: Mounted) -> Mounted:
    """The module's mount, without plans."""
    for path in plans_of(shared).iterdir():
        path.unlink()
    return shared


def plans_of(mnt: Mounted) -> Path:
    return mnt / ".s3prefetchfs/plans"


def told(mnt: Mounted, name: str) -> dict[str, Any]:
    """What the file of a plan says."""
    document: dict[str, Any] = json.loads((plans_of(mnt) / name).read_bytes())
    return document


def in_force(mnt: Mounted) -> list[str]:
    """The names of the plans that the engine has."""
    return [plan["name"] for plan in mnt.status()["plans"]]


# ------------------------------------------------------------------------------------------- as files


def test_copying_a_file_there_submits_it(mnt: Mounted, tmp_path: Path) -> None:
    """When cp has returned the plan is in force, is listed, and tells its progress; rm cancels it."""
    (tmp_path / "plan").write_bytes(PLAN)
    subprocess.run(["cp", "-p", tmp_path / "plan", plans_of(mnt) / "mine"], check=True)
    assert in_force(mnt) == ["mine"]
    assert os.listdir(plans_of(mnt)) == ["mine"]
    document = told(mnt, "mine")
    assert (document["entries"], document["epochs"], document["missing_files"]) == (FILES, 1, 0)
    assert (document["warnings"], document["error"]) == ([], None)
    assert (plans_of(mnt) / "mine").stat().st_size == len(PLAN)
    subprocess.run(["rm", plans_of(mnt) / "mine"], check=True)
    assert in_force(mnt) == os.listdir(plans_of(mnt)) == []


@pytest.mark.parametrize("piece", [1, 7, len(PLAN)])
def test_pieces(mnt: Mounted, piece: int) -> None:
    """It may come in pieces of any size."""
    with open(plans_of(mnt) / "pieces", "wb", buffering=0) as file:
        for start in range(0, len(PLAN), piece):
            file.write(PLAN[start : start + piece])
    assert told(mnt, "pieces")["entries"] == FILES


def test_a_shell_writes_it(mnt: Mounted) -> None:
    """`> NAME` and `>> NAME`: a shell closes a copy of the descriptor before anything is written."""
    for operator, entries in ((">", 1), (">>", 2), (">", 1)):
        command = f"echo {PATHS[entries]} {operator} {plans_of(mnt)}/shell"
        subprocess.run(["sh", "-c", command], check=True)
        assert told(mnt, "shell")["entries"] == entries


def test_writing_over_one_replaces_it(mnt: Mounted) -> None:
    """The later file is the plan, however it comes: written over, moved over, or cut short."""
    path = plans_of(mnt) / "mine"
    path.write_bytes(PLAN)
    path.write_text(PATHS[0])
    assert told(mnt, "mine")["entries"] == 1
    (plans_of(mnt) / "other").write_bytes(PLAN)
    os.rename(plans_of(mnt) / "other", path)
    assert in_force(mnt) == os.listdir(plans_of(mnt)) == ["mine"]
    assert told(mnt, "mine")["entries"] == FILES
    os.truncate(path, 2 * len(PATHS[0]) + 2)
    assert told(mnt, "mine")["entries"] == 2


def test_editors_write_beside_and_rename(mnt: Mounted) -> None:
    """A file whose name is one of a work in progress is no plan until it is renamed."""
    draft = plans_of(mnt) / ".mine.Xy12"
    draft.write_bytes(b"//half a p")
    assert draft.read_bytes() == b"//half a p"
    assert in_force(mnt) == []
    with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
        os.rename(draft, plans_of(mnt) / "mine")
    draft.write_bytes(PLAN)
    os.rename(draft, plans_of(mnt) / "mine")
    assert in_force(mnt) == os.listdir(plans_of(mnt)) == ["mine"]


def test_a_plan_that_is_refused(mnt: Mounted, tmp_path: Path) -> None:
    """cp says so, and the file says why. One that was in force stays so."""
    (tmp_path / "bad").write_text('{"version": 1, "files": [')
    done = subprocess.run(["cp", tmp_path / "bad", plans_of(mnt) / "bad"], capture_output=True, text=True)
    assert done.returncode == 1
    assert os.strerror(errno.EINVAL) in done.stderr
    assert told(mnt, "bad")["error"]
    assert in_force(mnt) == []
    (plans_of(mnt) / "good").write_bytes(PLAN)
    with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
        (plans_of(mnt) / "good").write_text("/somewhere/else\n")
    assert in_force(mnt) == ["good"]
    assert told(mnt, "good")["entries"] == FILES
    assert "/somewhere/else" in told(mnt, "good")["error"]
    os.unlink(plans_of(mnt) / "bad")


def test_an_empty_file_is_no_plan(mnt: Mounted) -> None:
    """Nobody can be told at close, so the file tells."""
    (plans_of(mnt) / "empty").touch()
    assert eventually(lambda: told(mnt, "empty"), lambda document: document["error"])["state"] == "refused"


def test_touching_a_plan_does_not_begin_it_anew(mnt: Mounted) -> None:
    """What is opened for writing and not written is not submitted."""
    (plans_of(mnt) / "mine").write_bytes(PLAN)
    (plans_of(mnt) / "last").write_bytes(PLAN)
    subprocess.run(["touch", plans_of(mnt) / "mine"], check=True)
    (plans_of(mnt) / "mark").touch()
    eventually(lambda: told(mnt, "mark"), lambda document: document["error"])
    assert in_force(mnt) == ["mine", "last"]


def test_too_large(mnt: Mounted) -> None:
    """Beyond 256 MiB a write is EFBIG."""
    with (
        open(plans_of(mnt) / ".large", "wb", buffering=0) as file,
        pytest.raises(OSError, match=os.strerror(errno.EFBIG)),
    ):
        file.seek(256 * MIB)
        file.write(b"x")


@pytest.mark.parametrize(
    ("name", "code"), [(b"a" * 81, errno.ENAMETOOLONG), (b"line\nbreak", errno.EINVAL), (b"\xff", errno.EINVAL)]
)
def test_names(mnt: Mounted, name: bytes, code: int) -> None:
    """A name that could not be shown or kept is refused."""
    with pytest.raises(OSError, match=os.strerror(code)):
        os.open(os.fsencode(plans_of(mnt)) + b"/" + name, os.O_CREAT | os.O_WRONLY)


OTHER_WRITES = {
    "mkdir": lambda plans: os.mkdir(plans / "directory"),
    "rmdir": lambda plans: os.rmdir(plans),
    "out": lambda plans: os.rename(plans / "mine", plans.parent / "mine"),
    "beside": lambda plans: (plans.parent / "mine").write_bytes(PLAN),
    "link": lambda plans: os.link(plans / "mine", plans / "other"),
    "symlink": lambda plans: os.symlink("mine", plans / "other"),
    "mkfifo": lambda plans: os.mkfifo(plans / "fifo"),
    "status": lambda plans: os.unlink(plans.parent / "status.json"),
}


@pytest.mark.parametrize("name", OTHER_WRITES)
def test_only_plans_are_written(mnt: Mounted, name: str) -> None:
    """Everything else is EROFS as everywhere in the mount."""
    (plans_of(mnt) / "mine").write_bytes(PLAN)
    with pytest.raises(OSError, match=os.strerror(errno.EROFS)):
        OTHER_WRITES[name](plans_of(mnt))
    assert os.listdir(plans_of(mnt)) == ["mine"]


# ------------------------------------------------------------------------------------------- the bucket


def test_one_listing_for_a_directory(filled: StandInBucket, mount: Mount) -> None:
    """A plan costs a List for each thousand keys of its directories, and nothing for each file."""
    filled.synthesize("wide/k", 2500, 10)
    mnt = mount(filled, "--workers", "1")
    filled.clear_log()
    (plans_of(mnt) / "wide").write_text("".join(f"wide/k{number:08d}\n" for number in range(2500)))
    assert told(mnt, "wide")["missing_files"] == 0
    lists = filled.log("LIST")
    assert len(lists) == len(filled.directory_lists("wide/")) == 3
    assert not filled.log("HEAD")


def test_missing_files_are_a_warning(mnt: Mounted) -> None:
    """The plan is in force for what there is."""
    (plans_of(mnt) / "mine").write_text(f"{PATHS[0]}\ntrain/absent\nnowhere/at/all\ntrain\n")
    document = told(mnt, "mine")
    assert (document["error"], document["missing_files"]) == (None, 3)
    assert document["warnings"] == [
        f"not in the bucket: {path}" for path in ("train/absent", "nowhere/at/all", "train")
    ]


def test_patterns(mnt: Mounted) -> None:
    """They stand for the files that the bucket has now; one that matches nothing is a warning, alone an error."""
    (plans_of(mnt) / "mine").write_text("[to]*/k*\nnone/*\n")
    document = told(mnt, "mine")
    assert document["entries"] == FILES + 3
    assert document["warnings"] == ["not in the bucket: none/*"]
    with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
        (plans_of(mnt) / "none").write_text("none/*\n")
    assert "none/*" in told(mnt, "none")["error"]


def test_a_manifest_needs_no_request(filled: StandInBucket, mount: Mount) -> None:
    """Files given with size and ETag are found, stat-ed and opened without a List or Head; cancelled, they are not."""
    etag = filled.put_ramp("manifest/deep/x", MIB, 7)
    files = [{"path": "manifest/deep/x", "size": MIB, "etag": etag}]
    mnt = mount(filled, "--workers", "1", "--metadata-ttl", "0")
    filled.clear_log()
    (plans_of(mnt) / "mine").write_text(json.dumps({"version": 1, "name": "mine", "files": files, "epochs": 1}))
    assert (mnt / "manifest/deep/x").stat().st_size == MIB
    assert (mnt / "manifest/deep/x").read_bytes() == ramp(0, MIB, 7)
    assert {record.verb for record in filled.log()} == {"GET"}
    assert os.getxattr(mnt / "manifest/deep/x", "user.s3.etag") == etag.encode()
    assert os.listdir(mnt / "manifest") == ["deep"]
    os.unlink(plans_of(mnt) / "mine")
    filled.clear_log()
    (mnt / "manifest/deep/x").stat()
    assert filled.log("LIST")


def test_a_manifest_of_an_older_version(filled: StandInBucket, mount: Mount) -> None:
    """The first read finds that the version is gone; the file that is there now is opened next."""
    etag = filled.put_ramp("manifest/changed", MIB, 1)
    files = [{"path": "manifest/changed", "size": MIB, "etag": etag}]
    filled.put_ramp("manifest/changed", 2 * MIB, 2)
    mnt = mount(filled, "--workers", "1")
    (plans_of(mnt) / "mine").write_text(json.dumps({"version": 1, "name": "mine", "files": files, "epochs": 1}))

    def content() -> bytes | None:
        try:
            return (mnt / "manifest/changed").read_bytes()
        except OSError as error:
            assert error.errno == errno.ESTALE
            return None

    assert eventually(content) == ramp(0, 2 * MIB, 2)


# ------------------------------------------------------------------------------------------- the daemon's life


def test_a_restart(filled: StandInBucket, mount: Mount, tmp_path: Path) -> None:
    """Plans are in force again once the mount is ready; one whose file was damaged is not, and costs nothing else."""
    first = mount(filled, "--workers", "1", cache_dir=tmp_path / "cache")
    for name in ("a", "b", "damaged", "per%cent"):
        (plans_of(first) / name).write_bytes(PLAN)
    first.close()
    (kept,) = (tmp_path / "cache").glob("*/plans/damaged.plan")
    kept.write_bytes(PLAN[:-1])
    second = mount(filled, "--workers", "1", cache_dir=tmp_path / "cache")
    assert in_force(second) == ["a", "b", "per%cent"]
    assert "damaged" in told(second, "damaged")["error"]
    assert "plan damaged is refused" in second.log()
    os.unlink(plans_of(second) / "damaged")
    os.unlink(plans_of(second) / "a")
    second.close()
    assert in_force(mount(filled, "--workers", "1", cache_dir=tmp_path / "cache")) == ["b", "per%cent"]


def test_mount_with_plans(filled: StandInBucket, mount: Mount, tmp_path: Path) -> None:
    """`--plan` may be repeated; the plans are in force when the mount is there."""
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(PLAN)
    mnt = mount(filled, "--workers", "1", "--plan", str(tmp_path / "a"), "--plan", str(tmp_path / "b"))
    assert in_force(mnt) == ["a", "b"]


def test_mount_with_a_bad_plan(filled: StandInBucket, tmp_path: Path) -> None:
    """It fails with the message, and nothing is mounted."""
    (tmp_path / "bad").write_text("/somewhere/else\n")
    (tmp_path / "mnt").mkdir()
    for name in ("bad", "absent"):
        where = ("--endpoint-url", filled.server.endpoint_url, "--cache-dir", tmp_path / "cache")
        done = run(filled, "mount", filled.name, tmp_path / "mnt", *where, "--plan", tmp_path / name)
        assert done.returncode == 1
        assert str(tmp_path / name) in done.stderr
        assert not os.path.ismount(tmp_path / "mnt")


# ------------------------------------------------------------------------------------------- the commands


def test_submit_list_cancel(mnt: Mounted, filled: StandInBucket, tmp_path: Path) -> None:
    """The commands work through the files in the mount."""
    (tmp_path / "plan.txt").write_bytes(PLAN)
    assert run(filled, "plan", "submit", mnt.path, tmp_path / "plan.txt", "--name", "mine").returncode == 0
    assert run(filled, "plan", "submit", mnt.path, tmp_path / "plan.txt").returncode == 0
    listed = run(filled, "plan", "list", mnt.path)
    assert "mine" in listed.stdout
    assert "plan.txt" in listed.stdout
    as_json = json.loads(run(filled, "plan", "list", mnt.path, "--json").stdout)
    assert [plan["name"] for plan in as_json] == ["mine", "plan.txt"]
    table = run(filled, "status", mnt.path).stdout
    assert f"0/{FILES}" in table
    assert "confidence" in table
    assert run(filled, "plan", "cancel", mnt.path, "mine").returncode == 0
    assert in_force(mnt) == ["plan.txt"]
    done = run(filled, "plan", "cancel", mnt.path, "mine")
    assert done.returncode == 1
    assert "mine" in done.stderr


def test_submit_refused(mnt: Mounted, filled: StandInBucket, tmp_path: Path) -> None:
    """A refused plan is exit code 1 with its error; missing files are a warning, with --strict an error."""
    (tmp_path / "bad").write_text("/somewhere/else\n")
    done = run(filled, "plan", "submit", mnt.path, tmp_path / "bad")
    assert done.returncode == 1
    assert "/somewhere/else" in done.stderr
    (tmp_path / "empty").touch()
    for arguments in ([tmp_path / "empty"], [tmp_path / "absent"], [tmp_path / "bad", "--name", "a/b"]):
        done = run(filled, "plan", "submit", mnt.path, *arguments)
        assert (done.returncode, done.stderr.startswith("s3prefetchfs: ")) == (1, True)
    assert os.listdir(plans_of(mnt)) == ["bad"]
    (tmp_path / "missing").write_text(f"{PATHS[0]}\ntrain/absent\n")
    done = run(filled, "plan", "submit", mnt.path, tmp_path / "missing")
    assert done.returncode == 0
    assert "train/absent" in done.stderr
    assert in_force(mnt) == ["missing"]
    done = run(filled, "plan", "submit", mnt.path, tmp_path / "missing", "--strict")
    assert done.returncode == 1
    assert "train/absent" in done.stderr
    assert in_force(mnt) == []


@pytest.mark.parametrize("path", ["train/\x1bc", "/\x1bc"], ids=["warning", "refusal"])
def test_names_do_not_command_the_terminal(mnt: Mounted, filled: StandInBucket, tmp_path: Path, path: str) -> None:
    """Control characters in a path (here one that resets a terminal) are shown escaped."""
    (tmp_path / "odd").write_text(f"{PATHS[0]}\n{path}\n")
    said = run(filled, "plan", "submit", mnt.path, tmp_path / "odd").stderr
    listed = run(filled, "plan", "list", mnt.path).stdout
    checked = run(filled, "plan", "check", tmp_path / "odd", "--against", mnt.path).stderr
    for text in (said, listed, checked):
        assert "/\\x1bc" in text
        assert "\x1b" not in text


def test_ranges_are_followed_behind_the_kernel(filled: StandInBucket, mount: Mount) -> None:
    """Ranges that begin anywhere, have bytes in common, and are read as the kernel reads: ahead, and from memory."""
    filled.put_ramp("raw/0", 96 * MIB)
    chance = random.Random(5)
    ranges = [(chance.randrange(90 * MIB), chance.randint(MIB, 6 * MIB)) for _ in range(40)]
    plan = {"version": 1, "files": ["raw/0"], "epochs": [[[0, offset, length] for offset, length in ranges]]}
    mnt = mount(filled, "--cache-size", "64MiB")
    (plans_of(mnt) / "segments").write_text(json.dumps(plan))
    for offset, length in ranges:
        with (mnt / "raw/0").open("rb", buffering=0) as file:
            file.seek(offset)
            content = b""
            while piece := file.read(min(MIB, length - len(content))):
                content += piece
        assert content == ramp(offset, offset + length)
    eventually(lambda: told(mnt, "segments")["state"] == "finished")
    assert told(mnt, "segments")["deviations"] <= 4  # where one begins that the kernel was reading ahead anyway
    assert told(mnt, "segments")["confidence"] > 0.5


# ------------------------------------------------------------------------------------------- opens


def test_opens_are_recorded(filled: StandInBucket, mount: Mount) -> None:
    """Every open in its order, each file once, a new epoch when one comes again; as a plan that can be submitted."""
    mnt = mount(filled, "--workers", "1")
    opens = mnt / ".s3prefetchfs/opens"
    assert json.loads(opens.read_bytes())["epochs"] == []
    for path in (PATHS[2], PATHS[0], PATHS[2], PATHS[1]):
        (mnt / path).read_bytes()
    document = json.loads(opens.read_bytes())
    assert document["files"] == [PATHS[2], PATHS[0], PATHS[1]]
    assert document["epochs"] == [[0, 1], [0, 2]]
    assert document["truncated"] is False
    subprocess.run(["cp", opens, plans_of(mnt) / "again"], check=True)
    assert told(mnt, "again")["epochs"] == 2
