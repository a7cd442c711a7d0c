"""The table of options, its four front doors, and what they refuse."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3prefetchfs import config as table
from s3prefetchfs import units
from s3prefetchfs.config import OPTIONS, Config, Option
from s3prefetchfs.errors import UserError
from s3prefetchfs.sources import parse_source, resolve

BASE = {"bucket": "my-bucket", "mountpoint": "/mnt/data"}


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("S3PREFETCHFS_", "AWS_")):
            monkeypatch.delenv(name)


def refused(
    flags: Mapping[str, str] = BASE, mount_options: tuple[str, ...] = (), *, naming: str, hint: str = ""
) -> UserError:
    """`resolve` refuses this with exit code 2, in a message that holds `naming`."""
    with pytest.raises(UserError) as caught:
        resolve(flags, mount_options)
    assert naming in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.exit_code == 2
    return caught.value


# --- Units ---


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("64MiB", 64 * 2**20),
        ("500GiB", 500 * 2**30),
        ("2TB", 2 * 10**12),
        ("1.5 GiB", 3 * 2**29),
        ("1kB", 1000),
        ("1KB", 1000),
        ("7B", 7),
        ("5gib", 5 * 2**30),
        ("0.1GB", 10**8),
    ],
)
def test_sizes(text: str, size_bytes: int) -> None:
    """Decimal and binary units, with and without a blank; fractions are exact."""
    assert units.parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "GiB", "5Gb", "-1", "1e9", "nan", "inf", "1 000", "5GiB/s", "٣", "5parsecs"])
def test_what_is_not_a_size(text: str) -> None:
    """Ambiguous units (G, Gb), signs, exponents and foreign digits are refused, with what to write."""
    with pytest.raises(ValueError, match=r"^a size: write 500GiB"):
        units.parse_size(text)


def test_a_size_that_is_ambiguous() -> None:
    """What everybody types is refused with the two things it may mean."""
    with pytest.raises(ValueError, match=r"^a size: write 5GiB \(powers of 1024\) or 5GB \(of 1000\)$"):
        units.parse_size("5G")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("60s", 60), ("5m", 300), ("2min", 120), ("1h", 3600), ("1d", 86400), ("500ms", 0.5), ("2.5", 2.5), ("0", 0)],
)
def test_durations(text: str, seconds: float) -> None:
    """From milliseconds to days; a plain number is seconds."""
    assert units.parse_duration(text) == seconds


def test_indefinite_is_infinite() -> None:
    """`indefinite` is the one way to say for ever."""
    assert units.parse_duration("indefinite") == math.inf


@pytest.mark.parametrize("text", ["", "s", "-1s", "inf", "nan", "1h30m", "forever"])
def test_what_is_not_a_duration(text: str) -> None:
    """Everything else is refused, with what to write."""
    with pytest.raises(ValueError, match="a duration: write 60s"):
        units.parse_duration(text)


@given(st.integers(0, 2**62))
def test_a_plain_number_is_itself(number: int) -> None:
    """Bytes, bytes per second and counts without a unit, up to the largest, lose nothing."""
    text = str(number)
    assert units.parse_size(text) == units.parse_rate(text) == number
    assert number >= 10**18 or units.parse_count(text) == number


@given(st.text(max_size=12))
def test_no_text_breaks_a_parser(text: str) -> None:
    """A parser gives a value or a ValueError for any text whatever."""
    for option in OPTIONS.values():
        with contextlib.suppress(ValueError):
            option.read(text)


# --- Four doors, one table ---

SAMPLES = {
    table.TEXT: "sample",
    table.PATH: "/some/where",
    table.PATHS: "/some/where:/or/there",
    table.URL: "https://s3.example.com:9000",
    table.SIZE: "20GiB",
    table.RATE: "700MB/s",
    table.DURATION: "90s",
    table.COUNT: "7",
    table.MODE: "0440",
    table.FLAG: "true",
    table.INVERSE_FLAG: "true",
}
CHOSEN = {"addressing-style": "virtual", "log-level": "debug", "passthrough": "on"}


def as_flag(name: str, text: str, _: Path) -> Config:
    return resolve(BASE | {name: text})


def as_mount_option(name: str, text: str, _: Path) -> Config:
    return resolve(BASE, [f"{name.replace('-', '_')}={text}"])


def as_variable(name: str, text: str, _: Path) -> Config:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("S3PREFETCHFS_" + name.upper().replace("-", "_"), text)
        return resolve(BASE)


def as_file_key(name: str, text: str, tmp_path: Path) -> Config:
    file = tmp_path / "mount.toml"
    file.write_text(f"{name} = {text if text == 'true' else repr(text)}\n")
    return resolve(BASE | {"config": str(file)})


@pytest.mark.parametrize("door", [as_flag, as_mount_option, as_variable, as_file_key])
@pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS)
def test_every_option_passes_every_door(
    option: Option, door: Callable[[str, str, Path], Config], tmp_path: Path
) -> None:
    """Flag, -o, environment and file all read the same text as the same value, which is not the default."""
    text = CHOSEN.get(option.name) or SAMPLES[option.kind]
    value = getattr(door(option.name, text, tmp_path), option.field)
    assert value == option.read(text)
    assert value != getattr(resolve(BASE), option.field)


def test_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags beat -o, which beats the environment, which beats the file, which beats AWS's variables and defaults."""
    file = tmp_path / "mount.toml"
    flags: dict[str, str] = dict(BASE)
    options: list[str] = []
    seen = [resolve(flags, options).endpoint_url]
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://aws-general")
    seen.append(resolve(flags, options).endpoint_url)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://aws")
    seen.append(resolve(flags, options).endpoint_url)
    file.write_text('endpoint_url = "http://file"')
    monkeypatch.setenv("S3PREFETCHFS_CONFIG", str(file))
    seen.append(resolve(flags, options).endpoint_url)
    monkeypatch.setenv("S3PREFETCHFS_ENDPOINT_URL", "http://environment")
    seen.append(resolve(flags, options).endpoint_url)
    options.append("endpoint_url=http://option")
    seen.append(resolve(flags, options).endpoint_url)
    flags["endpoint-url"] = "http://flag"
    seen.append(resolve(flags, options).endpoint_url)
    assert seen == [
        None,
        "http://aws-general",
        "http://aws",
        "http://file",
        "http://environment",
        "http://option",
        "http://flag",
    ]


