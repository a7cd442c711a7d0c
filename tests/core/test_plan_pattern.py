"""Patterns of a text plan, against a slow matcher of whole paths."""

from __future__ import annotations

import fnmatch
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3prefetchfs.core.plan_pattern import PathPattern

PATHS = ["/".join(parts) for depth in (1, 2, 3) for parts in product(("a", "ab", "b.x"), repeat=depth)]


def matched(pattern: str, paths: list[str] = PATHS) -> list[str]:
    """The paths that a walk down finds."""
    walk = PathPattern(pattern)
    found = []
    for path in paths:
        *directories, name = path.split("/")
        place = walk.start
        for directory in directories:
            if (only := walk.only_name(place)) is not None and only != directory:
                place = frozenset()
                break
            place = walk.below(place, directory)
        if walk.takes(place, name):
            found.append(path)
    return found


def slowly(parts: list[str], names: list[str]) -> bool:
    """Whether the components match the names, by trying everything."""
    if not parts:
        return not names
    if parts[0] == "**":
        if len(parts) == 1:
            return bool(names)
        return any(slowly(parts[1:], names[taken:]) for taken in range(len(names) + 1))
    return bool(names) and fnmatch.fnmatchcase(names[0], parts[0]) and slowly(parts[1:], names[1:])


@given(st.lists(st.sampled_from(["a", "ab", "*", "?", "a*", "*.x", "[ab]", "**"]), min_size=1, max_size=4))
def test_as_the_slow_matcher(parts: list[str]) -> None:
    """A walk finds exactly the files that match."""
    assert matched("/".join(parts)) == [path for path in PATHS if slowly(parts, path.split("/"))]


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("train/*.tfrecord", "train/a.tfrecord", True),
        ("train/*.tfrecord", "train/deep/a.tfrecord", False),
        ("**/*.tfrecord", "a.tfrecord", True),
        ("**/*.tfrecord", "x/y/z/a.tfrecord", True),
        ("train/**", "train/x/y", True),
        ("train/**", "train", False),
        ("*", ".hidden\n", True),
        ("[!a]*", "b", True),
    ],
)
def test_examples(pattern: str, path: str, matches: bool) -> None:
    """As people read them."""
    assert bool(matched(pattern, [path])) == matches


def test_what_need_not_be_listed() -> None:
    """The directories before the first pattern are known by name; the last component is a file's."""
    walk = PathPattern("a/b/*.x")
    place = walk.below(walk.start, "a")
    assert (walk.only_name(walk.start), walk.only_name(place)) == ("a", "b")
    assert walk.only_name(walk.below(place, "b")) is None
    assert PathPattern("**/a").only_name(PathPattern("**/a").start) is None
