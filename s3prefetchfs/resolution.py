"""From the paths and patterns of a plan to versions of objects: what of it the bucket has, at few requests.

Runs in the daemon's event loop. A directory in which anything is planned is listed once, through the catalog, a List
for each 1,000 keys, whatever is planned in it; a pattern lists the directories it can match in. Files that the plan
gives with size and ETag are taken at its word and cost nothing. What takes long without waiting is done in a thread
or in slices, so that a plan of 100,000 files does not hold up a reader.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import trio

from s3prefetchfs.catalog import KEY_MAX_BYTES, Catalog
from s3prefetchfs.config import Config
from s3prefetchfs.core.listing import Listing
from s3prefetchfs.core.namespace import declaration
from s3prefetchfs.core.plan import Epoch, Plan, PlannedFile
from s3prefetchfs.core.plan_format import ENTRIES_MAX, PlanError, check_bytes, relative_path
from s3prefetchfs.core.plan_pattern import PathPattern, Place
from s3prefetchfs.core.record import Entry, is_directory, name_of
from s3prefetchfs.core.version import PlanVersions, Version

LISTINGS = 4
"""Directories listed at once for a plan. A page takes the event loop some milliseconds, and all may come at once."""

SLICE = 500
"""Files looked up before others get their turn: a millisecond or two."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Resolved:
    """A plan whose files are those of the bucket.

    Attributes:
        plan: without patterns.
        versions: of its files.
        missing: what the bucket does not have, for people: paths as the plan says them, and patterns.
        declaration: for `Catalog.declare`: the files whose size and ETag the plan gives.
    """

    plan: Plan
    versions: PlanVersions
    missing: list[str]
    declaration: dict[bytes, bytes]


async def resolve(plan: Plan, catalog: Catalog, config: Config) -> Resolved:
    """Find the files of a plan.

    Raises:
        PlanError: a path is not in this mount, or there is no file at all. RequestError: S3 does not say.
    """
    return await _Resolution(plan, catalog, config).run()


