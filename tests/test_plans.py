"""Plans from file to engine: resolved at few requests, refused, replaced, kept. S3 is a dict, the engine a recorder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from s3prefetchfs import resolution, wire
from s3prefetchfs.catalog import Catalog
from s3prefetchfs.config import Config
from s3prefetchfs.core.namespace import Namespace
from s3prefetchfs.core.plan import Plan, PlanProgress
from s3prefetchfs.core.plan_format import PlanError
from s3prefetchfs.core.version import PlanVersions, Version
from s3prefetchfs.errors import FailureKind, RequestError, UserError
from s3prefetchfs.metrics import Metrics
from s3prefetchfs.plans import Plans
from s3prefetchfs.resolution import SLICE

ETAG = "0123456789abcdef0123456789abcdef"
PAGE_KEYS = 1000


class FakeEngine:
    """Keeps what it is given; `move` plays a reader."""

    def __init__(self) -> None:
        self.was_given = trio.Event()
        self.given: dict[str, tuple[Plan, PlanVersions]] = {}
        self.all_progress: dict[str, PlanProgress] = {}

    def add_plan(self, plan: Plan, versions: PlanVersions, start: tuple[int, int] = (0, 0)) -> None:
        assert len(versions.of_files) == len(plan.files)
        assert not any(file.is_pattern for file in plan.files)
        self.all_progress.pop(plan.name, None)
        self.given[plan.name] = plan, versions
        self.move(plan.name, *start)
        self.was_given.set()

    def move(self, name: str, epoch: int, position: int, state: str = "running") -> None:
        plan, versions = self.given[name]
        entries, missing = len(plan.epochs[epoch].files), versions.missing_files
        epochs = len(plan.epochs)
        self.all_progress[name] = PlanProgress(
            name, state, plan.order.value, 1, epochs, epoch, entries, position, missing, 0, None, 0, 1.0, 0.0
        )

    def remove_plan(self, name: str) -> None:
        del self.given[name], self.all_progress[name]

    def plans(self) -> list[PlanProgress]:
        return list(self.all_progress.values())

    def progress(self, name: str) -> PlanProgress:
        return self.all_progress[name]

    def keys(self, name: str) -> list[str | None]:
        """The keys of a plan's first epoch, in order; None where the bucket has none."""
        plan, versions = self.given[name]
        read = [versions.of_files[number] for number in plan.epochs[0].files]
        return [None if version is None else version.key for version in read]


@dataclass
class FakePool:
    """Lists the keys it is given."""

    keys: list[str]
    asked: list[str] = field(default_factory=list)
    error: RequestError | None = None
    gate: trio.Event | None = None
    was_asked: trio.Event = field(default_factory=trio.Event)

    async def list(self, prefix: str, delimiter: str | None, token: str | None, max_keys: int) -> wire.Listed:
        self.asked.append(prefix)
        self.was_asked.set()
        await trio.lowlevel.checkpoint()
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        below = [key for key in self.keys if key.startswith(prefix)]
        directories = sorted(
            {prefix + key[len(prefix) :].partition("/")[0] + "/" for key in below if "/" in key[len(prefix) :]}
        )
        files = [key for key in below if "/" not in key[len(prefix) :]]
        first = int(token or 0)
        page = [(key.encode(), 5, 1_700_000_000_000, ETAG, "STANDARD") for key in files[first : first + max_keys]]
        more = str(first + max_keys) if first + max_keys < len(files) else None
        return wire.Listed(0, page, [] if first else [name.encode() for name in directories], more)


@dataclass
class World:
    """A daemon's worth of parts around one Plans."""

    plans: Plans
    engine: FakeEngine
    pool: FakePool
    catalog: Catalog


Body = Callable[[World], Awaitable[None]]


def in_a_mount(place: Path, keys: Sequence[str], body: Body, prefix: str = "") -> None:
    """Run `body` in a mount that ends with it; `place` is what stays over a restart."""

    async def main() -> None:
        config = Config(bucket="my-bucket", prefix=prefix, mountpoint=Path("/mnt/data"), cache_dir=place)
        pool = FakePool(list(keys))
        engine = FakeEngine()
        catalog = Catalog(Namespace(prefix.encode(), 60.0), pool, 0.0, Metrics(), lambda ino, name: None)  # type: ignore[arg-type]
        plans = Plans(config, place, catalog, engine)
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                await nursery.start(catalog.run)
                await nursery.start(plans.run)
                await plans.restore()
                await body(World(plans, engine, pool, catalog))
                nursery.cancel_scope.cancel()

    trio.run(main)


# ---------------------------------------------------------------------------------------------- resolution