def test_several_files(tmp_path: Path) -> None:
    """A list in TOML is several values, relative to the file; one that is named twice counts once."""
    file = tmp_path / "mount.toml"
    file.write_text('plan = ["a", "/some/b", "a"]')
    assert resolve(BASE | {"config": str(file)}).plans == (tmp_path / "a", Path("/some/b"))
    for wrong in ("[]", "[1]", "1", '["a", ["b"]]'):
        file.write_text(f"plan = {wrong}")
        refused(BASE | {"config": str(file)}, naming="plan", hint="text")


def test_a_flag_can_be_taken_back() -> None:
    """What the file switches on, the command line switches off."""
    assert resolve(BASE | {"allow-other": "false"}, ["allow_other"]).allow_other is False
    assert resolve(BASE | {"no-sign-request": "false"}, ["no_sign_request"]).sign_requests is True


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but a bucket and a mountpoint is needed."""
    config = resolve(BASE)
    assert config == Config(bucket="my-bucket", mountpoint=Path("/mnt/data"))
    assert (config.uid, config.gid) == (os.getuid(), os.getgid())
    assert (config.file_mode, config.dir_mode) == (0o444, 0o555)
    assert config.cache_size_bytes is config.max_throughput_bytes_per_s is config.log_file is None
    assert (config.metadata_ttl_s, config.retry_timeout_s, config.stall_timeout_s) == (60, 120, 10)
    assert 2 <= config.worker_processes <= 8
    assert config.sign_requests


def test_cache_directory_of_root_and_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root's is in /var/cache; anyone else's where XDG says, unless that is relative, or in ~/.cache."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert resolve(BASE).cache_dir == Path("/var/cache/s3prefetchfs")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert resolve(BASE).cache_dir == Path("/home/ann/.cache/s3prefetchfs")
    monkeypatch.setenv("XDG_CACHE_HOME", "/nvme/ann")
    assert resolve(BASE).cache_dir == Path("/nvme/ann/s3prefetchfs")


def test_config_is_a_value() -> None:
    """Immutable, comparable, and the same after the way to another process."""
    config = resolve(BASE)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.bucket = "other"  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config


def test_the_command_line_names_bucket_and_mountpoint_last(tmp_path: Path) -> None:
    """The file may hold them; the command line overrides it."""
    file = tmp_path / "mount.toml"
    file.write_text('bucket = "s3://from-file/some/prefix"\nmountpoint = "mnt"\n')
    config = resolve({"config": str(file)})
    assert (config.bucket, config.prefix) == ("from-file", "some/prefix/")
    assert config.mountpoint == tmp_path / "mnt", "a relative path starts at the file"
    assert resolve({"config": str(file), "bucket": "other"}).prefix == ""


def test_relative_paths_of_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They start at the working directory; every path of a Config is absolute."""
    monkeypatch.chdir(tmp_path)
    config = resolve(BASE | {"mountpoint": "mnt", "cache-dir": "../cache", "log-file": "log"})
    assert config.mountpoint == tmp_path / "mnt"
    assert config.cache_dir == tmp_path.parent / "cache"
    assert config.log_file == tmp_path / "log"


