"""The simulator: recorded rounds replayed exactly, other schedules over the same texts, counts in closed form."""

from __future__ import annotations

import json
import math
import sys

import depths
import plot
import pytest
import sim_cases
import simulate
from cost_table import UNIT, CostTable
from depths import PowerLaw
from sim_cases import DUAL, PLAIN, SINGLE, TRUNC, Case, Grid
from sim_paths import ChanceText, RecordedText
from sim_replay import Replay, ReplayError
from sim_rounds import ride
from typer.testing import CliRunner

from sglang_trunc.core.pipeline import Schedule
from sglang_trunc.core.trace import read_traces
from tests.core.scripted_engine import Script
from tests.core.traced_run import Request, Worker

EVERY_DEPTH = Script(7, {depth: 0.5 + 0.05 * depth for depth in range(1, 8)}, vocabulary=9)


def requests() -> list[Request]:
    return [
        Request([1, 2, 3], 25),
        Request([4], 40, arrives=1, stops=17),
        Request([2, 2], 20, arrives=2, retracted=4),
        Request([3], 1, arrives=2),
        Request([1, 4, 4], 30, arrives=3),
        Request([6, 4, 4], 2, arrives=8),
    ]


@pytest.fixture(params=[False, True], ids=["cold", "warm"])
def warm(request) -> bool:
    return request.param


@pytest.fixture
def record(tmp_path, warm):
    """``record(plan)``: a worker that has run, and its trace."""

    def run(plan: Schedule, exchange: bool = True, asked=requests, script: Script = EVERY_DEPTH):
        worker = Worker(plan, script, asked(), tmp_path / "t.jsonl", exchange, ride if warm else None)
        worker.run()
        return worker, read_traces(tmp_path / "t.jsonl")[-1]

    return run


# Exact replay.


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


# Other schedules.


def texts_of(trace, limit=None):
    return [RecordedText(trace, text, limit) for text in trace.texts]


@pytest.mark.parametrize("concurrency", [1, 3])
def test_every_schedule_gives_the_recorded_texts(record, concurrency):
    """``Live.take`` compares them; here that all of them came, and what the counters must obey."""
    _, trace = record(Schedule(8, 1, 3, 8, 0.0))
    texts = texts_of(trace)
    cases = Grid(sim_cases.SCHEDULES, [2, 8], [2, 5], 0.02).cases(8, trace.depths)
    assert {case.schedule for case in cases} == {PLAIN, *sim_cases.SCHEDULES}
    wanted = sum(len(text.tokens) - 1 - text.warm for text in texts)
    for case in cases:
        outcome = case.run(8, texts, concurrency)
        counters = outcome.counters
        assert outcome.delivered == wanted <= outcome.tokens
        assert counters.ticks >= outcome.tokens * 8 / max(counters.widths)
        assert sum(width * ticks for width, ticks in counters.widths.items()) == counters.rows
        read = sum(rows * calls for rows, calls in outcome.readouts.items())
        assert read <= counters.readouts.total() <= read + getattr(counters, "warm_rows", 0)
        if case.schedule in (PLAIN, TRUNC):
            assert counters.rows == 8 * outcome.tokens + outcome.wasted
        else:
            assert counters.rows + counters.warm_rows == 8 * outcome.tokens + outcome.wasted
            assert max(counters.widths) <= max(case.max_width, concurrency)
    assert cases[0].run(8, texts, 1).counters.ticks == 8 * wanted


@pytest.mark.parametrize("plan", [(4, 1, None), (4, 1, 2), (6, 1, 3)], ids=str)
def test_the_recorded_schedule_costs_what_it_cost(record, plan, warm):
    """One request at a time: the simulator's own rounds, against the worker's."""

    def one_by_one():
        return [Request([key], 20, arrives=100 * key) for key in range(4)]

    worker, trace = record(Schedule(*plan, 6, 0.02), asked=one_by_one)
    kind = DUAL if plan[2] else SINGLE
    outcome = Case(kind, *plan[1:], max_width=6, min_survival=0.02).run(plan[0], texts_of(trace), 1)
    ours, theirs = outcome.counters, worker.counters
    assert ours.tokens == theirs.tokens == 4 * 19
    assert ours.accepted == theirs.accepted
    if not warm:  # a prompt's last token is not read at every depth
        assert ours.report() == theirs.report()


def test_texts_can_be_cut_short(record, warm):
    _, trace = record(Schedule(4, 1, 2, 6, 0.02))
    texts = texts_of(trace, 5)
    assert {len(text.tokens) for text in texts} <= set(range(2, 7))
    for case in (Case(PLAIN), Case(TRUNC, 1, block_size=3), Case(DUAL, 1, 2, max_width=6, min_survival=0.02)):
        assert case.run(4, texts, 2).delivered == sum(len(text.tokens) - 1 - text.warm for text in texts)


