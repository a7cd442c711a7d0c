"""`s3prefetchfs plan make`: write a plan for the files that match."""

from __future__ import annotations

import random
import re
from typing import Any

import click

from s3prefetchfs.cli.manual import EXIT_CODES, ManualCommand, store_options
from s3prefetchfs.cli.plan import orders
from s3prefetchfs.cli.plan.matching import find_files
from s3prefetchfs.cli.plan.output import write_plan
from s3prefetchfs.core.plan import Order
from s3prefetchfs.core.plan_format import EPOCHS_MAX, INTERLEAVE_MAX
from s3prefetchfs.core.plan_order import Arrange, Shard, cut, make_plan
from s3prefetchfs.errors import UserError
from s3prefetchfs.units import parse_size

_SECTIONS = [
    (
        "Examples",
        """
        Three epochs in name order, for a pipeline that opens 16 files at once:
          s3prefetchfs plan make '/mnt/train/*.tfrecord' --epochs 3 --interleave 16 \\
            -o plan.json
        What list_files(pattern, seed=7) yields, from the bucket, with sizes and ETags:
          s3prefetchfs plan make 's3://my-bucket/train/*.tfrecord' --tf-list-files --seed 7 \\
            --epochs 90 --manifest --endpoint-url http://minio:9000 -o plan.json
        The order of the sampler in loader.py, for rank 0 of 8:
          s3prefetchfs plan make /mnt/train --order-from loader:order --epochs 10 --shard 0/8
        Segments of 16 MB of all files, in random order:
          s3prefetchfs plan make '/mnt/raw/*.bin' --segments 16MB --shuffle --seed 1 \\
            -o plan.json
        """,
    ),
    (
        "Sources",
        """
        A SOURCE is a path or pattern on a mount or any other directory, or s3://BUCKET/KEY.
        *, ? and [...] match within a component, ** any directories. A directory, or an
        s3:// source that ends in a slash, stands for all files below it. A name that exists
        is taken as it is. On a mount, paths are written relative to its mountpoint.
        """,
    ),
    (
        "Order",
        """
        Without any of the options it is name order, by bytes. --tf-list-files runs TensorFlow
        itself. Of --tf-epochs, `reshuffled` is one Dataset that is iterated again for each
        epoch, or repeat()ed; `anew` one that is made anew for each epoch with the same seed,
        or cache()d; `fixed` list_files(pattern, shuffle=False).shuffle(n, seed=SEED,
        reshuffle_each_iteration=False). Without --seed, list_files must be the first after
        tf.random.set_seed. Make the plan with the TensorFlow that trains.
        --shard shares out what is ordered, as list_files(..., seed=S).shard(N, I) does: with
        one seed, all ranks together read each file once. With --shard-first each rank keeps
        its files through all epochs, as list_files(..., shuffle=False).shard(N, I).shuffle().
        """,
    ),
    ("Exit status", EXIT_CODES),
]


class _ShardType(click.ParamType["tuple[int, int]"]):
    name = "I/N"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", value)
        if found is None or int(found[1]) >= int(found[2]):
            self.fail(f"{value!r} is not a shard: write 0/8 to 7/8", param, context)
        return int(found[1]), int(found[2])


class _SegmentsType(click.ParamType["tuple[int, int]"]):
    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        low, dash, high = value.partition("-")
        try:
            lengths = parse_size(low), parse_size(high if dash else low)
        except ValueError:
            lengths = 0, 0
        if not 1 <= lengths[0] <= lengths[1]:
            self.fail(f"{value!r} is no length of segments: write 16MB, or 5MB-30MB", param, context)
        return lengths


