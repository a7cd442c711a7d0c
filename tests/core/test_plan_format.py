"""Plans in text and JSON: what they mean, what is said about broken ones, that they come back, big ones."""

from __future__ import annotations

import json
import random
import resource
import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from s3prefetchfs.core.plan import Epoch, Order, Plan, PlannedFile
from s3prefetchfs.core.plan_format import PIECE_BYTES, PlanError, check_bytes, parse, relative_path, to_json


def paths(plan: Plan, epoch: int = 0) -> list[str]:
    """What one epoch reads, in order."""
    return [plan.files[number].path for number in plan.epochs[epoch].files]


def make_epoch(files: Sequence[int], ranges: Sequence[tuple[int, int]] | None = None) -> Epoch:
    """An epoch of these; offset and length are flattened."""
    flat = None if ranges is None else memoryview(array("Q", [value for pair in ranges for value in pair]))
    return Epoch(memoryview(array("I", files)), flat)


# ---------------------------------------------------------------------------------------------------- text


def test_text() -> None:
    """Comments, blank lines, CRLF, a BOM and repeated lines."""
    plan = parse(b"\xef\xbb\xbf# first\r\n\r\nb/2\r\n  a 1 \n\t# no\nb/2\nd\xc3\xa9", "p")
    assert (plan.name, plan.order, plan.interleave, len(plan.epochs)) == ("p", Order.STRICT, 1, 1)
    assert [file.path for file in plan.files] == ["b/2", "a 1", "d\u00e9"]
    assert paths(plan) == ["b/2", "a 1", "b/2", "d\u00e9"]


@pytest.mark.parametrize(
    ("line", "path", "is_pattern"),
    [
        ("a/*.x", "a/*.x", True),
        ("a?", "a?", True),
        ("[ab]", "[ab]", True),
        ("a]", "a]", False),
        ("\\a*", "a*", False),
        ("\\#a", "#a", False),
        ("\\\\a", "\\a", False),
        ("a\\*", "a\\*", True),
        ("a#b", "a#b", False),
        ("s3://bucket/*", "s3://bucket/*", True),
    ],
)
def test_patterns_and_backslashes(line: str, path: str, is_pattern: bool) -> None:
    """A backslash in front takes the rest as it is; elsewhere it is part of the path."""
    assert parse(line.encode(), "p").files == [PlannedFile(path, is_pattern=is_pattern)]


def test_a_pattern_and_a_file_of_that_name() -> None:
    """They are two."""
    assert len(parse(b"a*\n\\a*\na*\n", "p").files) == 2


def test_text_that_begins_with_a_bracket() -> None:
    """A pattern may; only what is a list as a whole is taken for JSON."""
    for content in (b"[ab]/x\n", b"[[]x]\n", b'["a]/x\n'):
        assert parse(content, "p").files[0].is_pattern


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"# only\n\n", "empty"),
        (b"a\nb\n\xe9t\xe9\n", "line 3: byte 1 is not UTF-8"),
        (b"a\n\\\n", "line 2: nothing follows the backslash"),
        (b"a\n" + b"x" * 20_000, "line 2: longer than"),
        (b'["a", "b"]', "JSON list: write one path a line"),
        (b'\n[\n "a",\n "b"\n]\n', "JSON list: write one path a line"),
        (b'[{"path": "a", "size": 1}]\n', "JSON list: write one path a line"),
    ],
)
def test_broken_text(content: bytes, message: str) -> None:
    """The message names the line."""
    with pytest.raises(PlanError, match=message):
        parse(content, "p")


# ---------------------------------------------------------------------------------------------------- JSON


def test_json() -> None:
    """All there is in one; its name does not count, that of the submission does."""
    document = {
        "version": 1,
        "epochs": [[1, [0, 5, 10], 1], [0]],
        "name": "other",
        "order": "any",
        "interleave": 16,
        "files": ["a*", {"path": "b", "size": 7, "etag": "e-2"}],
        "truncated": False,
    }
    plan = parse(json.dumps(document, indent=2).encode(), "p")
    assert plan == Plan(
        "p",
        Order.ANY,
        16,
        [PlannedFile("a*"), PlannedFile("b", 7, "e-2")],
        (make_epoch([1, 0, 1], [(0, 0), (5, 10), (0, 0)]), make_epoch([0])),
    )


