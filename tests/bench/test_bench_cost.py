"""Cost tables from what servers report, and predictions from an arm's own counters."""

from __future__ import annotations

import json

import cost_table
import predict
import pytest
from cost_table import CostTable, interpolated
from typer import Typer
from typer.testing import CliRunner

COST = {"context": 100, "tick": {"1": 0.01, "2": 0.012, "8": 0.03}, "readout": {"1": 0.001, "2": 0.002, "8": 0.008}}
TABLE = CostTable(100, {1: 0.01, 2: 0.012, 8: 0.03}, {1: 0.001, 2: 0.002, 8: 0.008})


def test_between_measured_widths_a_line_is_drawn():
    times = {1: 1.0, 3: 2.0, 7: 10.0}
    assert [interpolated(times, rows) for rows in (1, 2, 3, 4, 6, 7, 1.5)] == [1.0, 1.5, 2.0, 4.0, 8.0, 10.0, 1.25]


@pytest.mark.parametrize("rows", [0, 8, 0.5])
def test_outside_of_them_nothing_is_guessed(rows):
    with pytest.raises(ValueError, match="is outside the measured 1 to 7"):
        interpolated({1: 1.0, 7: 2.0}, rows)
    with pytest.raises(ValueError, match="an empty cost table"):
        interpolated({}, rows)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda cost: {"internal_states": [{"sglang_trunc": {"cost": cost}}]},
        lambda cost: {"sglang_trunc": {"cost": cost}},
        lambda cost: {"cost": cost},
        lambda cost: cost,
    ],
)
def test_any_part_of_the_servers_answer_will_do(wrap, tmp_path):
    path = tmp_path / "info.json"
    path.write_text(json.dumps(wrap(COST)))
    assert cost_table.loaded(path) == TABLE


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"internal_states": [{"sglang_trunc": {"cost": null}}]}', "has no cost table; was the server started with"),
        ("{}", "has no cost table"),
        ("{", "is not readable JSON"),
    ],
)
def test_a_file_without_a_table_is_refused(text, sentence, tmp_path):
    path = tmp_path / "info.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"info.json {sentence}"):
        cost_table.loaded(path)


# Counters of one cell; 10 tokens each.
TRUNC = {
    "rounds": 5, "runs": 5, "ticks": 30, "rows": 50, "request_ticks": 30, "tokens": 10, "drafted": 5, "accepted": 5,
    "readouts_by_depth": {"1": 5, "4": 10}, "ticks_by_width": {"1": 10, "2": 20},
}  # fmt: skip
DUAL = {
    "rounds": 10, "runs": 10, "ticks": 20, "rows": 60, "request_ticks": 20, "tokens": 10, "drafted": 9, "accepted": 8,
    "readouts_by_depth": {"1": 15, "2": 15, "4": 10}, "ticks_by_width": {"2": 10, "4": 10, "6": 0},
}  # fmt: skip
OPTIONS = {
    "plain": {},
    "trunc": {"d1": 1, "block_size": 2, "draft_threshold": 0.0, "recurrences": 4},
    "dual": {"d1": 1, "d2": 2, "max_width": 8, "min_survival": 0.05, "recurrences": 4},
}
SECONDS = {  # per token
    "plain": 4 * 0.01 + 0.001,
    "trunc": (10 * 0.01 + 20 * 0.012 + 5 * 0.001 + 5 * 0.002) / 10,
    "dual": (10 * 0.012 + 10 * 0.018 + 20 * 0.002) / 10,
}


def compared(counters=True):
    cell = {"prompt_len": 7, "concurrency": 1}
    lines = [
        {"arm": arm, "cell": at, "decode_tps": 50.0, "accept_length": None}
        for arm in OPTIONS
        for at in (cell, {**cell, "concurrency": 4})
    ]
    counted = {"plain": {}, "trunc": TRUNC, "dual": DUAL}
    measured = [{"arm": arm, "cell": cell, "round": n, "counters": counted[arm]} for arm in OPTIONS for n in (0, 1)]
    arms = {arm: {"options": options} for arm, options in OPTIONS.items()}
    return {"arms": arms, "summary": lines, **({"measurements": measured} if counters else {})}


def test_every_arm_is_predicted_from_its_own_counters():
    rows = list(predict.predicted_rows(compared(), TABLE, 4))
    assert [row["arm"] for row in rows] == list(OPTIONS)
    for row in rows:
        assert row["predicted_ms"] == pytest.approx(1e3 * SECONDS[row["arm"]])
        assert row["served_ms"] == 20.0
    slower = list(predict.predicted_rows(compared(), TABLE, 4, overhead=0.003))
    extra = [slow["predicted_ms"] - row["predicted_ms"] for slow, row in zip(slower, rows, strict=True)]
    assert extra == pytest.approx([3.0, 1.5, 3.0])  # a round gives plain one token, TRUNC two, dual one


@pytest.fixture
def run(tmp_path):
    app = Typer()
    app.command()(predict.main)

    def invoke(comparison, *arguments):
        for name, content in (("compare.json", comparison), ("cost.json", COST)):
            (tmp_path / name).write_text(json.dumps(content))
        return CliRunner().invoke(app, [str(tmp_path / "compare.json"), *arguments], env={"COLUMNS": "200"})

    return invoke


def test_the_table_has_every_arm(run, tmp_path):
    out = tmp_path / "out.json"
    said = run(compared(), "--cost", str(tmp_path / "cost.json"), "--out", str(out))
    assert said.exit_code == 0, said.output
    assert all(arm in said.output for arm in OPTIONS)
    assert [row["arm"] for row in json.loads(out.read_text())["rows"]] == list(OPTIONS)


def test_what_is_missing_is_said(run):
    assert "either --cost or --model-path is needed" in run(compared()).output
    assert "the engine's counters, were left out of this file" in run(compared(counters=False)).output
