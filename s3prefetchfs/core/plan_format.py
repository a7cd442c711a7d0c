"""The two ways to write a plan down: text, a path a line, and JSON. Pure; docs/plan.md is the specification.

A plan may have nine million entries and is parsed in a thread of a daemon that serves reads meanwhile. A call into C
keeps the interpreter until it returns, so there is none over the whole: bytes are looked at where they are, by regular
expressions of bounded length, and only pieces of PIECE_BYTES are decoded. Nothing is recursive, so no nesting is too
deep. Where an epoch is numbers only, a piece of it is decoded at once; whatever is odd about a piece is left to the
slower way, entry by entry, which can say what is wrong.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Iterator, Sequence

from s3prefetchfs.core.plan import Epoch, Order, Plan, PlannedFile

PIECE_BYTES = 65_536
"""What is decoded in one call: some 10,000 numbers, a millisecond or two."""

PATH_MAX_BYTES = 16_384
"""Of a line, or of a string in JSON: an S3 key is at most 1,024 bytes, of six characters each when they are escaped."""

EPOCHS_MAX = 100_000
INTERLEAVE_MAX = 65_536
NAME_MAX_CHARACTERS = PATH_MAX_BYTES // 12
"""Of the note in a plan: what is written with six bytes a character can be read back."""

OFFSET_MAX = 2**63 - 1
"""Offsets in files are signed (off_t)."""

EPOCH_MAX_BYTES = 2**60
"""What an epoch may read: positions on a plan's axis, which has some epochs, are signed, too."""

ENTRIES_MAX = 50_000_000
"""Of an epoch, when its patterns are replaced by what they match: 200 MB in memory."""

_BOM = b"\xef\xbb\xbf"
_BLANK = re.compile(rb"[ \t\r\n]{0,65536}")
_STRING = re.compile(rb'"(?:[^"\\\x00-\x1f]|\\.){0,16384}"')
_NUMBER = re.compile(rb"(?:0|-?[1-9][0-9]{0,19})(?![0-9.eE])")
_RANGE_FORM = rb"\[ *N *, *N *, *N *\]".replace(b" *", rb"[ \t\r\n]{0,99}")
_RANGE = re.compile(_RANGE_FORM.replace(b"N", rb"(0|-?[1-9][0-9]{0,19})"))
_RANGES = re.compile(
    rb"(?:%b[ \t\r\n]{0,99},[ \t\r\n]{0,99}){1,1000}" % _RANGE_FORM.replace(b"N", rb"(?:0|[1-9][0-9]{0,18})")
)
_NUMBERS = re.compile(rb"[0-9, \t\r\n]{1,%d}" % PIECE_BYTES)
_GLOB = re.compile(r"[*?\[]")
_JSON_LIST = re.compile(rb'\[[ \t\r\n]{0,99}["{]')


class PlanError(ValueError):
    """A plan that cannot be: the message names the line or entry and says what is wrong and what to do."""


def parse(content: bytes, name: str) -> Plan:
    """Read a plan, text or JSON, which begins with a brace.

    Args:
        name: of the plan. A name in the JSON is only a note: what a plan is called is up to who submits it.

    Raises:
        PlanError: see there.
    """
    start = len(_BOM) if content.startswith(_BOM) else 0
    start = _after_blanks(content, start)
    if content[start : start + 1] == b"{":
        return _Json(content, start, name).plan()
    if _JSON_LIST.match(content, start) and content[-PIECE_BYTES:].rstrip().endswith(b"]"):
        raise PlanError('this is a JSON list: write one path a line, or {"version": 1, "files": [...]} around the list')
    return _text(content, name)


