"""Depths in closed form, and the simulator's commands."""

from __future__ import annotations

import json
import math
import sys

import depths
import plot
import pytest
import sim_cases
import simulate
from depths import PowerLaw
from sim_cases import DUAL, PLAIN, SINGLE, TRUNC, Grid
from typer.testing import CliRunner

from sglang_trunc.core.pipeline import Schedule
from tests.bench.recording import EVERY_DEPTH

# Depths in closed form.


@pytest.mark.parametrize(("alpha", "beta", "wanted"), [(1.03, 0.175, (1.26, 8.85)), (1.08, 0.207, (1.41, 9.17))])
def test_closed_form(alpha, beta, wanted):
    found = depths.closed_form(PowerLaw(alpha, beta), 32)
    assert found == pytest.approx(wanted, abs=0.005)
    assert depths.nearest(found, 32) == (1, 9)


def test_fit_finds_a_power_law():
    law = PowerLaw(1.2, 0.3)
    found = depths.fit({depth: law.at(depth) for depth in range(1, 16)} | {16: 0.0})
    assert found == pytest.approx(law)
    assert depths.fit({1: 0.3}) is None
    assert depths.fit({1: 0.1, 2: 0.3}) is None


def test_depths_are_those_that_the_schedules_accept():
    assert depths.single_depths(4) == [1, 2]
    assert depths.dual_depths(4) == [(1, 2), (1, 3)]
    assert depths.dual_depths(2) == []
    assert depths.nearest((1.0, 8.0), 2) is None


def test_shares_are_of_verified_tokens(record):
    _, trace = record(Schedule(4, 1, None, 6, 0.0))
    shares = depths.wrong_shares([trace])
    assert set(shares) == {1, 2, 3}
    for depth, share in shares.items():
        assert share == pytest.approx(1 - EVERY_DEPTH.right[depth], abs=0.15)


# The commands.


def test_sweep_writes_every_case(record, tmp_path):
    record(Schedule(4, 1, 2, 6, 0.02))
    out, cost = tmp_path / "out.json", tmp_path / "cost.json"
    cost.write_text(json.dumps({"tick": {"1": 0.01, "32": 0.05}, "readout": {"1": 0.001, "32": 0.002}}))
    run = ["sweep", str(tmp_path / "t.jsonl"), "--cost", str(cost), "--concurrency", "1,2", "--out", str(out)]
    said = CliRunner().invoke(simulate.app, run)
    assert said.exit_code == 0, said.output
    written = json.loads(out.read_text())
    cases = Grid(sim_cases.SCHEDULES, [6], [2, 3, 4, 6], 0.02).cases(4, range(1, 5))
    assert len(written["rows"]) == 2 * len(cases)
    assert written["rows"][0]["ratio"] == 1.0
    assert said.output.count("*") >= 2
    assert written["closed_form"]["nearest"] in ([1, 2], [1, 3])
    assert "argv" in written["provenance"]


COMPARED = {
    "arms": {
        "plain": {"options": {}},
        "trunc": {"options": {"d1": 1, "block_size": 2, "draft_threshold": 0.0, "recurrences": 4}},
        "dual": {"options": {"d1": 1, "d2": 2, "max_width": 6, "min_survival": 0.02, "recurrences": 4}},
    },
    "summary": [
        {"arm": arm, "cell": {"prompt_len": 7, "concurrency": 2}, "decode_tps": 20.0}
        for arm in ("plain", "trunc", "dual")
    ],
}


def test_measured_arms_are_simulated(record, tmp_path):
    record(Schedule(4, 1, 2, 6, 0.02))
    cost, compared, out = tmp_path / "cost.json", tmp_path / "compare.json", tmp_path / "out.json"
    cost.write_text(json.dumps({"tick": {"1": 0.01, "32": 0.01}, "readout": {"1": 0.0, "32": 0.0}}))
    compared.write_text(json.dumps(COMPARED))
    run = ["sweep", str(tmp_path / "t.jsonl"), "--schedules", "single", "--d1", "2", "--cost", str(cost)]
    said = CliRunner().invoke(simulate.app, [*run, "--measured", str(compared), "--out", str(out)])
    assert said.exit_code == 0, said.output
    points = json.loads(out.read_text())["measured"]
    assert [point["arm"] for point in points] == ["plain", "trunc", "dual"]
    assert points[2]["predicted"] > points[0]["predicted"] > 25  # 2 requests, a token each in 40 ms at most
    assert all(point["measured"] == 20.0 for point in points)


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    plot.scatter([plot.Point("a", 7, 1, 10.0, 9.0), plot.Point("b", 7, 1, 20.0, 22.0)], tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--plot", "p.png"], "--plot draws what --measured compares"),
        (["--measured", "t.jsonl"], "--measured needs --cost or --measure"),
        (["--cost", "t.jsonl"], "t.jsonl"),
        (["--schedules", "tree"], "'tree' is not one of trunc, single, dual"),
        (["--concurrency", "0"], "numbers must be 1 or more"),
    ],
)
def test_what_cannot_be_swept_is_said_in_a_sentence(record, arguments, sentence, tmp_path, monkeypatch):
    record(Schedule(4, 1, 2, 6, 0.02))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", sys)  # as if it were there
    said = CliRunner().invoke(simulate.app, ["sweep", "t.jsonl", *arguments], env={"COLUMNS": "200"})
    assert said.exit_code == 2
    assert sentence in said.output


def test_a_missing_matplotlib_is_said_first(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"pip install -e '.\[bench\]'"):
        plot.needed()


def test_iid_command(tmp_path):
    out = tmp_path / "out.json"
    given = ["--recurrences", "8", "--d1", "1", "--a1", "0.7", "--d2", "4", "--a2", "0.9", "--tokens", "30"]
    said = CliRunner().invoke(simulate.app, ["iid", *given, "--out", str(out)])
    assert said.exit_code == 0, said.output
    schedules = [row["case"]["schedule"] for row in json.loads(out.read_text())["rows"]]
    assert schedules == [PLAIN, *[TRUNC] * 4, SINGLE, DUAL]
    assert math.isclose(json.loads(out.read_text())["rows"][0]["ticks"], 8)
