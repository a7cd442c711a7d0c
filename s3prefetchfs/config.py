"""Every option of a mount, once.

The fields of `Config` are the table: each carries, as metadata, the option's name, how its text is read, its
bounds, its default and its help. Four front doors are derived from this table and from nothing else: the flags
of the command (`cli/manual.py`), and the environment, the TOML file and the `-o` form of fstab (`sources.py`,
which merges them all). A value comes through each door as text and is read by the same parser.

Credentials are never here: they are boto3's business.
"""
# ruff: noqa: RUF009  `_option` returns a dataclasses.field, which is what a default should be.

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from s3prefetchfs import units


@dataclass(frozen=True, slots=True)
class Kind:
    """How the text of an option becomes a value.

    Args:
        metavar: stands for the value in the help; empty for an option that is on or off.
        parse: text to value; raises ValueError saying what it expected.
        toml: the types that TOML may hold for it.
    """

    metavar: str
    parse: Callable[[str], Any]
    toml: tuple[type, ...] = (str,)


def _parse_text(text: str) -> str:
    if not text or not text.isprintable():
        raise ValueError("usable: it is empty or holds control characters")
    return text


def _parse_path(text: str) -> Path:
    if not text or "\0" in text:
        raise ValueError("a path")
    return Path(os.path.abspath(os.path.expanduser(text)))


def _parse_paths(text: str) -> tuple[Path, ...]:
    """Paths with colons between them, as in $PATH."""
    return tuple(dict.fromkeys(_parse_path(part) for part in text.split(os.pathsep)))


def _parse_url(text: str) -> str:
    """An endpoint in one spelling, because it is part of a cache's identity: lower-case host, no last slash."""
    expected = "an endpoint: write http://HOST[:PORT] or https://HOST[:PORT], an IPv6 address in [brackets]"
    try:
        url = urlsplit(text)
        host, _ = url.hostname, url.port  # either raises ValueError
    except ValueError:
        raise ValueError(expected) from None
    if url.username is not None:
        raise ValueError("safe: leave credentials out of the URL, boto3 takes them from its own chain")
    if url.scheme not in ("http", "https") or not host or url.query or url.fragment or " " in text:
        raise ValueError(expected)
    return f"{url.scheme}://{url.netloc.lower()}{url.path.rstrip('/')}"


def _choice(*values: str) -> Kind:
    def parse(text: str) -> str:
        if text not in values:
            raise ValueError(f"one of {', '.join(values)}")
        return text

    return Kind("|".join(values), parse)


