"""The plans of a mount: taken in, made good, kept, and back in force after a restart.

Runs in the daemon's event loop. A submitted file is parsed in a thread, its paths are resolved to versions of objects
(`resolution.py`), and the engine gets the result. A plan that cannot be accepted leaves one of the same name that was
in force as it was, and stays as a text that says why.

Below the cache directory, in `plans/`, lie the submitted bytes, `NAME.plan`, and how far the plan has come,
`NAME.json`, with a digest of those bytes. NAME is percent-encoded. Both are replaced, never rewritten. A new plan
removes the old progress before it comes and gets its own after, so that none is ever taken for that of another.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, unquote

import trio

from s3prefetchfs.catalog import Catalog
from s3prefetchfs.config import Config
from s3prefetchfs.core.plan import Plan, PlanProgress
from s3prefetchfs.core.plan_format import PlanError, parse
from s3prefetchfs.core.version import PlanVersions
from s3prefetchfs.errors import RequestError, UserError, first
from s3prefetchfs.plan_file import read_plan_file
from s3prefetchfs.resolution import Resolved, resolve

log = logging.getLogger(__name__)

SETTLE_TIMEOUT_S = 60.0
"""How long who submits a plan waits for the answer. After that it is still taken in, and its file tells how it went."""

RESTORE_TIMEOUT_S = 25.0
"""How long mounting waits for the plans of before, and again for its own; both fit in what a start may take."""

PROGRESS_INTERVAL_S = 5.0
"""A daemon that is killed finds its place again by at most this much reading."""

WARNINGS_MAX = 100
"""Missing files named in a plan's file; the others are only counted."""

Start = tuple[int, int]
"""Epoch and position at which a plan begins."""


class PlanEngine(Protocol):
    """What plans want of the engine."""

    def add_plan(self, plan: Plan, versions: PlanVersions, start: Start = (0, 0)) -> None:
        """Put a plan in force, in the place of one of the same name."""

    def remove_plan(self, name: str) -> None:
        """Forget a plan; KeyError if there is none."""

    def plans(self) -> list[PlanProgress]:
        """How far each has come, in the order of their submission."""

    def progress(self, name: str) -> PlanProgress:
        """How far one has come; KeyError if there is none."""


# ------------------------------------------------------------------------------------------------- on disk


@dataclass(frozen=True, slots=True)
class _Kept:
    """A plan of an earlier mount; `error` says why it cannot be used."""

    name: str
    content: bytes
    start: Start = (0, 0)
    is_finished: bool = False
    error: str = ""


