"""``LaneChooser`` on lanes made by hand: paths, hidden states, looked-up lanes, relaxed acceptance."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from sglang_trunc.core.lane_tree import Lane, Proposal
from sglang_trunc.core.options import DualOptions, Options, SingleOptions
from sglang_trunc.core.survival import Standing
from sglang_trunc.engine.choosing import BatchChooser, LaneChooser
from sglang_trunc.engine.outputs import Outputs
from tests.engine.sampling_stand import Mirror, request, sampling_info

pytestmark = pytest.mark.usefixtures("sglang_context")
VOCABULARY, FULL_DEPTH = 30, 4


def batch_of(reqs: list[Any]) -> types.SimpleNamespace:
    return types.SimpleNamespace(reqs=reqs, sampling_info=sampling_info(reqs, VOCABULARY))


def lane(row: int, position: int, depth: int, token: int = 5, parent: Lane | None = None) -> Lane:
    return Lane(token, position, 100 + position, 0, row, parent, 0, depth)


def lane_chooser(reqs: list[Any], rows: list[int], options: Options | None = None, **more: Any) -> LaneChooser:
    for req in reqs:
        req.output_ids = req.output_ids or [5]
    bases = torch.tensor([len(req.origin_input_ids) + len(req.output_ids) - 1 for req in reqs])
    chooser = BatchChooser(batch_of(reqs), bases, Outputs())
    return LaneChooser(chooser, rows, FULL_DEPTH, options or SingleOptions(1, 8, 0.0), **more)


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def test_a_prompt_that_is_being_prefilled_has_its_last_token_for_a_base():
    """The lane on it is the root; its children's paths are the first tokens of the answer."""
    req = request("r", [3, 4, 6], processor=Mirror, custom_params={"boost": 1.0})
    seen: list[list[int]] = []
    batch = batch_of([req])
    (entry,) = batch.sampling_info.custom_logit_processor.values()
    entry.processor = lambda logits, params: seen.extend(list(p["__req__"].output_ids) for p in params) or logits
    chooser = LaneChooser(BatchChooser(batch, torch.tensor([2]), Outputs()), [1], FULL_DEPTH, SingleOptions(1, 8, 0.0))
    root = lane(1, 2, 3, token=6)
    child = lane(1, 3, 2, token=8, parent=root)
    grandchild = lane(1, 4, 1, token=9, parent=child)
    chooser([root, child, grandchild], random_logits(3))
    assert seen == [[], [8], [8, 9]]


def test_hidden_states_are_those_of_the_tokens_that_were_committed():
    """One row a commit, in the order of the text; rows of lanes on the way are not read."""
    read: list[list[Lane]] = []

    def read_hidden(lanes):
        read.append(list(lanes))
        return torch.tensor([[float(one.position), float(one.request_row)] for one in lanes])

    for reqs in ([request("a", [1]), request("b", [1, 2])], [request("a", [1]), request("b", [1, 2], temperature=1.0)]):
        read.clear()
        chooser = lane_chooser(reqs, [4, 2], read_hidden=read_hidden)
        first, second = lane(4, 1, FULL_DEPTH), lane(2, 2, FULL_DEPTH)
        (token,) = [c.token for c in chooser([first, second, lane(2, 3, 1, 7, second)], random_logits(3))][1:2]
        chooser([lane(4, 2, 2)], random_logits(1))
        chooser([lane(2, 3, FULL_DEPTH, token)], random_logits(1))
        assert [[(one.request_row, one.position) for one in lanes] for lanes in read] == [[(4, 1), (2, 2)], [(2, 3)]]
        assert [[row.tolist() for row in rows] for rows in chooser.hidden] == [[[1.0, 4.0]], [[2.0, 2.0], [3.0, 2.0]]]


def test_looked_up_lanes_that_reach_full_depth_together_commit_as_far_as_they_agree():
    """Behind the first that was not chosen nothing counts, and the next path goes through what was."""
    req = request("r", [1], logit_bias={"0": 0.0})
    for agrees in (True, False):
        chooser = lane_chooser([req], [1])
        logits = random_logits(3)
        best = logits.argmax(1).tolist()
        root = lane(1, 1, FULL_DEPTH)
        middle = lane(1, 2, FULL_DEPTH, best[0] if agrees else best[0] + 1, root)
        last = lane(1, 3, FULL_DEPTH, best[1], middle)
        assert [choice.token for choice in chooser([root, middle, last], logits)] == best
        committed = best if agrees else best[:1]
        newest = lane(1, 1 + len(committed), FULL_DEPTH, committed[-1])
        assert chooser._path(newest, 0) == committed
        (choice,) = chooser([newest], random_logits(1, seed=1))
        assert chooser._path(lane(1, 2 + len(committed), 1, choice.token), 0) == [*committed, choice.token]


def test_peeking_chooses_like_the_readout_and_leaves_no_mark():
    reqs = [request("r", [1], temperature=1.0, sampling_seed=9, repetition_penalty=1.5)]
    chooser = lane_chooser(reqs, [3])
    root, logits = lane(3, 1, FULL_DEPTH), random_logits(1)
    peeked = chooser.peek([root], logits.clone())
    assert chooser.peek([root], logits.clone()) == peeked
    assert not any(chooser._committed)
    assert chooser([root], logits.clone()) == peeked


def with_proposals(one: Lane, *tokens: int) -> Lane:
    one.proposals = [Proposal(1 + number, token, 0.5, Standing.OPEN) for number, token in enumerate(tokens)]
    return one


def test_a_proposal_that_comes_close_takes_the_place_of_the_choice():
    """The first one first; only at full depth, only of greedy requests."""
    options = DualOptions(1, 2, 8, 0.0, relax_top=2, relax_tau=0.5)
    logits = torch.zeros(5, VOCABULARY)
    logits[:, 9], logits[:, 4], logits[:, 6] = 5.0, 4.8, 4.7
    reqs = [request("greedy", [1]), request("sampled", [1], temperature=0.01, sampling_seed=1)]
    chooser = lane_chooser(reqs, [1, 2], options)
    lanes = [
        with_proposals(lane(1, 1, FULL_DEPTH), 6, 4),  # 6 is third best, 4 second
        with_proposals(lane(1, 2, 2), 4),  # not at full depth
        with_proposals(lane(2, 1, FULL_DEPTH), 4),  # sampled
        lane(1, 3, 1),
        with_proposals(lane(1, 2, FULL_DEPTH), 4, 9),  # the second one is the choice itself
    ]
    assert [choice.token for choice in chooser(lanes, logits)] == [4, 9, 9, 9, 4]
    for one in lanes:
        one.proposals.clear()
    assert [choice.token for choice in chooser(lanes, logits)] == [9] * 5