@click.command(cls=ManualCommand, sections=_SECTIONS, short_help="Write a plan for the files that match.")
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option("-o", "--output", metavar="FILE", default="-", help="Write it there.  [default: stdout]")
@click.option("--epochs", metavar="N", type=click.IntRange(1, EPOCHS_MAX), default=1, help="How many.  [default: 1]")
@click.option("--shuffle", is_flag=True, help="In random order, another one in each epoch.")
@click.option("--same-order", is_flag=True, help="With --shuffle: the same order in each epoch.")
@click.option("--seed", metavar="S", type=int, help="Of --shuffle (0 without it), --segments, or of list_files.")
@click.option("--tf-list-files", is_flag=True, help="As tf.data.Dataset.list_files(pattern, seed=S) yields them.")
@click.option("--tf-global-seed", metavar="G", type=int, help="With --tf-list-files: of tf.random.set_seed.")
@click.option(
    "--tf-epochs",
    type=click.Choice(orders.TF_EPOCHS),
    default=orders.TF_EPOCHS[0],
    metavar="WAY",
    help="With --tf-list-files: reshuffled, fixed or anew, see below.  [default: reshuffled]",
)
@click.option("--order-from", metavar="MODULE:FUNCTION", help="As this function (epoch, files) returns them.")
@click.option("--order", type=click.Choice([order.value for order in Order]), default="strict", metavar="strict|any",
              help="any: each entry once an epoch, nobody knows when.  [default: strict]")  # fmt: skip
@click.option(
    "--shard", metavar="I/N", type=_ShardType(), default=(0, 1), help="Only every Nth, from I, counted from 0."
)
@click.option("--shard-first", is_flag=True, help="With --shard: share out the files before they are ordered.")
@click.option("--segments", metavar="SIZE|MIN-MAX", type=_SegmentsType(),
              help="Byte ranges of this length, or of random ones between the two.")  # fmt: skip
@click.option("--interleave", metavar="K", type=click.IntRange(1, INTERLEAVE_MAX), default=1,
              help="How many files are read at once: cycle_length.  [default: 1]")  # fmt: skip
@click.option("--manifest", is_flag=True, help="With sizes and ETags, so that the mount looks nothing up.")
@click.option("--relative-to", metavar="DIR", help="Write local paths relative to DIR.  [default: the mountpoint]")
@click.option("--name", default="plan", help="A note in the plan.  [default: plan]")
@store_options
def make(
    sources: tuple[str, ...],
    output: str,
    epochs: int,
    shuffle: bool,
    same_order: bool,
    seed: int | None,
    tf_list_files: bool,
    tf_global_seed: int | None,
    tf_epochs: str,
    order_from: str | None,
    order: str,
    shard: tuple[int, int],
    shard_first: bool,
    segments: tuple[int, int] | None,
    interleave: int,
    manifest: bool,
    relative_to: str | None,
    name: str,
    **store: Any,
) -> None:
    """Write a plan that reads the files that match the SOURCEs, in each epoch.

    It is given to a mount with `mount --plan` or `plan submit`.
    """
    if sum([shuffle, tf_list_files, order_from is not None, order == Order.ANY.value]) > 1:
        raise click.UsageError("give only one of --shuffle, --tf-list-files, --order-from and --order any")
    if tf_list_files and seed is None and tf_global_seed is None:
        raise click.UsageError("--tf-list-files needs the --seed of list_files, or --tf-global-seed: no seed, no order")
    if seed is not None and not (shuffle or tf_list_files or segments is not None):
        raise click.UsageError("--seed goes with --shuffle, --tf-list-files or --segments: name order has no chance")
    if same_order and not shuffle:
        raise click.UsageError("--same-order goes with --shuffle; for list_files, see --tf-epochs")
    files = find_files(sources, store, wants_sizes=segments is not None, wants_etags=manifest, relative_to=relative_to)
    arrange: Arrange | None = None
    if shuffle:
        arrange = orders.shuffled(seed or 0, is_same=same_order)
    elif tf_list_files:
        arrange = orders.list_files_order(epochs, seed, tf_global_seed, tf_epochs)
    elif order_from is not None:
        index, count = shard if shard_first else (0, 1)
        arrange = orders.order_from(order_from, [file.path for file in files[index::count]])
    pieces = None
    if segments is not None:
        chance = random.Random(f"{seed or 0}/segments")
        pieces = [cut(file.size_bytes or 0, lambda: chance.randint(*segments)) for file in files]
    try:
        plan = make_plan(
            name,
            files,
            epochs,
            order=Order(order),
            interleave=interleave,
            arrange=arrange,
            shard=Shard(*shard, is_first=shard_first),
            segments=pieces,
            mixes_segments=shuffle or order == Order.ANY.value,
        )
    except ValueError as error:
        raise UserError(f"no plan is made: {error}", "choose fewer shards than there are files") from None
    write_plan(plan, output)
