"""LOOPSPEC_SINGLE and LOOPSPEC_DUAL over arbitrary readouts: the tokens of plain decoding, and nothing leaks.

``Stand`` and ``ScriptedEngine`` check every cycle; a test here only makes them run.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_trunc.core.pipeline import Schedule
from tests.core.pipeline_stand import Stand, schedule
from tests.core.scripted_engine import Script, names

DEPTHS = [
    (recurrences, d1, d2)
    for recurrences in (1, 2, 3, 4, 6, 8, 12)
    for d1 in range(1, recurrences + 1)
    if recurrences % d1 == 0
    for d2 in [None, *range(2 * d1, recurrences, d1)]
]
DUAL = [depths for depths in DEPTHS if depths[2]]
FEW_LANES = [(r, d1, d2) for r, d1, d2 in DEPTHS if d1 < r and (d2 is None or r // d1 <= 8)]  # at most 54 at once


def examples(count: int):
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=count, derandomize=True, deadline=None, suppress_health_check=quiet, database=None)


@st.composite
def schedules(draw) -> Schedule:
    depths = draw(st.sampled_from(DEPTHS) | st.sampled_from(DUAL))
    return Schedule(
        *depths, draw(st.integers(1, 6) | st.integers(4, 20)), draw(st.sampled_from([0, 0, 0.02, 0.3, 0.9]))
    )


@st.composite
def scripts(draw, plan: Schedule) -> Script:
    right = {plan.d1: draw(st.sampled_from([0.0, 0.4, 0.8, 1.0])), plan.d2: draw(st.sampled_from([0.0, 0.8, 1.0]))}
    echo = draw(st.sampled_from([None, None, None, plan.d1]))
    return Script(draw(st.integers(0, 10**6)), right, draw(st.integers(2, 6)), echo)


@st.composite
def stands(draw) -> Stand:
    plan = draw(schedules())
    tokens = st.lists(st.integers(0, 5), min_size=1, max_size=3)
    requests = draw(st.lists(st.tuples(tokens, st.integers(1, 8) | st.integers(12, 24)), min_size=1, max_size=4))
    return Stand(
        plan,
        draw(scripts(plan)),
        requests,
        exchange=draw(st.booleans()),
        branches=draw(st.just(plan.max_width) | st.integers(0, plan.max_width)),
        lookahead=plan.cycles + 1 + draw(st.integers(0, plan.cycles)),
    )


def disturb(stand: Stand, key: int, drop: bool) -> None:
    """Take a request out, or back in; one that only lost its lanes starts at once from the K/V it has."""
    request = stand.requests.get(key)
    if request is None or request.done:
        return
    if not request.joined:
        stand.join(key)
    elif drop:
        stand.leave(key)
    else:
        stand.leave(key, free=False)
        stand.join(key, prefill=False)


@given(stands(), st.integers(1, 4), st.lists(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=3)))
@examples(500)
def test_requests_that_come_and_go_get_the_tokens_of_plain_decoding(stand, first, events):
    for key in list(stand.requests)[:first]:
        stand.join(key)
    for round_events in events:
        for key, drop in round_events:
            disturb(stand, key, drop)
        stand.round()
    while stand.unfinished:
        for key in stand.unfinished:
            if not stand.requests[key].joined:
                stand.join(key)
        stand.round()
    stand.check_empty()


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "copy"])
@pytest.mark.parametrize("depths", [(4, 1, 2), (4, 1, 3), (12, 2, 6), (6, 1, 2)], ids=str)
@pytest.mark.parametrize("max_width", [12, 24, 60])
def test_kv_follow_the_path_where_branches_become_roots(depths, max_width, exchange):
    plan = schedule(*depths, max_width)
    script = Script(seed=max_width, right={plan.d1: 0.3, plan.d2: 0.9})
    stand = Stand(plan, script, [([key], 40 + key) for key in range(3)], exchange, branches=max_width)
    counters = stand.run()
    assert counters.accepted[plan.d2] > 10
    assert stand.engine.moves > 10


@given(stands(), st.integers(0, 8))
@examples(60)
def test_nothing_is_held_after_all_requests_were_aborted(stand, rounds):
    for key in stand.requests:
        stand.join(key)
    for _ in range(rounds):
        stand.round()
    for key in stand.active:
        stand.leave(key)
    stand.check_empty()


@given(st.sampled_from(FEW_LANES), st.data(), st.booleans())
@examples(60)
def test_with_room_for_every_lane_counts_and_time_follow_from_the_readouts(depths, data, exchange):
    """A token costs the depth at which its predecessor proposed it, or R; so LoopSpec's cost model is exact here."""
    recurrences, d1, d2 = depths
    plan = schedule(*depths, max_width=200)
    script = data.draw(scripts(plan))
    prompt, wanted = [1, 2, 3], data.draw(st.integers(1, 24))
    stand = Stand(plan, script, [(prompt, wanted)], exchange, branches=200)
    counters = stand.run()

    tokens = prompt + script.continuation(prompt, wanted)
    sources = [source(stand, tokens[:length]) for length in range(len(prompt), len(tokens) - 1)]
    assert counters.restarts == sources.count(recurrences)
    assert counters.missed == 0
    assert counters.accepted == {depth: sources.count(depth) for depth in (d1, d2) if depth in sources}
    assert counters.ticks == recurrences + sum(sources)
    report = counters.report()
    assert report["accept_length"] == pytest.approx(wanted * recurrences / counters.ticks)
    assert report["modelled_accept_length"] == pytest.approx(report["accept_length"])


def source(stand: Stand, tokens: list[int]) -> int:
    """The first depth that chooses what full depth chooses after these tokens."""
    path, plan = names(tokens)[-1], stand.plan
    depths = [depth for depth in (plan.d1, plan.d2) if depth]
    says = [stand.script.says(path, depth, plan.recurrences) for depth in depths]
    truth = stand.script.truth(path)
    return next((depth for depth, token in zip(depths, says, strict=True) if token == truth), plan.recurrences)


@given(schedules(), st.data())
@examples(15)
def test_equal_inputs_give_equal_decisions(plan, data):
    """Tensor-parallel ranks decide each for itself."""
    script = data.draw(scripts(plan))
    requests = [([key], 12) for key in range(3)]
    first, second = (Stand(plan, script, requests) for _ in range(2))
    assert first.run().report() == second.run().report()
    assert (first.widths, first.born) == (second.widths, second.born)
