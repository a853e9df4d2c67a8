"""Algorithm 1: its law counted on grids, with and without the bonus token, and everything that it refuses."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from sglang_trunc.core.contract.chain import (
    ChainProposal,
    ChainRun,
    Ending,
    SimulationRound,
    draft_chain,
    propose,
    replay_round,
    simulate_round,
    verify_chain,
)
from sglang_trunc.core.contract.readout import Readout
from tests.core.contract.toy import LAST_UNIFORM, ToyModel, assert_law, grid, law_of, random_rows, row, step

HALF = row(0.5, 0.5)


def test_binary_grid_counts_2500_of_10000_for_probability_a_quarter():
    p = row(0.75, 0.25)
    found = Counter(
        replay_round([HALF], [p], SimulationRound([draft], [accept], 0.5), bonus=False).tokens
        for draft, accept in grid(100, 2)
    )
    assert found == {(0,): 7500, (1,): 2500}


def test_grid_with_a_residual_that_is_drawn():
    """q (1/2, 1/2, 0) and p (1/4, 1/4, 1/2): all that is rejected becomes the third token."""
    q, p = row(0.5, 0.5, 0), row(0.25, 0.25, 0.5)
    found = Counter(replay_round([q], [p], SimulationRound([a], [b], c), bonus=False).tokens for a, b, c in grid(8, 3))
    assert found == {(0,): 128, (1,): 128, (2,): 256}


def test_grid_of_two_tokens_with_the_bonus():
    """One draft and the bonus: where two tokens come out, their joint law is p0 times p1."""
    q, p = HALF, [row(0.75, 0.25), HALF]
    found = Counter(replay_round([q], p, SimulationRound([a], [b], c)).tokens for a, b, c in grid(8, 3))
    # draft 0 (1/2) always kept; draft 1 (1/2) kept with 1/2, else replaced by 0 and the round ends
    assert found == {(0, 0): 128, (0, 1): 128, (1, 0): 64, (1, 1): 64, (0,): 128}


@pytest.mark.parametrize("seed", range(12))
def test_one_position_has_the_targets_law(seed):
    """Acceptance probability and replacement law are measured from outside; no sampling error."""
    vocabulary = 5
    q, p = random_rows(seed, 2, vocabulary, zeros=seed % 3)
    law = torch.zeros(vocabulary, dtype=torch.float64)
    for token in q.nonzero().squeeze(1).tolist():

        def last(accept, fallback, token=token):
            return verify_chain(ChainProposal((token,), [q]), [p], [accept], fallback, bonus=False)

        kept = step(lambda u: last(u, 0.5).ending, Ending.BOUNDARY)
        law[token] += q[token] * kept
        if kept < 1 - 1e-9:
            law += q[token] * (1 - kept) * law_of(lambda u: last(LAST_UNIFORM, u).tokens[0], vocabulary)
    assert torch.allclose(law, p, atol=1e-9)


@pytest.mark.parametrize("bonus", [True, False])
def test_lengths_and_endings(bonus):
    q, p = [HALF] * 3, [row(0.25, 0.75)] * (3 + bonus)
    drafts = ChainProposal((1, 0, 1), q)
    kept = verify_chain(drafts, p, [0.9, 0.49, 0.9], 0.0, bonus)
    assert kept == (ChainRun((1, 0, 1, 0), 3, Ending.BONUS) if bonus else ChainRun((1, 0, 1), 3, Ending.BOUNDARY))
    assert verify_chain(drafts, p, [0.9, 0.5, 0.9], 0.0, bonus) == ChainRun((1, 1), 1, Ending.REPLACED)


def test_bonus_is_drawn_from_the_row_behind_the_chain():
    proposal = ChainProposal((0,), [row(1, 0, 0)])
    rows = [row(1, 0, 0), row(0.25, 0.25, 0.5)]
    tokens = [verify_chain(proposal, rows, [0.99], u).tokens for u in (0.0, 0.3, 0.5, LAST_UNIFORM)]
    assert tokens == [(0, 0), (0, 1), (0, 2), (0, 2)]


def test_no_drafts_is_a_plain_step():
    assert verify_chain(ChainProposal((), []), [HALF], [], 0.7) == ChainRun((1,), 0, Ending.BONUS)


def test_equal_rows_accept_everything():
    q = random_rows(3, 4, 6)
    for uniforms in ([0.0] * 4, [LAST_UNIFORM] * 4):
        run = replay_round(q, q, SimulationRound(uniforms, [LAST_UNIFORM] * 4, 0.0), bonus=False)
        assert run.accepted == 4


def test_a_residual_lost_to_rounding_falls_back_to_the_target():
    """q is p but for one last bit, so p - q has no positive entry left."""
    p = row(0.5, 0.5)
    q = row(0.5 + 2**-53, 0.5)
    run = verify_chain(ChainProposal((0,), [q]), [p], [LAST_UNIFORM], 0.7, bonus=False)
    assert run == ChainRun((1,), 0, Ending.REPLACED)


REFUSALS = [
    ({"target_rows": [HALF]}, "target rows: expected 3 rows, got 1"),
    ({"target_rows": [HALF, HALF, row(1, 0, 0)]}, "target rows: rows must have equal vocabularies, got sizes [2, 3]"),
    ({"rows": [HALF]}, "draft rows: expected 2 rows, got 1"),
    ({"rows": [row(1, 0, 0)] * 2}, "draft rows: rows must have equal vocabularies, got sizes [2, 3]"),
    ({"rows": [HALF, row(math.nan, 1)]}, "draft rows[1][0] = nan is not finite"),
    ({"rows": [HALF, row(-0.5, 1.5)]}, "draft rows[1][0] = -0.5 is negative"),
    ({"rows": [HALF, row(0.5, 0.4)]}, "draft rows[1] has mass 0.9, a distribution has 1 within 1e-05"),
    ({"target_rows": [HALF, HALF, row(0.5, 0.25)]}, "target rows[2] has mass 0.75, a distribution has 1 within 1e-05"),
    ({"tokens": (0, 2)}, "draft token 1 = 2 is not a token id of a vocabulary of 2"),
    ({"rows": [HALF, row(1, 0)]}, "draft token 1 = 1 has probability 0 in the row that it was drawn from"),
    ({"accept_uniforms": [0.9, 1.0]}, "accept_uniforms[1] = 1.0 is outside [0, 1)"),
    ({"accept_uniforms": [0.9, math.nan]}, "accept_uniforms[1] = nan is not finite, a uniform lies in [0, 1)"),
    ({"accept_uniforms": [0.9]}, "accept_uniforms: expected 2 uniforms, got shape (1,)"),
    ({"fallback": -0.1}, "fallback = -0.1 is outside [0, 1)"),
]


@pytest.mark.parametrize(("change", "sentence"), REFUSALS)
def test_refusals_although_the_first_draft_is_rejected(change, sentence):
    """Token 0 has target probability 0, so the round ends at once; what lies behind is checked all the same."""
    given = {
        "tokens": (0, 1),
        "rows": [HALF, HALF],
        "target_rows": [row(0, 1), HALF, HALF],
        "accept_uniforms": [0.9, 0.5],
        "fallback": 0.5,
    }
    assert _verify(**given).accepted == 0
    with pytest.raises(ValueError, match=r"\w") as refusal:
        _verify(**(given | change))
    assert str(refusal.value) == sentence


def _verify(tokens, rows, target_rows, accept_uniforms, fallback):
    return verify_chain(ChainProposal(tokens, rows), target_rows, accept_uniforms, fallback)


def test_a_round_that_would_emit_nothing_is_refused():
    with pytest.raises(ValueError, match="a round without drafts and without the bonus token would emit nothing"):
        verify_chain(ChainProposal((), []), [], [], 0.5, bonus=False)


@pytest.mark.parametrize(
    ("uniforms", "sentence"),
    [
        ([0.5], "draft_uniforms: expected 2 uniforms, got shape (1,)"),
        ([0.5, 1.0], "draft_uniforms[1] = 1.0 is outside [0, 1)"),
    ],
)
def test_proposals_refuse_bad_draws(uniforms, sentence):
    with pytest.raises(ValueError, match="draft_uniforms") as refusal:
        propose([HALF, HALF], uniforms)
    assert str(refusal.value) == sentence


def test_models_are_asked_once_a_draft_and_once_for_all_target_rows():
    model = ToyModel()
    draft, target = Readout(model, 1), Readout(model, 4)
    draws = SimulationRound([0.1, 0.5, 0.9], [0.0, 0.0, 0.0], 0.5)
    run = simulate_round(draft, target, (7, 8), draws)
    x = run.tokens
    assert model.calls == [
        (1, ((7, 8),)),
        (1, ((7, 8, x[0]),)),
        (1, ((7, 8, *x[:2]),)),
        (4, ((7, 8), (7, 8, x[0]), (7, 8, *x[:2]), (7, 8, *x[:3]))),
    ]
    assert (draft.counts, target.counts) == ((3, 3), (4, 1))
    model.calls.clear()
    simulate_round(draft, target, (7, 8), draws, bonus=False)
    assert len(model.calls[-1][1]) == 3


def test_a_recorded_round_replays():
    model = ToyModel(vocabulary=5)
    draws = SimulationRound([0.3, 0.8, 0.6], [0.2, 0.9, 0.1], 0.4)
    run = simulate_round(Readout(model, 2), Readout(model, 4), (1,), draws)
    proposal = draft_chain(Readout(model, 2), (1,), draws.draft_uniforms)
    target = [model.row((1,) + proposal.tokens[:at]) for at in range(4)]
    assert replay_round(proposal.rows, target, draws) == run == replay_round(proposal.rows, target, draws)
    assert propose(proposal.rows, draws.draft_uniforms).tokens == proposal.tokens


def test_rounds_leave_their_inputs_alone():
    q, p = random_rows(8, 2, 4), random_rows(9, 3, 4)
    before = q.clone(), p.clone()
    replay_round(q, p, SimulationRound([0.9, 0.9], [0.99, 0.99], 0.5))
    assert torch.equal(q, before[0])
    assert torch.equal(p, before[1])


def test_sampled_rounds_never_emit_what_the_target_excludes():
    q, p = random_rows(10, 2, 6), random_rows(11, 3, 6, zeros=3)
    uniforms = torch.rand(2000, 5, generator=torch.Generator().manual_seed(12), dtype=torch.float64).tolist()
    firsts: Counter[int] = Counter()
    for u in uniforms:
        run = replay_round(q, p, SimulationRound(u[:2], u[2:4], u[4]))
        assert all(p[at, token] > 0 for at, token in enumerate(run.tokens))
        firsts[run.tokens[0]] += 1
    assert_law(firsts, dict(enumerate(p[0].tolist())))