def test_one_listing_for_each_directory(tmp_path: Path) -> None:
    """Whatever is planned in it, in each of the three ways to write a path; nothing is asked for single files."""
    keys = [f"data/{directory}/{number:04d}" for directory in "ab" for number in range(2500)]
    lines = [f"a/{number:04d}" for number in range(2500)]
    lines += [f"/mnt/data/b/{number:04d}" for number in range(1000)] + ["s3://my-bucket/data/b/2000"]

    async def body(world: World) -> None:
        await world.plans.submit("p", "\n".join(lines).encode())
        assert sorted(world.pool.asked) == ["data/a/"] * 3 + ["data/b/"] * 3
        assert world.engine.keys("p") == [*keys[:2500], *keys[2500:3500], "data/b/2000"]

    in_a_mount(tmp_path, keys, body, prefix="data/")


def test_missing_files(tmp_path: Path) -> None:
    """Absent names, directories, and keys that S3 cannot have are None, and named."""
    lines = ["x", "absent", "d", "nowhere/x", "k" * 1100]

    async def body(world: World) -> None:
        await world.plans.submit("p", "\n".join(lines).encode())
        assert world.engine.keys("p") == ["x", None, None, None, None]
        document = json.loads(world.plans.document("p"))
        assert document["warnings"] == [f"not in the bucket: {line}" for line in lines[1:]]
        assert document["error"] is None

    in_a_mount(tmp_path, ["x", "d/y"], body)


def test_many_missing_files_are_counted(tmp_path: Path) -> None:
    """The document of a plan for another bucket stays small."""

    async def body(world: World) -> None:
        await world.plans.submit("p", b"\n".join(b"%d" % number for number in range(1234)))
        warnings = json.loads(world.plans.document("p"))["warnings"]
        assert len(warnings) == 101
        assert warnings[-1] == "and 1,134 more are not in the bucket"

    in_a_mount(tmp_path, [], body)


def test_patterns_stand_for_files_in_name_order(tmp_path: Path) -> None:
    """In their place among the others, each file once in `files`; only directories that can match are listed."""
    keys = ["a/1.x", "a/2.x", "a/n.y", "a/d/3.x", "b/4.x", "c/5.x"]

    async def body(world: World) -> None:
        await world.plans.submit("p", b"a/2.x\n[ab]/*.x\nc/5.x\n")
        assert world.engine.keys("p") == ["a/2.x", "a/1.x", "a/2.x", "b/4.x", "c/5.x"]
        assert len(world.engine.given["p"][0].files) == 4
        assert sorted(world.pool.asked) == ["", "a/", "b/", "c/"]
        await world.plans.submit("q", b"a/**\n")
        assert world.engine.keys("q") == ["a/1.x", "a/2.x", "a/d/3.x", "a/n.y"]
        with pytest.raises(PlanError, match="none/"):
            await world.plans.submit("r", b"none/*\n")

    in_a_mount(tmp_path, keys, body)


def test_a_manifest_asks_nothing(tmp_path: Path) -> None:
    """Size and ETag are taken at their word, and the names are known from then on, until the plan is cancelled."""
    files = [{"path": "x", "size": 7, "etag": "v"}, {"path": "y", "size": 8, "etag": "w"}]
    content = json.dumps({"version": 1, "name": "p", "files": files, "epochs": 1}).encode()

    async def body(world: World) -> None:
        await world.plans.submit("p", content)
        assert world.engine.given["p"][1].of_files == [Version("x", "v", 7), Version("y", "w", 8)]
        found = (await world.catalog.lookup(1, b"x")).entry
        assert found is not None
        assert found.size_bytes == 7
        assert world.pool.asked == []
        await world.plans.remove("p")
        assert (await world.catalog.lookup(1, b"x")).entry is None
        assert world.pool.asked

    in_a_mount(tmp_path, [], body)


def test_others_get_their_turn(tmp_path: Path) -> None:
    """While many files are looked up, another task runs at least once for each slice of them."""
    count = 20 * SLICE
    keys = [f"{number:06d}" for number in range(count)]

    async def body(world: World) -> None:
        world.pool.gate = trio.Event()
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while True:
                await trio.lowlevel.checkpoint()
                turns += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.plans.submit, "p", "\n".join(keys).encode())
            await world.pool.was_asked.wait()
            world.pool.gate.set()
            nursery.start_soon(count_turns)
            await world.engine.was_given.wait()
            nursery.cancel_scope.cancel()
        assert turns >= count // SLICE + count // PAGE_KEYS

    in_a_mount(tmp_path, keys, body)


# ---------------------------------------------------------------------------------------------- submission