class _Resolution:
    def __init__(self, plan: Plan, catalog: Catalog, config: Config) -> None:
        self._plan = plan
        self._catalog = catalog
        self._config = config
        self._prefix = config.prefix.encode()
        self._listings = trio.CapacityLimiter(LISTINGS)
        self._paths: list[str] = []
        self._versions: list[Version | None] = [None] * len(plan.files)
        self._wanted: dict[bytes, list[tuple[bytes, int]]] = defaultdict(list)  # by directory: name, file number
        self._patterns: dict[int, PathPattern] = {}  # by file number
        self._matched: dict[int, dict[str, Version]] = defaultdict(dict)

    async def run(self) -> Resolved:
        await trio.to_thread.run_sync(self._sort_out, abandon_on_cancel=True)
        async with trio.open_nursery() as nursery:
            for prefix, wanted in self._wanted.items():
                await self._listings.acquire_on_behalf_of(prefix)
                nursery.start_soon(self._look_up, prefix, wanted)
            for number, pattern in self._patterns.items():
                nursery.start_soon(self._match, number, pattern, "", pattern.start)
        return await trio.to_thread.run_sync(self._result, abandon_on_cancel=True)

    def _sort_out(self) -> None:
        """Who must be asked for what. In a thread."""
        config = self._config
        mountpoint = str(config.mountpoint)
        for number, file in enumerate(self._plan.files):
            path = relative_path(file.path, config.bucket, config.prefix, mountpoint)
            self._paths.append(path)
            key = config.prefix + path
            if len(key.encode("utf-8", "replace")) > KEY_MAX_BYTES or "\0" in path:
                continue  # S3 cannot have it
            if file.is_pattern:
                self._patterns[number] = PathPattern(path)
            elif _is_declared(file):
                assert file.size_bytes is not None
                assert file.etag is not None
                self._versions[number] = Version(key, file.etag, file.size_bytes)
            else:
                above, slash, name = key.encode("utf-8", "replace").rpartition(b"/")
                self._wanted[above + slash].append((name, number))

    async def _look_up(self, prefix: bytes, wanted: list[tuple[bytes, int]]) -> None:
        """Find these names of a directory in its listing. Holds a place among the listings for this prefix."""
        try:
            listing = await self._catalog.list_below(prefix)
        finally:
            self._listings.release_on_behalf_of(prefix)
        for some in _sliced(wanted):
            for name, number in some:
                found = listing.find(name)
                if found is not None and found[0] is not None and not is_directory(found[0]):
                    self._versions[number] = _version(prefix, found[0])
            await trio.lowlevel.checkpoint()

    async def _match(self, number: int, pattern: PathPattern, directory: str, place: Place) -> None:
        """Collect what the pattern matches in a directory (empty, or ending in a slash) and below."""
        while (name := pattern.only_name(place)) is not None:
            directory, place = f"{directory}{name}/", pattern.below(place, name)
        prefix = self._prefix + directory.encode()
        async with self._listings:
            listing: Listing = await self._catalog.list_below(prefix)
        async with trio.open_nursery() as nursery:
            for some in _sliced(listing.sequence):
                for record in some:
                    name = name_of(record).decode("utf-8", "surrogateescape")
                    if not is_directory(record):
                        if pattern.takes(place, name):
                            self._matched[number][directory + name] = _version(prefix, record)
                    elif further := pattern.below(place, name):
                        nursery.start_soon(self._match, number, pattern, f"{directory}{name}/", further)
                await trio.lowlevel.checkpoint()

    def _result(self) -> Resolved:
        """Put it together. In a thread."""
        plan, versions = self._plan, self._versions
        missing = [
            file.path
            for number, file in enumerate(plan.files)
            if versions[number] is None and not self._matched.get(number)
        ]
        if self._patterns:
            plan, versions = self._without_patterns()
        if not plan.files:
            raise PlanError(f"no file of the bucket matches {missing[0]}: check the pattern with ls in the mount")
        check_bytes(plan, [0 if version is None else version.size_bytes for version in versions])
        prefix_len = len(self._config.prefix)
        declared = (
            (version.key[prefix_len:].encode(), version.size_bytes, version.etag)
            for file, version in zip(plan.files, versions, strict=True)
            if _is_declared(file) and version is not None
        )
        return Resolved(plan, PlanVersions(versions), missing, declaration(self._prefix, declared))

    def _without_patterns(self) -> tuple[Plan, list[Version | None]]:
        """The plan with the files that its patterns match in their place, in name order, each file once."""
        files: list[PlannedFile] = []
        versions: list[Version | None] = []
        numbers: dict[str, int] = {}

        def add(path: str, file: PlannedFile, version: Version | None) -> int:
            if path not in numbers:
                numbers[path] = len(files)
                files.append(file)
                versions.append(version)
            return numbers[path]

        new_numbers: list[list[int]] = []
        for number, file in enumerate(self._plan.files):
            if file.is_pattern:
                matched = sorted(self._matched[number].items(), key=lambda item: item[0].encode("utf-8", "replace"))
                new_numbers.append([add(path, PlannedFile(path), version) for path, version in matched])
            else:
                new_numbers.append([add(self._paths[number], file, self._versions[number])])
        epochs = tuple(_renumbered(epoch, new_numbers) for epoch in self._plan.epochs)
        return replace(self._plan, files=files, epochs=tuple(epoch for epoch in epochs if len(epoch.files))), versions


def _renumbered(epoch: Epoch, new_numbers: Sequence[Sequence[int]]) -> Epoch:
    """The epoch with each entry in the place of one for each of its new numbers."""
    files, ranges = array("I"), array("Q")
    for entry, number in enumerate(epoch.files):
        files.extend(new_numbers[number])
        if len(files) > ENTRIES_MAX:
            raise PlanError(
                f"its patterns stand for more than {ENTRIES_MAX:,} entries: write each only once, or split the plan"
            )
        if epoch.ranges is not None:
            ranges.extend([*epoch.ranges[2 * entry : 2 * entry + 2]] * len(new_numbers[number]))
    return Epoch(memoryview(files), None if epoch.ranges is None else memoryview(ranges))


def _is_declared(file: PlannedFile) -> bool:
    return file.size_bytes is not None and file.etag is not None and not file.is_pattern


def _version(prefix: bytes, record: bytes) -> Version:
    entry = Entry(0, prefix, record)
    return Version(entry.key.decode(), entry.etag, entry.size_bytes)


def _sliced(values: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(values), SLICE):
        yield values[start : start + SLICE]
