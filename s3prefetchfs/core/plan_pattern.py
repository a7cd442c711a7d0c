"""Globs of a text plan: `train/*.tfrecord`. Pure: the walk through the directories is `resolution.py`'s.

A pattern is a row of components. `*`, `?` and `[...]` match within one (`fnmatch`), so they never cross a slash; a
component `**` stands for any directories, none included, and as the last one for every file below. Where a walk
stands in the row is a set of component numbers, because `**` may have ended or not: no path is matched twice, and no
pattern takes longer than its components times the names there are.
"""

from __future__ import annotations

import fnmatch
import re

_ANY_DIRECTORIES = "**"

Place = frozenset[int]
"""The components that the next name may match."""


class PathPattern:
    """See the module's docstring.

    Attributes:
        start: the place at the root of the mount.
    """

    def __init__(self, pattern: str) -> None:
        self._parts = pattern.split("/")
        self._matches = [re.compile(fnmatch.translate(part)).match for part in self._parts]
        self.start = self._with_none({0})

    def only_name(self, place: Place) -> str | None:
        """The one name of a directory that leads on from here, if there is just one: then there is nothing to list."""
        if len(place) != 1:
            return None
        (number,) = place
        part = self._parts[number]
        return part if number < len(self._parts) - 1 and not re.search(r"[*?\[]", part) else None

    def below(self, place: Place, name: str) -> Place:
        """The place in the directory `name` of the one at `place`; empty if nothing there can match."""
        further = {number for number in place if self._parts[number] == _ANY_DIRECTORIES}
        last = len(self._parts) - 1
        further |= {number + 1 for number in place if number < last and self._is_match(number, name)}
        return self._with_none(further)

    def takes(self, place: Place, name: str) -> bool:
        """Whether the file `name` in the directory at `place` matches."""
        last = len(self._parts) - 1
        return last in place and (self._parts[last] == _ANY_DIRECTORIES or self._is_match(last, name))

    def matches(self, path: str) -> bool:
        """Whether a path, from the root, matches."""
        *directories, name = path.split("/")
        place = self.start
        for directory in directories:
            place = self.below(place, directory)
        return self.takes(place, name)

    def _is_match(self, number: int, name: str) -> bool:
        return self._parts[number] != _ANY_DIRECTORIES and self._matches[number](name) is not None

    def _with_none(self, place: set[int]) -> Place:
        """With what follows a `**` that stands for no directory."""
        reached = set(place)
        for number in range(len(self._parts) - 1):
            if number in reached and self._parts[number] == _ANY_DIRECTORIES:
                reached.add(number + 1)
        return frozenset(reached)
