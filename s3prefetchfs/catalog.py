"""Answers questions about names: the way of a listing or a lookup to S3 and back.

Runs in the daemon's event loop and owns the namespace. A question that the namespace cannot answer becomes one or
two small requests; the same question asked twice meanwhile waits for the same answer. A directory is listed by one
task, page by page, and everybody who reads it gets the entries as the pages come in.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import TypeVar

import trio

from s3prefetchfs import wire
from s3prefetchfs.core.listing import Listing
from s3prefetchfs.core.namespace import Answer, Counts, Namespace
from s3prefetchfs.core.pacing import backoff_s
from s3prefetchfs.core.record import Entry, ListedObject
from s3prefetchfs.errors import FailureKind, RequestError, only
from s3prefetchfs.metrics import Metrics
from s3prefetchfs.s3.pool import Pool

log = logging.getLogger(__name__)

PAGE_KEYS = 1000
"""The most that ListObjectsV2 gives in one answer."""

KEY_MAX_BYTES = 1024
"""S3's limit: a longer path cannot exist, and asking for it is an error."""

SWEEP_INTERVAL_S = 30.0
"""How often listings that have expired are dropped."""

_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class _Progress:
    """A listing in progress: `moved` is set, and replaced, with every page; `error` ends it early."""

    moved: trio.Event = field(default_factory=trio.Event)
    error: RequestError | None = None

    def move(self) -> None:
        self.moved.set()
        self.moved = trio.Event()


@dataclass(frozen=True, slots=True)
class OpenDirectory:
    """What an open directory handle reads: one listing, complete or growing."""

    listing: Listing
    progress: _Progress | None


