"""Looked-up chains in the pipelines: the tokens of plain decoding, several commits a cycle, screening at d1."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_trunc.core.lane_tree import LOOKUP
from sglang_trunc.core.pipeline import Schedule
from tests.core.pipeline_stand import ScriptedLookups, Stand
from tests.core.scripted_engine import Script
from tests.core.test_pipeline import disturb, examples, schedules, scripts

PROMPTS = [([1, 2, 3], 30), ([2], 17), ([0, 0, 1], 24)]


@st.composite
def stands(draw) -> Stand:
    plan = draw(schedules())._replace(
        lookup=draw(st.integers(1, 6)),
        lookup_candidates=draw(st.integers(1, 3)),
        screen_top=draw(st.integers(0, 2)),
    )
    script = draw(scripts(plan))
    tokens = st.lists(st.integers(0, 5), min_size=1, max_size=3)
    requests = draw(st.lists(st.tuples(tokens, st.integers(1, 8) | st.integers(12, 24)), min_size=1, max_size=4))
    return Stand(
        plan,
        script,
        requests,
        exchange=draw(st.booleans()),
        branches=draw(st.just(plan.max_width) | st.integers(0, plan.max_width)),
        lookahead=plan.cycles * (1 + plan.lookup) + 1 + draw(st.integers(0, plan.cycles)),
        lookups=ScriptedLookups(script, draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])), draw(st.integers(0, 6))),
    )


@given(stands(), st.integers(1, 4), st.lists(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=3)))
@examples(400)
def test_requests_that_come_and_go_get_the_tokens_of_plain_decoding(stand, first, events):
    for key in list(stand.requests)[:first]:
        stand.join(key)
    for changes in events:
        for key, drop in changes:
            disturb(stand, key, drop)
        if stand.active:
            stand.round()
    for key in stand.unfinished:
        if not stand.requests[key].joined:
            stand.join(key)
    while stand.active:
        stand.round()
    stand.check_empty()


def ran(right: float, plan: Schedule, drafts: float = 0.5) -> Stand:
    script = Script(5, {plan.d1: drafts, plan.d2: drafts})
    lookahead = plan.cycles * (1 + plan.lookup) + 1
    stand = Stand(plan, script, PROMPTS, lookahead=lookahead, lookups=ScriptedLookups(script, right, plan.lookup))
    stand.run()
    return stand


PLAN = Schedule(4, 1, 2, 64, 0.0, 6)


def test_right_chains_are_committed_together():
    """Drafts that d1 confirms come through in the cycle of their root."""
    stand = ran(1.0, PLAN, drafts=1.0)
    counters = stand.counters
    tokens = sum(wanted for _, wanted in PROMPTS)
    assert counters.screened_out == 0
    assert counters.accepted[LOOKUP] > tokens // 2
    assert counters.report()["accept_length"] > PLAN.cycles


def test_wrong_chains_go_at_d1():
    stand = ran(0.0, PLAN, drafts=1.0)
    counters = stand.counters
    assert counters.accepted[LOOKUP] == 0
    assert counters.drafted[LOOKUP] > 0
    assert counters.screened_out > 0
    # Whoever is screened out has run d1 ticks, or the few more until its turn came.
    assert counters.rows_wasted <= counters.lanes_dropped * PLAN.recurrences


def test_without_screening_wrong_chains_go_when_full_depth_says_so():
    """What d1 lets pass costs the rows of all depths."""
    screened, open_ended = ran(0.0, PLAN, drafts=1.0), ran(0.0, PLAN._replace(screen_top=0), drafts=1.0)
    assert open_ended.counters.screened_out == 0
    assert open_ended.counters.accepted[LOOKUP] == 0
    assert open_ended.counters.rows_wasted > 2 * screened.counters.rows_wasted


def test_a_closer_look_lets_less_pass():
    """d1 proposes the second best here, and knows it: two tokens pass that one does not."""
    script, plan = Script(5, {PLAN.d1: 0.0, PLAN.d2: 1.0}), PLAN._replace(lookup=2)
    runs = []
    for top in (1, 5):
        stand = Stand(plan._replace(screen_top=top), script, PROMPTS, lookups=ScriptedLookups(script, 1.0, 2))
        stand.run()
        runs.append(stand.counters)
    strict, lenient = runs
    assert strict.accepted[LOOKUP] == 0
    assert strict.screened_out > 0
    assert lenient.accepted[LOOKUP] > sum(wanted for _, wanted in PROMPTS) // 2
    assert lenient.screened_out == 0


def test_two_candidates_are_better_than_one_where_either_may_be_right():
    """They share the rows, and the right one of two half-right guesses is kept; no depth knows better here."""
    script = Script(5, {PLAN.d1: 0.0, PLAN.d2: 0.0})
    accepted = []
    for count in (1, 2):
        plan = PLAN._replace(screen_top=0, lookup_candidates=count)
        stand = Stand(plan, script, PROMPTS, lookups=ScriptedLookups(script, 0.5, 2))
        stand.run()
        accepted.append(stand.counters.accepted[LOOKUP])
    assert accepted[1] > accepted[0] > 0


def test_the_estimate_learns_how_good_lookups_are():
    """Below the minimum survival none starts."""
    plan = PLAN._replace(min_survival=0.3)
    bad, good = (ran(right, plan, drafts=1.0).counters for right in (0.0, 1.0))
    assert 0 < bad.drafted[LOOKUP] < good.drafted[LOOKUP] / 2
