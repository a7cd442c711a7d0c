"""Where the values of options come from, and which of them counts.

`resolve` merges the sources of `config.py`'s table: flags > `-o` > environment > file > AWS's endpoint variables >
defaults. It runs in the command, before anything starts; the daemon and its workers get the frozen result.

Each value keeps where it was written, so that an error says what is wrong, where, and what to write instead. A
name that nobody knows is refused, with the nearest one that exists: a silent typo would be a mount that is not
the one asked for.
"""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from s3prefetchfs.config import MODE, OPTIONS, PATH, PATHS, TEXT, Config
from s3prefetchfs.errors import UserError

USAGE_EXIT_CODE = 2
"""Of every error in here. It is what click uses for a wrong command line, and it tells systemd that starting the
same thing again cannot help (`RestartPreventExitStatus=`)."""

ENVIRONMENT_PREFIX = "S3PREFETCHFS_"


@dataclass(frozen=True, slots=True)
class _Given:
    """What somebody wrote, and where: `origin` is a flag, a variable, or a file and its key."""

    text: str
    origin: str


def _refuse(message: str, hint: str) -> UserError:
    return UserError(message, hint, USAGE_EXIT_CODE)


FILE_MAX_BYTES = 1024 * 1024
"""Of a configuration."""


def _unknown(what: str, name: str, known: Iterable[str], spell: Callable[[str], str] = str) -> UserError:
    if not name:
        return _refuse(f"{what.strip()} has an empty name", f"write one of {', '.join(map(spell, known))}")
    (nearest,) = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)
    return _refuse(f"{what} is unknown", f"the nearest valid name is {spell(nearest)}")


def _variable(name: str) -> str:
    return ENVIRONMENT_PREFIX + name.upper().replace("-", "_")


def _from_environment() -> dict[str, _Given]:
    """Variables named S3PREFETCHFS_*. An empty one counts as not set: compose files cannot unset one."""
    names = {_variable(name): name for name in ("bucket", "mountpoint", "config", *OPTIONS)}
    given = {}
    for variable, text in os.environ.items():
        if variable.startswith(ENVIRONMENT_PREFIX):
            if variable not in names:
                raise _unknown(f"environment variable {variable}", variable, names)
            if text:
                given[names[variable]] = _Given(text, variable)
    return given


def _from_aws_environment() -> dict[str, _Given]:
    """The endpoint that boto3 would take from the environment: known here, it is part of `Config.identity`."""
    if os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true":
        return {}
    for variable in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        if text := os.environ.get(variable):
            return {"endpoint-url": _Given(text, variable)}
    return {}


def _from_file(path: Path) -> dict[str, _Given]:
    """A TOML file. Relative paths in it start at its own directory."""
    try:
        with path.open("rb") as file:
            content = file.read(FILE_MAX_BYTES + 1)
        if len(content) > FILE_MAX_BYTES:
            raise _refuse(f"{path} is larger than {FILE_MAX_BYTES >> 20} MiB", "give a TOML file to --config")
        document = tomllib.loads(content.decode())
    except OSError as error:
        raise _refuse(f"cannot read {path}: {error.strerror}", "give a readable TOML file to --config") from None
    except (ValueError, RecursionError) as error:  # not TOML, or not UTF-8, or nested without end
        raise _refuse(f"{path}: {error}", 'write TOML: one option a line, such as cache-size = "500GiB"') from None
    known = ("bucket", "mountpoint", *OPTIONS)
    given = {}
    for key, value in document.items():
        name = key.replace("_", "-")
        origin = f"{path}: {key}"
        if name not in known:
            raise _unknown(origin, name, known)
        if name in given:
            raise _refuse(f"{origin} is given twice", "dashes and underscores are the same: keep one of the two")
        kind = TEXT if name == "bucket" else PATH if name == "mountpoint" else OPTIONS[name].kind
        if kind is PATHS and isinstance(value, list) and value and all(isinstance(part, str) for part in value):
            value = os.pathsep.join(value)
        if type(value) not in kind.toml or isinstance(value, list):
            example = '"0444"' if kind is MODE else '"..."'
            wanted = "true or false" if kind.toml == (bool,) else f"text, such as {key} = {example}"
            if int in kind.toml:
                wanted = f"a whole number, or {wanted}"
            shown = f"0o{value:o}" if kind is MODE and type(value) is int else repr(value)
            raise _refuse(f"{origin}: {shown} is not of the right type", f"write {wanted}")
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if kind in (PATH, PATHS) and text:
            parts = text.split(os.pathsep) if kind is PATHS else [text]
            text = os.pathsep.join(part if part.startswith(("/", "~")) else str(path.parent / part) for part in parts)
        given[name] = _Given(text, origin)
    return given