# --- What fstab writes ---


def test_standard_mount_options_are_accepted() -> None:
    """What fstab, mount(8) and systemd put there changes nothing; allow_other is ours."""
    line = "ro,_netdev,nofail,noauto,auto,user,nosuid,nodev,noexec,x-systemd.automount,x-gvfs-hide,defaults,dev,suid"
    assert resolve(BASE, [line]) == resolve(BASE)
    assert resolve(BASE, ["ro,allow_other"]).allow_other


def test_rw_is_refused() -> None:
    """The filesystem cannot be written, and says so instead of pretending."""
    refused(mount_options=("rw,allow_other",), naming="read-only", hint="write ro")


def test_escaped_commas() -> None:
    r"""`\,` is a comma inside a value, `\\` a backslash."""
    config = resolve(BASE, [r"cache_dir=/nvme/a\,b\\c,metadata-ttl=5m", "uid=7"])
    assert config.cache_dir == Path(r"/nvme/a,b\c")
    assert (config.metadata_ttl_s, config.uid) == (300, 7)


def test_mount_option_without_its_value() -> None:
    """Only what is on or off may stand alone."""
    refused(mount_options=("cache_size",), naming="-o cache_size has no value", hint="-o cache_size=VALUE")
    refused(mount_options=("config",), naming="-o config has no value")
    refused(mount_options=("cache_size=",), naming="-o cache_size: ''")


def test_mount_option_can_name_the_file(tmp_path: Path) -> None:
    """An fstab line can leave the details to a TOML file."""
    (tmp_path / "a,b.toml").write_text("uid = 77")
    assert resolve(BASE, [f"ro,config={tmp_path}/a\\,b.toml"]).uid == 77


# --- Refusals say what, where, and what to do ---


