"""What came out, for people and for programs: a table on the terminal, Markdown, and JSON with every single run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.table import Table

from bench.contenders import CONTENDERS
from bench.runner import Outcome
from bench.summary import METRICS, TOGETHER, Rounds, Spread, Target, ratios, spread_of


def rows(outcome: Outcome) -> tuple[list[str], list[list[str]]]:
    """The headings, and a row for each contender that has runs: medians, extremes in brackets where they matter."""
    scenario, rounds = outcome.scenario, outcome.rounds
    first, *others = scenario.metrics
    with_ratio = len(scenario.contenders) > 1
    headings = ["", f"{METRICS[first].label} (min-max)"]
    headings += [f"x {scenario.reference} (min-max)"] if with_ratio else []
    headings += [METRICS[metric].label for metric in others]
    table = []
    for name in scenario.contenders:
        if not any(name in samples for samples in rounds):
            continue
        row = [name, _with_ends(spread_of(rounds, first, name), METRICS[first].show)]
        if with_ratio:
            row.append(_with_ends(ratios(rounds, first, name, scenario.reference), "{:.2f}".format))
        table.append(row + [_medians(rounds, metric, name) for metric in others])
    return headings, table


def _with_ends(spread: Spread | None, show: Callable[[float], str]) -> str:
    return f"{show(spread.median)} ({show(spread.low)}-{show(spread.high)})" if spread else "-"


def _medians(rounds: Rounds, metric: str, name: str) -> str:
    spreads = [spread_of(rounds, part, name) for part in TOGETHER.get(metric, (metric,))]
    return " + ".join(METRICS[metric].show(spread.median) if spread else "-" for spread in spreads)


def verdict(target: Target, outcome: Outcome) -> str:
    """A target, what was measured, and whether that is enough, in one line."""
    relation = "<=" if target.at_most else ">="
    versus = f" x {target.versus}" if target.versus else ""
    value = target.measured(outcome.rounds)
    measured = "not measured" if value is None else f"{value:.3g}" if value < 10 else f"{value:.1f}"
    versus += f", or {target.enough:g}" if target.enough else ""
    judged = "pass" if target.met(outcome.rounds) else "FAIL"
    label = METRICS[target.metric].label
    return f"{target.contender}: {label} {relation} {target.limit:g}{versus}: {measured}: {judged}"


def notes(outcome: Outcome) -> list[str]:
    """What has to be said below the table: targets first, then who was absent."""
    lines = [f"target {verdict(target, outcome)}" for target in outcome.scenario.targets]
    return lines + [f"absent {name}: {why}" for name, why in outcome.absent.items()]


def terminal(outcome: Outcome) -> Table:
    """The table in colours; targets and absences are its caption."""
    headings, body = rows(outcome)
    caption = "\n".join([outcome.scenario.about, *notes(outcome)])
    style = "red" if outcome.missed else "green"
    table = Table(title=_title(outcome), caption=caption, caption_justify="left", caption_style=style)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    for row in body:
        table.add_row(*row)
    return table


def markdown(outcome: Outcome) -> str:
    """The same as Markdown."""
    headings, body = rows(outcome)
    lines = [f"### {_title(outcome)}", "", f"{outcome.scenario.about[:1].upper()}{outcome.scenario.about[1:]}.", ""]
    lines += [_line(headings), _line(["---"] + ["--:"] * (len(headings) - 1)), *map(_line, body), ""]
    lines += [f"- {note}" for note in notes(outcome)]
    return "\n".join(lines) + "\n"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _title(outcome: Outcome) -> str:
    return f"{outcome.scenario.name}, medians of {len(outcome.rounds)} runs"


def document(outcome: Outcome, machine: dict[str, str]) -> dict[str, Any]:
    """Everything, as JSON has it."""
    scenario, rounds = outcome.scenario, outcome.rounds
    present = [name for name in scenario.contenders if name not in outcome.absent]
    return {
        "scenario": scenario.name,
        "about": scenario.about,
        "machine": machine,
        "network": scenario.network,
        "contenders": {name: CONTENDERS[name].about for name in present},
        "absent": outcome.absent,
        "reference": scenario.reference,
        "summary": {name: _summary(outcome, name) for name in present},
        "targets": [
            {"target": verdict(target, outcome), "met": target.met(rounds), "measured": target.measured(rounds)}
            for target in scenario.targets
        ],
        "rounds": rounds,
        "series": outcome.series,
    }


def _summary(outcome: Outcome, name: str) -> dict[str, Any]:
    scenario, rounds = outcome.scenario, outcome.rounds
    parts = [part for metric in scenario.metrics for part in TOGETHER.get(metric, (metric,))]
    spreads = {part: spread_of(rounds, part, name) for part in parts}
    spreads["ratio"] = ratios(rounds, scenario.metrics[0], name, scenario.reference)
    return {metric: [s.median, s.low, s.high] for metric, s in spreads.items() if s}
