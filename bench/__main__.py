"""The command: python -m bench [--scenario NAME ...] [--contender NAME ...] [--runs N] [--check]"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from random import Random

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from bench import machine, plots, report
from bench.contender import Readers, Site
from bench.contenders import CONTENDERS
from bench.data import Data, write_tfrecords
from bench.runner import Outcome, Runner
from bench.scenarios import SCENARIOS
from tests.s3stub import S3Stub

RESULTS = Path(__file__).parent / "results"

WORKDIR_PARENT = "/var/tmp"
"""Unlike /tmp it is on a disk everywhere."""

LOG_COLUMNS = 140
"""Width of tables in a log, which does not say how wide it is."""


GROUPS = list(dict.fromkeys(scenario.group for scenario in SCENARIOS.values()))


@click.command()
@click.option(
    "--scenario",
    "scenarios",
    multiple=True,
    default=["all"],
    metavar="NAME",
    type=click.Choice(["all", *dict.fromkeys([*GROUPS, *SCENARIOS])]),
    help="What; a name before the slash is all of these.",
)
@click.option(
    "--contender", "contenders", multiple=True, default=list(CONTENDERS), type=click.Choice(list(CONTENDERS)),
    help="Who; all if not given.",
)  # fmt: skip
@click.option("--runs", default=5, show_default=True, type=click.IntRange(1), help="Rounds.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="All results in one file.")
@click.option(
    "--workdir", type=click.Path(path_type=Path, file_okay=False, exists=True), default=WORKDIR_PARENT,
    show_default=True, help="Where a temporary directory is made; its disk is the one under test. Needs 12 GiB.",
)  # fmt: skip
@click.option("--check", is_flag=True, help="Exit with 1 if a target is missed or was not measured.")
@click.option("--list", "list_only", is_flag=True, help="Name scenarios and contenders, and stop.")
def main(
    scenarios: tuple[str, ...],
    contenders: tuple[str, ...],
    runs: int,
    json_file: Path | None,
    workdir: Path,
    check: bool,
    list_only: bool,
) -> None:
    """Measure s3prefetchfs and others side by side; results are also written to bench/results/."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = LOG_COLUMNS
    if list_only:
        for heading, named in (("scenarios", SCENARIOS), ("contenders", CONTENDERS)):
            console.print(f"[bold]{heading}[/]")
            for name, item in named.items():
                console.print(f"  {name:34} {item.about}")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    names = [n for n, one in SCENARIOS.items() if {"all", n, one.group} & set(scenarios)]
    outcomes, documents = _measure(console, names, list(contenders), runs, workdir)
    if json_file:
        json_file.write_text(json.dumps(documents, indent=1) + "\n")
    sys.exit(check and any(outcome.missed for outcome in outcomes))


def _measure(
    console: Console, names: list[str], contenders: list[str], runs: int, parent: Path
) -> tuple[list[Outcome], list[dict[str, object]]]:
    outcomes, documents = [], []
    with ExitStack() as until:
        workdir = Path(tempfile.mkdtemp(prefix="s3prefetchfs-bench-", dir=parent))
        until.callback(_remove, workdir, console)
        described = machine.describe(workdir)
        console.print(*(f"{name}: {text}" for name, text in described.items()), sep="\n")
        if not machine.may_drop_caches():
            console.print("[yellow]caches are not dropped between runs: that needs root[/]")
        if not machine.is_idle():
            console.print("[yellow]this machine is busy with something else: see the rest of the CPU time[/]")
        served, local = workdir / "served", workdir / "local"
        served.mkdir()
        local.mkdir()
        stub = until.enter_context(S3Stub(workdir))
        warm_up = workdir / "warm-up.tfrecord"
        write_tfrecords(warm_up, Random(0))
        site = Site(workdir, local, warm_up, stub.endpoint_url, stub.bucket, _environment())
        data = Data(stub, served, local, until)
        readers = Readers(site)
        until.callback(readers.close)
        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        progress = until.enter_context(Progress(*columns, console=console, transient=True))
        task = progress.add_task("")
        runner = Runner(site, stub, data, readers, lambda what: progress.update(task, description=what))
        for name in names:
            outcome = runner.run(SCENARIOS[name], contenders, runs)
            console.print(report.terminal(outcome))
            document = report.document(outcome, described)
            outcomes.append(outcome)
            documents.append(document)
            RESULTS.mkdir(exist_ok=True)
            stem = name.replace("/", "-")
            (RESULTS / f"{stem}.json").write_text(json.dumps(document) + "\n")
            (RESULTS / f"{stem}.md").write_text(report.markdown(outcome))
            plots.draw(outcome, RESULTS / f"{stem}.svg")
    return outcomes, documents


def _environment() -> dict[str, str]:
    """What the contenders and readers see: nothing of the user's own settings for S3."""
    kept = {
        name: text for name, text in os.environ.items() if not name.startswith(("AWS_", "RCLONE_", "S3PREFETCHFS_"))
    }
    keys = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench", "AWS_DEFAULT_REGION": "us-east-1"}
    files = {"AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull}
    return {**kept, **keys, **files, "NO_PROXY": "127.0.0.1"}


def _remove(workdir: Path, console: Console) -> None:
    """Remove the temporary directory, unless a mount is left in it that would be emptied."""
    left = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    if left := [mountpoint for mountpoint in left if mountpoint.startswith(f"{workdir}/")]:
        console.print(f"[red]still mounted, so not removed: {', '.join(left)}[/]")
    else:
        shutil.rmtree(workdir, ignore_errors=True)


if __name__ == "__main__":
    main()