def test_a_bug_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan on which the engine breaks is taken out of it again, and does not come back after a restart."""

    def break_down(self: FakeEngine, *arguments: Any) -> None:
        honest(self, *arguments)
        raise OverflowError("int too big to convert")

    honest = FakeEngine.add_plan

    async def body(world: World) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(FakeEngine, "add_plan", break_down)
            with pytest.raises(PlanError, match=r"this is a bug, see the log: OverflowError"):
                await world.plans.submit("p", b"a")
        assert not world.engine.given
        assert json.loads(world.plans.document("p"))["state"] == "refused"
        await world.plans.submit("p", b"a")
        assert list(world.engine.given) == ["p"]
        await world.plans.remove("p")

    in_a_mount(tmp_path, ["a"], body)

    async def nothing(world: World) -> None:
        assert world.plans.names() == []

    in_a_mount(tmp_path, ["a"], nothing)


def test_a_pattern_that_stands_for_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few lines must not become more entries than a daemon can hold."""
    monkeypatch.setattr(resolution, "ENTRIES_MAX", 10)

    async def body(world: World) -> None:
        await world.plans.submit("p", b"d/*\nd/?")
        with pytest.raises(PlanError, match=r"stand for more than 10 entries"):
            await world.plans.submit("q", b"d/*\nd/?\nd/[0-9]")

    in_a_mount(tmp_path, [f"d/{number}" for number in range(5)], body)


def test_a_refused_plan_leaves_the_one_before(tmp_path: Path) -> None:
    """In force, on disk, and with the error beside its progress; the next good one takes the error away."""

    async def body(world: World) -> None:
        await world.plans.submit("p", b"x\n")
        for bad in (b"/elsewhere\n", b'{"version": 1, "files"', b""):
            with pytest.raises(PlanError):
                await world.plans.submit("p", bad)
            document = json.loads(world.plans.document("p"))
            assert (document["entries"], bool(document["error"])) == (1, True)
            assert await world.plans.content("p") == b"x\n"
        await world.plans.submit("p", b"x\nx\n")
        document = json.loads(world.plans.document("p"))
        assert (document["entries"], document["error"]) == (2, None)

    in_a_mount(tmp_path, ["x"], body)


def test_s3_that_does_not_list(tmp_path: Path) -> None:
    """The plan is refused with what S3 said."""

    async def body(world: World) -> None:
        world.pool.error = RequestError(FailureKind.DENIED, "AccessDenied")
        with pytest.raises(PlanError, match="AccessDenied"):
            await world.plans.submit("p", b"x\n")
        assert world.plans.names() == ["p"]
        assert world.engine.plans() == []

    in_a_mount(tmp_path, ["x"], body)


def test_the_last_of_two_submissions_counts(tmp_path: Path) -> None:
    """One that is still being resolved gives way to the next of its name, and to a removal."""

    async def body(world: World) -> None:
        world.pool.gate = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.plans.submit, "p", b"x\nx\nx\n")
            nursery.start_soon(world.plans.submit, "gone", b"x\n")
            await world.pool.was_asked.wait()
            assert json.loads(world.plans.document("p"))["state"] == "resolving"
            nursery.start_soon(world.plans.submit, "p", b"x\n")
            await trio.testing.wait_all_tasks_blocked()
            await world.plans.remove("gone")
            world.pool.gate.set()
        assert world.engine.keys("p") == ["x"]
        assert list(world.engine.given) == ["p"]
        assert await world.plans.content("p") == b"x\n"

    in_a_mount(tmp_path, ["x"], body)


def test_renaming(tmp_path: Path) -> None:
    """The plan goes on where it is, in the place of one that had the name; a refused one cannot be renamed."""

    async def body(world: World) -> None:
        await world.plans.submit("a", b"x\nx\n")
        await world.plans.submit("b", b"x\n")
        world.engine.move("a", 0, 1)
        await world.plans.rename("a", "b")
        assert world.plans.names() == ["b"]
        assert [(plan.name, plan.entries, plan.position) for plan in world.engine.plans()] == [("b", 2, 1)]
        with pytest.raises(PlanError):
            await world.plans.submit("bad", b"/elsewhere\n")
        with pytest.raises(PlanError):
            await world.plans.rename("bad", "b")
        with pytest.raises(KeyError):
            await world.plans.rename("absent", "b")

    in_a_mount(tmp_path, ["x"], body)


# ---------------------------------------------------------------------------------------------- on disk

NAMES = ["b", "a", "per%2fcent", "with blank", "ü"]