class Catalog:
    """See the module's docstring.

    Args:
        namespace: fresh; from now on the catalog's.
        pool: sends the requests.
        retry_timeout_s: how long a request may go on failing before its asker gets the error.
        metrics: counted into.
        forget_name: tells the kernel that what it knows of a name in a directory (inode, name) is void.
    """

    def __init__(
        self,
        namespace: Namespace,
        pool: Pool,
        retry_timeout_s: float,
        metrics: Metrics,
        forget_name: Callable[[int, bytes], None],
    ) -> None:
        self._namespace = namespace
        self._pool = pool
        self._retry_timeout_s = retry_timeout_s
        self._metrics = metrics
        self._forget_name = forget_name
        self._nursery: trio.Nursery | None = None
        self._listings: dict[Listing, _Progress] = {}
        self._lookups: dict[tuple[int, bytes], trio.Event] = {}

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            while True:
                await trio.sleep(SWEEP_INTERVAL_S)
                self._namespace.sweep(trio.current_time())

    async def check(self, prefix: str, timeout_s: float) -> bool:
        """Ask for the first key of the bucket or prefix; returns whether there is one.

        Raises:
            RequestError: the bucket cannot be listed, after trying for `timeout_s` where that may help.
        """
        ask = partial(self._list_page, prefix, None, None, 1)
        page = await self._ask(ask, timeout_s, final=FailureKind.CREDENTIALS)
        return bool(page.objects)

    # ------------------------------------------------------------------------------------- questions

    async def lookup(self, parent_ino: int, name: bytes) -> Answer:
        """What a name in a directory means.

        Raises:
            RequestError: S3 does not say. KeyError, NotADirectoryError: as Namespace.
        """
        question = parent_ino, name
        answer = self._namespace.lookup(parent_ino, name, trio.current_time())
        if answer is None and question in self._lookups:
            await self._lookups[question].wait()
            # Still none if the other one failed, or if nothing is believed. Then all who waited ask, at once.
            answer = self._namespace.lookup(parent_ino, name, trio.current_time())
        if answer is not None:
            return answer
        done = self._lookups[question] = trio.Event()
        try:
            return await self._probe(parent_ino, name)
        finally:
            done.set()
            if self._lookups.get(question) is done:
                del self._lookups[question]

    def believed_listing(self, ino: int) -> Listing | None:
        """The complete listing of a directory, if all of it may still be believed; None, too, for what is none."""
        try:
            return self._namespace.listing(ino, trio.current_time())
        except (KeyError, NotADirectoryError):
            return None

    async def open_directory(self, ino: int) -> OpenDirectory:
        """A listing of the directory: one that is still believed, or one that now begins."""
        return self._open_below(self._namespace.prefix_of(ino))

    def _open_below(self, prefix: bytes) -> OpenDirectory:
        assert self._nursery is not None
        listing = self._namespace.listing_below(prefix, trio.current_time())
        if listing is not None:
            return OpenDirectory(listing, None)
        listing, new = self._namespace.begin_listing_below(prefix, trio.current_time())
        if new:
            self._listings[listing] = _Progress()
            self._nursery.start_soon(self._list, listing)
        return OpenDirectory(listing, self._listings[listing])

    async def entries(self, directory: OpenDirectory, position: int) -> Iterator[tuple[int, Entry, float]]:
        """The entries after a position, as `Namespace.entries`; waits until there are some, or none will come.

        Raises:
            RequestError: the listing failed, and what it has was already read.
        """
        listing, progress = directory.listing, directory.progress
        while progress is not None and position >= len(listing.sequence) and not listing.is_end(position):
            if progress.error is not None:
                raise progress.error
            await progress.moved.wait()
        return self._namespace.entries(listing, position)

    async def list_below(self, prefix: bytes) -> Listing:
        """The complete listing of the directory whose keys begin with `prefix`, whether the kernel knows it or not.

        Raises:
            RequestError: it cannot be listed.
        """
        directory = self._open_below(prefix)
        while directory.progress is not None and not directory.listing.complete:
            if directory.progress.error is not None:
                raise directory.progress.error
            await directory.progress.moved.wait()
        return directory.listing

    def declare(self, owner: str, declaration: dict[bytes, bytes]) -> None:
        """As Namespace.declare."""
        self._namespace.declare(owner, declaration)

    def withdraw(self, owner: str) -> None:
        """As Namespace.withdraw."""
        self._namespace.withdraw(owner)

    def entry(self, ino: int) -> Entry:
        """As Namespace.entry."""
        return self._namespace.entry(ino)

    def remember(self, entry: Entry) -> None:
        """As Namespace.remember."""
        self._namespace.remember(entry)

    def forget(self, ino: int, lookups: int) -> None:
        """As Namespace.forget."""
        self._namespace.forget(ino, lookups)

    def version_gone(self, key: str) -> None:
        """S3 no longer has the version of the object that we know: ask again when its name comes up."""
        self._namespace.invalidate(key.encode())
        self._forget_name(*self.place_of(key))

    def place_of(self, key: str) -> tuple[int, bytes]:
        """Where the kernel finds an object: the inode of its directory, and its name there."""
        prefix, slash, name = key.encode().rpartition(b"/")
        return self._namespace.directory_ino(prefix + slash), name

    @property
    def inodes(self) -> int:
        """As Namespace.inodes."""
        return self._namespace.inodes

    def counts(self) -> Counts:
        """As Namespace.counts."""
        return self._namespace.counts()

    # ------------------------------------------------------------------------------------- requests

    async def _probe(self, parent_ino: int, name: bytes) -> Answer:
        """Ask for the object of that name and for any key below it, at once."""
        key_bytes = self._namespace.entry(parent_ino).key + name
        asked_s = trio.current_time()
        found: list[ListedObject | None] = [None]
        below = [False]
        denied_below: list[RequestError] = []

        async def probe_object(key: str) -> None:
            try:
                page = await self._ask(partial(self._list_page, key, None, None, 1))
                found[0] = page.objects[0] if page.objects else None
            except RequestError as error:
                if error.kind is not FailureKind.DENIED:
                    raise
                found[0] = await self._head(key)

        async def probe_below(key: str) -> None:
            try:
                below[0] = bool((await self._ask(partial(self._list_page, key + "/", None, None, 1))).objects)
            except RequestError as error:
                if error.kind is not FailureKind.DENIED:
                    raise
                denied_below.append(error)

        try:
            key = key_bytes.decode()
        except UnicodeDecodeError:
            key = ""
        error = None
        if key and len(key_bytes) <= KEY_MAX_BYTES:  # else S3 cannot have it
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(probe_object, key)
                    nursery.start_soon(probe_below, key)
            except BaseExceptionGroup as group:  # of one of them, or of both
                error = only(RequestError, group)
                if error is None:
                    raise
        if error is not None:
            raise error
        if denied_below and found[0] is not None:
            # S3 lists in byte order, so the first key that begins with the name tells of those below it, too.
            first, start_below = found[0][0], key_bytes + b"/"
            if key_bytes < first < start_below:  # such as `a-b`, before what may be `a/x`
                raise denied_below[0]
            below[0] = first.startswith(start_below)
        return self._namespace.learn(parent_ino, name, found[0], below[0], asked_s)

    async def _head(self, key: str) -> ListedObject | None:
        """The object of that key, for where listing is denied."""

        async def ask() -> wire.Headed:
            self._metrics.heads += 1
            return await self._pool.head(key)

        try:
            return astuple((await self._ask(ask)).object)
        except RequestError as error:
            if error.kind is FailureKind.NOT_FOUND:
                return None
            raise

    async def _list(self, listing: Listing) -> None:
        """List a directory to its end. Order and page boundaries are the namespace's business, not trusted here."""
        progress = self._listings[listing]
        token: str | None = None
        tokens: set[str] = set()
        try:
            prefix = listing.prefix.decode()
            while True:
                page = await self._ask(partial(self._list_page, prefix, "/", token, PAGE_KEYS))
                self._namespace.add_page(listing, page.objects, page.prefixes, trio.current_time())
                progress.move()
                if (token := page.next_token) is None:
                    break
                if token in tokens:
                    raise RequestError(
                        FailureKind.PROTOCOL, f"listing of {prefix!r}: the server repeats a continuation token"
                    )
                tokens.add(token)
            self._namespace.finish_listing(listing, trio.current_time())
        except RequestError as error:
            log.warning("cannot list %r: %s", listing.prefix, error)
            progress.error = error
            self._namespace.fail_listing(listing)
        finally:
            del self._listings[listing]
            progress.move()
        for unreachable in self._namespace.take_unreachable():
            log.warning("key %r is not reachable: %s", unreachable.key, unreachable.reason.value)

    async def _list_page(self, prefix: str, delimiter: str | None, token: str | None, max_keys: int) -> wire.Listed:
        self._metrics.lists += 1
        return await self._pool.list(prefix, delimiter, token, max_keys)

    async def _ask(
        self,
        request: Callable[[], Awaitable[_T]],
        timeout_s: float | None = None,
        final: FailureKind | None = None,
    ) -> _T:
        """Send a request, again and again while that may help; the last error is the answer after the timeout.

        Args:
            timeout_s: None for the retry timeout of the mount.
            final: not tried again, although it might pass.
        """
        deadline_s = trio.current_time() + (self._retry_timeout_s if timeout_s is None else timeout_s)
        attempt = 0
        while True:
            try:
                return await request()
            except RequestError as error:
                attempt += 1
                wait_s = backoff_s(attempt, random.random(), error.retry_after_s)
                if not error.kind.retryable or error.kind is final or trio.current_time() + wait_s > deadline_s:
                    raise
                log.info("metadata request failed, again in %.1f s: %s", wait_s, error)
                await trio.sleep(wait_s)