def test_a_number_of_epochs() -> None:
    """They share their entries: the files as they are listed. One is what there is without a number."""
    plan = parse(b'{"version":1,"files":["b","a"],"epochs":90}', "p")
    assert len(plan.epochs) == 90
    assert all(epoch is plan.epochs[0] for epoch in plan.epochs)
    assert paths(plan) == ["b", "a"]
    assert len(parse(b' {"version":1,"files":["b"]}', "p").epochs) == 1


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ('"version": 2', '"version" is 2'),
        ('"version": 1.5', "line 2, .*whole number"),
        ('"order": "random"', "\"order\" is 'random'"),
        ('"interleave": 0', '"interleave" is 0'),
        ('"interleave": 99999999', '"interleave" is 99999999'),
        ('"interleave": true', "'true}' is not a whole number"),
        ('"epoch": 3', "line 2, the plan: nothing is called 'epoch'"),
        ('"epochs": 0', '"epochs" is 0'),
        ('"epochs": -3', '"epochs" is -3'),
        ('"epochs": 1000000000', '"epochs" is 1000000000'),
        ('"epochs": []', '"epochs" is empty'),
        ('"epochs": [[0], []]', "epoch 1: it has no entries"),
        ('"epochs": [0]', "epoch 0: '0]}' is not a list"),
        ('"epochs": [[0, 1], [1, 2]]', "epoch 1, entry 1: there is no file 2"),
        ('"epochs": [[0, -1]]', "epoch 0, entry 1: there is no file -1"),
        ('"epochs": [[0, 4294967296]]', "epoch 0, entry 1: there is no file 4294967296"),
        ('"epochs": [[0, 1, "a"]]', "epoch 0, entry 2: "),
        ('"epochs": [[0, 1,, 1]]', "epoch 0, entry 2: "),
        ('"epochs": [[0, 01, 1, 1]]', "epoch 0, entry 1: "),
        ('"epochs": [[0, 1.0]]', "epoch 0, entry 1: "),
        ('"epochs": [[0, [1, 2]]]', "epoch 0, entry 1: .*offset, length"),
        ('"epochs": [[0, [1, -1, 5]]]', "epoch 0, entry 1: 5 bytes at -1"),
        ('"epochs": [[0, [0, 5, 0]]]', "epoch 0, entry 1: 0 bytes at 5"),
        ('"epochs": [[0, [0, 9223372036854775807, 1]]]', "epoch 0, entry 1: "),
        ('"epochs": [[0, [1, 0, 8]]]', "epoch 0, entry 1: the range ends at 8, file 1 at 7"),
        ('"epochs": [[0, [2, 0, 8]]]', "epoch 0, entry 1: there is no file 2"),
        ('"truncated": 1', "true or false"),
        ('"files": ["c"]', '"files" is there twice'),
    ],
)
def test_broken_fields(field: str, message: str) -> None:
    """The message names the entry, and the line where it is a matter of lines."""
    version = "" if "version" in field else ', "version": 1'
    content = f'{{"files": ["a", {{"path": "b", "size": 7}}]{version},\n{field}}}'
    with pytest.raises(PlanError, match=message):
        parse(content.encode(), "p")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (b'["a", "b", "a"]', "file 2: a is already file 0"),
        (b'["a", {"path": "a"}]', "file 1: a is already file 0"),
        (b'["a", ""]', "file 1: its path is empty"),
        (b'["a", {"size": 3}]', "file 1: its path is empty"),
        (b'["a", {"path": "b", "size": -1}]', 'file 1: "size" is -1'),
        (b'["a", {"path": "b", "etag": "\\"x\\""}]', 'file 1: "etag"'),
        (b'["a", {"path": "b", "etag": "\\r\\nX-Evil: 1"}]', 'file 1: "etag"'),
        (b'["a", {"path": "b", "sise": 1}]', "file 1: nothing is called 'sise'"),
        (b'["a", 5]', "file 1: .*string"),
        (b'["a",\n "\xe9"]', "line 2, file 1: .*UTF-8"),
        (b'["a", "\\ud800"]', "file 1: .*UTF-8"),
        (b'["a", "\\x"]', "file 1: .*escapes"),
        (b'["a" "b"]', "file 0: .*comma"),
        (b'["a",]', "file 1: .*string"),
        (b"[]", "no files"),
        (b"[", "file 0: '}' is not a string"),
        (b"[" * 100_000, "file 0"),
    ],
)
def test_broken_files(files: bytes, message: str) -> None:
    """The message names the file by its number."""
    with pytest.raises(PlanError, match=message):
        parse(b'{"version": 1, "files": ' + files + b"}", "p")