def test_unknown_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each door refuses a name that nobody knows, with the nearest one in its own spelling."""
    refused(mount_options=("cache_siz=1GiB",), naming="-o cache_siz ", hint="cache_size")
    file = tmp_path / "mount.toml"
    file.write_text('cache_sise = "1GiB"')
    refused(BASE | {"config": str(file)}, naming=f"{file}: cache_sise", hint="cache-size")
    file.write_text("[cache]\nsize = 1\n")
    refused(BASE | {"config": str(file)}, naming=f"{file}: cache ")
    monkeypatch.setenv("S3PREFETCHFS_CACHESIZE", "1GiB")
    refused(naming="S3PREFETCHFS_CACHESIZE", hint="S3PREFETCHFS_CACHE_SIZE")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("cache-size", "5G", "'5G' is not a size"),
        ("cache-size", "15MiB", "is not at least 16MiB"),
        ("metadata-ttl", "-1s", "is not a duration"),
        ("retry-timeout", "indefinite", "is not at most 1d"),
        ("stall-timeout", "0", "is not at least 100ms"),
        ("mount-timeout", "indefinite", "is not at most 1h"),
        ("workers", "0", "is not at least 1"),
        ("workers", "65", "is not at most 64"),
        ("max-connections", "0", "is not at least 1"),
        ("max-connections", "1025", "is not at most 1024"),
        ("max-throughput", "fast", "is not a rate"),
        ("uid", "ann", "is not a whole number"),
        ("uid", "4294967295", "is not at most 4294967294"),
        ("file-mode", "0888", "is not octal permission bits"),
        ("file-mode", "4755", "is not octal permission bits"),
        ("addressing-style", "Path", "is not one of auto, path, virtual"),
        ("log-level", "loud", "is not one of debug, info, warning, error"),
        ("allow-other", "perhaps", "is not yes or no"),
        ("profile", "", "is not usable"),
        ("region", "eu\n1", "is not usable"),
        ("endpoint-url", "minio:9000", "is not an endpoint"),
        ("endpoint-url", "ftp://minio", "is not an endpoint"),
        ("endpoint-url", "http://", "is not an endpoint"),
        ("endpoint-url", "http://minio:99999", "is not an endpoint"),
        ("endpoint-url", "http://::1:9000", "is not an endpoint"),
        ("endpoint-url", "http://minio?x=1", "is not an endpoint"),
        ("endpoint-url", "http://key:secret@minio", "is not safe"),
    ],
)
def test_bad_values(name: str, text: str, said: str) -> None:
    """A wrong value is refused with the flag it was given by."""
    error = refused(BASE | {name: text}, naming=said)
    assert error.message.startswith(f"--{name}: ")


def test_bad_values_are_found_where_they_were_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The message names the variable, or the file and its key."""
    file = tmp_path / "mount.toml"
    file.write_text('cache_size = "much"')
    refused(BASE | {"config": str(file)}, naming=f"{file}: cache_size: 'much' is not a size")
    monkeypatch.setenv("S3PREFETCHFS_WORKERS", "many")
    refused(naming="S3PREFETCHFS_WORKERS: 'many' is not a whole number")
    monkeypatch.delenv("S3PREFETCHFS_WORKERS")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "minio")
    refused(naming="AWS_ENDPOINT_URL_S3: 'minio' is not an endpoint")


def test_an_empty_variable_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose files and unit files have no other way to unset one."""
    monkeypatch.setenv("S3PREFETCHFS_CACHE_SIZE", "")
    assert resolve(BASE).cache_size_bytes is None


@pytest.mark.parametrize(
    ("text", "naming"),
    [
        ("uid = 7\nuid = 8", "Cannot overwrite a value"),
        ("cache-size = '1GiB'\ncache_size = '2GiB'", "given twice"),
        ("file-mode = 0o444", "0o444 is not of the right type"),
        ("allow-other = 'yes'", "'yes' is not of the right type"),
        ("uid = true", "True is not of the right type"),
        ("x = " + 5000 * "[" + 5000 * "]", "recursion"),
        ("log-level = ['debug']", "is not of the right type"),
        ("metadata-ttl = inf", "'inf' is not a duration"),
        ("config = 'other.toml'", "config is unknown"),
        ("no toml", "Expected '='"),
        ("log-file = ''", "'' is not a path"),
    ],
)
def test_bad_files(text: str, naming: str, tmp_path: Path) -> None:
    """A file is read strictly."""
    file = tmp_path / "mount.toml"
    file.write_text(text)
    assert str(file) in refused(BASE | {"config": str(file)}, naming=naming).message


def test_unreadable_files(tmp_path: Path) -> None:
    """A missing file, a directory and bytes that are not UTF-8 are told apart."""
    refused(BASE | {"config": str(tmp_path / "none.toml")}, naming="No such file")
    refused(BASE | {"config": str(tmp_path)}, naming="Is a directory")
    (tmp_path / "latin1.toml").write_bytes(b'profile = "\xe9"')
    refused(BASE | {"config": str(tmp_path / "latin1.toml")}, naming="utf-8")


def test_numbers_in_files(tmp_path: Path) -> None:
    """TOML's own numbers mean plain bytes, seconds and counts."""
    file = tmp_path / "mount.toml"
    file.write_text("cache-size = 20_000_000\nmetadata-ttl = 2.5\nworkers = 3\n")
    config = resolve(BASE | {"config": str(file)})
    assert (config.cache_size_bytes, config.metadata_ttl_s, config.worker_processes) == (20_000_000, 2.5, 3)


