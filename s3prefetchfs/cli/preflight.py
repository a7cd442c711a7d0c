"""What can be known to fail before anything is started: each check says what is wrong and what to do.

Called by `mount`, before it forks. What only the endpoint or the cache's lock can tell is
the daemon's to find out. No check waits longer than `mounts.PROBE_TIMEOUT_S`.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path

from s3prefetchfs.config import Config
from s3prefetchfs.errors import UserError
from s3prefetchfs.fuse import mounts
from s3prefetchfs.log import fields

_DEVICE = Path("/dev/fuse")
_FUSE_CONF = Path("/etc/fuse.conf")

_logger = logging.getLogger(__name__)


def check(config: Config) -> Config:
    """Make sure that mounting can begin, clearing what a dead daemon left at the mountpoint.

    Returns:
        The configuration, its mountpoint free of symbolic links.

    Raises:
        UserError: it cannot begin.
    """
    _check_fuse(config)
    _check_not_mounted(config)
    config = dataclasses.replace(config, mountpoint=Path(os.path.realpath(config.mountpoint)))
    _check_directory(config)
    return config


def _check_fuse(config: Config) -> None:
    try:
        os.close(os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        raise UserError(
            f"there is no {_DEVICE}",
            "load the kernel module with `modprobe fuse`; in a container, add `--device /dev/fuse --cap-add SYS_ADMIN`",
        ) from None
    except OSError as error:
        raise UserError(
            f"cannot open {_DEVICE}: {error.strerror}",
            "its permissions, or the container's device rules, keep this user out",
        ) from None
    if os.geteuid() == 0:
        return
    if shutil.which("fusermount3") is None:
        raise UserError("fusermount3 is not installed, and only root can mount without it", "install the package fuse3")
    if config.allow_other and not _user_may_allow_other():
        raise UserError(
            f"--allow-other is not permitted to users: {_FUSE_CONF} has no line `user_allow_other`",
            f"have root add that line to {_FUSE_CONF}, mount as root, or leave --allow-other out",
        )


def _user_may_allow_other() -> bool:
    try:
        text = _FUSE_CONF.read_text()
    except OSError:
        return False
    return re.search(r"^\s*user_allow_other\s*$", text, re.MULTILINE) is not None


def _check_not_mounted(config: Config) -> None:
    mount = mounts.mount_at(config.mountpoint)
    if mount is None:
        return
    where = mount.mountpoint
    if not mount.is_ours:
        if not config.nonempty:
            raise UserError(
                f"{where} already is a mountpoint, of {mount.source} ({mount.fs_type})",
                "choose another directory, or hide that mount with --nonempty",
            )
        return
    try:
        mounts.read_file(where / mounts.STATUS_FILE)
    except TimeoutError:
        raise UserError(
            f"{where} is already mounted by s3prefetchfs, whose daemon does not answer",
            f"end it and detach its mount: s3prefetchfs umount --lazy {where}",
        ) from None
    except OSError as error:
        if error.errno in mounts.DEAD_ERRNOS:
            _clear(where)
            return
    raise UserError(
        f"{where} is already mounted by s3prefetchfs, with {mount.source}",
        f"see what it is with `s3prefetchfs status {where}`, or `s3prefetchfs umount {where}` first",
    )


def _clear(mountpoint: Path) -> None:
    try:
        mounts.unmount(mountpoint, lazy=True)
    except OSError as error:
        raise UserError(
            f"{mountpoint} is a mount whose daemon is dead, and it cannot be cleared: {error.strerror}",
            f"clear it as the user who mounted it, or as root: umount --lazy {mountpoint}",
        ) from None
    _logger.warning("cleared a mount whose daemon was dead %s", fields(mountpoint=mountpoint))


def _check_directory(config: Config) -> None:
    mountpoint = config.mountpoint
    try:
        with os.scandir(mountpoint) as entries:
            first = next(entries, None)
    except FileNotFoundError:
        raise UserError(f"the mountpoint {mountpoint} does not exist", f"create it: mkdir -p {mountpoint}") from None
    except NotADirectoryError:
        raise UserError(f"the mountpoint {mountpoint} is not a directory", "give a directory") from None
    except OSError as error:
        raise UserError(
            f"cannot look into the mountpoint {mountpoint}: {error.strerror}", "give a directory of your own"
        ) from None
    if first is not None and not config.nonempty:
        raise UserError(
            f"the mountpoint {mountpoint} is not empty: it holds {first.name!r}",
            "the mount would hide what is there; give an empty directory, or --nonempty",
        )


def check_cache_dir(cache_dir: Path) -> None:
    """Make the cache directory if it is missing, and prove that it can be written.

    Raises:
        UserError: it cannot.
    """
    try:
        cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=cache_dir).close()
    except OSError as error:
        reason = "it is not a directory" if isinstance(error, FileExistsError) else error.strerror
        raise UserError(
            f"the cache directory {cache_dir} cannot be written: {reason}",
            "give one that you can write, on a local disk, with --cache-dir",
        ) from None