@pytest.mark.parametrize("content", [b"{", b"{}", b'{"files": ["a"]}', b'{"version":1,"files":["a"]} x'])
def test_no_plan(content: bytes) -> None:
    """Something is missing, or too much."""
    with pytest.raises(PlanError):
        parse(content, "p")


def test_what_cannot_be_counted() -> None:
    """An epoch of more bytes than there are offsets for is refused, and the file is named."""
    plan = parse(b'{"version": 1, "files": ["a", "b"], "epochs": 2}', "plan")
    check_bytes(plan, [2**40, 2**50])
    with pytest.raises(PlanError, match=r"epoch 0 reads more than 1 EiB.*\bb with 1152921504606846976 bytes"):
        check_bytes(plan, [1, 2**60])


@pytest.mark.parametrize("change", [{"interleave": 65_537}, {"name": "\udcff"}, {"name": 20_000 * "n"}])
def test_what_could_not_be_read_back_is_not_written(change: dict[str, Any]) -> None:
    """A plan beyond a limit is refused by whoever makes it."""
    plan = parse(b"a\n", "plan")
    with pytest.raises(PlanError):
        to_json(replace(plan, **change))


def test_a_pattern_is_not_for_json() -> None:
    """It would come back as a file."""
    with pytest.raises(PlanError, match="pattern"):
        to_json(parse(b"a*", "p"))