# fmt: off
_STANDARD_MOUNT_OPTIONS = frozenset({
    "ro", "defaults", "auto", "noauto", "user", "nouser", "users", "owner", "group", "_netdev", "nofail", "async",
    "suid", "nosuid", "dev", "nodev", "exec", "noexec",
    "atime", "noatime", "relatime", "norelatime", "diratime", "nodiratime",
})
# fmt: on
"""Taken and ignored: they are true already (files are read-only and FUSE itself sees to nosuid and nodev), or speak
to mount(8) and systemd. `noexec` is true as well: files carry no x unless --file-mode gives it."""


def _from_mount_options(texts: Iterable[str]) -> dict[str, _Given]:
    """`-o KEY[=VALUE],...`, as fstab has it; `\\,` is a comma inside a value."""
    known = ("config", *OPTIONS)
    given = {}
    for item in (item for text in texts for item in re.findall(r"(?:\\.|[^,])+", text)):
        key, equals, value = item.partition("=")
        name = key.strip().replace("_", "-")
        if key in _STANDARD_MOUNT_OPTIONS or key.startswith("x-"):
            continue
        if key == "rw":
            raise _refuse(
                "-o rw: the filesystem is read-only", "write ro; mount(8) adds rw by itself where ro is missing"
            )
        if name not in known:
            raise _unknown(f"-o {key}", name, known, lambda nearest: nearest.replace("-", "_"))
        if not equals and (name == "config" or OPTIONS[name].kind.metavar):
            raise _refuse(f"-o {key} has no value", f"write -o {key}=VALUE")
        given[name] = _Given(re.sub(r"\\(.)", r"\1", value) if equals else "true", f"-o {key}")
    return given


def resolve(flags: Mapping[str, str], mount_options: Iterable[str] = ()) -> Config:
    """The configuration of one mount from all its sources.

    Args:
        flags: what was given on the command line, as text, by option name; also `bucket`, `mountpoint`, `config`.
        mount_options: the arguments of `-o`.

    Raises:
        UserError: a name, a value or a combination is wrong; says where it was written.
    """
    given = _given(flags, mount_options)
    for name in ("bucket", "mountpoint"):
        if name not in given:
            hint = f"give it on the command line, as {_variable(name)}, or as `{name}` in the --config file"
            raise _refuse(f"no {name} given", hint)
    bucket, prefix = _read(given["bucket"], parse_source)
    values = {option.field: _read(given[name], option.read) for name, option in OPTIONS.items() if name in given}
    config = Config(bucket=bucket, prefix=prefix, mountpoint=_read(given["mountpoint"], PATH.parse), **values)
    if "workers" not in given and config.worker_processes > config.max_connections:
        config = dataclasses.replace(config, worker_processes=config.max_connections)
    _check(config, {name: item.origin for name, item in given.items()})
    return config


def resolve_group(flags: Mapping[str, str], group: str) -> dict[str, Any]:
    """The options of one group that were given anywhere, by field: for commands that need no mount.

    Raises:
        UserError: as `resolve`.
    """
    given = _given(flags, ())
    return {
        option.field: _read(given[name], option.read)
        for name, option in OPTIONS.items()
        if name in given and option.group == group
    }