TEXT = Kind("TEXT", _parse_text)
PATH = Kind("PATH", _parse_path)
PATHS = Kind("FILE", _parse_paths, (str, list))
"""May be repeated on the command line; a list in TOML; with colons between them elsewhere."""
URL = Kind("URL", _parse_url)
SIZE = Kind("SIZE", units.parse_size, (str, int))
RATE = Kind("RATE", units.parse_rate, (str, int))
DURATION = Kind("DURATION", units.parse_duration, (str, int, float))
COUNT = Kind("N", units.parse_count, (str, int))
MODE = Kind("OCTAL", units.parse_mode)  # text only: TOML's 0o444 is the number 292, and 0444 is an error
FLAG = Kind("", units.parse_flag, (bool,))
INVERSE_FLAG = Kind("", lambda text: not units.parse_flag(text), (bool,))


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the table.

    Args:
        name: as in `--name`. group: its heading in the help. default: what the help calls the default.
        field: of Config. low, high: inclusive bounds, as text; empty for none. short: as in `-f`.
    """

    name: str
    kind: Kind
    group: str
    help: str
    default: str
    field: str = ""
    low: str = ""
    high: str = ""
    short: str = ""

    def read(self, text: str) -> Any:
        """The value that `text` stands for.

        Raises:
            ValueError: what was expected, to follow "is not".
        """
        value = self.kind.parse(text)
        if self.low and value < self.kind.parse(self.low):
            raise ValueError(f"at least {self.low}")
        if self.high and value > self.kind.parse(self.high):
            raise ValueError(f"at most {self.high}")
        return value


def _option(
    name: str,
    kind: Kind,
    group: str,
    help: str,
    *,
    default: str | None = None,
    computed: Callable[[], Any] | None = None,
    shown: str = "",
    **more: str,
) -> Any:
    """A field of Config that is an option; with neither `default` nor `computed` it is None by default."""
    metadata = {"option": Option(name, kind, group, help, shown or default or "", **more)}
    if computed is not None:
        return dataclasses.field(default_factory=computed, metadata=metadata)
    return dataclasses.field(default=None if default is None else kind.parse(default), metadata=metadata)


def _default_cache_dir() -> Path:
    if os.geteuid() == 0:
        return Path("/var/cache/s3prefetchfs")
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path.
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "s3prefetchfs"


def _default_workers() -> int:
    """At least two, so that one can be lost; beyond eight, the interpreter no longer limits the fetching."""
    return min(max(len(os.sched_getaffinity(0)) // 4, 2), 8)


_MAX_ID = str(2**32 - 2)
"""The largest uid or gid; 2^32 - 1 means "none" to the kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One mount. Immutable, picklable, complete: nothing else is read from flags, environment or files.

    `bucket`, `prefix` (empty, or ending in "/") and `mountpoint` (absolute) say what and where. Every other field
    is an option, explained by its help text; a size is in bytes, a duration in seconds.
    """

    bucket: str
    prefix: str = ""
    mountpoint: Path

    # fmt: off
    endpoint_url: str | None = _option(
        "endpoint-url", URL, "S3",
        "Where the S3 API answers: MinIO, Ceph RGW, any S3-compatible store.",
        shown="$AWS_ENDPOINT_URL_S3, or AWS")
    region: str | None = _option(
        "region", TEXT, "S3",
        "Region of the bucket.",
        shown="boto3's choice")
    profile: str | None = _option(
        "profile", TEXT, "S3",
        "Profile in ~/.aws to take credentials from.",
        shown="boto3's choice")
    sign_requests: bool = _option(
        "no-sign-request", INVERSE_FLAG, "S3",
        "Send anonymous requests, for public buckets.",
        default="false")
    requester_pays: bool = _option(
        "requester-pays", FLAG, "S3",
        "Agree to pay for requests, where the bucket's owner does not.",
        default="false")
    addressing_style: str = _option(
        "addressing-style", _choice("auto", "path", "virtual"), "S3",
        "Bucket in the path or in the host name.",
        default="auto")

    cache_dir: Path = _option(
        "cache-dir", PATH, "Cache",
        "Where cached bytes live. A local NVMe disk is best.",
        computed=_default_cache_dir,
        shown="/var/cache/s3prefetchfs as root, else $XDG_CACHE_HOME/s3prefetchfs")
    cache_size_bytes: int | None = _option(
        "cache-size", SIZE, "Cache",
        "The cache never occupies more than this.",
        shown="the free space less 10 %", low="16MiB")
    metadata_ttl_s: float = _option(
        "metadata-ttl", DURATION, "Cache",
        "How long listings, attributes and absences are believed: 0 asks S3 each time, indefinite asks once.",
        default="60s")

    plans: tuple[Path, ...] = _option(
        "plan", PATHS, "Plans",
        "Read ahead by this plan. May be repeated; elsewhere, write colons between files, or a list in TOML.",
        computed=tuple, shown="none")

    passthrough: str = _option(
        "passthrough", _choice("auto", "on", "off"), "Kernel",
        "Let the kernel read files that are wholly cached by itself: auto where it can, on or no mount, off.",
        default="auto")
    open_wait_s: float = _option(
        "open-wait", DURATION, "Kernel",
        "How long opening a file whose last bytes are on their way may wait for them, so that the kernel can read it.",
        default="100ms", high="1h")

    uid: int = _option(
        "uid", COUNT, "Attributes",
        "Owner of every file.",
        computed=os.getuid, shown="the mounting user", high=_MAX_ID)
    gid: int = _option(
        "gid", COUNT, "Attributes",
        "Group of every file.",
        computed=os.getgid, shown="the mounting user's", high=_MAX_ID)
    file_mode: int = _option(
        "file-mode", MODE, "Attributes",
        "Permissions of files.",
        default="0444")
    dir_mode: int = _option(
        "dir-mode", MODE, "Attributes",
        "Permissions of directories.",
        default="0555")
    allow_other: bool = _option(
        "allow-other", FLAG, "Attributes",
        "Let other users in. The permissions above then apply to them.",
        default="false")
    nonempty: bool = _option(
        "nonempty", FLAG, "Attributes",
        "Mount even over files or over another mount, which are hidden meanwhile.",
        default="false")

    worker_processes: int = _option(
        "workers", COUNT, "Network",
        "Processes that talk to S3.",
        computed=_default_workers, shown="a quarter of the CPUs, 2 to 8", low="1", high="64")
    max_connections: int = _option(
        "max-connections", COUNT, "Network",
        "Connections to S3, over all workers.",
        default="32", low="1", high="1024")
    max_throughput_bytes_per_s: int | None = _option(
        "max-throughput", RATE, "Network",
        "Fetch no faster than this, such as 500MB/s.",
        shown="no limit", low="64KiB")
    retry_timeout_s: float = _option(
        "retry-timeout", DURATION, "Network",
        "How long a read is retried before it fails with EIO.",
        default="120s", high="1d")
    stall_timeout_s: float = _option(
        "stall-timeout", DURATION, "Network",
        "A request that yields no byte for this long is given up, and retried.",
        default="10s", low="100ms", high="1h")
    mount_timeout_s: float = _option(
        "mount-timeout", DURATION, "Network",
        "How long mounting keeps trying to reach the endpoint.",
        default="10s", high="1h")

    log_level: str = _option(
        "log-level", _choice("debug", "info", "warning", "error"), "Logging",
        "Least level to log.",
        default="info")
    log_file: Path | None = _option(
        "log-file", PATH, "Logging",
        "Log to this file, rotated at 10 MB, three old ones kept.",
        shown="stderr in the foreground, else a file in the cache directory")
    foreground: bool = _option(
        "foreground", FLAG, "Options",
        "Stay in the foreground, and tell systemd when ready.",
        default="false", short="f")
    # fmt: on

    @property
    def identity(self) -> str:
        """A directory name of its own for each (endpoint, bucket, prefix): two sources never share a cache."""
        source = "\0".join((self.endpoint_url or "", self.bucket, self.prefix))
        return f"{self.bucket}-{hashlib.sha256(source.encode()).hexdigest()[:12]}"


def _collect() -> dict[str, Option]:
    rows = ((field.name, field.metadata.get("option")) for field in dataclasses.fields(Config))
    return {row.name: dataclasses.replace(row, field=name) for name, row in rows if row is not None}


OPTIONS = _collect()
"""The table by option name, in the order of the help."""
