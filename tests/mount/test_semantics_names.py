"""Which keys appear under which names: docs on the namespace, sentence by sentence."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.mount.conftest import Mount
from tests.mount.mounted import Mounted
from tests.servers import StandInBucket

ODD_NAMES = [
    "plain",
    "ctl\x01",
    "x\x13y",
    "cr\rname",
    "lf\nname",
    "tab\tname",
    " blank ",
    "sp ace+plus%41 é?#&",
    "pct%41",
    "%2F",
    "%",
    "a+b",
    "Case",
    "case",
    "\u00e9",  # é, composed
    "e\u0301",  # é, decomposed
    "back\\slash",
    "quo\"te's",
    "<&amp;>",
    "...",
    ".hidden",
    "~",
    "\u65e5\u672c" * 42 + "xyz",  # 255 bytes
    "n" * 255,
]
"""Names that can be paths, however odd."""

HIDDEN_KEYS = [
    "odd/a//b",
    "odd/./x",
    "odd/../y",
    "odd/" + "n" * 256,
    "odd/" + "n" * 300 + "/below",
    "odd/" + "\u65e5" * 100,  # 300 bytes
]
"""Keys that cannot."""


@pytest.fixture(scope="module")
def mnt(module_bucket: StandInBucket, module_mount: Mount) -> Mounted:
    bucket = module_bucket
    for name in ODD_NAMES:
        bucket.put(f"odd/{name}", name.encode())
    for key in (*HIDDEN_KEYS, "/lead", "../up", "./here"):
        bucket.put(key, b"hidden")
    for key in ("both/out", "both/out/", "both/out/x", "both/out.txt", "both/out-x"):
        bucket.put(key, b"" if key.endswith("/") else key.encode())
    bucket.put("markers/empty/", b"")
    bucket.put("markers/full/", b"ten bytes.")
    bucket.put("markers/full/x", b"x")
    bucket.put("implicit/deep/er/x", b"implicit")
    bucket.put("a.b/c.d/x", b"dots")
    for odd in ("list_repeat_token", "list_truncated_no_token"):
        bucket.synthesize(f"{odd}/k", 10, 1)
    return module_mount(bucket, "--workers", "1")


@pytest.fixture(scope="module")
def forgetful(mnt: Mounted, module_bucket: StandInBucket, module_mount: Mount) -> Mounted:
    """The same bucket, mounted so that S3 is asked each time."""
    return module_mount(module_bucket, "--workers", "1", "--metadata-ttl", "0")


def test_any_key_that_can_be_a_path_works(mnt: Mounted) -> None:
    """Names are bytes: control characters, CR, LF, `%`, `+`, NFC beside NFD; each file is itself."""
    assert sorted(os.listdir(mnt / "odd")) == sorted([*ODD_NAMES, "a"])
    for name in ODD_NAMES:
        assert (mnt / "odd" / name).read_bytes() == name.encode()


def test_any_key_that_can_be_a_path_is_found_unlisted(forgetful: Mounted, module_bucket: StandInBucket) -> None:
    """The same names, looked up in a directory that is not listed."""
    for name in ODD_NAMES:
        assert (forgetful / "odd" / name).read_bytes() == name.encode()
    assert not module_bucket.directory_lists()


@pytest.mark.parametrize("which", ["mnt", "forgetful"])
def test_keys_that_cannot_be_paths_are_hidden(request: pytest.FixtureRequest, which: str) -> None:
    """An empty component, `.`, `..`, one over 255 bytes, a leading slash: not listed, and not found by name."""
    mnt: Mounted = request.getfixturevalue(which)
    assert os.listdir(mnt / "odd/a") == []
    assert not {".", "..", "", "lead", "up", "here"} & set(os.listdir(mnt.path))
    for name in ("n" * 256, "n" * 300, "\u65e5" * 100):
        with pytest.raises(OSError, match=os.strerror(errno.ENOENT)):
            os.stat(mnt / "odd" / name)
    assert (mnt / "odd/..").samefile(mnt.path)
    assert not (mnt / "lead").exists()
    assert not (mnt / "up").exists()


def test_a_key_with_a_nul_is_hidden(forgetful: Mounted, module_bucket: StandInBucket) -> None:
    """A NUL cannot be in a path; the names beside it are unaffected."""
    module_bucket.put("nul/good", b"good")
    module_bucket.configure(list_inject=["nul/not\0this"])
    assert os.listdir(forgetful / "nul") == ["good"]


def test_hidden_keys_are_counted(mnt: Mounted) -> None:
    """Status counts the hidden keys of what is listed, each once."""
    for directory in ("", "odd", "odd/a", "markers/full"):
        os.listdir(mnt / directory)
    of_root, of_markers = 3, 1
    assert mnt.status()["namespace"]["hidden_keys"] == len(HIDDEN_KEYS) + of_root + of_markers


def test_hidden_keys_are_named_in_the_log_once(forgetful: Mounted) -> None:
    """However often the directory is listed."""
    for _ in range(3):
        os.listdir(forgetful / "odd")
        os.listdir(forgetful / "odd/a")
    lines = [line for line in forgetful.log().splitlines() if "not reachable" in line and "odd/" in line]
    assert len(lines) == len(set(lines)) == len(HIDDEN_KEYS)
    assert all(" WARNING " in line for line in lines)


@pytest.mark.parametrize("which", ["forgetful", "mnt"])
def test_a_directory_wins_over_a_file(request: pytest.FixtureRequest, which: str) -> None:
    """Of a key and a prefix with one name the directory is seen: by name, by a path through it, in listings."""
    mnt: Mounted = request.getfixturevalue(which)
    assert (mnt / "both/out").is_dir()
    assert (mnt / "both/out/x").read_bytes() == b"both/out/x"
    assert sorted(os.listdir(mnt / "both")) == ["out", "out-x", "out.txt"]
    assert os.listdir(mnt / "both/out") == ["x"]
    assert (mnt / "both/out.txt").read_bytes() == b"both/out.txt"


def test_the_shadowed_key_is_counted(mnt: Mounted) -> None:
    """In status, and in the log once."""
    os.listdir(mnt / "both")
    assert mnt.status()["namespace"]["shadowed_keys"] == 1
    assert mnt.log().count("key b'both/out' is not reachable: a directory has the same name") == 1


def test_a_file_whose_children_the_server_hides(forgetful: Mounted, module_bucket: StandInBucket) -> None:
    """If listings show `file_1` and not what is below it, then it is a file, and a path through it ENOTDIR."""
    module_bucket.put("hide/file_1", b"file")
    module_bucket.put("hide/file_1/file_2", b"hidden by the server")
    module_bucket.configure(list_hide=["hide/file_1/*"])
    assert (forgetful / "hide/file_1").read_bytes() == b"file"
    with pytest.raises(NotADirectoryError):
        (forgetful / "hide/file_1/file_2").read_bytes()


def test_markers_make_directories(mnt: Mounted) -> None:
    """A zero-byte `dir/` makes an empty directory without a nameless child; one with data too, and the log says so."""
    assert sorted(os.listdir(mnt / "markers")) == ["empty", "full"]
    assert (mnt / "markers/empty").is_dir()
    assert os.listdir(mnt / "markers/empty") == []
    assert os.listdir(mnt / "markers/full") == ["x"]
    assert mnt.log().count("key b'markers/full/' is not reachable") == 1


def test_prefixes_are_directories(mnt: Mounted) -> None:
    """Directories exist because keys are below them."""
    assert list(os.walk(mnt / "implicit")) == [
        (str(mnt / "implicit"), ["deep"], []),
        (str(mnt / "implicit/deep"), ["er"], []),
        (str(mnt / "implicit/deep/er"), [], ["x"]),
    ]


@pytest.mark.parametrize(
    ("source", "prefix", "file", "content"),
    [("{}/implicit", "implicit/", "deep/er/x", b"implicit"), ("s3://{}/a.b/c.d/", "a.b/c.d/", "x", b"dots")],
)
@pytest.mark.usefixtures("mnt")
def test_a_prefix_can_be_mounted(
    module_bucket: StandInBucket, mount: Mount, source: str, prefix: str, file: str, content: bytes
) -> None:
    """Mounting `bucket/prefix` shows what is below it, and asks for nothing else; it needs no marker."""
    part = mount(module_bucket, "--workers", "1", source=source.format(module_bucket.name))
    assert [Path(path) / name for path, _, names in os.walk(part.path) for name in names] == [part / file]
    assert (part / file).read_bytes() == content
    assert part.status()["prefix"] == prefix
    assert all(record.key.startswith(prefix) for record in module_bucket.log("LIST"))


@pytest.mark.parametrize("list_no_encode", [False, True])
def test_listings_are_decoded_once(forgetful: Mounted, module_bucket: StandInBucket, list_no_encode: bool) -> None:
    """URL-encoded keys are decoded if the answer says that it is encoded, and only then."""
    names = ["sp ace+plus%41 é?#&", "%252F", "a+b", "<&>"]
    for name in names:
        module_bucket.put(f"encoded/{name}", name.encode())
    module_bucket.configure(list_no_encode=list_no_encode)
    assert sorted(os.listdir(forgetful / "encoded")) == sorted(names)
    for name in names:
        assert (forgetful / "encoded" / name).read_bytes() == name.encode()


@pytest.mark.parametrize("odd", ["", "list_shuffle", "list_prefixes_first", "list_dup"])
@pytest.mark.parametrize("page_size", [1, 2, 1000])
def test_order_and_page_boundaries_are_not_trusted(
    forgetful: Mounted, module_bucket: StandInBucket, odd: str, page_size: int
) -> None:
    """Shuffled pages, prefixes before all objects, entries twice: every name comes out, and once."""
    for key in ("a", "a.txt", "a/b", "a-b/1", "a0", "b"):
        module_bucket.put(f"order/{key}", key.encode())
    module_bucket.configure(page_size=page_size, **({odd: True} if odd else {}))
    assert sorted(os.listdir(forgetful / "order")) == ["a", "a-b", "a.txt", "a0", "b"]
    assert (forgetful / "order/a/b").read_bytes() == b"a/b"


@pytest.mark.parametrize("odd", ["list_repeat_token", "list_truncated_no_token"])
def test_a_listing_without_progress_is_an_error(mnt: Mounted, module_bucket: StandInBucket, odd: str) -> None:
    """A repeated token, or none where more is promised: EIO and a log line; no loop, and no half listing."""
    os.stat(mnt / odd)
    module_bucket.configure(page_size=3, **{odd: True})
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        os.listdir(mnt / odd)
    assert f"cannot list b'{odd}/'" in mnt.log()
    assert len(module_bucket.directory_lists()) < 10
    module_bucket.configure(list_repeat_token=False, list_truncated_no_token=False)
    assert len(os.listdir(mnt / odd)) == 10


def test_a_listing_of_many_pages_is_complete(forgetful: Mounted, module_bucket: StandInBucket) -> None:
    """2,501 keys and a directory, on three pages."""
    module_bucket.synthesize("many/k", 2501, 1)
    module_bucket.put("many/0/x", b"")
    assert sorted(os.listdir(forgetful / "many")) == sorted([*(f"k{i:08d}" for i in range(2501)), "0"])
    assert len(module_bucket.directory_lists("many/")) == 3
