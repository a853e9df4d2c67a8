"""What LOOPSPEC_SINGLE and LOOPSPEC_DUAL do in single cases: counts in closed form, and one cycle at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sglang_trunc.core.counters import PipelineCounters
from sglang_trunc.core.lane_tree import Lane, LaneTree
from sglang_trunc.core.pipeline import Choice, Commit, Pipeline, Schedule
from sglang_trunc.core.pipeline_round import choose
from sglang_trunc.core.survival import Standing
from tests.core.pipeline_stand import Stand, schedule
from tests.core.scripted_engine import Script

OURO, OURO_DUAL, RAVEN, RAVEN_DUAL = (4, 1, None), (4, 1, 2), (32, 2, None), (32, 2, 8)
EVERY_PLAN = pytest.mark.parametrize("depths", [OURO, OURO_DUAL, (4, 2, None), (12, 2, 6), (8, 1, 3)], ids=str)


def lone(depths, wanted: int, d1_right: float, d2_right: float = 1.0, max_width: int = 300, **script) -> Stand:
    """One request that has run to its end."""
    plan = schedule(*depths, max_width)
    right = {plan.d1: d1_right, plan.d2: d2_right}
    stand = Stand(plan, Script(3, right, **script), [([4, 2], wanted)], branches=max_width)
    stand.run()
    return stand


# Counts in closed form.


@pytest.mark.parametrize(("depths", "bound"), [(OURO, 4), (OURO_DUAL, 7), (RAVEN, 16), (RAVEN_DUAL, 249)], ids=str)
def test_births_without_a_budget_follow_the_published_recurrence(depths, bound):
    """d2 contradicts d1 everywhere: b_t = b_{t-1} + b_{t-X}, until the first root is final."""
    recurrences, d1, d2 = depths
    cycles = recurrences // d1
    stand = lone(depths, cycles + 6, d1_right=0.0 if d2 else 1.0)
    born = stand.born[:cycles]
    for t in range(1, cycles):
        assert born[t] == born[t - 1] + (born[t - d2 // d1] if d2 and t >= d2 // d1 else 0)
    assert sum(born) == stand.widths[cycles - 1] == max(stand.widths) == bound


@EVERY_PLAN
def test_always_right_takes_d1_ticks_a_token(depths):
    recurrences, d1, _ = depths
    counters = lone(depths, 20, d1_right=1.0).counters
    assert counters.ticks == recurrences + 19 * d1
    assert counters.accepted == {d1: 19}


@EVERY_PLAN
def test_always_wrong_takes_full_depth_a_token(depths):
    counters = lone(depths, 20, d1_right=0.0, d2_right=0.0).counters
    assert counters.ticks == depths[0] * 20
    assert (counters.restarts, counters.missed, counters.ended) == (19, 0, 1)


@pytest.mark.parametrize("depths", [OURO_DUAL, (12, 2, 6), (8, 1, 3)], ids=str)
def test_wrong_at_d1_and_right_at_d2_takes_d2_ticks_a_token(depths):
    recurrences, _, d2 = depths
    counters = lone(depths, 20, d1_right=0.0, d2_right=1.0).counters
    assert counters.ticks == recurrences + 19 * d2
    assert counters.accepted == {d2: 19}


@pytest.mark.parametrize("d1_right", [0.0, 0.5, 1.0])
def test_a_second_proposal_equal_to_the_first_is_dropped(d1_right):
    dual = lone(OURO_DUAL, 20, d1_right, echo=1)
    single = lone(OURO, 20, d1_right)
    assert dual.counters.readouts[2] > 0
    assert dual.counters.drafted[2] == dual.counters.accepted[2] == 0
    assert (dual.widths, dual.born) == (single.widths, single.born)


@pytest.mark.parametrize("depths", [OURO, OURO_DUAL], ids=str)
@pytest.mark.parametrize("wanted", range(1, 12))
def test_no_lane_behind_the_end(depths, wanted):
    stand = lone(depths, wanted, d1_right=1.0)
    assert stand.counters.ticks == 4 + wanted - 1
    assert max(stand.widths) <= min(wanted, 4)
    assert sum(stand.born) == wanted
    assert stand.counters.ended == 1


def test_one_wanted_token_is_one_lane_and_one_readout():
    counters = lone(OURO_DUAL, 1, d1_right=1.0).counters
    assert (counters.rows, counters.tokens) == (4, 1)
    assert counters.readouts == {4: 1}


@pytest.mark.parametrize(("requests", "max_width"), [(1, 1), (3, 1), (3, 3)])
def test_without_a_spare_row_nothing_is_proposed(requests, max_width):
    plan = schedule(*OURO_DUAL, max_width)
    stand = Stand(plan, Script(3, {1: 1.0}), [([key], 6) for key in range(requests)], branches=0)
    counters = stand.run()
    assert counters.readouts == {4: 6 * requests}
    assert counters.widths == {requests: 24}
    assert not counters.proposed


def test_a_round_returns_the_logits_behind_its_tokens_where_asked_for():
    stand = Stand(schedule(*OURO_DUAL), Script(3, {1: 0.5}), [([1, key], 9) for key in range(2)])
    for key in stand.requests:
        stand.join(key)
    while stand.active:
        for run in stand.round(keep_logits=True).values():
            assert [int(logits.argmax()) for logits in run.logits] == run.tokens


def test_the_lowest_id_wins_a_tie():
    logits = torch.tensor([[0.0, 3.0, 3.0], [1.0, 1.0, 1.0], [0.0, 0.0, 50.0]])
    tokens, probabilities, _ = zip(*choose(logits), strict=True)
    assert tokens == (1, 0, 2)
    assert probabilities == pytest.approx((0.4879, 1 / 3, 1.0), abs=1e-4)


# One cycle at a time.

Says = Callable[[Lane], tuple[int, float]]


def begin(plan: Schedule, requests: int = 1) -> tuple[Pipeline, list[LaneTree]]:
    rows = max(plan.max_width, requests)
    pipeline = Pipeline(plan, range(1000, 1000 + rows), rows, PipelineCounters(recurrences=plan.recurrences))
    trees = [pipeline.join(key, key) for key in range(requests)]
    for key, tree in enumerate(trees):
        tree.reserve(0, list(range(50 * key, 50 * key + 50)), 49)
        tree.plant(0, 0)
    return pipeline, trees


def cycle(pipeline: Pipeline, says: Says) -> list[Commit]:
    readers = pipeline.advanced(pipeline.lanes())
    return pipeline.absorb(readers, [Choice(*says(lane)) for lane in readers])[0]


def test_a_kept_proposal_keeps_its_whole_subtree():
    pipeline, (tree,) = begin(schedule(*OURO))
    for _ in range(3):
        assert not cycle(pipeline, lambda lane: (7, 0.9))
    root, *rest = tree.lanes
    commits = cycle(pipeline, lambda lane: (7, 0.9))
    assert commits == [Commit(0, 7, root)]
    assert tree.lanes[:-1] == rest
    assert (tree.root, tree.root.parent) == (rest[0], None)
    assert [lane.depth for lane in tree.lanes] == [3, 2, 1, 0]
    assert (pipeline.counters.restarts, pipeline.counters.lanes_dropped) == (0, 0)


def test_a_kept_second_proposal_drops_the_first_ones_subtree():
    pipeline, (tree,) = begin(schedule(*OURO_DUAL))
    for _ in range(3):
        cycle(pipeline, lambda lane: (lane.depth, 0.5))
    first, second = [proposal.lane for proposal in tree.root.proposals]
    assert (first.token, second.token) == (1, 2)
    cycle(pipeline, lambda lane: (2, 0.5) if lane is tree.root else (lane.depth, 0.5))
    assert tree.root is second
    assert not first.alive
    assert sorted((lane.depth, lane.token) for lane in tree.lanes) == [(0, 1), (0, 2), (1, 1), (2, 2)]
    assert pipeline.counters.accepted == {2: 1}


def test_a_restart_keeps_nothing():
    pipeline, (tree,) = begin(schedule(*OURO))
    for _ in range(3):
        cycle(pipeline, lambda lane: (7, 0.9))
    before = tree.lanes
    cycle(pipeline, lambda lane: (8 if lane.depth == 4 else 7, 0.9))
    assert not any(lane.alive for lane in before)
    assert [(lane.token, lane.position, lane.depth) for lane in tree.lanes] == [(8, 1, 0)]
    counters = pipeline.counters
    assert (counters.restarts, counters.missed, counters.lanes_dropped, counters.rows_wasted) == (1, 0, 3, 3 + 2 + 1)


def test_a_proposal_that_found_no_row_starts_as_soon_as_there_is_room():
    """Three rows for two requests: the surer one has the spare row, until it leaves."""
    pipeline, (sure, waiting) = begin(schedule(*OURO_DUAL, max_width=3), requests=2)
    cycle(pipeline, lambda lane: (7, 0.9 if lane is sure.root else 0.2))
    assert [len(sure.lanes), len(waiting.lanes)] == [2, 1]
    pipeline.leave(0)
    cycle(pipeline, lambda lane: (7, 0.2))
    child = waiting.root.proposals[0].running
    assert (child.token, child.source, child.depth, waiting.root.depth) == (7, 1, 0, 2)
    cycle(pipeline, lambda lane: (7, 0.2))
    cycle(pipeline, lambda lane: (7, 0.2))
    assert (waiting.root, child.depth) == (child, 2)
    assert pipeline.counters.accepted == {1: 1}


def test_a_token_whose_proposal_found_no_row_is_a_miss():
    pipeline, (sure, waiting) = begin(schedule(*OURO_DUAL, max_width=3), requests=2)
    for _ in range(4):
        cycle(pipeline, lambda lane: (7, 0.9 if lane.position else 0.9 if lane is sure.root else 0.2))
    assert (pipeline.counters.restarts, pipeline.counters.missed) == (1, 1)
    assert waiting.root.depth == 0


def test_a_lane_that_d2_contradicts_makes_room_when_the_budget_binds():
    """Its request's other lanes and those of others stay; the second proposal has its row."""
    pipeline, (one, other) = begin(schedule(*OURO_DUAL, max_width=5), requests=2)
    cycle(pipeline, lambda lane: (7, 0.6))
    first, kept = one.root.proposals[0].lane, other.root.proposals[0].lane
    cycle(pipeline, lambda lane: (8 if lane is one.root else 7, 0.5))
    assert not first.alive
    assert kept.alive
    second = one.root.proposals[1].lane
    assert (second.token, second.source) == (8, 2)
    assert pipeline.counters.lanes_dropped == 1


