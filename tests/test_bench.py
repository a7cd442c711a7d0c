"""The pure parts of the benchmark: what runs come to, and how it is written down."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from random import Random

import pytest

from bench import plots, report
from bench.contenders import CONTENDERS
from bench.data import RECORD_BYTES, RECORDS_PER_SHARD, write_tfrecords
from bench.runner import Outcome
from bench.scenarios import SCENARIOS
from bench.summary import METRICS, TOGETHER, Spread, Target, order, percentile, ratios, spread_of, throughput

ROUNDS = [
    {"ours": {"mb_per_s": 300.0}, "theirs": {"mb_per_s": 400.0}},
    {"ours": {"mb_per_s": 100.0}, "theirs": {"mb_per_s": 50.0}},  # a slow minute for both
    {"ours": {"mb_per_s": 360.0}, "theirs": {"mb_per_s": 400.0}},
]


def test_ratios_are_formed_within_rounds():
    """The median of ratios is taken, not the ratio of medians (which is 300 / 400)."""
    assert ratios(ROUNDS, "mb_per_s", "ours", "theirs") == Spread(0.9, 0.75, 2.0)


def test_a_round_without_the_reference_has_no_ratio():
    """A contender that failed in one round is compared in the others."""
    rounds = [*ROUNDS, {"ours": {"mb_per_s": 9.0}}]
    assert ratios(rounds, "mb_per_s", "ours", "theirs") == Spread(0.9, 0.75, 2.0)
    assert spread_of(rounds, "mb_per_s", "ours") == Spread(200.0, 9.0, 360.0)


def test_nothing_measured_is_no_figure():
    """Absent contenders and metrics yield None, not zero."""
    assert spread_of(ROUNDS, "mb_per_s", "absent") is None
    assert spread_of(ROUNDS, "p50_ms", "ours") is None
    assert ratios(ROUNDS, "mb_per_s", "ours", "absent") is None


@pytest.mark.parametrize(
    ("target", "met"),
    [
        (Target("ours", "mb_per_s", 0.9, versus="theirs"), True),
        (Target("ours", "mb_per_s", 0.91, versus="theirs"), False),
        (Target("ours", "mb_per_s", 300), True),
        (Target("ours", "mb_per_s", 300, at_most=True), True),
        (Target("ours", "mb_per_s", 299, at_most=True), False),
        (Target("ours", "mb_per_s", 0.1, versus="absent"), False),
        (Target("absent", "mb_per_s", 1e9, at_most=True), False),
    ],
)
def test_a_target_can_be_missed(target: Target, met: bool):
    """A target is met on the right side of its limit, and never by what was not measured."""
    assert target.met(ROUNDS) is met


def test_percentile_is_one_of_the_values():
    """Nearest rank: p50 of an even number is the lower middle, p99 of a hundred is the second largest."""
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.0
    assert percentile([float(n) for n in range(100)], 0.99) == 98.0
    assert percentile([7.0], 0.01) == percentile([7.0], 1.0) == 7.0


def test_throughput_loses_no_byte():
    """What came evenly over a time is spread evenly over its intervals, from and to the middle of one."""
    width_s, rates = throughput([(10.005, 10.035, 3_000_000), (10.5, 10.5, 1_000_000)], 10.0, 11.0)
    assert width_s == pytest.approx(0.01)
    assert [round(rate) for rate in rates[:5]] == [50, 100, 100, 50, 0]
    assert sum(rates) * width_s == pytest.approx(4.0)


def test_order_alternates():
    """Each contender goes before and after each other one equally often."""
    assert order(["a", "b", "c"], 0) == ["a", "b", "c"]
    assert order(["a", "b", "c"], 1) == ["c", "b", "a"]


def test_scenarios_name_what_exists():
    """References, targets and columns of every scenario are of known contenders and metrics."""
    for scenario in SCENARIOS.values():
        named = {scenario.reference} | {t.contender for t in scenario.targets} | {t.versus for t in scenario.targets}
        assert named - {""} <= set(scenario.contenders) <= set(CONTENDERS)
        assert {*scenario.metrics, *(t.metric for t in scenario.targets)} <= set(METRICS)


def _outcome(ours_mb_per_s: float) -> Outcome:
    sample = {"gets": 31.0, "s3_mb": 256.0, "start_s": 0.5, **dict.fromkeys(TOGETHER["cpu_s_per_gb"], 1.25)}
    rounds = [
        {"downloader": {**sample, "mb_per_s": 400.0}, "ours-no-plan": {**sample, "mb_per_s": ours_mb_per_s + n}}
        for n in range(3)
    ]
    return Outcome(SCENARIOS["cold-stream"], rounds, {"rclone": "not installed"})


def test_markdown_has_medians_ratios_targets_and_absences():
    """One row per contender; below it what was aimed at and who is missing."""
    text = report.markdown(_outcome(379.0))
    ours = next(line for line in text.splitlines() if line.startswith("| ours-no-plan |"))
    assert "| 380 (379-381) | 0.95 (0.95-0.95) |" in ours
    assert "| 1.25 + 1.25 + 1.25 + 1.25 |" in ours
    assert "- target ours-no-plan: MB/s >= 0.85 x downloader: 0.95: pass" in text
    assert "- absent rclone: not installed" in text
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1


def test_pictures_have_what_was_measured(tmp_path: Path):
    """A panel for each kind of series; nothing to draw is no picture."""
    outcome = _outcome(379.0)
    assert not plots.draw(outcome, tmp_path / "nothing.svg")
    series = {"s3_mb_per_s": [1.0, 2.0], "s3_interval_s": [0.5], "waits_s": [0.0, 0.1], "epoch_s3_mb": [10.0, 5.0]}
    outcome.series = {"downloader": series, "ours-no-plan": dict(series, waits_s=[])}
    pytest.importorskip("matplotlib")
    assert plots.draw(outcome, tmp_path / "drawn.svg")
    assert (tmp_path / "drawn.svg").read_text().count('id="axes_') == 3


def test_a_missed_target_is_said_and_counted():
    """FAIL is in the table, in JSON and in what --check looks at."""
    outcome = _outcome(200.0)
    assert outcome.missed
    assert "0.502: FAIL" in report.markdown(outcome)
    document = json.loads(json.dumps(report.document(outcome, {"cpu": "two"})))
    assert [target["met"] for target in document["targets"]] == [False]
    assert document["summary"]["ours-no-plan"]["mb_per_s"] == [201.0, 200.0, 202.0]
    assert len(document["rounds"]) == 3


def test_an_unmeasured_target_is_missed():
    """Leaving the reference out does not make a benchmark pass."""
    outcome = _outcome(400.0)
    alone = dataclasses.replace(outcome, rounds=[{"ours-no-plan": r["ours-no-plan"]} for r in outcome.rounds])
    assert alone.missed
    assert "not measured: FAIL" in report.markdown(alone)


def test_shards_are_tfrecord_files(tmp_path: Path):
    """Length, its CRC, the data, its CRC, over and over; TensorFlow agrees in the mount tests and in every epoch."""
    path = tmp_path / "shard"
    write_tfrecords(path, Random(0))
    content = path.read_bytes()
    assert len(content) == RECORDS_PER_SHARD * (RECORD_BYTES + 16)
    assert content[: 8 + 4] == RECORD_BYTES.to_bytes(8, "little") + content[8:12]
    assert content[12 : 12 + RECORD_BYTES] == Random(0).randbytes(RECORD_BYTES)
