"""One directory entry in as few bytes as possible, and the readable view of it.

A million keys are a million entries, so an entry is one `bytes` object, a *record*:

    name "/"                                                a directory
    name "/" etag [class] size(8) form(1) mtime(8) class(1)   a file

A name contains no "/" and no NUL, so records sort by name + "/", a directory right before a file of the same
name, and a bisect for name + "/" finds the entry, the directory first. `core.listing` says why that order is
the right one. The number of a storage class is never that of "/", so the last byte tells files from directories. An
ETag that starts with 32 hexadecimal digits, as nearly all do, keeps those in 16 bytes.

Called by `core.namespace` and `core.listing`; `Entry` is what they hand out.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from struct import Struct

ListedObject = tuple[bytes, int, int, str, str]
"""An object as `wire.Listed` carries it: full key, size in bytes, mtime in ms since the epoch, ETag, storage class."""

NAME_MAX_BYTES = 255
"""The longest path component: NAME_MAX of Linux. The kernel does not check it for FUSE, programs rely on it."""

_TAIL = Struct("<qBqB")  # size in bytes, form of the ETag, mtime in ms, number of the storage class
_AFTER_VERSION = Struct("<qB")  # what of it does not tell versions apart

_ETAG_NONE, _ETAG_TEXT, _ETAG_HEX = range(3)
_DIGEST_BYTES = 16
_DIGEST_DIGITS = 2 * _DIGEST_BYTES

_CLASSES = (
    *("STANDARD", "REDUCED_REDUNDANCY", "STANDARD_IA", "ONEZONE_IA", "INTELLIGENT_TIERING", "GLACIER"),
    *("DEEP_ARCHIVE", "GLACIER_IR", "OUTPOSTS", "SNOW", "EXPRESS_ONEZONE", ""),
)
_CLASS_NUMBERS = {storage_class: number for number, storage_class in enumerate(_CLASSES)}
_CLASS_IN_TEXT = 255  # any other class: its text, and the length of that in one byte, stand before the size

_INO_SPACE = 1 << 63
"""Inode numbers of entries have the top bit set; the root and the control files use small ones."""


def is_component(name: bytes) -> bool:
    """Whether `name` (without "/") can be one component of a path."""
    return 0 < len(name) <= NAME_MAX_BYTES and name != b"." and name != b".." and b"\0" not in name


def directory_record(name: bytes) -> bytes:
    return name + b"/"


def file_record(name: bytes, size_bytes: int, mtime_ms: int, etag: str, storage_class: str) -> bytes:
    """The record of the object `name`, with the fields of `ListedObject`. Only 255 bytes of the class are kept."""
    form, version = _pack_etag(etag)
    class_number = _CLASS_NUMBERS.get(storage_class)
    if class_number is None:
        class_number = _CLASS_IN_TEXT
        text = storage_class.encode("utf-8", "replace")[:255]
        version += text + bytes((len(text),))
    return name + b"/" + version + _TAIL.pack(size_bytes, form, mtime_ms, class_number)


def name_of(record: bytes) -> bytes:
    return record[: record.index(b"/")]


def is_directory(record: bytes) -> bool:
    return record.endswith(b"/")


def version_of(record: bytes) -> bytes:
    """The part of a record that says which version of which entry it is.

    For a file: name, size and ETag; the mtime stands in for an ETag that the server does not give.
    """
    if record.endswith(b"/"):
        return record
    if record[-_AFTER_VERSION.size - 1] == _ETAG_NONE:
        return record[:-1]
    return record[: -_AFTER_VERSION.size]


def inode_number(prefix: bytes, record: bytes) -> int:
    """The inode number of an entry, which depends on its path and version alone.

    A replaced object is thus another inode, as if renamed over: the kernel never mixes pages of two versions.

    Args:
        prefix: of the directory the entry is in, from the start of the key.
    """
    digest = blake2b(prefix + version_of(record), digest_size=8).digest()
    return int.from_bytes(digest, "little") | _INO_SPACE


def next_inode_number(ino: int) -> int:
    """The number to try after `ino` was found taken."""
    return (ino + 1) % _INO_SPACE | _INO_SPACE


@dataclass(frozen=True, slots=True)
class Entry:
    """A file or directory: the readable view of a record, which is decoded when asked.

    The attributes of a file never change: they are those of one version of the object, and so is the inode.

    Attributes:
        ino: inode number.
        prefix: of the keys in the directory that this entry is in.
        record: see the module's docstring.
    """

    ino: int
    prefix: bytes
    record: bytes

    @property
    def is_directory(self) -> bool:
        return self.record.endswith(b"/")

    @property
    def name(self) -> bytes:
        """The last component of the path; empty for the root."""
        return self.record[: self.record.index(b"/")]

    @property
    def key(self) -> bytes:
        """The object's full key. Of a directory: the prefix of all keys in it, empty or ending in "/"."""
        if not self.is_directory:
            return self.prefix + self.name
        return self.prefix + self.record if len(self.record) > 1 else self.prefix

    @property
    def size_bytes(self) -> int:
        """Of the object; 0 for a directory."""
        return 0 if self.is_directory else self._tail()[0]

    @property
    def mtime_ms(self) -> int:
        """Since the epoch; 0 for a directory, of which S3 knows none."""
        return 0 if self.is_directory else self._tail()[2]

    @property
    def etag(self) -> str:
        """As the server gave it, without quotes; empty for a directory."""
        if self.is_directory:
            return ""
        _, form, _, class_number = self._tail()
        stop = self._tail_offset()
        if class_number == _CLASS_IN_TEXT:
            stop -= 1 + self.record[stop - 1]
        return _unpack_etag(form, self.record[self.record.index(b"/") + 1 : stop])

    @property
    def storage_class(self) -> str:
        """As the server gave it; empty for a directory."""
        if self.is_directory:
            return ""
        class_number = self._tail()[3]
        if class_number != _CLASS_IN_TEXT:
            return _CLASSES[class_number]
        stop = self._tail_offset() - 1
        return self.record[stop - self.record[stop] : stop].decode("utf-8", "replace")

    def _tail(self) -> tuple[int, int, int, int]:
        return _TAIL.unpack_from(self.record, len(self.record) - _TAIL.size)

    def _tail_offset(self) -> int:
        return len(self.record) - _TAIL.size


def _pack_etag(etag: str) -> tuple[int, bytes]:
    if not etag:
        return _ETAG_NONE, b""
    digits, rest = etag[:_DIGEST_DIGITS], etag[_DIGEST_DIGITS:]
    try:
        digest = bytes.fromhex(digits)
    except ValueError:
        digest = b""
    if digest.hex() == digits:  # else upper case, or white space
        return _ETAG_HEX, digest + rest.encode("utf-8", "surrogatepass")
    return _ETAG_TEXT, etag.encode("utf-8", "surrogatepass")


def _unpack_etag(form: int, packed: bytes) -> str:
    if form == _ETAG_HEX:
        return packed[:_DIGEST_BYTES].hex() + packed[_DIGEST_BYTES:].decode("utf-8", "surrogatepass")
    return packed.decode("utf-8", "surrogatepass")
