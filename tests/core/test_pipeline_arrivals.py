"""The budget where requests come or go beside a pipeline that is full."""

from __future__ import annotations

import torch

from sglang_trunc.core.counters import PipelineCounters
from sglang_trunc.core.pipeline_round import pipeline_round
from tests.core.pipeline_stand import Stand, schedule
from tests.core.scripted_engine import Script
from tests.core.test_pipeline_directed import OURO, begin, cycle


def full_stand(state_rows: int) -> Stand:
    """One request fills three rows; a second one is about to come."""
    stand = Stand(schedule(*OURO, max_width=3), Script(3, {}), [([1], 20), ([2], 20)], state_rows=state_rows)
    stand.join(0)
    stand.round()
    assert len(stand.pipeline.lanes()) == 3
    return stand


def test_a_request_may_arrive_when_lanes_hold_the_whole_width():
    full_stand(state_rows=3 + 1).join(1)


def test_an_arrival_does_not_widen_the_next_tick():
    stand = full_stand(state_rows=4)
    stand.join(1)
    stand.round()
    assert max(stand.widths) <= 3


class AlwaysSeven:
    """An engine that only reads out."""

    def start(self, lanes):
        pass

    def advance(self, lanes, ticks):
        pass

    def move(self, moves):
        pass

    def readout(self, lanes):
        return torch.eye(8)[7].repeat(len(lanes), 1)


def test_a_proposal_starts_as_soon_as_a_request_has_left():
    """SINGLE reads nothing more of the other request until its root is final, too late for the proposal."""
    pipeline, (sure, waiting) = begin(schedule(*OURO, max_width=3), requests=2)
    cycle(pipeline, lambda lane: (7, 0.9 if lane is sure.root else 0.2))
    pipeline.leave(0)
    pipeline_round(AlwaysSeven(), pipeline, [1])
    assert pipeline.counters.accepted == {1: 1}
    assert waiting.root.depth >= 2


def test_rows_of_lanes_are_counted_when_the_pool_is_flushed():
    pipeline, _ = begin(schedule(*OURO))
    counters: PipelineCounters = pipeline.counters
    for _ in range(2):
        lanes = pipeline.lanes()
        counters.count_ticks(1, len(lanes), 1)
        cycle(pipeline, lambda lane: (7, 0.9))
    pipeline.reset(range(3))
    assert counters.rows == 4 * counters.tokens + counters.rows_wasted
