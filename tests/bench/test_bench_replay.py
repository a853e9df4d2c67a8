"""Recorded rounds, replayed without a model: the counters of the recording, or where they begin to differ."""

from __future__ import annotations

import json

import pytest
import simulate
from sim_replay import Replay, ReplayError
from typer.testing import CliRunner

from sglang_trunc.core.pipeline import Schedule
from sglang_trunc.core.trace import read_traces


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "copy"])
@pytest.mark.parametrize("max_width", [3, 6, 12])
@pytest.mark.parametrize("plan", [(4, 1, None), (4, 1, 2), (8, 2, 6), (6, 1, 3)], ids=str)
def test_replay_gives_the_counters_of_the_recording(record, plan, max_width, exchange, warm):
    worker, trace = record(Schedule(*plan, max_width, 0.02), exchange)
    replay = Replay(trace)
    assert replay.run() == json.loads(json.dumps(worker.counters.report()))
    assert replay.rounds == worker.counters.rounds > 10
    assert not replay.cut
    assert worker.counters.warm_rows == 0 or warm
    assert worker.counters.warm_rows > 0 or not warm or max_width == 3


def edited(path, edit) -> None:
    """Change the first line that ``edit`` has another text for."""
    lines = path.read_text().splitlines(keepends=True)
    for index in reversed(range(len(lines))):
        if (new := edit(lines[index])) is not None:
            lines[index] = new
            break
    path.write_text("".join(lines))


def counted(line: str) -> str | None:
    return line.replace('"rows":', '"rows":1') if '"counted"' in line else None


def other_token(line: str) -> str | None:
    event = json.loads(line)
    if len(event.get("read", ())) < 3:
        return None
    event["read"][0][2] = 8 - event["read"][0][2]
    return json.dumps(event) + "\n"


def other_lane(line: str) -> str | None:
    event = json.loads(line)
    if len(event.get("read", ())) < 3:
        return None
    event["read"].pop()
    return json.dumps(event) + "\n"


@pytest.mark.parametrize("edit", [counted, other_token, other_lane])
def test_replay_sees_every_difference(record, edit, tmp_path):
    record(Schedule(4, 1, 2, 6, 0.02))
    edited(tmp_path / "t.jsonl", edit)
    with pytest.raises(ReplayError, match="round"):
        Replay(read_traces(tmp_path / "t.jsonl")[0]).run()
    said = CliRunner().invoke(simulate.app, ["replay", str(tmp_path / "t.jsonl")])
    assert said.exit_code == 1
    assert "round" in said.output


def test_replay_compares_with_what_the_server_says(record, tmp_path):
    worker, _ = record(Schedule(4, 1, 2, 6, 0.02))
    info, trace = tmp_path / "info.json", str(tmp_path / "t.jsonl")
    state = {"sglang_trunc": {"counters": worker.counters.report()}}
    info.write_text(json.dumps({"internal_states": [state]}))
    same = CliRunner().invoke(simulate.app, ["replay", trace, "--served", str(info)])
    assert same.exit_code == 0, same.output
    assert "all counters equal" in " ".join(same.output.split())
    state["sglang_trunc"]["counters"]["missed"] += 1
    info.write_text(json.dumps({"internal_states": [state]}))
    other = CliRunner().invoke(simulate.app, ["replay", trace, "--served", str(info)])
    assert other.exit_code == 1
    assert "missed" in other.output


def test_a_recording_that_stops_in_a_round_is_replayed_so_far(record, tmp_path):
    record(Schedule(4, 1, 2, 6, 0.02))
    path = tmp_path / "t.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    last = max(index for index, line in enumerate(lines) if line.startswith('{"counted"'))
    # The last round's last readout, and everything behind it, is missing.
    read = max(index for index in range(last) if lines[index].startswith('{"read"'))
    path.write_text("".join(lines[:read]))
    replay = Replay(read_traces(path)[0])
    replay.run()
    assert replay.cut