def test_a_lane_below_the_threshold_gives_its_row_back():
    pipeline, (tree,) = begin(schedule(*OURO_DUAL, min_survival=0.3))
    cycle(pipeline, lambda lane: (7, 0.6))
    first = tree.root.proposals[0].lane
    assert first.alive
    cycle(pipeline, lambda lane: (8, 0.2))
    assert not first.alive
    assert tree.lanes == [tree.root]


@pytest.mark.parametrize(
    ("second", "standings"),
    [(7, [Standing.CONFIRMED]), (8, [Standing.CONTESTED, Standing.SECOND])],
    ids=["agrees", "contradicts"],
)
def test_d2_says_how_a_proposal_stands(second, standings):
    pipeline, (tree,) = begin(schedule(*OURO_DUAL))
    cycle(pipeline, lambda lane: (7, 0.6))
    assert [(proposal.standing, proposal.depth) for proposal in tree.root.proposals] == [(Standing.OPEN, 1)]
    cycle(pipeline, lambda lane: (second if lane is tree.root else 7, 0.5))
    assert [proposal.standing for proposal in tree.root.proposals] == standings


def test_what_became_of_proposals_is_learnt_from_full_depth():
    pipeline, (tree,) = begin(schedule(*OURO_DUAL))
    before = {standing: pipeline.control.estimator.estimate(standing, 0.5) for standing in Standing}
    for _ in range(4):
        cycle(pipeline, lambda lane: (8 if lane.depth == 1 else 7, 0.5))
    after = {standing: pipeline.control.estimator.estimate(standing, 0.5) for standing in Standing}
    assert after[Standing.CONTESTED] < before[Standing.CONTESTED]
    assert after[Standing.SECOND] > before[Standing.SECOND]
    assert after[Standing.OPEN] < before[Standing.OPEN]  # it had been open before d2 spoke


