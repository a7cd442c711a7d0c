"""ListObjects and ListObjectsV2: which keys are on a page, and the XML, with all that can be odd about either.

A page of a listing is a list of entries, each a key or a common prefix, in key order. A continuation token is the
last entry of the page before, in base64; a marker is the same in the clear.
"""

from __future__ import annotations

import re
from base64 import b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import lru_cache
from random import Random
from time import gmtime, strftime
from urllib.parse import quote_plus
from xml.sax.saxutils import escape

from tests.s3stub.bucket import Bucket
from tests.s3stub.knobs import Knobs, Rule

NAMESPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'

Entry = tuple[str, bool]
"""A key or common prefix, and whether it is a common prefix."""


def render(bucket: Bucket, name: str, query: dict[str, str], knobs: Knobs, fault: Rule, random: Random) -> str:
    """The answer to a request with this query, of either version.

    Raises:
        ValueError: max-keys or the continuation token is not valid.
    """
    version_2 = query.get("list-type") == "2"
    prefix, delimiter, token = (query.get(field, "") for field in ("prefix", "delimiter", "continuation-token"))
    after = position(query)
    if token:
        after = b64decode(token, b"-_", validate=True).decode(errors="surrogateescape")
    max_keys = int(query.get("max-keys") or 1000)
    page, truncated = _page(bucket, prefix, delimiter, after, max(0, min(max_keys, knobs.page_size)), knobs)
    last = page[-1][0] if page else after
    if knobs.list_dup and page:
        before = [(after, _cut(after, prefix, delimiter) != "")] if after and "start-after" not in query else []
        page = [*before, page[0], *page]
    if knobs.list_shuffle:
        random.shuffle(page)

    encoded = query.get("encoding-type") == "url" and not knobs.list_no_encode
    encode: Callable[[str], str] = _url if encoded else xml_text
    more = truncated and not knobs.list_truncated_no_token
    next_after = after if after and knobs.list_repeat_token else last
    parts = {
        "Name": name,
        "Prefix": encode(prefix),
        "MaxKeys": str(max_keys),
        "IsTruncated": str(truncated).lower(),
        "EncodingType": "url" if encoded else None,
        "Delimiter": encode(delimiter) or None,
    }
    if version_2:
        parts["KeyCount"] = str(len(page))
        parts["ContinuationToken"] = token or None
        parts["StartAfter"] = encode(query.get("start-after", "")) or None
        parts["NextContinuationToken"] = _token(next_after) if more else None
    else:
        parts["Marker"] = encode(after)
        parts["NextMarker"] = encode(next_after) if more and delimiter else None
    about = "".join(f"<{element}>{text}</{element}>" for element, text in parts.items() if text is not None)
    prefixes = "".join(
        f"<CommonPrefixes><Prefix>{encode(entry)}</Prefix></CommonPrefixes>" for entry, is_prefix in page if is_prefix
    )
    contents = "".join(_contents(bucket, entry, encode, fault) for entry, is_prefix in page if not is_prefix)
    return f"<ListBucketResult {NAMESPACE}>{about}{contents}{prefixes}</ListBucketResult>"


def position(query: dict[str, str]) -> str:
    """Where a listing goes on, as the client says it: token, marker or start-after."""
    return query.get("continuation-token") or query.get("marker") or query.get("start-after") or ""


def _contents(bucket: Bucket, key: str, encode: Callable[[str], str], fault: Rule) -> str:
    item = bucket.get(key)
    if item is None:  # list_inject
        size, etag, mtime_s, storage_class = 0, "&quot;injected&quot;", 0.0, "STANDARD"
    else:
        etag = etag_text(item.etag, fault).replace('"', "&quot;")
        size, mtime_s, storage_class = item.size, item.mtime_s, item.storage_class
    return (
        f"<Contents><Key>{encode(key)}</Key><LastModified>{_iso(mtime_s)}</LastModified><ETag>{etag}</ETag>"
        f"<Size>{size}</Size><StorageClass>{storage_class}</StorageClass></Contents>"
    )


def _page(
    bucket: Bucket, prefix: str, delimiter: str, after: str, limit: int, knobs: Knobs
) -> tuple[list[Entry], bool]:
    """At most `limit` entries behind `after`, and whether there are more."""
    if knobs.list_prefixes_first:
        everything = sorted(_entries(bucket, prefix, delimiter, "", knobs), key=lambda entry: not entry[1])
        begin = 1 + [entry for entry, _ in everything].index(after) if after else 0
        return everything[begin : begin + limit], begin + limit < len(everything)
    page: list[Entry] = []
    for entry in _entries(bucket, prefix, delimiter, after, knobs):
        if len(page) == limit:
            return page, limit > 0
        page.append(entry)
    return page, False


def _entries(bucket: Bucket, prefix: str, delimiter: str, after: str, knobs: Knobs) -> Iterator[Entry]:
    """The entries behind `after`, in order. What a common prefix stands for is skipped, not looked at."""
    common = _cut(after, prefix, delimiter)
    start = _next_sibling(after) if common and common == after else after and after + "\0"
    start = max(start, prefix)
    previous = None
    while True:
        for key in bucket.keys_from(start, knobs.list_inject):
            if not key.startswith(prefix):
                return
            if key == previous or any(fnmatchcase(key, pattern) for pattern in knobs.list_hide):
                continue
            if common := _cut(key, prefix, delimiter):
                yield common, True
                start = _next_sibling(common)
                break
            yield key, False
            previous = key
        else:
            return


def _cut(key: str, prefix: str, delimiter: str) -> str:
    """The common prefix that stands for this key, or ""."""
    found = key.find(delimiter, len(prefix)) if delimiter else -1
    return key[: found + len(delimiter)] if found >= 0 else ""


def _next_sibling(common: str) -> str:
    """The least string above all that begin with `common`."""
    return common[:-1] + chr(ord(common[-1]) + 1)


def _token(entry: str) -> str:
    return urlsafe_b64encode(entry.encode(errors="surrogateescape")).decode()


def etag_text(etag: str, fault: Rule) -> str:
    """An ETag as a header or listing has it."""
    if fault.etag == "unquoted":
        return etag
    return f'W/"{etag}"' if fault.etag == "weak" else f'"{etag}"'


def xml_text(text: str) -> str:
    """As S3 writes text in XML: control characters become references that XML 1.0 does not know."""
    return _CONTROL.sub(lambda match: f"&#x{ord(match[0]):x};", escape(text))


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f]")


def _url(text: str) -> str:
    """As S3 encodes with encoding-type=url: a space is a plus, slashes stay."""
    return quote_plus(text, safe="/*", errors="surrogateescape")


@lru_cache(4096)
def _iso(mtime_s: float) -> str:
    return f"{strftime('%Y-%m-%dT%H:%M:%S', gmtime(mtime_s))}.{int(mtime_s * 1000) % 1000:03d}Z"