class _Files:
    """The directory of kept plans. Blocking: for a thread. OSError is the caller's."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def path(self, name: str, suffix: str) -> Path:
        return self._directory / f"{quote(name, safe=' ')}{suffix}"

    def write(self, name: str, content: bytes, start: Start) -> None:
        self._directory.mkdir(mode=0o700, exist_ok=True)
        self.path(name, ".json").unlink(missing_ok=True)
        self._replace(self.path(name, ".plan"), content)
        self.write_progress(name, _digest(content), start, is_finished=False)

    def write_progress(self, name: str, digest: str, start: Start, *, is_finished: bool) -> None:
        progress = {"sha256": digest, "epoch": start[0], "position": start[1], "finished": is_finished}
        self._replace(self.path(name, ".json"), json.dumps(progress).encode())

    def read(self, name: str) -> bytes:
        return self.path(name, ".plan").read_bytes()

    def remove(self, name: str) -> None:
        for suffix in (".json", ".plan"):
            self.path(name, suffix).unlink(missing_ok=True)

    def load(self) -> list[_Kept]:
        """All of them, in the order in which they were submitted."""
        if not self._directory.is_dir():
            return []
        for left in self._directory.glob("*.new"):
            left.unlink()
        paths = sorted(self._directory.glob("*.plan"), key=lambda path: path.stat().st_mtime_ns)
        return [self._load(path) for path in paths]

    def _load(self, path: Path) -> _Kept:
        name = unquote(path.stem)
        try:
            content = path.read_bytes()
            progress_path = path.with_suffix(".json")
            if not progress_path.exists():  # killed between the two: it had not begun
                return _Kept(name, content)
            progress = json.loads(progress_path.read_bytes())
            start = int(progress["epoch"]), int(progress["position"])
            if min(start) < 0 or progress["sha256"] != _digest(content):
                raise ValueError("digest or position")
        except OSError as error:
            return _Kept(name, b"", error=f"{path} cannot be read: {error.strerror}")
        except (ValueError, KeyError, TypeError):
            return _Kept(name, b"", error=f"what was kept of it in {path.parent} is damaged")
        return _Kept(name, content, start, bool(progress.get("finished")))

    @staticmethod
    def _replace(path: Path, content: bytes) -> None:
        new = path.with_name(f"{path.name}.new")
        with new.open("wb") as file:
            file.write(content)
            file.flush()
            now_ns = time.time_ns()
            os.utime(file.fileno(), ns=(now_ns, now_ns))  # finer than the kernel's clock: it is the order of plans
            os.fsync(file.fileno())
        new.replace(path)


# ------------------------------------------------------------------------------------------------ in memory


@dataclass(slots=True, eq=False)
class _Entry:
    """A name in the directory of plans.

    Attributes:
        size_bytes: of the last file submitted.
        in_force: whether the engine has a plan of this name.
        digest: of the file of that plan.
        error: why the last file was refused; empty if it was not, or is not settled.
        saved: the progress that is on disk.
        scope: of the work on the last file; `settled` when that has ended.
    """

    size_bytes: int = 0
    in_force: bool = False
    digest: str = ""
    error: str = ""
    warnings: list[str] = field(default_factory=list)
    saved: tuple[Start, bool] = ((0, 0), False)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    settled: trio.Event = field(default_factory=trio.Event)


@dataclass(frozen=True, slots=True)
class _Submission:
    """A file on its way in.

    Args:
        is_kept: it is on disk already. after: the one that is to be in force before it.
    """

    content: bytes
    start: Start = (0, 0)
    is_kept: bool = False
    after: trio.Event | None = None


class Plans:
    """See the module's docstring.

    Args:
        config: of the mount.
        directory: the mount's own cache directory.
        catalog, engine: who resolve and obey.
    """

    def __init__(self, config: Config, directory: Path, catalog: Catalog, engine: PlanEngine) -> None:
        self._config = config
        self._catalog = catalog
        self._engine = engine
        self._files = _Files(directory / "plans")
        self._disk = trio.Lock()
        self._entries: dict[str, _Entry] = {}
        self._nursery: trio.Nursery | None = None

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; the last progress is then written down."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                task_status.started()
                while True:
                    await trio.sleep(PROGRESS_INTERVAL_S)
                    async with self._disk:
                        await trio.to_thread.run_sync(self._save, self._unsaved())
        finally:
            self._save(self._unsaved())

    async def restore(self) -> None:
        """Put the plans of the mount before in force again, and drop those that were finished."""
        before: trio.Event | None = None
        for kept in await trio.to_thread.run_sync(self._files.load):
            if kept.is_finished:
                await trio.to_thread.run_sync(self._files.remove, kept.name)
                continue
            entry = self._entries[kept.name] = _Entry(size_bytes=len(kept.content))
            if kept.error:
                self._refuse(kept.name, entry, kept.error)
                entry.settled.set()
            else:
                self._begin(kept.name, entry, _Submission(kept.content, kept.start, is_kept=True, after=before))
                before = entry.settled
        with trio.move_on_after(RESTORE_TIMEOUT_S):
            for entry in list(self._entries.values()):
                await entry.settled.wait()

    async def submit_files(self, paths: Sequence[Path]) -> None:
        """Take in the files of the mount command. One that was in force before the restart goes on where it was.

        Raises:
            UserError: one cannot be read, or is refused.
        """
        begun: dict[str, tuple[Path, _Entry]] = {}
        for path in paths:
            name, content = await trio.to_thread.run_sync(read_plan_file, path)
            if name in begun:
                raise UserError(
                    f"the plans {begun[name][0]} and {path} have the same name", "rename one of the two files"
                )
            digest = await trio.to_thread.run_sync(_digest, content)
            entry = self._entries.setdefault(name, _Entry())
            if not entry.in_force or entry.digest != digest:
                after = [other.settled for _, other in begun.values()]
                self._begin(name, entry, _Submission(content, after=after[-1] if after else None))
            begun[name] = path, entry
        with trio.move_on_after(RESTORE_TIMEOUT_S):
            for _, entry in begun.values():
                await entry.settled.wait()
        for path, entry in begun.values():
            if entry.error:
                raise UserError(f"the plan {path} is refused: {entry.error}", "see docs/plan.md, or give another file")

    # ------------------------------------------------------------------------------------- by name

    async def submit(self, name: str, content: bytes, start: Start = (0, 0)) -> None:
        """Take in a plan, in the place of one of the same name; returns when it is in force, or after a minute.

        Raises:
            PlanError: it is refused, and why. One that was in force stays so.
        """
        entry = self._entries.setdefault(name, _Entry())
        settled = self._begin(name, entry, _Submission(content, start))
        with trio.move_on_after(SETTLE_TIMEOUT_S):
            await settled.wait()
        if entry.error and entry.settled is settled:
            raise PlanError(entry.error)

    async def remove(self, name: str) -> None:
        """Cancel a plan and forget it. KeyError if there is none."""
        entry = self._entries.pop(name)
        entry.scope.cancel()
        if entry.in_force:
            self._engine.remove_plan(name)
            self._catalog.withdraw(name)
        async with self._disk:
            await trio.to_thread.run_sync(self._files.remove, name)

    async def rename(self, name: str, new_name: str) -> None:
        """Give a plan another name, in the place of one that has it; it goes on where it is.

        Raises:
            KeyError: there is none. PlanError: it is not in force, or can no longer be read.
        """
        entry = self._entries[name]
        if not entry.in_force:
            raise PlanError(entry.error or "it is not in force yet")
        progress = self._engine.progress(name)
        await self.submit(new_name, await self.content(name), (progress.epoch, progress.position))
        await self.remove(name)

    def names(self) -> list[str]:
        """Of all plans, also of those that were refused, in the order of their submission."""
        return list(self._entries)

    def size_bytes(self, name: str) -> int:
        """Of the file that was submitted."""
        return self._entries[name].size_bytes

    async def content(self, name: str) -> bytes:
        """The file of the plan in force.

        Raises:
            PlanError: it cannot be read.
        """
        try:
            async with self._disk:
                return await trio.to_thread.run_sync(self._files.read, name)
        except OSError as error:
            raise PlanError(f"the submitted file cannot be read any more: {error.strerror}") from None

    def document(self, name: str) -> bytes:
        """What reading the plan's file in the mount gives: progress, `warnings` and `error`, as JSON."""
        entry = self._entries[name]
        document: dict[str, Any] = {"name": name, "state": "refused"}
        if entry.in_force:
            document = asdict(self._engine.progress(name))
        if not entry.settled.is_set():
            document["state"] = "resolving"
        document |= {"warnings": entry.warnings, "error": entry.error or None}
        return json.dumps(document, indent=2).encode() + b"\n"

    # ------------------------------------------------------------------------------------- within

    def _begin(self, name: str, entry: _Entry, submission: _Submission) -> trio.Event:
        """Start taking in a file, and stop with one that came before; returns what is set when it is settled."""
        assert self._nursery is not None
        entry.scope.cancel()
        entry.scope, entry.settled, entry.error = trio.CancelScope(), trio.Event(), ""
        entry.size_bytes = len(submission.content)
        self._nursery.start_soon(self._take_in, name, entry, submission, entry.scope, entry.settled)
        return entry.settled

    async def _take_in(
        self, name: str, entry: _Entry, submission: _Submission, scope: trio.CancelScope, settled: trio.Event
    ) -> None:
        content, start = submission.content, submission.start
        error = ""
        try:
            with scope:
                plan = await trio.to_thread.run_sync(parse, content, name, abandon_on_cancel=True)
                resolved = await resolve(replace(plan, name=name), self._catalog, self._config)
                digest = await trio.to_thread.run_sync(_digest, content)
                if submission.after is not None:
                    await submission.after.wait()
                # Until it is in force, or its progress could be saved as that of the one before.
                async with self._disk:
                    if not submission.is_kept:
                        await trio.to_thread.run_sync(self._files.write, name, content, start)
                    await trio.lowlevel.checkpoint_if_cancelled()
                    try:
                        self._put_in_force(name, entry, resolved, digest, start)
                    except Exception:  # a bug, of which nothing may be left
                        entry.in_force = False
                        self._catalog.withdraw(name)
                        with suppress(KeyError):
                            self._engine.remove_plan(name)
                        await trio.to_thread.run_sync(self._files.remove, name)
                        raise
        except* (PlanError, RequestError) as group:
            error = str(first(group))
        except* OSError as group:
            error = f"it cannot be kept below the cache directory: {first(group)}"
        except* Exception as group:  # a bug, which must not end the mount
            log.exception("plan %s", name, exc_info=first(group))
            error = f"this is a bug, see the log: {first(group)!r}"
        finally:
            if error and not scope.cancel_called:  # else there is a later file to speak of
                self._refuse(name, entry, error)
            settled.set()

    def _put_in_force(self, name: str, entry: _Entry, resolved: Resolved, digest: str, start: Start) -> None:
        plan = resolved.plan
        epoch = min(start[0], len(plan.epochs) - 1)
        position = min(start[1], len(plan.epochs[epoch].files)) if epoch == start[0] else 0
        self._catalog.declare(name, resolved.declaration)
        self._engine.add_plan(plan, resolved.versions, (epoch, position))
        entry.in_force, entry.digest, entry.saved = True, digest, (start, False)
        missing = resolved.missing
        entry.warnings = [f"not in the bucket: {path}" for path in missing[:WARNINGS_MAX]]
        if len(missing) > WARNINGS_MAX:
            entry.warnings.append(f"and {len(missing) - WARNINGS_MAX:,} more are not in the bucket")
        log.info("plan %s is in force: %d files, %d epochs", name, len(plan.files), len(plan.epochs))
        if missing:
            log.warning("plan %s: %d files are not in the bucket, such as %r", name, len(missing), missing[0])

    def _refuse(self, name: str, entry: _Entry, error: str) -> None:
        entry.error = error
        log.warning("plan %s is refused: %s", name, error)

    def _unsaved(self) -> list[tuple[str, str, Start, bool]]:
        """The progress that is not on disk: name, digest, position and whether it is finished."""
        unsaved = []
        for progress in self._engine.plans():
            entry = self._entries.get(progress.name)
            now = (progress.epoch, progress.position), progress.state == "finished"
            if entry is not None and entry.in_force and now != entry.saved:
                entry.saved = now
                unsaved.append((progress.name, entry.digest, *now))
        return unsaved

    def _save(self, unsaved: list[tuple[str, str, Start, bool]]) -> None:
        for name, digest, start, is_finished in unsaved:
            try:
                self._files.write_progress(name, digest, start, is_finished=is_finished)
            except OSError as error:
                log.warning("the progress of plan %s cannot be kept: %s", name, error)


def _digest(content: bytes) -> str:
    """Tells one submitted file from another, and a whole one from a damaged one."""
    return hashlib.sha256(content).hexdigest()