def test_a_restart(tmp_path: Path) -> None:
    """Every plan is in force again in the old order, at its position; a finished one goes, and a removed one."""

    async def first(world: World) -> None:
        for name in [*NAMES, "finished", "removed"]:
            await world.plans.submit(name, b"x\nx\nx\n")
        for position, name in enumerate(NAMES[:4]):
            world.engine.move(name, 0, position)
        world.engine.move("finished", 0, 3, state="finished")
        await world.plans.remove("removed")

    async def second(world: World) -> None:
        assert [(plan.name, plan.position) for plan in world.engine.plans()] == list(
            zip(NAMES, (0, 1, 2, 3, 0), strict=True)
        )
        assert world.plans.names() == NAMES

    in_a_mount(tmp_path, ["x"], first)
    in_a_mount(tmp_path, ["x"], second)
    assert len(list((tmp_path / "plans").iterdir())) == 2 * len(NAMES)


def test_killed_before_the_progress_was_written(tmp_path: Path) -> None:
    """A plan without progress begins at its begin; a half-written file is dropped."""

    async def first(world: World) -> None:
        await world.plans.submit("p", b"x\nx\n")

    async def second(world: World) -> None:
        assert [(plan.name, plan.position) for plan in world.engine.plans()] == [("p", 0)]

    in_a_mount(tmp_path, ["x"], first)
    (tmp_path / "plans/p.json").unlink()
    (tmp_path / "plans/p.plan.new").write_bytes(b"x")
    in_a_mount(tmp_path, ["x"], second)
    assert not (tmp_path / "plans/p.plan.new").exists()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda plans: (plans / "p.plan").write_bytes(b"x\n"),
    "empty": lambda plans: (plans / "p.plan").write_bytes(b""),
    "no JSON": lambda plans: (plans / "p.json").write_bytes(b"\xff{"),
    "other JSON": lambda plans: (plans / "p.json").write_bytes(b"[1]"),
    "no numbers": lambda plans: (plans / "p.json").write_bytes(b'{"epoch": null, "position": 0}'),
    "a directory": lambda plans: ((plans / "p.plan").unlink(), (plans / "p.plan").mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_costs_that_plan(tmp_path: Path, damage: str) -> None:
    """With a reason in its file, and nothing else: the next mount comes up, with the other plans."""

    async def first(world: World) -> None:
        for name in ("p", "q"):
            await world.plans.submit(name, b"x\nx\n")

    async def second(world: World) -> None:
        assert [plan.name for plan in world.engine.plans()] == ["q"]
        assert json.loads(world.plans.document("p"))["error"]
        await world.plans.submit("q", b"x\n")

    in_a_mount(tmp_path, ["x"], first)
    DAMAGES[damage](tmp_path / "plans")
    in_a_mount(tmp_path, ["x"], second)


def test_a_position_beyond_the_plan(tmp_path: Path) -> None:
    """A pattern that matches fewer files than before the restart does not end the mount."""

    async def first(world: World) -> None:
        await world.plans.submit("p", b"*\n")
        world.engine.move("p", 0, 3)

    async def second(world: World) -> None:
        assert [(plan.entries, plan.position) for plan in world.engine.plans()] == [(1, 1)]

    in_a_mount(tmp_path, ["x", "y", "z"], first)
    in_a_mount(tmp_path, ["x"], second)


# ---------------------------------------------------------------------------------------------- of the mount command


def test_plans_of_the_command(tmp_path: Path) -> None:
    """The same file goes on after a restart, a changed one begins anew."""
    file = tmp_path / "p"
    file.write_bytes(b"x\nx\n")

    async def first(world: World) -> None:
        await world.plans.submit_files([file])
        world.engine.move("p", 0, 1)

    async def second(world: World) -> None:
        await world.plans.submit_files([file])
        assert world.engine.progress("p").position == 1
        file.write_bytes(b"x\nx\nx\n")
        await world.plans.submit_files([file])
        assert (world.engine.progress("p").entries, world.engine.progress("p").position) == (3, 0)
        with pytest.raises(UserError, match="same name"):
            await world.plans.submit_files([file, copied])

    (tmp_path / "other").mkdir()
    copied = Path(shutil.copy(file, tmp_path / "other"))
    in_a_mount(tmp_path, ["x"], first)
    in_a_mount(tmp_path, ["x"], second)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("absent", None, "No such file"),
        ("bad", b"/elsewhere\n", "elsewhere"),
        ("empty", b"", "empty"),
        (".hidden", b"x\n", "not plans yet"),
        ("n" * 81, b"x\n", "longer than 80 bytes"),
    ],
)
def test_bad_plans_of_the_command(tmp_path: Path, name: str, content: bytes | None, reason: str) -> None:
    """Each is an error that names the file and the reason."""
    if content is not None:
        (tmp_path / name).write_bytes(content)

    async def body(world: World) -> None:
        with pytest.raises(UserError) as failed:
            await world.plans.submit_files([tmp_path / name])
        assert name in failed.value.message
        assert reason in failed.value.message

    in_a_mount(tmp_path, ["x"], body)