def test_a_request_goes_on_with_lanes_that_fit_it():
    pipeline, (tree,) = begin(schedule(*OURO))
    cycle(pipeline, lambda lane: (7, 0.9))
    before = list(tree.lanes)
    assert pipeline.admit(0, request_row=0, position=0, token=0, reserved=[0, 1, 2], end=9) is None
    assert pipeline.trees[0].lanes == before
    assert (tree.limit, pipeline.counters.cold_starts) == (2, 0)


@pytest.mark.parametrize("fact", [{"request_row": 1}, {"position": 1}, {"token": 1}, {"reserved": [5, 6, 7]}], ids=str)
def test_a_request_starts_cold_where_its_lanes_do_not_fit(fact):
    pipeline, (tree,) = begin(schedule(*OURO))
    cycle(pipeline, lambda lane: (7, 0.9))
    before = list(tree.lanes)
    said = {"request_row": 0, "position": 0, "token": 0, "reserved": [0, 1, 2], "end": 9, **fact}
    pipeline.admit(0, **said)
    assert not any(lane.alive for lane in before)
    root = pipeline.trees[0].root
    assert (root.request_row, root.position, root.token) == tuple(said.values())[:3]
    assert (root.slot, root.depth, pipeline.counters.cold_starts) == (said["reserved"][0], 0, 1)
    assert pipeline.lanes() == [root]


def test_leaving_twice_or_without_lanes_is_no_error():
    pipeline, _ = begin(schedule(*OURO), requests=2)
    pipeline.keep([1, "never came"])
    pipeline.leave(0)
    assert list(pipeline.trees) == [1]
    pipeline.reset(range(5))
    pipeline.leave(1)
    assert not pipeline.lanes()
    assert (pipeline.slots.free, pipeline.slots.size) == (5, 5)