def _given(flags: Mapping[str, str], mount_options: Iterable[str]) -> dict[str, _Given]:
    """What counts of all that was given, by name."""
    arguments = {"bucket": "BUCKET", "mountpoint": "MOUNTPOINT"}
    sources = [
        {name: _Given(text, arguments.get(name, f"--{name}")) for name, text in flags.items()},
        _from_mount_options(mount_options),
        _from_environment(),
    ]
    file = next((source["config"] for source in sources if "config" in source), None)
    if file is not None:
        sources.append(_from_file(_read(file, PATH.parse)))
    sources.append(_from_aws_environment())
    given: dict[str, _Given] = {}
    for source in reversed(sources):
        given |= source
    return given


def _read(given: _Given, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(given.text)
    except ValueError as error:
        said, _, hint = str(error).partition(": ")
        raise _refuse(f"{given.origin}: {given.text!r} is not {said}", hint) from None


def parse_source(text: str) -> tuple[str, str]:
    """Bucket and prefix from `bucket`, `bucket/prefix` or `s3://bucket/prefix`. The prefix is taken literally.

    Raises:
        ValueError: what was expected, to follow "is not".
    """
    scheme = re.match(r"(\w+)://", text)
    if scheme is not None and scheme[1] != "s3":
        raise ValueError("in S3: write s3://BUCKET[/PREFIX] or BUCKET[/PREFIX]")
    bucket, _, prefix = text.removeprefix("s3://").partition("/")
    # The widest rule that boto3 lets through; what a store really allows, the store says.
    if re.fullmatch(r"[A-Za-z0-9._-]{3,255}", bucket) is None or ".." in bucket:
        raise ValueError("a bucket name: it has 3 or more letters, digits, dots and dashes (no ARN: use its alias)")
    if prefix and not prefix.endswith("/"):
        prefix += "/"
    try:
        usable = len(prefix.encode()) <= 1024 and "\0" not in prefix
    except UnicodeEncodeError:  # bytes of the command line that are not UTF-8
        usable = False
    if not usable:
        raise ValueError("a usable prefix: S3 keys are UTF-8 text of at most 1024 bytes")
    return bucket, prefix


def _check(config: Config, origins: Mapping[str, str]) -> None:
    """Refuse settings that contradict each other.

    Raises:
        UserError: names both, as they were written.
    """

    def origin(name: str) -> str:
        return origins.get(name, f"--{name} (default)")

    if config.worker_processes > config.max_connections:
        raise _refuse(
            f"{origin('workers')} is {config.worker_processes}, more than {origin('max-connections')},"
            f" {config.max_connections}",
            "give every worker a connection at least",
        )
    if config.requester_pays and not config.sign_requests:
        raise _refuse(
            f"{origin('requester-pays')} and {origin('no-sign-request')} contradict each other",
            "an anonymous request has nobody to pay for it: drop one of the two",
        )
    host = urlsplit(config.endpoint_url or "").hostname or ""
    if config.addressing_style == "virtual" and _is_address(host):
        raise _refuse(
            f"{origin('addressing-style')} is virtual, but {host} is an address and cannot carry a bucket name",
            "use path or auto, or an endpoint with a host name",
        )
    mountpoint = config.mountpoint
    if config.cache_dir.is_relative_to(mountpoint) or mountpoint.is_relative_to(config.cache_dir):
        raise _refuse(
            f"{origin('cache-dir')}: {config.cache_dir} and the mountpoint {mountpoint} are inside one another",
            "keep the cache outside the mount, and the mount outside the cache",
        )
    if config.log_file is not None and config.log_file.is_relative_to(mountpoint):
        raise _refuse(
            f"{origin('log-file')}: {config.log_file} is inside the mountpoint {mountpoint}",
            "a log cannot be written to the filesystem that it is about",
        )


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
