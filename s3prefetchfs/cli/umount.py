"""`s3prefetchfs umount`: unmount, and return when the daemon is gone."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import click

from s3prefetchfs.cli.manual import EXIT_CODES, ManualCommand
from s3prefetchfs.cli.status import absolute
from s3prefetchfs.errors import UserError
from s3prefetchfs.fuse import mounts
from s3prefetchfs.fuse.holders import Holder, find_holders
from s3prefetchfs.sources import resolve

_DAEMON_TIMEOUT_S = 30.0
"""What a daemon may take to end after its mount is gone: it stops its workers and closes its index."""

_SHOWN_HOLDERS = 10

_SECTIONS = [
    (
        "Examples",
        """
        s3prefetchfs umount /mnt/train
        s3prefetchfs umount --lazy /mnt/train      detach now, whoever still uses it
        """,
    ),
    ("Exit status", EXIT_CODES),
]


@click.command(cls=ManualCommand, sections=_SECTIONS, short_help="Unmount, and wait for the daemon to end.")
@click.argument("mountpoint", required=False)
@click.option("--lazy", is_flag=True, help="Detach a busy or hung mount now; it ends when its last user does.")
@click.option("--config", metavar="FILE", help="Take the mountpoint from the file that it was mounted with.")
@click.option("--quiet", is_flag=True, help="Say nothing, and succeed, if nothing is mounted.")
def umount(mountpoint: str | None, lazy: bool, config: str | None, quiet: bool) -> None:
    """Unmount the s3prefetchfs at MOUNTPOINT, and return when its daemon is gone.

    While something uses the mount it changes nothing, and names the processes that do. A mount whose daemon has
    died is cleared.
    """
    if mountpoint is None:
        if config is None:
            raise click.UsageError("Give a MOUNTPOINT, or --config FILE.")
        mountpoint = str(resolve({"config": config}).mountpoint)
    path = absolute(mountpoint)
    mount = mounts.mount_at(path)
    if mount is None:
        if quiet:
            return
        raise UserError(f"nothing is mounted at {path}", "`findmnt -t fuse.s3prefetchfs` lists the mounts there are")
    if not mount.is_ours:
        raise UserError(f"{path} is not an s3prefetchfs but {mount.source} ({mount.fs_type})", "see umount(8)")
    os.chdir("/")  # our own working directory may be in it
    _unmount(mount.mountpoint, lazy)


def _unmount(path: Path, lazy: bool) -> None:
    dead, daemon = _find_daemon(path)
    holders = find_holders(path) if lazy and not dead else []  # once detached, nobody's path shows the mount
    try:
        mounts.unmount(path, lazy=lazy or dead)
    except OSError as error:
        raise _explain(error, path) from None
    if dead:
        click.echo(f"cleared {path}, whose daemon was dead", err=True)
    elif holders:
        click.echo(f"{path} is detached; its daemon ends when these do:\n{_listed(holders)}", err=True)
    elif daemon is None:
        click.echo(f"{path} is unmounted; its daemon did not say who it is, so it was not waited for", err=True)
    else:
        pid, pidfd = daemon
        if not mounts.wait_for_exit(pidfd, _DAEMON_TIMEOUT_S):
            raise UserError(
                f"{path} is unmounted, but its daemon (pid {pid}) still runs after {_DAEMON_TIMEOUT_S:g} s",
                f"its log may say why; `kill -9 {pid}` is safe, the cache survives it",
            )


def _find_daemon(path: Path) -> tuple[bool, tuple[int, int] | None]:
    """Whether the daemon is dead, and else its pid and pidfd if it says who it is."""
    try:
        pid = int(json.loads(mounts.read_file(path / mounts.STATUS_FILE))["pid"])
        return False, (pid, os.pidfd_open(pid))
    except OSError as error:  # a time-out too: a hung daemon can be unmounted, but cannot say who it is
        return error.errno in mounts.DEAD_ERRNOS, None
    except (ValueError, LookupError, TypeError):
        return False, None


def _explain(error: OSError, path: Path) -> UserError:
    if error.errno != errno.EBUSY:
        return UserError(f"cannot unmount {path}: {error.strerror}", "unmount as the user who mounted it, or as root")
    message = f"{path} is busy, and stays mounted"
    inner = [str(mount.mountpoint) for mount in mounts.all_mounts() if path in mount.mountpoint.parents]
    if holders := find_holders(path):
        return UserError(f"{message}. In use by\n{_listed(holders)}", "end these, or detach it now with --lazy")
    if inner:
        return UserError(f"{message}: other mounts are inside it", f"unmount these first: {', '.join(inner)}")
    return UserError(
        f"{message}, by a process that cannot be seen from here",
        "look as root, on the host if this is a container, or detach it now with --lazy",
    )


def _listed(holders: list[Holder]) -> str:
    lines = [f"  {holder}" for holder in holders[:_SHOWN_HOLDERS]]
    if more := len(holders) - _SHOWN_HOLDERS:
        lines += [f"  and {more} more"] if more > 0 else []
    return "\n".join(lines)
