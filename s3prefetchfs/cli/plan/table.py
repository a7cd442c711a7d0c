"""Plans as rows of a table, for `plan list` and `status`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from s3prefetchfs.units import format_duration, format_size

if TYPE_CHECKING:
    from rich.table import Table


def plan_table(plans: Iterable[Mapping[str, Any]]) -> Table:
    """A row for each plan, from the daemon's JSON; one that is not in force has no progress."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("plan", "state", "epoch", "position", "ahead", "deviations", "confidence", "stall"):
        table.add_column(heading, overflow="fold")
    for plan in plans:
        if "epoch" in plan:
            cells = [
                f"{plan['epoch'] + 1}/{plan['epochs']}",
                f"{plan['position']:,}/{plan['entries']:,}",
                format_size(plan["bytes_ahead"]),
                f"{plan['deviations']:,}",
                f"{plan['confidence']:.0%}",
                format_duration(plan["predicted_stall_s"]),
            ]
        else:
            cells = []
        table.add_row(*map(Text, [plan["name"], plan["state"], *cells]))
    return table