def to_json(plan: Plan) -> bytes:
    """Write a plan down, compactly: `parse` gives back an equal one.

    Raises:
        PlanError: it has a pattern, which only text can say, or is beyond a limit, so that `parse` would refuse it.
    """
    if plan.interleave > INTERLEAVE_MAX:
        raise PlanError(f"it would read {plan.interleave:,} files at once: no more than {INTERLEAVE_MAX:,} can be")
    if len(plan.epochs) > EPOCHS_MAX:
        raise PlanError(f"it would have {len(plan.epochs):,} epochs: no more than {EPOCHS_MAX:,} can be")
    if len(plan.name) > NAME_MAX_CHARACTERS or any("\ud800" <= character <= "\udfff" for character in plan.name):
        raise PlanError(f"its name is not text, or has more than {NAME_MAX_CHARACTERS:,} characters")
    pieces = [
        f'{{"version":1,"name":{json.dumps(plan.name)},"order":"{plan.order.value}","interleave":{plan.interleave},'
        '"files":['
    ]
    for number, file in enumerate(plan.files):
        if file.is_pattern:
            raise PlanError(f"file {number}: {file.path} is a pattern: write it in a text plan, or name its files")
        fields = {"path": file.path, "size": file.size_bytes, "etag": file.etag}
        given = {key: value for key, value in fields.items() if value is not None}
        value = json.dumps(given if len(given) > 1 else file.path, separators=(",", ":"))
        pieces.append(f"{',' if number else ''}{value}")
    pieces.append('],"epochs":')
    in_order = _in_order(len(plan.files))
    if all(_is_same(epoch, in_order) for epoch in plan.epochs):
        pieces.append(str(len(plan.epochs)))
    else:
        for number, epoch in enumerate(plan.epochs):
            pieces.append(",[" if number else "[[")
            pieces += _entries(epoch)
            pieces.append("]")
        pieces.append("]")
    pieces.append("}\n")
    return "".join(pieces).encode()


def check_bytes(plan: Plan, sizes: Sequence[int]) -> None:
    """Whether what a plan reads can be counted.

    Args:
        sizes: of its files, in bytes.

    Raises:
        PlanError: an epoch reads more than EPOCH_MAX_BYTES.
    """
    largest_bytes = max(sizes, default=0)
    for number, epoch in enumerate(plan.epochs):
        if largest_bytes * len(epoch.files) <= EPOCH_MAX_BYTES:
            continue
        if sum(sizes[file] for file in epoch.files) > EPOCH_MAX_BYTES:
            path = plan.files[sizes.index(largest_bytes)].path
            raise PlanError(
                f"epoch {number} reads more than {EPOCH_MAX_BYTES >> 60} EiB: correct the sizes of its files, the"
                f" largest of which is {path} with {largest_bytes} bytes"
            )


def relative_path(path: str, bucket: str, prefix: str, mountpoint: str) -> str:
    """The path below the mountpoint of a path as plans have it: relative, absolute, or `s3://bucket/key`.

    Raises:
        PlanError: it is not in this mount.
    """
    if path.startswith("s3://"):
        root = f"s3://{bucket}/{prefix}"
    elif path.startswith("/"):
        root = mountpoint.rstrip("/") + "/"
    else:
        root = ""
    if not path.startswith(root):
        raise PlanError(f"{path} is not below {root}: write paths in this mount, or submit the plan to another one")
    relative = path[len(root) :]
    if any(part in ("", ".", "..") for part in relative.split("/")):
        raise PlanError(f"{path} is no path of a file: write it as find prints it, without //, . and .., or remove it")
    return relative


def _in_order(files: int) -> Epoch:
    return Epoch(memoryview(array("I", range(files))))


def _is_same(epoch: Epoch, other: Epoch) -> bool:
    if epoch is other:
        return True
    return (
        epoch.ranges is None
        and epoch.files.nbytes == other.files.nbytes
        and epoch.files.tobytes() == other.files.tobytes()
    )


def _entries(epoch: Epoch) -> Iterator[str]:
    """The inside of an epoch's JSON list, in pieces."""
    step = PIECE_BYTES // 8
    for start in range(0, len(epoch.files), step):
        numbers = epoch.files[start : start + step].tolist()
        if start:
            yield ","
        if epoch.ranges is None:
            yield ",".join(map(str, numbers))
        else:
            ranges = epoch.ranges[2 * start : 2 * (start + step)].tolist()
            yield ",".join(
                f"[{number},{offset},{length}]" if length else str(number)
                for number, offset, length in zip(numbers, ranges[::2], ranges[1::2], strict=True)
            )


def _after_blanks(content: bytes, at: int) -> int:
    while (found := _BLANK.match(content, at)) is not None and found.end() > at:
        at = found.end()
    return at


def _excerpt(content: bytes, at: int) -> str:
    """What is there, for a message: printable, on one line, short."""
    line = content[at : at + 30].partition(b"\n")[0].decode("utf-8", "replace").strip()
    return ascii(line) if line else "the end of the line" if at < len(content) else "the end of the file"


