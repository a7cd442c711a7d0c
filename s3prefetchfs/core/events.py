"""What the scheduler is told, and what it tells others to do.

Events and instructions are plain values. Object, handle, read and fetch ids are integers chosen by whoever
creates the thing: the scheduler makes the fetch ids, the engine all others. Extents are half-open byte ranges
of one object; `first` and `last` are half-open ranges of chunk numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from s3prefetchfs.core.plan import Plan
from s3prefetchfs.core.version import PlanVersions, Version
from s3prefetchfs.errors import FailureKind

# ---------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class ObjectAdded:
    """The cache has an object of this version now, the only one that is not on its way out.

    Args:
        resident: a byte per chunk, 1 where a previous session left it on disk; None for a new object.
        bypass: the cache has no file for it (disk full): it is only ever read through memory.
    """

    object_id: int
    version: Version
    resident: bytes | None = None
    bypass: bool = False


@dataclass(frozen=True, slots=True)
class Opened:
    handle_id: int
    object_id: int


@dataclass(frozen=True, slots=True)
class WholeWanted:
    """Who opened this would have the kernel read the file, which takes a whole one: verify what is unverified."""

    handle_id: int


@dataclass(frozen=True, slots=True)
class PassedThrough:
    """From now on the kernel reads the file of this handle by itself, and nobody hears of it.

    The object is complete. It must stay so while any handle of it is open.
    """

    handle_id: int


@dataclass(frozen=True, slots=True)
class Closed:
    handle_id: int


@dataclass(frozen=True, slots=True)
class ReadStarted:
    """A reader wants `[start, stop)`, not empty and within the object. A `Wake` answers it, maybe at once."""

    read_id: int
    handle_id: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ReadFinished:
    """The reader has its bytes (or its error, or went away): they need no longer be kept for it."""

    read_id: int


@dataclass(frozen=True, slots=True)
class Landed:
    """The bytes `[start, stop)` of a fetch, whole chunks, are in the cache file."""

    fetch_id: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class FetchDone:
    fetch_id: int


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """A fetch ended early. `jitter` is uniform in [0, 1), for the backoff."""

    fetch_id: int
    kind: FailureKind
    retry_after_s: float | None
    jitter: float


@dataclass(frozen=True, slots=True)
class Verified:
    """The checksums of the chunks `[first, last)` were compared; those in `bad` did not match."""

    object_id: int
    first: int
    last: int
    bad: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Damaged:
    """Resident chunks of `[first, last)` could not be read back: they are no longer there.

    Args:
        bypass: not for the first time, so the disk is not to be trusted with this object any more.
    """

    object_id: int
    first: int
    last: int
    bypass: bool


@dataclass(frozen=True, slots=True)
class Released:
    """The chunks `[first, last)` no longer occupy the disk."""

    object_id: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Evicted:
    """The object no longer occupies the disk. Its id is never used again."""

    object_id: int


@dataclass(frozen=True, slots=True)
class PlanAdded:
    """What will be read was declared.

    Args:
        versions: of its files.
        start: epoch and position in it to begin at.
    """

    plan_id: int
    plan: Plan
    versions: PlanVersions
    start: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class PlanRemoved:
    plan_id: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    ObjectAdded
    | Opened
    | WholeWanted
    | PassedThrough
    | Closed
    | ReadStarted
    | ReadFinished
    | Landed
    | FetchDone
    | FetchFailed
    | Verified
    | Damaged
    | Released
    | Evicted
    | PlanAdded
    | PlanRemoved
    | Tick
)

# ---------------------------------------------------------------------------------------------- instructions


@dataclass(frozen=True, slots=True)
class Fetch:
    """GET the extent into the cache file, or back into memory. Space for it is already reserved."""

    fetch_id: int
    object_id: int
    start: int
    stop: int
    to_memory: bool


@dataclass(frozen=True, slots=True)
class Admit:
    """Make an object of a planned file, to fetch into; answer with `ObjectAdded`."""

    version: Version


@dataclass(frozen=True, slots=True)
class Verify:
    """Compare the checksums of these chunks, left by a previous session; answer with `Verified`."""

    object_id: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Release:
    """Punch a hole over these chunks of an open object; answer with `Released`."""

    object_id: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Evict:
    """Delete the object from the cache; answer with `Evicted`. It must not be opened again under this id."""

    object_id: int


@dataclass(frozen=True, slots=True)
class Wake:
    """Answer a reader.

    Args:
        failure: why it gets an error; None if its bytes are there.
        fetch_id: the fetch to memory whose bytes are the answer; None if they are in the cache file.
    """

    read_id: int
    failure: FailureKind | None = None
    fetch_id: int | None = None


@dataclass(frozen=True, slots=True)
class VersionGone:
    """S3 no longer has this version: what is known about its name must be asked again."""

    object_id: int


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send a `Tick` at this time; it replaces the one asked for before."""

    at_s: float


Instruction = Fetch | Admit | Verify | Release | Evict | Wake | VersionGone | WakeAt
