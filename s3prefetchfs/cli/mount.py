"""`s3prefetchfs mount`: collect the options, check what can be checked, start the daemon."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from s3prefetchfs import log
from s3prefetchfs.cli import preflight
from s3prefetchfs.cli.background import START_SLACK_S, run_in_background
from s3prefetchfs.cli.manual import EXIT_CODES, ManualCommand, config_options, typed
from s3prefetchfs.config import Config
from s3prefetchfs.errors import UserError
from s3prefetchfs.sources import resolve

_SECTIONS = [
    (
        "Examples",
        """
        A bucket on AWS, with the credentials that boto3 finds:
          s3prefetchfs mount my-bucket /mnt/data
        A prefix of a bucket on MinIO, with half a terabyte of cache on NVMe:
          s3prefetchfs mount s3://my-bucket/train /mnt/train \\
            --endpoint-url http://minio:9000 --cache-dir /nvme --cache-size 500GiB
        From a file, for systemd (s3prefetchfs@.service):
          s3prefetchfs mount --foreground --config /etc/s3prefetchfs/train.toml
        From /etc/fstab:
          my-bucket/train /mnt/train fuse.s3prefetchfs ro,_netdev,allow_other 0 0
        """,
    ),
    (
        "Values",
        """
        SIZE      500GiB, 2TB, 64MiB or plain bytes; MB is 10^6 and MiB 2^20 bytes
        RATE      a SIZE a second, as in 500MB/s
        DURATION  60s, 5m, 1h, 500ms, plain seconds, or indefinite where it makes sense
        OCTAL     permission bits, as in 0444
        """,
    ),
    (
        "Configuration",
        """
        An option is taken from the first of these that has it:
          1. the command line    --cache-size 500GiB
          2. -o, as in fstab     -o cache_size=500GiB,allow_other
          3. the environment     S3PREFETCHFS_CACHE_SIZE=500GiB
          4. the --config file   cache-size = "500GiB"
        In -o, a comma inside a value is written \\, and the standard options of mount(8)
        are accepted. The file is TOML and may also hold bucket and mountpoint; its own
        path may come from S3PREFETCHFS_CONFIG. A name that does not exist is refused.
        """,
    ),
    (
        "Credentials and region",
        """
        boto3 finds and refreshes them: AWS_ACCESS_KEY_ID and its kin, AWS_PROFILE, ~/.aws,
        SSO, web identity, roles of containers and instances. It also heeds
        AWS_CA_BUNDLE, HTTPS_PROXY and NO_PROXY.
        """,
    ),
    (
        "Exit status",
        f"""{EXIT_CODES}
In the background, 0 means that the mount is usable; in the foreground, that it was
unmounted.""",
    ),
]


@click.command(cls=ManualCommand, sections=_SECTIONS, short_help="Mount a bucket.")
@click.argument("bucket", required=False, metavar="BUCKET[/PREFIX]")
@click.argument("mountpoint", required=False, metavar="MOUNTPOINT")
@click.option("--config", metavar="FILE", help="Read options from a TOML file.")
@click.option("-o", "mount_options", multiple=True, metavar="KEY[=VALUE],...", help="Options as fstab has them.")
@config_options
def mount(
    bucket: str | None, mountpoint: str | None, config: str | None, mount_options: tuple[str, ...], **flags: Any
) -> None:
    """Show the objects of BUCKET, or those below PREFIX, as read-only files at MOUNTPOINT.

    Also takes s3://BUCKET/PREFIX. Returns once the mount is usable and leaves a daemon behind; a mount that
    cannot work says why and leaves nothing. MOUNTPOINT is an empty directory; a dead mount of s3prefetchfs on it
    is cleared first.
    """
    arguments = {"bucket": bucket, "mountpoint": mountpoint, "config": config}
    given = {name: text for name, text in arguments.items() if text is not None}
    exit_code = start(resolve(given | typed(flags), mount_options), _daemon)
    click.get_current_context().exit(exit_code)


_PATH_VARIABLES = (
    "AWS_CA_BUNDLE",
    "AWS_CONFIG_FILE",
    "AWS_SHARED_CREDENTIALS_FILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "REQUESTS_CA_BUNDLE",
)
"""Files that botocore opens by name. Daemon and workers leave the working directory, so they are made absolute."""


def _daemon(config: Config, on_ready: Callable[..., None]) -> int:
    from s3prefetchfs.daemon import run  # heavy: after the checks, and in the background after the fork

    return run(config, on_ready)


def start(config: Config, daemon: Callable[[Config, Callable[..., None]], int]) -> int:
    """Check, then run `daemon` here or in the background.

    Args:
        config: of the mount.
        daemon: gets the configuration and what to call once it is usable (`background.Run`); returns its exit code.

    Returns:
        The exit code: the daemon's in the foreground; 0 in the background, where it is left running.

    Raises:
        UserError: the mount cannot work.
    """
    preflight.check_cache_dir(config.cache_dir)
    for variable in _PATH_VARIABLES:
        if path := os.environ.get(variable):
            os.environ[variable] = os.path.abspath(os.path.expanduser(path))
    if config.foreground:
        _start_log(config, config.log_file)
        return daemon(preflight.check(config), lambda *_: None)
    log_file = config.log_file or config.cache_dir / f"{config.identity}.log"
    _start_log(config, log_file)
    checked = dataclasses.replace(preflight.check(config), log_file=log_file)
    return run_in_background(
        lambda on_ready: daemon(checked, on_ready), log_file, config.mount_timeout_s + START_SLACK_S
    )


def _start_log(config: Config, file: Path | None) -> None:
    try:
        log.start(config.log_level, file)
    except OSError as error:
        raise UserError(
            f"cannot write the log {file}: {error.strerror}", "give a file that you can write with --log-file"
        ) from None
