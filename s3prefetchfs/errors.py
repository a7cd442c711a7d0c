"""Every way in which an operation can fail, and what it means to each side.

Two tables, two borders. `FailureKind` names what can go wrong between us and S3 or the cache disk; each kind
knows the errno a reader gets and whether trying again can help. Foreign errors are translated into a kind once,
in `s3/failures.py`; kinds become errnos once, in `fuse/adapter.py`. `UserError` is for people: a message that says
what to do, and the exit code of the command.
"""

from __future__ import annotations

import errno
from enum import Enum
from typing import TypeVar

E = TypeVar("E", bound=BaseException)


class FailureKind(Enum):
    """What went wrong with one request to S3, or with writing its bytes to the cache.

    Attributes:
        errno: what a reader gets when the failure is final.
        retryable: whether the same request may succeed later.
    """

    NOT_FOUND = ("not found", errno.ENOENT, False)
    DENIED = ("access denied", errno.EACCES, False)
    CHANGED = ("the object was replaced", errno.ESTALE, False)
    ARCHIVED = ("the object is archived and must be restored first", errno.EIO, False)
    PROTOCOL = ("the server's answer makes no sense", errno.EIO, False)
    CREDENTIALS = ("credentials are missing, expired or refused", errno.EACCES, True)
    THROTTLED = ("the server asks to slow down", errno.EIO, True)
    SERVER = ("server error", errno.EIO, True)
    TIMEOUT = ("no answer in time", errno.EIO, True)
    CONNECTION = ("cannot connect, or connection lost", errno.EIO, True)
    BODY = ("the body ended early", errno.EIO, True)
    WORKER_LOST = ("the worker process died", errno.EIO, True)
    NO_SPACE = ("the cache disk is full", errno.EIO, True)
    CACHE_IO = ("the cache disk failed", errno.EIO, True)

    def __init__(self, text: str, errno_: int, retryable: bool) -> None:
        self.text = text
        self.errno = errno_
        self.retryable = retryable


class S3PrefetchError(Exception):
    """The root of what this package raises on purpose."""


class RequestError(S3PrefetchError):
    """A request to S3 failed, finally or not.

    Args:
        kind: the row of the table above.
        detail: for people: the S3 error code and message, the key, the address.
        retry_after_s: what the server asked us to wait (`Retry-After`), if it did.
    """

    def __init__(self, kind: FailureKind, detail: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"{kind.text}: {detail}" if detail else kind.text)
        self.kind = kind
        self.detail = detail
        self.retry_after_s = retry_after_s


class UserError(S3PrefetchError):
    """Something the person at the keyboard can put right.

    Args:
        message: what is wrong, in one sentence.
        hint: what to do about it.
        exit_code: of the process; 1 unless a script needs to tell it apart.
    """

    def __init__(self, message: str, hint: str = "", exit_code: int = 1) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code


def first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first exception in a group, of any depth."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def only(kind: type[E], group: BaseExceptionGroup[BaseException]) -> E | None:
    """As `first`, if all in the group are of that kind; else None.

    For what `except*` must not do: until Python 3.11.3 it wraps an exception of the group that is raised out of it.
    """
    _, others = group.split(kind)
    error = first(group)
    return error if others is None and isinstance(error, kind) else None