# ----------------------------------------------------------------------------------------------- both ways


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans that JSON can say; sizes are such that every range fits."""
    names = draw(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1, unique=True))
    sizes = st.none() | st.integers(2**50, 2**60)
    etags = st.none() | st.text("0123456789abcdef-", min_size=1)
    files = [PlannedFile(name, draw(sizes), draw(etags)) for name in names]
    whole = st.just((0, 0))
    ranges = st.tuples(st.integers(0, 2**49), st.integers(1, 2**49))
    entries = st.tuples(st.integers(0, len(files) - 1), draw(st.sampled_from([whole, whole | ranges])))
    epochs = []
    for _ in range(draw(st.integers(1, 4))):
        epoch = draw(st.lists(entries, min_size=1))
        pairs = [pair for _, pair in epoch]
        epochs.append(
            make_epoch([number for number, _ in epoch], pairs if any(length for _, length in pairs) else None)
        )
    if draw(st.booleans()):
        epochs = [make_epoch(range(len(files)))] * len(epochs)
    return Plan(draw(st.text()), draw(st.sampled_from(Order)), draw(st.integers(1, 1000)), files, tuple(epochs))


@given(plans())
def test_round_trip(plan: Plan) -> None:
    """What is written down is read as the same, by any JSON parser too."""
    content = to_json(plan)
    found = parse(content, plan.name)
    assert found == plan
    for epoch in found.epochs:
        assert (epoch.files.format, epoch.ranges and epoch.ranges.format) in (("I", None), ("I", "Q"))
    assert json.loads(content)["name"] == plan.name
    assert parse(json.dumps(json.loads(content), indent=1, ensure_ascii=False).encode("utf-8"), plan.name) == plan


def test_round_trip_over_pieces() -> None:
    """Epochs longer than what is decoded at once: of numbers, of ranges, of numbers with ranges at odd places."""
    numbers = random.Random(1).choices(range(1000), k=PIECE_BYTES)
    some = [(index, 5) if index % 20_011 == 7 else (0, 0) for index in range(len(numbers))]
    every = [(index, index + 1) for index in range(len(numbers))]
    files = [PlannedFile(str(number)) for number in range(1000)]
    epochs = (make_epoch(numbers), make_epoch(numbers, some), make_epoch(numbers, every))
    plan = Plan("p", Order.STRICT, 1, files, epochs)
    assert parse(to_json(plan), "p") == plan


@pytest.mark.parametrize(
    "entry", ["4294967296", "01", "[1, 5, 0]", "[4294967296, 0, 1]", "[0, 9223372036854775807, 1]", ""]
)
@pytest.mark.parametrize("around", ["0", "[0, 1, 2]"])
def test_the_odd_one_of_many(entry: str, around: str) -> None:
    """An entry that is wrong is named wherever it is in what is decoded at once."""
    entries = [around] * 9000
    entries[8765] = entry
    content = f'{{"version": 1, "files": ["a"], "epochs": [[{",".join(entries)}]]}}'
    with pytest.raises(PlanError, match="epoch 0, entry 8765: "):
        parse(content.encode(), "p")


GOOD = to_json(
    Plan("p", Order.ANY, 2, [PlannedFile("a", 9, "e"), PlannedFile("\u00e9")], (make_epoch([1, 0], [(0, 0), (1, 2)]),))
)


@given(st.binary() | st.binary().map(b"{".__add__))
@example(b"{" + b"9" * 9999)
def test_noise(content: bytes) -> None:
    """Anything is a plan or a PlanError."""
    try:
        plan = parse(content, "p")
    except PlanError:
        return
    assert all(len(epoch.files) for epoch in plan.epochs)


@given(
    st.integers(0, len(GOOD)), st.integers(0, 3), st.binary(max_size=4) | st.sampled_from(list(b'[]{}",:0-')).map(chr)
)
def test_a_damaged_plan(at: int, cut: int, noise: bytes | str) -> None:
    """Neither is a damaged plan anything else, nor is it taken where JSON does not take it."""
    content = GOOD[:at] + (noise.encode() if isinstance(noise, str) else noise) + GOOD[at + cut :]
    try:
        plan = parse(content, "p")
    except PlanError:
        return
    if content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        json.loads(content.decode("utf-8-sig"))
    assert plan.files


# ---------------------------------------------------------------------------------------------------- paths


@pytest.mark.parametrize("path", ["a/b", "/mnt/data/a/b", "s3://bucket/pre/a/b"])
def test_paths(path: str) -> None:
    """Three ways to name a file."""
    assert relative_path(path, "bucket", "pre/", "/mnt/data") == "a/b"


@pytest.mark.parametrize(
    "path",
    ["/mnt/database/a", "/mnt/data", "s3://bucket/a", "s3://bucket2/pre/a", "../a", "a//b", "./a", "a/", "/mnt/data/"],
)
def test_paths_elsewhere(path: str) -> None:
    """Not in this mount, or no way to write a file's path."""
    with pytest.raises(PlanError):
        relative_path(path, "bucket", "pre/", "/mnt/data")


# ------------------------------------------------------------------------------------------------- big plan


def test_a_big_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """100,000 files in 90 epochs, each in an order of its own: 20 s, 1 GiB, and nothing decoded but small pieces."""
    numbers = array("I", range(100_000))
    random.Random(1).shuffle(numbers)
    epochs = tuple(Epoch(memoryview(numbers[turn:] + numbers[:turn])) for turn in range(90))
    files = [PlannedFile(f"train/part-{number:06d}.tfrecord") for number in range(100_000)]
    plan = Plan("p", Order.STRICT, 16, files, epochs)
    content = to_json(plan)
    lengths: set[int] = set()
    decode = json.loads

    def loads(piece: bytes) -> object:
        lengths.add(len(piece))
        return decode(piece)

    monkeypatch.setattr(json, "loads", loads)
    rss_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start_s = time.process_time()
    found = parse(content, "p")
    assert time.process_time() - start_s < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - rss_kib < 1 << 20
    assert PIECE_BYTES // 2 < max(lengths) <= PIECE_BYTES + 2
    assert found == plan
