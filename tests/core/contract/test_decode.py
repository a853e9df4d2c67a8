"""Whole decoders: the target's joint law, exact budgets, and no query beyond the last token wanted."""

from __future__ import annotations

from collections import Counter

import pytest

from sglang_trunc.core.contract.builder import AdaptiveTreePolicy
from sglang_trunc.core.contract.decode import ChainDecoder, PlainDecoder, SeededUniforms, TreeDecoder
from sglang_trunc.core.contract.readout import Readout
from sglang_trunc.core.contract.scoring import score_tree_from_model, score_tree_layers_from_batch_model
from tests.core.contract.toy import ToyModel, assert_law

PROMPT = (2, 0)
MODEL = ToyModel()
NARROW = AdaptiveTreePolicy(min_width=1, max_width=2, start_depth=2, max_depth=3)
DECODERS = {
    "plain": PlainDecoder(),
    "chain": ChainDecoder(MODEL, draft_depth=1, gamma=2),
    "chain, no bonus": ChainDecoder(MODEL, draft_depth=2, gamma=2, bonus=False),
    "tree": TreeDecoder(MODEL, draft_depth=1, policy=NARROW),
    "another draft": ChainDecoder(ToyModel(seed=77), draft_depth=4, gamma=1),
}


def run(decoder, new_tokens, seed=0):
    return decoder.decode(Readout(MODEL, 4), PROMPT, new_tokens, SeededUniforms(seed))


@pytest.mark.parametrize("name", DECODERS)
def test_joint_law_of_two_tokens_is_the_targets(name):
    found = Counter(run(DECODERS[name], 2, seed).tokens for seed in range(1000))
    assert_law(found, MODEL.joint(PROMPT, 2))


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("new_tokens", [0, 1, 2, 5, 17])
def test_exactly_the_tokens_asked_for_and_repeatable(name, new_tokens):
    found = run(DECODERS[name], new_tokens, seed=3)
    assert len(found.tokens) == new_tokens
    assert found == run(DECODERS[name], new_tokens, seed=3)
    assert 0 <= found.accepted <= found.drafted


def test_seeds_matter():
    assert len({run(PlainDecoder(), 8, seed).tokens for seed in range(5)}) > 1


@pytest.mark.parametrize("name", DECODERS)
def test_no_query_reaches_past_the_budget(name):
    """Token ``new_tokens`` needs the context of ``new_tokens - 1`` tokens; a longer one is discarded work."""
    for seed in range(6):
        MODEL.calls.clear()
        run(DECODERS[name], 4, seed)
        assert max(len(context) for _, asked in MODEL.calls for context in asked) == len(PROMPT) + 3


def test_counts_of_a_chain():
    target = Readout(MODEL, 4)
    MODEL.calls.clear()
    found = DECODERS["chain"].decode(target, PROMPT, 9, SeededUniforms(1))
    for depth, counts in ((1, found.draft), (4, target.counts)):
        calls = [asked for at, asked in MODEL.calls if at == depth]
        assert counts == (sum(map(len, calls)), len(calls))
    assert found.draft.queries == found.draft.calls == found.draft_batches == found.drafted
    assert target.counts == (found.drafted + found.rounds, found.rounds)
    assert found.target_batches == found.rounds


@pytest.mark.parametrize("score", [score_tree_from_model, score_tree_layers_from_batch_model])
def test_adapters_change_the_calls_and_nothing_else(score):
    target = Readout(MODEL, 4), Readout(MODEL, 4)
    one_call = DECODERS["tree"].decode(target[0], PROMPT, 12, SeededUniforms(4))
    other = TreeDecoder(MODEL, 1, NARROW, score).decode(target[1], PROMPT, 12, SeededUniforms(4))
    assert one_call == other
    assert target[0].counts.queries == target[1].counts.queries
    assert target[0].counts.calls == one_call.rounds < target[1].counts.calls


def test_perfect_drafts_are_kept():
    perfect = run(ChainDecoder(MODEL, draft_depth=4, gamma=3), 12)
    assert (perfect.rounds, perfect.accepted) == (3, 9)
    without = run(ChainDecoder(MODEL, draft_depth=4, gamma=3, bonus=False), 12)
    assert (without.rounds, without.accepted) == (4, 12)


def test_depth_of_trees_follows_what_was_accepted():
    sharp = ToyModel(sharpness=400)
    policy = AdaptiveTreePolicy(min_width=1, max_width=1, start_depth=1, max_depth=4)
    found = TreeDecoder(sharp, 4, policy).decode(Readout(sharp, 4), PROMPT, 11, SeededUniforms(0))
    assert (found.rounds, found.drafted, found.accepted) == (5, 11, 11)  # 1 + 2 + 3 + 4, then the one token left


def test_a_chain_needs_a_draft():
    with pytest.raises(ValueError, match="gamma = 0, a chain has at least one draft"):
        ChainDecoder(MODEL, 1, 0)
