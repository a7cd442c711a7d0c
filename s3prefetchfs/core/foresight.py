"""All declared plans, and what they mean for the cache: what to fetch next, what must stay, what may go first.

Between the scheduler, which knows objects, handles and reads, and the followers, which know one plan each. Several
plans, one for each job or rank, share the pipe by deadline and the cache by parts: each may keep its share from one
reading to the next, and the space for what is ahead of the readers is everybody's. A file that two plans read has a
piece in each, and stays while either wants it.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence

from s3prefetchfs.core.events import PlanAdded
from s3prefetchfs.core.extent import CHUNK_BYTES
from s3prefetchfs.core.follower import RESYNC_MATCHES, Follower, Piece, PlannedObject, Wish
from s3prefetchfs.core.plan import PlanProgress
from s3prefetchfs.core.residency import CachedObject, Residency
from s3prefetchfs.core.version import Version

UNPLANNED_SHARE = 20
"""While there are plans, what none of them speaks of has a twentieth of the cache to itself."""

PIPE_BOUND_SHARE = 0.5
"""When the readers need more than this part of the bandwidth, evicting early what is used later is of no help: each
such byte has to come over the same pipe again. (Simulated with a pipe 5 % above the need, 0.95 cost up to 10 % more
bytes and 5 % of the utilisation, and 0.8 still 6 % where the need was about that.)"""

LEAVE_PIECES = 256
"""Pieces taken from their files in one go, about half a millisecond."""

RATE_UNKNOWN = 200e6
"""Bytes per second that a plan is taken to be read at before that is known, when two plans are weighed."""


class Foresight:
    """See the module's docstring.

    Args:
        disk: what is in the cache. capacity_bytes: of it.
    """

    def __init__(self, disk: Residency, capacity_bytes: int) -> None:
        self._disk = disk
        self._capacity_bytes = capacity_bytes
        self._files: dict[Version, PlannedObject] = {}  # those in the window of any plan
        self._followers: dict[int, Follower] = {}
        self._begun: dict[int, list[Piece]] = {}  # ranges that were begun through a handle
        self._leaving: deque[Piece] = deque()  # of windows that were given up
        self._now = 0.0

    def __bool__(self) -> bool:
        return bool(self._followers or self._leaving)

    # ------------------------------------------------------------------------------------- plans and files

    def add(self, event: PlanAdded, now: float) -> None:
        """Follow a plan from now on."""
        self._now = now
        self._followers[event.plan_id] = Follower(
            event.plan_id, event.plan, event.versions, self._file_of, 0, event.start, now
        )
        self._share()

    def remove(self, plan_id: int) -> None:
        """Forget a plan; what it brought is now like anything else in the cache."""
        follower = self._followers.pop(plan_id)
        self._leaving += follower.leave()
        still = {handle_id: [*filter(_is_opened, pieces)] for handle_id, pieces in self._begun.items()}
        self._begun = {handle_id: pieces for handle_id, pieces in still.items() if pieces}
        self._share()

    def _file_of(self, version: Version) -> PlannedObject:
        """The file of which a window is to have a piece."""
        file = self._files.get(version)
        if file is None:
            file = self._files[version] = PlannedObject(version, self._disk.by_version.get(version))
        return file

    def object_added(self, found: CachedObject) -> bool:
        """An object came into the cache; returns whether a plan had asked for it."""
        file = self._files.get(found.version)
        if file is None:
            return False
        file.found = found
        admitting, file.admitting = file.admitting, False
        self._disk.set_planned(found, file.planned)
        self._forget_unplanned(file)
        return admitting

    def object_gone(self, found: CachedObject) -> None:
        """The object is on its way out of the cache."""
        if (file := self._files.get(found.version)) is not None:
            file.found = None

    def grow(self) -> None:
        """Unroll the plans a little further, and take apart a little of the windows that were given up."""
        for _ in range(min(LEAVE_PIECES, len(self._leaving))):
            piece = self._leaving.popleft()
            piece.file.remove(piece)
            if piece.file.found is not None:
                self._disk.set_planned(piece.file.found, piece.file.planned)
            self._forget_unplanned(piece.file)
        for follower in self._followers.values():
            if follower.growing:
                for piece in follower.grow():
                    found = piece.file.found
                    if found is None:
                        continue
                    self._disk.set_planned(found, True)
                    if piece.whole and found.handles:
                        follower.opened(piece, follower.last_read_s)

    @property
    def growing(self) -> bool:
        """Whether there is more to unroll or to take apart."""
        return bool(self._leaving) or any(follower.growing for follower in self._followers.values())

    def _share(self) -> None:
        running = [follower for follower in self._followers.values() if not follower.finished]
        for follower in running:
            follower.share(self._capacity_bytes // len(running))

    def _forget_unplanned(self, file: PlannedObject) -> None:
        """Forget a file that is in no window any more; one whose object is being made, when that is there."""
        if not file.planned and not file.admitting:
            del self._files[file.version]

    # ------------------------------------------------------------------------------------- readers

    def passed(self, now: float, waiting: bool) -> None:
        """Time went by, in which somebody waited for bytes or not."""
        before_s, self._now = self._now, now
        for follower in self._followers.values():
            follower.passed(now - before_s, waiting)

    def opened(self, found: CachedObject, now: float) -> None:
        """A file was opened."""
        version = found.version
        in_place: list[Follower] = []
        by_range: set[Follower] = set()
        if (file := self._files.get(version)) is not None:
            by_range = {piece.follower for piece in file.ranges}
            in_place = [piece.follower for piece in file.wholes if piece.follower.opened(piece, now)]
        concerned = in_place or [
            follower for follower in self._followers.values() if follower.knows(version) and follower not in by_range
        ]
        self._judge(concerned, bool(in_place), version, 0)

    def read(self, found: CachedObject, handle_id: int, start: int, stop: int, new_run: bool, now: float) -> None:
        """Bytes `[start, stop)` of an open file are being read."""
        file = self._files.get(found.version)
        if file is None:
            return
        for piece in file.wholes:
            piece.follower.read(piece, stop)
        if not file.ranges:
            return
        touched: dict[Follower, list[Piece]] = {}
        for piece in file.overlapping(start, stop):
            touched.setdefault(piece.follower, []).append(piece)
        in_place: list[Follower] = []
        offset = start
        for follower, pieces in touched.items():
            begun = follower.begun(pieces, start, new_run, now)
            if begun is not None:
                self._begun[handle_id] = [*filter(_is_opened, self._begun.get(handle_id, ())), begun]
            for piece in pieces:
                if piece.opened:
                    in_place.append(follower)
                    offset = piece.start
                    follower.read(piece, stop - piece.start)
                    if stop >= piece.stop:
                        follower.finish(piece)
        if new_run:
            concerned = in_place or list({piece.follower for piece in file.ranges})
            self._judge(concerned, bool(in_place), found.version, offset)

    def closed(self, found: CachedObject, handle_id: int) -> None:
        """A handle of a file was closed: it was read, though what is in the kernel's memory is read unseen."""
        for piece in self._begun.pop(handle_id, ()):
            piece.follower.finish(piece)
        file = self._files.get(found.version)
        if file is None or found.handles:
            return
        for piece in list(file.pieces()):
            if not (piece.whole and piece.follower.finish(piece)):
                piece.follower.rank(piece)

    def landed(self, found: CachedObject, first: int, last: int) -> None:
        """A fetch of the object's chunks `[first, last)` has ended: what of them no plan wants any more can go."""
        file = self._files.get(found.version)
        if file is None:
            return
        for piece in [*file.wholes, *file.overlapping(first * CHUNK_BYTES, last * CHUNK_BYTES)]:
            piece.follower.rank(piece)

    def _judge(self, followers: Sequence[Follower], in_place: bool, version: Version, offset: int) -> None:
        for follower in followers:
            place = follower.judge(in_place, version, offset)
            if place is not None:
                self._leaving += follower.jump(place)
            elif follower.any_order and follower.astray >= RESYNC_MATCHES:
                follower.begin_next_epoch()

    # ------------------------------------------------------------------------------------- wishes

    def wish(self) -> tuple[Follower, Wish] | None:
        """What to fetch next for any plan: what is due first; for one that is idle only if no other wants anything."""
        best: tuple[tuple[bool, float], Follower, Wish] | None = None
        for follower in self._followers.values():
            wish = follower.wish()
            if wish is None:
                continue
            ahead_bytes = follower.ahead_bytes(wish.key)
            if follower.confidence < 1 and ahead_bytes > follower.confidence * self._capacity_bytes:
                continue
            due = follower.idle(self._now), ahead_bytes / (follower.rate or RATE_UNKNOWN)
            if best is None or due < best[0]:
                best = due, follower, wish
        return None if best is None else best[1:]

    def wants(self, found: CachedObject) -> bool:
        """Whether a plan will read the object soon."""
        file = self._files.get(found.version)
        return file is not None and any(piece.staged for piece in file.pieces())

    def by_ranges(self, version: Version) -> bool:
        """Whether ranges of the file, not the whole of it, are planned."""
        file = self._files.get(version)
        return file is not None and bool(file.ranges)

    def reach(self, found: CachedObject, position: int) -> int:
        """How far from a reader's position on its file is worth reading ahead: to the end of the range it reads."""
        file = self._files.get(found.version)
        if file is None or not file.ranges:
            return found.size_bytes
        begun = (piece.stop for piece in file.overlapping(position - 1, position) if piece.opened)
        return max(begun, default=position)

    # ------------------------------------------------------------------------------------- space

    @property
    def unplanned_bytes(self) -> int:
        """What plans leave to everything else: all of it where there is none."""
        return self._capacity_bytes // UNPLANNED_SHARE if self._followers else 0

    def stays(
        self, found: CachedObject, chunks: tuple[int, int], reader_chunk: int, giving_up: Piece | None
    ) -> Iterator[tuple[int, int]]:
        """The chunks of an object that plans want to stay, as far as they have to do with some of its chunks.

        Args:
            reader_chunk: where the hindmost reader of the object is.
            giving_up: whoever else wants them, this piece does not.
        """
        file = self._files.get(found.version)
        if file is None:
            return
        for piece in [*file.wholes, *file.overlapping(chunks[0] * CHUNK_BYTES, chunks[1] * CHUNK_BYTES)]:
            follower = piece.follower
            if piece is giving_up or not follower.trusted or (piece.opened and follower.idle(self._now)):
                continue
            if piece.opened:
                yield max(piece.first, reader_chunk), piece.last
                yield piece.first, piece.kept_after_last()
            else:
                yield piece.first, piece.kept_last()

    def surplus(self) -> Iterator[Piece]:
        """Pieces that are not kept until their next reading, or not all of them, furthest first; each is given once."""
        yield from self._furthest([follower.surplus for follower in self._followers.values()])

    def retained(self, staged: bool) -> Iterator[Piece]:
        """Pieces that are kept, furthest first; also those that are staged if asked for.

        Each is given once, and then only if it was ranked again: what is taken from one, its follower must be told.
        """
        for piece in self._furthest([follower.retained for follower in self._followers.values()]):
            if piece.staged and not staged:
                piece.follower.rank(piece)
                return
            if not piece.opened:
                yield piece

    def of_idle_plans(self) -> Iterator[Piece]:
        """As `retained`: pieces, staged ones too, of plans that nobody has read from for long."""
        idle = [follower.retained for follower in self._followers.values() if follower.idle(self._now)]
        yield from (piece for piece in self._furthest(idle) if not piece.opened)

    def _furthest(self, heaps: list[list[tuple[int, int, Piece]]]) -> Iterator[Piece]:
        while True:
            heaps = [heap for heap in heaps if heap]
            if not heaps:
                return
            heap = min(heaps, key=self._top_time) if len(heaps) > 1 else heaps[0]
            item = heapq.heappop(heap)
            if item[2].follower.is_current(item) and item[2].file.found is not None:
                yield item[2]

    @staticmethod
    def _top_time(heap: list[tuple[int, int, Piece]]) -> float:
        follower = heap[0][2].follower
        return -follower.distance_bytes(-heap[0][0]) / (follower.rate or RATE_UNKNOWN)

    # ------------------------------------------------------------------------------------- for people

    def progress(self, plan_id: int) -> PlanProgress:
        """How far a plan is."""
        return self._followers[plan_id].progress()

    def check(self) -> None:
        """Assert the invariants."""
        for follower in self._followers.values():
            follower.check()
        for version, file in self._files.items():
            assert file.version == version
            assert file.planned or file.admitting
            assert file.found is self._disk.by_version.get(version)
        for version, found in self._disk.by_version.items():
            assert found.planned == (version in self._files and self._files[version].planned)


def _is_opened(piece: Piece) -> bool:
    return piece.opened
