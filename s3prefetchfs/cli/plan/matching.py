"""The files that the sources of a plan stand for: paths and patterns on a mount, or in a bucket.

Both ways match by `core.plan_pattern`, so a pattern means the same in a plan, on a mount and in a bucket. A name that
exists is taken as it is, whatever is in it; a directory stands for all files below it.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import click

from s3prefetchfs.cli.manual import typed
from s3prefetchfs.cli.status import read_status
from s3prefetchfs.core.pacing import backoff_s
from s3prefetchfs.core.plan import PlannedFile
from s3prefetchfs.core.plan_pattern import PathPattern, Place
from s3prefetchfs.core.record import is_component
from s3prefetchfs.errors import FailureKind, RequestError, UserError
from s3prefetchfs.fuse import mounts
from s3prefetchfs.sources import parse_source, resolve_group

ATTEMPTS = 6
"""Of one List: some seconds of pauses in all, for a store that asks to slow down."""

PAGE_KEYS = 1000

S3_SCHEME = "s3://"


def find_files(
    sources: Sequence[str], store: Mapping[str, Any], *, wants_sizes: bool, wants_etags: bool, relative_to: str | None
) -> list[PlannedFile]:
    """The files that match, in byte order of their paths, each once.

    Args:
        store: the flags of the group S3.
        relative_to: write local paths relative to this directory, instead of the mountpoint they are below.

    Raises:
        UserError: nothing matches, or what is there cannot be seen.
    """
    in_bucket = [source.startswith(S3_SCHEME) for source in sources]
    if any(in_bucket) and not all(in_bucket):
        raise click.UsageError("paths and s3:// sources cannot be mixed: make two plans, or name all one way")
    found: dict[str, PlannedFile] = {}
    for source in sources:
        if not source:
            raise click.UsageError("a SOURCE is empty: is a variable not set?")
        if source.startswith(S3_SCHEME):
            matching = list(_in_bucket(source, store, wants_sizes, wants_etags))
        else:
            matching = list(_on_disk(source, wants_sizes or wants_etags))
        if not matching:
            raise UserError(
                f"nothing matches {source}",
                "name a directory with a slash at its end, and check the spelling"
                if source.startswith(S3_SCHEME)
                else "check it with ls; quote patterns, so that no shell expands them",
            )
        for file in matching:
            found[file.path] = file
    files = [found[path] for path in sorted(found, key=os.fsencode)]
    for file in files:
        try:
            file.path.encode()
        except UnicodeEncodeError:
            raise UserError(
                f"no plan is made: the name {file.path!a} is not UTF-8", "rename it, or leave it out"
            ) from None
    return files if any(in_bucket) else _relative(files, relative_to, wants_etags)


# ---------------------------------------------------------------------------------------------------- on disk


@cache
def _alive(mountpoint: Path) -> Path:
    where, _ = read_status(mountpoint)
    return where


def mount_of(path: str) -> Path | None:
    """The mountpoint of ours that an absolute path is below, alive; None if there is none.

    Raises:
        UserError: it is dead, or does not answer.
    """
    ours = [mount.mountpoint for mount in mounts.all_mounts() if mount.is_ours]
    for resolve in (str, os.path.realpath):  # as written first: resolving asks the filesystem, which may be hung
        spelling = Path(resolve(path))
        if above := [at for at in ours if spelling.is_relative_to(at)]:
            return _alive(max(above, key=lambda at: len(at.parts)))
    return None


def _on_disk(source: str, wants_sizes: bool) -> Iterator[PlannedFile]:
    path = os.path.abspath(source)
    mount_of(path)
    try:
        if os.path.isdir(path):
            pattern = PathPattern("**")
            yield from _walk(path, pattern, pattern.start, wants_sizes)
        elif os.path.lexists(path):
            yield PlannedFile(path, os.stat(path).st_size if wants_sizes else None)
        else:
            pattern = PathPattern(path.lstrip("/"))
            yield from _walk("/", pattern, pattern.start, wants_sizes)
    except OSError as error:
        raise UserError(f"cannot look into {error.filename}: {error.strerror}", "see whether ls can") from None


def _walk(directory: str, pattern: PathPattern, place: Place, wants_sizes: bool) -> Iterator[PlannedFile]:
    while (name := pattern.only_name(place)) is not None:
        directory, place = os.path.join(directory, name), pattern.below(place, name)
    try:
        with os.scandir(directory) as entries:
            inside = sorted(entries, key=lambda entry: os.fsencode(entry.name))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in inside:
        if entry.is_dir():
            if further := pattern.below(place, entry.name):
                yield from _walk(entry.path, pattern, further, wants_sizes)
        elif pattern.takes(place, entry.name):
            yield PlannedFile(entry.path, entry.stat().st_size if wants_sizes else None)


def _relative(files: Sequence[PlannedFile], relative_to: str | None, wants_etags: bool) -> list[PlannedFile]:
    root = os.path.abspath(relative_to) if relative_to else None
    base = root or str(mount_of(files[0].path) or "")
    result = []
    for file in files:
        etag = None
        if wants_etags:
            try:
                etag = os.getxattr(file.path, "user.s3.etag").decode()
            except OSError:
                raise UserError(
                    f"no plan is made: the ETag of {file.path} is not known",
                    "--manifest needs paths on an s3prefetchfs, or s3:// sources",
                ) from None
        path = file.path
        if base and not _is_below(path, base):
            path = os.path.realpath(path)
        if base and _is_below(path, base):
            path = os.path.relpath(path, base)
        elif root:
            raise click.UsageError(f"{file.path} is not below {root}: give another --relative-to")
        result.append(PlannedFile(path, file.size_bytes, etag))
    return result


def _is_below(path: str, base: str) -> bool:
    return path.startswith(base.rstrip("/") + "/")


# ---------------------------------------------------------------------------------------------------- in a bucket


class Lister:
    """Lists a bucket.

    Args:
        where: `s3://BUCKET[/PREFIX]`.
        store: the flags of the group S3.

    Raises:
        UserError: no such profile, a malformed endpoint.
    """

    def __init__(self, where: str, store: Mapping[str, Any]) -> None:
        from s3prefetchfs.s3.client import Client, ClientSettings  # heavy

        try:
            self.bucket, _ = parse_source(where.partition("*")[0])
        except ValueError as error:
            raise click.UsageError(f"{where} is not {error}") from None
        try:
            self._client = Client(ClientSettings(bucket=self.bucket, **resolve_group(typed(store), "S3")))
        except RequestError as error:
            raise self._cannot(error) from None

    def objects(self, prefix: str, *, is_deep: bool) -> Iterator[tuple[str, int, str]]:
        """Key, size in bytes and ETag of what is below a prefix; all of it, or only up to the next slash.

        Raises:
            UserError: S3 does not say.
        """
        token: str | None = None
        while True:
            objects, _, token = self._page(prefix, None if is_deep else "/", token)
            for key, size_bytes, _, etag, _ in objects:
                if all(map(is_component, key.split(b"/"))):  # others are not shown in a mount
                    yield key.decode("utf-8", "surrogateescape"), size_bytes, etag
            if token is None:
                return

    def _page(self, prefix: str, delimiter: str | None, token: str | None) -> tuple[Any, Any, str | None]:
        attempt = 1
        while True:
            try:
                return self._client.list_page(prefix, delimiter, token, PAGE_KEYS)
            except RequestError as error:
                if not error.kind.retryable or error.kind is FailureKind.CREDENTIALS or attempt == ATTEMPTS:
                    raise self._cannot(error) from None
                time.sleep(backoff_s(attempt, random.random(), error.retry_after_s))
                attempt += 1

    def _cannot(self, error: RequestError) -> UserError:
        return UserError(
            f"cannot list s3://{self.bucket}: {error}",
            "check the bucket's name, --endpoint-url, and the credentials (--profile, or --no-sign-request)",
        )


def _in_bucket(source: str, store: Mapping[str, Any], wants_sizes: bool, wants_etags: bool) -> Iterator[PlannedFile]:
    lister = Lister(source, store)
    key = source.removeprefix(f"{S3_SCHEME}{lister.bucket}").removeprefix("/")

    def file(found: tuple[str, int, str]) -> PlannedFile:
        path = f"{S3_SCHEME}{lister.bucket}/{found[0]}"
        return PlannedFile(path, found[1] if wants_sizes or wants_etags else None, found[2] if wants_etags else None)

    if key == "" or key.endswith("/"):
        yield from map(file, lister.objects(key, is_deep=True))
        return
    exact = [found for found in lister.objects(key, is_deep=False) if found[0] == key]
    if exact:
        yield file(exact[0])
        return
    pattern = PathPattern(key)
    place, base = pattern.start, ""
    while (name := pattern.only_name(place)) is not None:
        base, place = f"{base}{name}/", pattern.below(place, name)
    literal = re.split(r"[*?\[]", key, maxsplit=1)[0]
    rest = key.removeprefix(base)
    for found in lister.objects(max(base, literal, key=len), is_deep="/" in rest or rest == "**"):
        if pattern.matches(found[0]):
            yield file(found)
