"""The request log: what was asked and what was sent, the ground truth of tests.

A record enters the log when its request has been read, so requests under way can be seen too (`end_s` is None).
Control requests are not in it. `Record` is shared by the server and `handle`, and travels as a plain list.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields


@dataclass(slots=True)
class Record:
    """One request.

    Attributes:
        verb: GET and HEAD (of an object or bucket), PUT, DELETE, LIST (ListObjects, both versions), BUCKET (the rest).
        key: of a LIST the prefix.
        token: of a LIST the continuation token, marker or start-after.
        range: half-open bytes that the Range header asked for; None without one. Cut to the object's size if the
            answer was good, else as asked, with -1 for an end that was left open.
        start_s, first_byte_s, end_s: `time.monotonic()`, which processes of one machine share: request read,
            answer's head sent, and answer complete or connection lost; None if that has not happened.
        status: HTTP status; 0 if no answer was sent.
        body_bytes: of the answer's body, as far as handed to the kernel. If the connection broke, only what the
            client's kernel had acknowledged.
        fault: what was done wrong on purpose: names of the actions joined by `+`; also "blackhole" and "slow_down".
    """

    verb: str
    bucket: str
    key: str
    delimiter: str
    token: str
    range: tuple[int, int] | None
    connection: int
    user_agent: str
    start_s: float
    first_byte_s: float | None = None
    end_s: float | None = None
    status: int = 0
    body_bytes: int = 0
    fault: str = ""

    def to_row(self) -> list[object]:
        """The fields in order, as JSON can carry them."""
        return [getattr(self, name) for name in _FIELDS]

    @classmethod
    def from_row(cls, row: list[object]) -> Record:
        """The inverse of `to_row` after a trip through JSON."""
        record = cls(*row)  # type: ignore[arg-type]
        if record.range is not None:
            record.range = (record.range[0], record.range[1])
        return record


_FIELDS = [field.name for field in fields(Record)]


def most_at_once(records: list[Record]) -> int:
    """How many requests were under way at the same time, at most."""
    moments = [(record.start_s, 1) for record in records] + [(record.end_s or 0.0, -1) for record in records]
    running = most = 0
    for _, change in sorted(moments):
        running += change
        most = max(most, running)
    return most


class RequestLog:
    """All records since the last `clear`, and counters since the start."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._requests: Counter[str] = Counter()
        self._body_bytes = 0
        self.connections_accepted = 0
        self.connections_open = 0

    def begin(self, record: Record) -> None:
        """A request was read."""
        self.records.append(record)
        self._requests[record.verb] += 1

    def finish(self, record: Record, now: float) -> None:
        """The request has had its answer, or never will."""
        record.end_s = now
        self._body_bytes += record.body_bytes

    def stats(self) -> dict[str, object]:
        """Counters; `body_bytes` counts finished requests."""
        return {
            "requests": dict(self._requests),
            "body_bytes": self._body_bytes,
            "connections_accepted": self.connections_accepted,
            "connections_open": self.connections_open,
        }