# ---------------------------------------------------------------------------------------------------- text


def _text(content: bytes, name: str) -> Plan:
    files: list[PlannedFile] = []
    numbers: dict[tuple[str, bool], int] = {}
    entries = array("I")
    for number, line in enumerate(_lines(content), 1):
        if len(line) > PATH_MAX_BYTES:
            raise PlanError(f"line {number}: longer than {PATH_MAX_BYTES:,} bytes: write one path a line")
        try:
            text = line.decode().strip(" \t\r")
        except UnicodeDecodeError as error:
            raise PlanError(f"line {number}: byte {error.start + 1} is not UTF-8: save the plan as UTF-8") from None
        if not text or text.startswith("#"):
            continue
        is_literal = text.startswith("\\")
        path = text[1:] if is_literal else text
        if not path:
            raise PlanError(f"line {number}: nothing follows the backslash: write a path after it, or two backslashes")
        is_pattern = not is_literal and _GLOB.search(path) is not None
        file_number = numbers.setdefault((path, is_pattern), len(files))
        if file_number == len(files):
            files.append(PlannedFile(path, is_pattern=is_pattern))
        entries.append(file_number)
    if not files:
        raise PlanError("the plan is empty: write one path a line, in the order of reading")
    return Plan(name, Order.STRICT, 1, files, (Epoch(memoryview(entries)),))


def _lines(content: bytes) -> Iterator[bytes]:
    """Without their ends; of a line that is too long only so much that it can be told."""
    at = len(_BOM) if content.startswith(_BOM) else 0
    while at < len(content):
        end = content.find(b"\n", at)
        end = len(content) if end < 0 else end
        yield content[at : min(end, at + PATH_MAX_BYTES + 1)]
        at = end + 1


# ---------------------------------------------------------------------------------------------------- JSON


