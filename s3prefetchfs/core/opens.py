"""What a mount has seen opened, in the form of a plan: the raw material of `s3prefetchfs plan record`. Pure.

Each file has one number. An epoch goes on until a file of it is opened again. Memory is bounded: when MAX_OPENS opens
are recorded the record is complete, what comes after is not in it, and it says so (`truncated`).
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator

MAX_OPENS = 1_000_000
"""Four bytes each, and about 200 for each file: a hundred epochs of ten thousand files, or ten of a hundred thousand.
A loader that opens more has told its order long before."""

_PIECE = 10_000
"""Entries encoded in one call, which keeps the interpreter for a few milliseconds."""


class OpensRecord:
    """See the module's docstring.

    Args:
        max_opens: after which it is complete.
    """

    def __init__(self, max_opens: int = MAX_OPENS) -> None:
        self._max_opens = max_opens
        self._opens = 0
        self._numbers: dict[str, int] = {}
        self._epochs: list[array[int]] = []
        self._in_epoch: set[int] = set()
        self._truncated = False

    def add(self, path: str) -> None:
        """A file was opened; its path is relative to the mountpoint."""
        if self._opens >= self._max_opens:
            self._truncated = True
            return
        self._opens += 1
        number = self._numbers.setdefault(path, len(self._numbers))
        if not self._epochs or number in self._in_epoch:
            self._epochs.append(array("I"))
            self._in_epoch.clear()
        self._in_epoch.add(number)
        self._epochs[-1].append(number)

    def freeze(self) -> FrozenRecord:
        """What is recorded so far, for another thread to write down."""
        epochs = [*self._epochs[:-1], *(epoch[:] for epoch in self._epochs[-1:])]  # only the last one still grows
        return FrozenRecord(list(self._numbers), epochs, self._truncated)


class FrozenRecord:
    """A record that no longer changes; `to_json` is slow for a long one."""

    def __init__(self, files: list[str], epochs: list[array[int]], truncated: bool) -> None:
        self._files = files
        self._epochs = epochs
        self._truncated = truncated

    def to_json(self) -> bytes:
        """A plan of version 1, with the field `truncated` besides; without opens it has neither files nor epochs."""
        head = {"version": 1, "name": "opens", "order": "strict", "interleave": 1, "truncated": self._truncated}
        pieces = [json.dumps(head)[:-1], ', "files": [', ",".join(_encoded(self._files)), '], "epochs": [']
        for number, epoch in enumerate(self._epochs):
            pieces += ["," if number else "", "[", ",".join(_encoded(epoch)), "]"]
        pieces.append("]}\n")
        return "".join(pieces).encode()


def _encoded(values: list[str] | array[int]) -> Iterator[str]:
    """The inside of a JSON list, in pieces."""
    for start in range(0, len(values), _PIECE):
        yield json.dumps(list(values[start : start + _PIECE]))[1:-1]
