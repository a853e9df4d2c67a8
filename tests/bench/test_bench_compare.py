"""compare.py end to end against fake servers, and what it writes."""

import json

import arms
import compare
import pytest
from typer import Typer
from typer.testing import CliRunner

app = Typer()
app.command()(compare.main)


@pytest.fixture
def run(fake_servers, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_DELAY", "0.002")

    def invoke(*arguments):
        out = tmp_path / "out" / "result.json"
        basic = ["--model-path", "fake", "--prompt-lens", "5", "--concurrency", "1,2", "--max-new-tokens", "13"]
        result = CliRunner().invoke(app, [*basic, "--out", str(out), *arguments])
        assert result.exit_code == 0, result.output
        return json.loads(out.read_text()), out.with_suffix(".md").read_text(), result.output

    return invoke


@pytest.mark.parametrize("mode", [[], ["--keep-alive"]])
def test_measures_every_arm_in_every_cell_and_round(run, fake_servers, mode):
    written, table, said = run("--rounds", "2", "--requests", "3", *mode)
    measured = {
        (m["arm"], m["round"], m["cell"]["prompt_len"], m["cell"]["concurrency"]) for m in written["measurements"]
    }
    names = ("plain", "block1", "trunc", "single", "dual")
    assert measured == {(a, r, n, c) for a in names for r in (0, 1) for n in (5,) for c in (1, 2)}
    assert len(written["measurements"]) == len(measured)
    assert len(fake_servers) == (5 if mode else 10)
    assert not any(server.is_alive() for server in fake_servers)
    for line in written["summary"]:
        # Three requests are three waves of one, but two waves of two.
        assert line["equal"] == line["texts"] == 2 * (3 if line["cell"]["concurrency"] == 1 else 4)
        assert line["ratio_min"] <= line["ratio"] <= line["ratio_max"]
        assert line["ratio"] == 1.0 or line["arm"] != "plain"
    # Every cell, then the worst one of each arm, each under two lines of head.
    assert table.count("\n|") == 1 + len(written["summary"]) + 2 + 4
    assert "differ from plain" not in said


def test_a_fake_that_sends_three_tokens_a_time_is_faster(run, monkeypatch):
    monkeypatch.setenv("FAKE_DELAY", "0.02")  # large beside what a busy machine adds
    written, _, _ = run("--rounds", "1", "--requests", "2", "--arm", "trunc")
    fast = [line for line in written["summary"] if line["arm"] == "trunc"]
    assert all(line["ratio"] > 1.3 for line in fast)


def test_unequal_texts_are_said_aloud(run, monkeypatch):
    monkeypatch.setenv("FAKE_SWAP", "11:0.1")
    written, _, said = run("--rounds", "1", "--requests", "1")
    trunc = [line for line in written["summary"] if line["arm"] == "trunc"]
    assert [line["first_differences"] for line in trunc] == [[6], [6, 6]]
    assert "texts that differ from plain: block1, dual, single, trunc" in " ".join(said.split())


def test_settings_and_provenance_are_written(run, fake_servers):
    written, _, _ = run("--rounds", "1", "--requests", "1", "--threads", "1", "--", "--page-size", "16")
    assert [cell["prompt_len"] for cell in written["settings"]["cells"]] == [5, 5]
    assert written["settings"]["threads"] == 1
    assert written["settings"]["server_args"][-2:] == ["--page-size", "16"]
    assert written["settings"]["prompts"]["mixed"]
    assert written["provenance"]["environment"]["OMP_NUM_THREADS"] == "1"
    assert written["provenance"]["packages"]["sglang-trunc"]
    assert written["arms"]["plain"]["kv_bytes_per_token"] == 0.5 * 1024**3 / 4096
    assert all(server.env["OMP_NUM_THREADS"] == "1" for server in fake_servers)
    assert all("--page-size" in server.command for server in fake_servers)


def plan(**changes):
    cells = [compare.Cell(100, 1), compare.Cell(800, 4)]
    defaults = {
        "model_path": "m", "arms": [], "cells": cells, "rounds": 1, "requests": 4, "tokens": 64, "threads": None,
        "server_args": [],
    }  # fmt: skip
    return compare.Plan(**(defaults | changes))


def test_pool_is_the_same_for_all_arms_and_large_enough():
    assert plan().pool_args == ["--max-total-tokens", str(2 * 4 * (800 + 64 + 256))]
    assert plan(server_args=["--max-total-tokens", "99"]).pool_args == []


def test_requests_are_rounded_up_to_whole_waves():
    assert [plan(requests=n).count(compare.Cell(1, 4)) for n in (1, 4, 5)] == [4, 4, 8]


def test_order_rotates():
    assert [[arm.name for arm in compare.rotated(arms.DEFAULT_ARMS, n)][0] for n in range(4)] == [
        "plain",
        "block1",
        "trunc",
        "single",
    ]