class _Json:
    """A plan in JSON, read from front to back: the methods take what is at `_at` and leave it behind that."""

    def __init__(self, content: bytes, start: int, name: str) -> None:
        self._content = content
        self._at = start
        self._odd_until = 0  # before that, entries are taken one by one
        self._name = name
        self._place = "the plan"
        self._order = Order.STRICT
        self._interleave = 1
        self._files: list[PlannedFile] = []
        self._epochs: int | list[Epoch] = 1
        self._has_sizes = False

    def plan(self) -> Plan:
        keys = self._object(
            {
                "version": self._take_version,
                "name": self._string,
                "order": self._take_order,
                "interleave": self._take_interleave,
                "truncated": self._take_truncated,
                "files": self._take_files,
                "epochs": self._take_epochs,
            }
        )
        if self._peek():
            raise self._error("something follows the plan", "remove what is after its last brace")
        if "version" not in keys:
            raise PlanError('the plan has no "version": add "version": 1')
        if not self._files:
            raise PlanError('the plan has no files: list their paths in "files"')
        if isinstance(self._epochs, int):
            epochs = (_in_order(len(self._files)),) * self._epochs
        else:
            epochs = tuple(self._epochs)
            self._has_sizes = any(file.size_bytes is not None for file in self._files)
            for number, epoch in enumerate(epochs):
                self._check(number, epoch)
        return Plan(self._name, self._order, self._interleave, self._files, epochs)

    # -- fields

    def _take_version(self) -> None:
        if (version := self._number()) != 1:
            raise self._error(f'"version" is {version}', "write 1, or upgrade s3prefetchfs")

    def _take_order(self) -> None:
        text = self._string()
        try:
            self._order = Order(text)
        except ValueError:
            raise self._error(f'"order" is {text[:30]!a}', 'write "strict" or "any"') from None

    def _take_interleave(self) -> None:
        self._interleave = self._number()
        if not 1 <= self._interleave <= INTERLEAVE_MAX:
            raise self._error(f'"interleave" is {self._interleave}', f"write a number from 1 to {INTERLEAVE_MAX:,}")

    def _take_truncated(self) -> None:
        """A recording says so; it is a plan all the same."""
        self._peek()
        for word in (b"true", b"false"):
            if self._content.startswith(word, self._at):
                self._at += len(word)
                return
        raise self._expected("true or false")

    def _take_files(self) -> None:
        seen: dict[str, int] = {}
        for number in self._list():
            self._place = f"file {number}"
            file = self._described_file() if self._peek() == b"{" else PlannedFile(self._string())
            if not file.path:
                raise self._error("its path is empty", "write its path, or remove it and renumber the entries")
            first = seen.setdefault(file.path, number)
            if first != number:
                raise self._error(f"{file.path} is already file {first}", 'name each once, and repeat it in "epochs"')
            self._files.append(file)
        self._place = "the plan"

    def _described_file(self) -> PlannedFile:
        path, size_bytes, etag = "", None, None

        def take_path() -> None:
            nonlocal path
            path = self._string()

        def take_size() -> None:
            nonlocal size_bytes
            size_bytes = self._number()
            if not 0 <= size_bytes <= OFFSET_MAX:
                raise self._error(f'"size" is {size_bytes}', "write its size in bytes")

        def take_etag() -> None:
            nonlocal etag
            etag = self._string()
            if not etag or '"' in etag or not (etag.isascii() and etag.isprintable()):
                raise self._error(
                    '"etag" is empty or has quotes or other odd characters in it',
                    "write it as S3 has it between the quotes",
                )

        self._object({"path": take_path, "size": take_size, "etag": take_etag})
        return PlannedFile(path, size_bytes, etag)

    def _take_epochs(self) -> None:
        if self._peek() != b"[":
            self._epochs = self._number()
            if not 1 <= self._epochs <= EPOCHS_MAX:
                raise self._error(f'"epochs" is {self._epochs}', f"write a number from 1 to {EPOCHS_MAX:,}, or a list")
            return
        self._epochs = []
        for number in self._list():
            if number == EPOCHS_MAX:
                raise self._error(f"it has more than {EPOCHS_MAX:,} epochs", "split it into several plans")
            self._epochs.append(self._epoch(number))
        self._place = "the plan"
        if not self._epochs:
            raise self._error('"epochs" is empty', "write how many there are, or a list of entries for each")

    def _epoch(self, epoch: int) -> Epoch:
        files = array("I")
        ranges: array[int] | None = None
        self._place = f"epoch {epoch}"
        for _ in self._list():
            self._take_numbers(files, ranges)
            if ranges is not None:
                self._take_ranges(files, ranges)
            self._place = f"epoch {epoch}, entry {len(files)}"
            if self._peek() != b"[":
                number, offset, length = self._number(), 0, 0
            else:
                number, offset, length = self._range()
                if ranges is None:
                    ranges = array("Q", bytes(16 * len(files)))
            if not 0 <= number < 2**32:
                raise self._error(f"there is no file {number}", 'write the number of one in "files", from 0')
            files.append(number)
            if ranges is not None:
                ranges.extend((offset, length))
        if not files:
            self._place = f"epoch {epoch}"
            raise self._error("it has no entries", "write the numbers of the files it reads, or remove it")
        return Epoch(memoryview(files), None if ranges is None else memoryview(ranges))

    def _take_numbers(self, files: array[int], ranges: array[int] | None) -> None:
        """As many numbers as can be had at once, but not the last one, and none about which anything is odd."""
        while self._at >= self._odd_until and (found := _NUMBERS.match(self._content, self._at)) is not None:
            piece, comma, _ = found[0].rpartition(b",")
            if not comma:
                return
            try:
                numbers = array("I", json.loads(b"[%b]" % piece))
            except (ValueError, OverflowError):
                self._odd_until = found.end()
                return
            if not numbers:
                return
            files.extend(numbers)
            if ranges is not None:
                ranges.frombytes(bytes(16 * len(numbers)))
            self._at += len(piece) + 1

    def _take_ranges(self, files: array[int], ranges: array[int]) -> None:
        """The same of ranges."""
        while self._at >= self._odd_until and (found := _RANGES.match(self._content, self._at)) is not None:
            flat = array("Q", json.loads(b"[%b]" % found[0].translate(None, b"[]").rstrip(b", \t\r\n")))
            numbers, offsets, lengths = flat[::3], flat[1::3], flat[2::3]
            if max(numbers) >= 2**32 or not min(lengths) or max(offsets) + max(lengths) > OFFSET_MAX:
                self._odd_until = found.end()
                return
            pairs = array("Q", bytes(16 * len(numbers)))
            pairs[::2], pairs[1::2] = offsets, lengths
            files.extend(array("I", numbers))
            ranges.extend(pairs)
            self._at = found.end()

    def _range(self) -> tuple[int, int, int]:
        found = _RANGE.match(self._content, self._at)
        if found is None:
            raise self._expected("[file number, offset, length]")
        number, offset, length = map(int, found.groups())
        if offset < 0 or length < 1 or offset + length > OFFSET_MAX:
            what = f"{length} bytes at {offset} are no range"
            raise self._error(what, "write an offset from 0 and a length from 1, or only the number for the whole file")
        self._at = found.end()
        return number, offset, length

    def _check(self, number: int, epoch: Epoch) -> None:
        """Whether its entries are in files that there are: only now are all of them known."""
        step = PIECE_BYTES
        for start in range(0, len(epoch.files), step):
            piece = epoch.files[start : start + step]
            if max(piece) >= len(self._files):
                entry = next(entry for entry, file in enumerate(piece, start) if file >= len(self._files))
                what = f"there is no file {epoch.files[entry]}: they are numbered from 0 to {len(self._files) - 1}"
                raise PlanError(f'epoch {number}, entry {entry}: {what}; add it to "files" or correct the number')
        if epoch.ranges is None or not self._has_sizes:
            return
        for entry, file_number in enumerate(epoch.files):
            size_bytes = self._files[file_number].size_bytes
            if size_bytes is not None:
                end = epoch.ranges[2 * entry] + epoch.ranges[2 * entry + 1]
                if end > size_bytes:
                    what = f"the range ends at {end}, file {file_number} at {size_bytes}"
                    raise PlanError(f"epoch {number}, entry {entry}: {what}: correct the range or the size")

    # -- JSON

    def _peek(self) -> bytes:
        """The next byte that is not blank, empty at the end."""
        self._at = _after_blanks(self._content, self._at)
        return self._content[self._at : self._at + 1]

    def _expect(self, byte: bytes, what: str) -> None:
        if self._peek() != byte:
            raise self._expected(what)
        self._at += 1

    def _list(self) -> Iterator[int]:
        """Stops before each element, with a running number."""
        self._expect(b"[", "a list")
        if self._peek() == b"]":
            self._at += 1
            return
        number = 0
        while True:
            yield number
            number += 1
            if self._peek() == b"]":
                self._at += 1
                return
            self._expect(b",", "a comma or the end of the list")

    def _object(self, take: dict[str, Callable[[], object]]) -> set[str]:
        """Take the value of each key by its function. Returns the keys."""
        keys: set[str] = set()
        self._expect(b"{", "an object")
        if self._peek() == b"}":
            self._at += 1
            return keys
        while True:
            key = self._string()
            if key not in take:
                known = ", ".join(take)
                raise self._error(f"nothing is called {key[:30]!a}", f"correct or remove it; there are {known}")
            if key in keys:
                raise self._error(f'"{key}" is there twice', "remove one")
            keys.add(key)
            self._expect(b":", "a colon")
            take[key]()
            if self._peek() == b"}":
                self._at += 1
                return keys
            self._expect(b",", "a comma or the end of the object")

    def _string(self) -> str:
        self._peek()
        found = _STRING.match(self._content, self._at)
        if found is None:
            raise self._expected("a string in double quotes")
        try:
            text = json.loads(found[0])
            assert isinstance(text, str)
            text.encode()
        except UnicodeError:
            raise self._error(f"{_excerpt(self._content, self._at)} is not UTF-8", "save the plan as UTF-8") from None
        except ValueError:
            raise self._expected("a string in double quotes, without other escapes than those of JSON") from None
        self._at = found.end()
        return text

    def _number(self) -> int:
        self._peek()
        found = _NUMBER.match(self._content, self._at)
        if found is None:
            raise self._expected("a whole number")
        self._at = found.end()
        return int(found[0])

    def _expected(self, what: str) -> PlanError:
        return self._error(f"{_excerpt(self._content, self._at)} is not {what}", "correct it")

    def _error(self, what: str, hint: str) -> PlanError:
        line = 1 + sum(
            self._content.count(b"\n", start, min(start + 2**20, self._at)) for start in range(0, self._at, 2**20)
        )
        return PlanError(f"line {line}, {self._place}: {what}: {hint}")
