"""Schedules over recorded and made-up text: the recorded texts, counts in closed form, seconds."""

from __future__ import annotations

import pytest
import sim_cases
from cost_table import UNIT, CostTable
from sim_cases import DUAL, PLAIN, SINGLE, TRUNC, Case, Grid
from sim_paths import ChanceText, RecordedText

from sglang_trunc.core.pipeline import Schedule
from tests.core.traced_run import Request

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
