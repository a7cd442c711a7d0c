"""What a person types: `s3prefetchfs VERB ...`, one module per verb, loaded when it is used.

No verb imports trio, boto3, pyfuse3 or the daemon before a mount is really started, so help and errors come at
once, and the process that forks into the background has no thread yet. A UserError of any depth ends here, as text
on stderr and an exit code.
"""

from __future__ import annotations

import errno
import os
from typing import Any

import click

from s3prefetchfs import __version__
from s3prefetchfs.cli.manual import VerbGroup
from s3prefetchfs.errors import UserError

VERBS = ("mount", "umount", "status", "plan", "demo")
"""In the order of the help. Each is a module of this package that holds a command of the same name."""


class _Verbs(VerbGroup):
    def resolve_command(
        self, context: click.Context, arguments: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # mount(8) runs `s3prefetchfs BUCKET MOUNTPOINT -o OPTIONS` for the type fuse.s3prefetchfs in fstab.
        if len(arguments) == 4 and arguments[2] == "-o" and arguments[0] not in VERBS:
            arguments = ["mount", *arguments]
        return super().resolve_command(context, arguments)

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except UserError as error:
            _print_error(error)
            context.exit(error.exit_code)
        except OSError as error:
            if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise  # of a file, or no full disk: not of what is printed
            _print_error(UserError(f"cannot write the output: {error.strerror}", "make room, or write it elsewhere"))
            _leave_stdout()
            context.exit(1)


def _leave_stdout() -> None:
    """What could not be written is not tried again when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _print_error(error: UserError) -> None:
    """The message on one line of stderr, the hint on the next."""
    click.echo(f"s3prefetchfs: {error.message}", err=True)
    if error.hint:
        click.echo(f"  {error.hint}", err=True)


@click.group(
    cls=_Verbs,
    package=__name__,
    verbs=VERBS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    no_args_is_help=True,
)
@click.version_option(__version__, prog_name="s3prefetchfs")
def main() -> None:
    """An S3 bucket as local files, cached on disk and read ahead of the training job.

    \b
    s3prefetchfs mount my-bucket/train /mnt/train     mount, and leave a daemon behind
    s3prefetchfs status /mnt/train                    how it is doing
    s3prefetchfs plan make '/mnt/train/*' -o p.json   write down what will be read
    s3prefetchfs plan submit /mnt/train epochs.json   say what will be read, in which order
    s3prefetchfs umount /mnt/train                    unmount, and wait for the daemon to end
    s3prefetchfs demo                                 try it all on this machine

    `s3prefetchfs VERB --help` is the manual of each verb.
    """