def test_what_is_missing() -> None:
    """Without a bucket or a mountpoint the ways to give one are named."""
    refused({"mountpoint": "/mnt"}, naming="no bucket", hint="S3PREFETCHFS_BUCKET")
    refused({"bucket": "my-bucket"}, naming="no mountpoint", hint="S3PREFETCHFS_MOUNTPOINT")


# --- Bucket and prefix ---


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("my-bucket", ("my-bucket", "")),
        ("my-bucket/", ("my-bucket", "")),
        ("my-bucket/a/b", ("my-bucket", "a/b/")),
        ("my-bucket/a/b/", ("my-bucket", "a/b/")),
        ("s3://my-bucket/a", ("my-bucket", "a/")),
        ("s3://My_Old.bucket", ("My_Old.bucket", "")),
        ("my-bucket//a", ("my-bucket", "/a/")),
        ("my-bucket/s3://x", ("my-bucket", "s3://x/")),
        ("my-bucket/données 1", ("my-bucket", "données 1/")),
    ],
)
def test_source(text: str, source: tuple[str, str]) -> None:
    """Bucket and prefix in each form; the prefix is taken literally, and ends in a slash."""
    assert parse_source(text) == source


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/a",
        "s3://",
        "ab",
        "a..b",
        "my bucket",
        "gs://my-bucket",
        "https://my-bucket.s3.amazonaws.com",
        "arn:aws:s3:us-west-2:1:accesspoint/x",
        "b" * 256,
        "my-bucket/" + "x" * 1025,
        "my-bucket/\udcff",
        "my-bucket/\0",
    ],
)
def test_bad_sources(text: str) -> None:
    """What cannot be a bucket, or a prefix of keys, is refused before anybody is asked."""
    refused(BASE | {"bucket": text}, naming="BUCKET: ")


# --- Combinations ---


def test_workers_and_connections() -> None:
    """More workers than connections is a contradiction, unless the workers are only our default."""
    refused(BASE | {"workers": "4", "max-connections": "3"}, naming="--workers is 4, more than --max-connections, 3")
    assert resolve(BASE | {"max-connections": "1"}).worker_processes == 1


def test_contradictions() -> None:
    """Both sides are named, each as it was written."""
    refused(
        BASE | {"no-sign-request": "true"},
        ("requester_pays",),
        naming="-o requester_pays and --no-sign-request contradict",
    )
    for endpoint in ("http://127.0.0.1:9000", "http://[::1]:9000"):
        refused(BASE | {"endpoint-url": endpoint, "addressing-style": "virtual"}, naming="--addressing-style")
    refused(BASE | {"cache-dir": "/mnt/data/cache"}, naming="--cache-dir")
    refused(BASE | {"cache-dir": "/mnt/data"}, naming="--cache-dir")
    refused(BASE | {"cache-dir": "/mnt"}, naming="--cache-dir")
    refused(BASE | {"log-file": "/mnt/data/log"}, naming="--log-file")


def test_anonymous_with_a_profile_is_fine() -> None:
    """A profile also brings a region and an endpoint."""
    assert not resolve(BASE | {"no-sign-request": "true", "profile": "lab"}).sign_requests


# --- Identity ---


def test_endpoints_are_spelled_one_way() -> None:
    """Case and a last slash do not make another endpoint; port, scheme and path do."""

    def identity(url: str) -> str:
        return resolve(BASE | {"endpoint-url": url}).identity

    assert identity("http://MinIO:9000/") == identity("http://minio:9000")
    others = ["http://minio:9000", "https://minio:9000", "http://minio", "http://minio:9000/s3", "http://[::1]:9000"]
    assert len({identity(url) for url in others}) == len(others)


def test_identity_separates_sources() -> None:
    """Endpoint, bucket and prefix each make another directory, whatever characters they hold."""
    sources = [("my-bucket", ""), ("my-bucket", "a"), ("my-bucket", "a/b"), ("my-bucket.a", "b"), ("other", "a")]
    identities = {resolve(BASE | {"bucket": f"{bucket}/{prefix}"}).identity for bucket, prefix in sources}
    assert len(identities) == len(sources)
    for identity in identities:
        assert "/" not in identity
        assert len(identity.rpartition("-")[2]) == 12