def test_beside_the_text_a_path_agrees_with_itself_as_the_text_does(record):
    _, trace = record(Schedule(4, 1, None, 6, 0.02))
    text = texts_of(trace)[0]
    on_text = text.start()
    for index in range(1, 12):
        beside, on_text = on_text.child(-index), on_text.child(text.tokens[index])
        ours = [on_text.says(depth) for depth in range(1, 5)]
        theirs = [beside.says(depth) for depth in range(1, 5)]
        assert [choice.probability for choice in ours] == [choice.probability for choice in theirs]
        alike = [[a.token == b.token for a in said for b in said] for said in (ours, theirs)]
        assert alike[0] == alike[1]
        assert not {choice.token for choice in theirs} & set(text.tokens)


def test_depths_that_were_not_read_are_not_tried(record):
    _, trace = record(Schedule(8, 2, 4, 6, 0.02))
    cases = Grid(sim_cases.SCHEDULES, [8], [2], 0.02).cases(8, trace.depths)
    assert {depth for case in cases for depth in case.depths} == {2, 4, 6}
    cases = Grid(sim_cases.SCHEDULES, [8], [2], 0.02, [2], [6]).cases(8, trace.depths)
    assert [case.name for case in cases] == ["plain", "TRUNC 2 block 2", "SINGLE 2 width 8", "DUAL 2/6 width 8"]


# Independent acceptance.


def chance(recurrences: int, agreement: dict[int, float], tokens: int = 60, requests: int = 1):
    return [ChanceText(recurrences, agreement, tokens, seed) for seed in range(requests)]


@pytest.mark.parametrize(("recurrences", "d1", "d2"), [(4, 1, 2), (32, 2, 8), (12, 3, 6)])
@pytest.mark.parametrize("dual", [False, True])
def test_always_right_takes_d1_ticks_a_token_and_always_wrong_takes_r(recurrences, d1, d2, dual):
    case = Case(DUAL if dual else SINGLE, d1, d2 if dual else None, max_width=250, min_survival=0.0)
    for right, ticks in ((1.0, recurrences + 59 * d1), (0.0, recurrences * 60)):
        outcome = case.run(recurrences, chance(recurrences, {d1: right, d2: right}), 1)
        assert outcome.counters.ticks == ticks


def test_with_room_for_every_lane_ticks_follow_from_the_agreement():
    agreement, texts = {1: 0.6, 3: 0.85}, chance(6, {1: 0.6, 3: 0.85}, 300, 6)
    case = Case(DUAL, 1, 3, max_width=60, min_survival=0.0)
    ticks = case.run(6, texts, 1).counters.ticks / (6 * 300)
    assert ticks == pytest.approx(agreement[1] * 1 + 0.25 * 3 + 0.15 * 6, rel=0.05)


@pytest.mark.parametrize("block", [1, 2, 5])
def test_trunc_of_independent_acceptance(block):
    right, tokens = 0.7, 4000
    outcome = Case(TRUNC, 1, block_size=block).run(4, chance(4, {1: right}, tokens), 1)
    accept = (1 - right**block) / (1 - right)
    assert outcome.tokens / outcome.counters.rounds == pytest.approx(accept, rel=0.05)
    assert outcome.counters.ticks == pytest.approx(tokens / accept * (block + 3), rel=0.05)


def test_the_seed_decides_everything():
    case = Case(DUAL, 1, 2, max_width=6, min_survival=0.05)
    runs = [case.run(4, chance(4, {1: 0.6, 2: 0.8}, 50, 3), 2).counters.report() for _ in range(2)]
    assert runs[0] == runs[1]


# Cost.


def test_seconds_add_up():
    cost = CostTable(100, {1: 1.0, 3: 3.0}, {1: 0.5, 2: 0.7}, {1: 10.0})
    assert cost.seconds({1: 4, 2: 2}, {1: 3, 1.5: 1}) == 4 * 1.0 + 2 * 2.0 + 3 * 0.5 + 0.6
    assert cost.seconds({}, {}, {1: 2}) == 20.0
    assert UNIT.seconds({1: 4, 7: 2}, {3: 5}) == 6


def test_speed_and_ratio_are_of_the_cost_table():
    texts = chance(4, {1: 1.0}, 40)
    cost = CostTable(None, {1: 0.01, 4: 0.02}, {1: 0.001, 4: 0.001})
    plain = sim_cases.figures(Case(PLAIN), Case(PLAIN).run(4, texts, 1), 1, cost, 0.0, None)
    assert plain.speed == pytest.approx(1 / 0.041)
    case = Case(SINGLE, 1, max_width=4, min_survival=0.0)
    outcome = case.run(4, texts, 1)
    fast = sim_cases.figures(case, outcome, 1, cost, 0.0, plain.speed)
    assert fast.ratio == pytest.approx(fast.speed / plain.speed)
    slow = sim_cases.figures(case, outcome, 1, cost, 0.1, plain.speed)
    assert slow.seconds == pytest.approx(fast.seconds + 0.1 * outcome.counters.rounds)


def test_percentile_is_of_ticks():
    assert sim_cases.percentile({1: 98, 5: 1, 9: 1}, 0.99) == 5
    assert sim_cases.percentile({3: 1}, 0.99) == 3


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
