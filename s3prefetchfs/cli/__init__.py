"""What a person types: `s3prefetchfs VERB ...`, one file per verb.

Nothing here imports trio, boto3, pyfuse3 or the daemon before a mount is really started, so help, errors and
completion come at once, and the process that forks into the background has no thread yet. A UserError of any depth
ends here, as text on stderr and an exit code.
"""

from __future__ import annotations

from typing import Any

import click

from s3prefetchfs import __version__
from s3prefetchfs.cli import demo, mount, status, umount
from s3prefetchfs.errors import UserError


class _Verbs(click.Group):
    def resolve_command(
        self, context: click.Context, arguments: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # mount(8) runs `s3prefetchfs BUCKET MOUNTPOINT -o OPTIONS` for the type fuse.s3prefetchfs in fstab.
        if len(arguments) == 4 and arguments[2] == "-o" and arguments[0] not in self.commands:
            arguments = ["mount", *arguments]
        return super().resolve_command(context, arguments)

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except UserError as error:
            print_error(error)
            context.exit(error.exit_code)


def print_error(error: UserError) -> None:
    """The message on one line of stderr, the hint on the next."""
    click.echo(f"s3prefetchfs: {error.message}", err=True)
    if error.hint:
        click.echo(f"  {error.hint}", err=True)


@click.group(
    cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}, no_args_is_help=True
)
@click.version_option(__version__, prog_name="s3prefetchfs")
def main() -> None:
    """An S3 bucket as local files, cached on disk and read ahead of the training job.

    \b
    s3prefetchfs mount my-bucket/train /mnt/train     mount, and leave a daemon behind
    s3prefetchfs status /mnt/train                    how it is doing
    s3prefetchfs umount /mnt/train                    unmount, and wait for the daemon to end
    s3prefetchfs demo                                 try it all on this machine

    `s3prefetchfs VERB --help` is the manual of each verb.
    """


main.add_command(mount.mount)
main.add_command(umount.umount)
main.add_command(status.status)
main.add_command(demo.demo)
