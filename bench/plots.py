"""Pictures of a scenario's last round: what came from S3 over time, what each step waited, bytes from S3 per epoch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.runner import Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_IN, PANEL_IN = 8.0, 2.4


def draw(outcome: Outcome, path: Path) -> bool:
    """Draw what there is to draw of an outcome.

    Returns:
        Whether there was anything, and something to draw it with: matplotlib is an extra.
    """
    drawn = {"s3_mb_per_s": _throughput, "waits_s": _waits, "epoch_s3_mb": _epochs}
    panels = [
        (panel, shown)
        for name, panel in drawn.items()
        if (shown := {who: series for who, series in outcome.series.items() if any(series.get(name, ()))})
    ]
    if not panels:
        return False
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = outcome.scenario.name  # the same picture is the same file
    matplotlib.rcParams["svg.fonttype"] = "none"  # and text stays text, which is a third of the size
    from matplotlib import pyplot

    figure, rows = pyplot.subplots(len(panels), 1, figsize=(WIDTH_IN, PANEL_IN * len(panels)), squeeze=False)
    colours = {who: f"C{number}" for number, who in enumerate(outcome.series)}
    for [axes], (panel, shown) in zip(rows, panels, strict=True):
        panel(axes, shown, colours)
        axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.suptitle(outcome.scenario.name)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return True


def _throughput(axes: Axes, shown: dict[str, Any], colours: dict[str, str]) -> None:
    for who, series in shown.items():
        [width_s], rates = series["s3_interval_s"], series["s3_mb_per_s"]
        at_s = [number * width_s for number in range(len(rates))]
        axes.plot(at_s, rates, label=who, color=colours[who], drawstyle="steps-post")
    axes.set_xlabel("seconds")
    axes.set_ylabel("MB/s from S3")
    axes.set_ylim(bottom=0)


def _waits(axes: Axes, shown: dict[str, Any], colours: dict[str, str]) -> None:
    for who, series in shown.items():
        axes.plot([1000 * wait_s for wait_s in series["waits_s"]], label=who, color=colours[who], linewidth=0.8)
    axes.set_yscale("symlog", linthresh=1)
    axes.set_xlabel("step")
    axes.set_ylabel("waiting, ms")


def _epochs(axes: Axes, shown: dict[str, Any], colours: dict[str, str]) -> None:
    width = 0.8 / len(shown)
    for place, (who, series) in enumerate(shown.items()):
        at = [number + width * (place - (len(shown) - 1) / 2) for number in range(len(series["epoch_s3_mb"]))]
        axes.bar(at, series["epoch_s3_mb"], width=0.9 * width, label=who, color=colours[who])
    axes.set_xlabel("epoch")
    axes.set_ylabel("MB from S3")
