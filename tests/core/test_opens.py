"""The record of what a mount has seen opened."""

from __future__ import annotations

import json

from s3prefetchfs.core.opens import OpensRecord


def test_a_file_that_comes_again_begins_an_epoch() -> None:
    """Each file has one number; within an epoch none comes twice; a frozen record stays as it is."""
    record = OpensRecord()
    for path in "bacab":
        record.add(path)
    frozen = record.freeze()
    record.add("new")
    document = json.loads(frozen.to_json())
    assert document["files"] == ["b", "a", "c"]
    assert document["epochs"] == [[0, 1, 2], [1, 0]]
    assert (document["version"], document["order"], document["truncated"]) == (1, "strict", False)


def test_it_ends_at_its_limit_and_says_so() -> None:
    """Opens beyond the limit are not in it."""
    record = OpensRecord(max_opens=3)
    for path in ("a", "b", "a"):
        record.add(path)
    assert json.loads(record.freeze().to_json())["truncated"] is False
    record.add("c")
    document = json.loads(record.freeze().to_json())
    assert (document["files"], document["epochs"], document["truncated"]) == (["a", "b"], [[0, 1], [0]], True)


def test_many_opens_and_strange_names() -> None:
    """What is written in pieces is one list; any name comes back as it was."""
    record = OpensRecord()
    paths = [f'{number}-é\n"\\' for number in range(25_000)]
    for path in paths + paths:
        record.add(path)
    document = json.loads(record.freeze().to_json())
    assert document["files"] == paths
    assert document["epochs"] == [list(range(25_000))] * 2
