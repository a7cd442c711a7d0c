"""What the stand-in can be told to do: limits, delays, odd listings (`Knobs`) and faults of single requests (`Rule`).

Knobs are values; `Faults` is the only state here: it counts which requests each rule has seen. Time and randomness
are arguments. The server asks `Faults.pick` once for each request; the rule it returns, or `NO_FAULT`, goes with the
request to whoever has to misbehave.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from random import Random
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """Settings of the whole server; 0, empty and False mean "off". Rates are bytes per second.

    Attributes:
        latency_ms: from request to first byte, for every request that is answered.
        latency: a distribution in its place: "fixed:MS" or "lognormal:MEDIAN_MS:SIGMA".
        list_latency_ms: in place of both, for LIST.
        rate_per_connection: cap of each body.
        aggregate_rate: cap of all bodies together, shared fairly.
        max_requests_per_s: more are answered 503 SlowDown; one second's worth may come at once.
        faults: rules as dicts, see `Rule`. Setting them starts their counters anew.
        require_access_key: only requests signed (or pretending to be) with this access key id are served.
        expired_status: how others are refused: 0 is 403 InvalidAccessKeyId, any other this status and ExpiredToken.
        page_size: the most entries of a listing page.
        list_shuffle: entries of a page in random order.
        list_prefixes_first: all common prefixes on the first pages, all objects after.
        list_dup: the first entry of a page comes twice, and a page begins with the last entry of the one before.
        list_no_encode: encoding-type is ignored: raw XML, no EncodingType element.
        list_repeat_token: page 2 names its own token as the next one.
        list_truncated_no_token: more is promised, but no token given.
        list_inject: keys that are listed but do not exist.
        list_hide: globs of keys that exist but are not listed.
        refuse: for this many seconds connections are refused; those that exist are reset.
        blackhole: connections are accepted, requests read, and nothing ever answered to those that came meanwhile.
        seed: of everything random.
    """

    latency_ms: float = 0
    latency: str = ""
    list_latency_ms: float | None = None
    rate_per_connection: float = 0
    aggregate_rate: float = 0
    max_requests_per_s: float = 0
    faults: list[dict[str, Any]] = field(default_factory=list)
    require_access_key: str = ""
    expired_status: int = 0
    page_size: int = 1000
    list_shuffle: bool = False
    list_prefixes_first: bool = False
    list_dup: bool = False
    list_no_encode: bool = False
    list_repeat_token: bool = False
    list_truncated_no_token: bool = False
    list_inject: list[str] = field(default_factory=list)
    list_hide: list[str] = field(default_factory=list)
    refuse: float = 0
    blackhole: bool = False
    seed: int = 0

    def changed(self, values: dict[str, Any]) -> Knobs:
        """A copy with some knobs set.

        Raises:
            ValueError: no such knob, or a value that makes no sense.
        """
        _check_names("knob", values, _KNOB_NAMES)
        knobs = replace(self, **values)
        Faults(knobs.faults, 0, Random(0))
        knobs.latency_s("GET", Random(0))
        return knobs

    def latency_s(self, verb: str, random: Random) -> float:
        """How long this request waits for its first byte."""
        if verb == "LIST" and self.list_latency_ms is not None:
            return self.list_latency_ms / 1000
        kind, _, parameters = (self.latency or f"fixed:{self.latency_ms}").partition(":")
        numbers = [float(number) for number in parameters.split(":")]
        if kind == "fixed" and len(numbers) == 1:
            return numbers[0] / 1000
        if kind == "lognormal" and len(numbers) == 2:
            return random.lognormvariate(math.log(numbers[0]), numbers[1]) / 1000
        raise ValueError(f"latency {self.latency!r}: expected fixed:MS or lognormal:MEDIAN_MS:SIGMA")


@dataclass(slots=True, kw_only=True)
class Rule:
    """What to do wrong (actions), to which requests (conditions, all of which must hold).

    Conditions:
        verb: as in the log. key: a glob; of a LIST it is the prefix. range_start: first byte asked for (0: no Range).
        first: only the first N requests that fit the three above. every: only each Nth of them.
        probability: of those left. for_s: only this long after the rule was set.
    Actions (most can be combined):
        status, code: this error; code defaults by status. retry_after_s: a Retry-After header to go with it.
        delay_ms: added to the latency.
        reset_before: RST in place of an answer. reset_after: RST when this many bytes of the body were received.
        short_body: this many bytes are missing at the end: full Content-Length, clean close.
        chunked_short: the same with Transfer-Encoding chunked.
        stall_after: after this many bytes of the body nothing more comes, the connection stays open.
        no_first_byte: no answer, the connection stays open.
        drip: bytes per second of the body, in place of rate_per_connection.
        lie_len: Content-Length, and the body, are this many bytes short: a complete answer with too little in it.
        ignore_range: 200 and the whole object. range_200: the right bytes, but 200 and no Content-Range.
        corrupt: a bit of the byte at this offset of the object is flipped.
        ignore_ifmatch: If-Match is not looked at.
        deny: 403 AccessDenied. archived: 403 InvalidObjectState for GET.
        etag: how ETags are written: "weak" (W/"x") or "unquoted"; in listings too.
        redirect_region: 301 PermanentRedirect (or 400 AuthorizationHeaderMalformed with status=400) unless the request
            is signed for this region.
        require_header: "name:value" or 403. reject_header: 400 if the request has this header.
    """

    verb: str | None = None
    key: str | None = None
    range_start: int | None = None
    first: int | None = None
    every: int | None = None
    probability: float | None = None
    for_s: float | None = None

    status: int | None = None
    code: str | None = None
    retry_after_s: int | None = None
    delay_ms: float = 0
    reset_before: bool = False
    reset_after: int | None = None
    short_body: int = 0
    chunked_short: int = 0
    stall_after: int | None = None
    no_first_byte: bool = False
    drip: float = 0
    lie_len: int = 0
    ignore_range: bool = False
    range_200: bool = False
    corrupt: int | None = None
    ignore_ifmatch: bool = False
    deny: bool = False
    archived: bool = False
    etag: str | None = None
    redirect_region: str | None = None
    require_header: str | None = None
    reject_header: str | None = None

    name: str = field(init=False, default="")
    """The actions, for the log."""
    seen: int = field(init=False, default=0)
    """Requests that fitted verb, key and range_start."""

    def __post_init__(self) -> None:
        if self.etag not in (None, "weak", "unquoted"):
            raise ValueError(f'etag is "weak" or "unquoted", not {self.etag!r}')
        acts = [f.name for f in _RULE_FIELDS if getattr(self, f.name) != f.default and f.name not in _CONDITIONS]
        self.name = "+".join(acts)


_CONDITIONS = ("verb", "key", "range_start", "first", "every", "probability", "for_s")
_RULE_FIELDS = [f for f in fields(Rule) if f.init]
_RULE_NAMES = [f.name for f in _RULE_FIELDS]
_KNOB_NAMES = [f.name for f in fields(Knobs)]

NO_FAULT = Rule()


class Faults:
    """The rules in force. The first one whose conditions hold is applied, and later ones do not see the request.

    Args:
        rules: keyword arguments of `Rule`. now: seconds, for `for_s`.

    Raises:
        ValueError: a rule has an unknown name or a wrong value.
    """

    def __init__(self, rules: list[dict[str, Any]], now: float, random: Random) -> None:
        for rule in rules:
            _check_names("fault", rule, _RULE_NAMES)
        self._rules = [Rule(**rule) for rule in rules]
        self._set_at = now
        self._random = random

    def pick(self, verb: str, key: str, range_start: int, now: float) -> Rule:
        """The rule to apply to this request, or NO_FAULT."""
        for rule in self._rules:
            if rule.verb not in (None, verb) or rule.range_start not in (None, range_start):
                continue
            if rule.key is not None and not fnmatchcase(key, rule.key):
                continue
            rule.seen += 1
            if rule.first is not None and rule.seen > rule.first:
                continue
            if rule.every is not None and rule.seen % rule.every:
                continue
            if rule.for_s is not None and now > self._set_at + rule.for_s:
                continue
            if rule.probability is not None and self._random.random() >= rule.probability:
                continue
            return rule
        return NO_FAULT


def _check_names(what: str, given: dict[str, Any], known: list[str]) -> None:
    for name in given:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, 1)
            raise ValueError(f"unknown {what} {name!r}" + (f"; did you mean {nearest[0]!r}?" if nearest else ""))
