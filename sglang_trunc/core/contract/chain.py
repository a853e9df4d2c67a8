"""The single-path sampler: Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding",
ICML 2023, Algorithm 1.

A proposal is gamma tokens, each with the exact row q that it was drawn from. Token x is accepted with
min(1, p(x) / q(x)). The first rejected token is replaced by a draw from normalise(max(p - q, 0)) and the round ends.
After gamma accepted tokens one more is drawn from the target's next row, so a round emits 1 to gamma + 1 tokens.
Without this bonus (the *round boundary* variant) it emits 1 to gamma; also lossless, the next round starts at that row.

Every draw is an input, so a round is a pure function, and a grid of draws counts its law exactly. All inputs are
checked before the first decision, those behind a rejection as well. The law holds if draws are independent and
uniform; a seeded stream makes them repeatable, it is no source of independence.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from sglang_trunc.core.contract.readout import Context, Readout
from sglang_trunc.core.contract.rows import (
    Rows,
    Uniforms,
    as_rows,
    as_token,
    as_uniform,
    as_uniforms,
    draw_token,
    residual,
)


class ChainProposal(NamedTuple):
    """A drafted chain."""

    tokens: tuple[int, ...]  # gamma token ids
    rows: Rows  # floating [gamma, vocabulary]: row i is the q that token i was drawn from


class SimulationRound(NamedTuple):
    """All draws of one round; independent uniforms in [0, 1)."""

    draft_uniforms: Uniforms  # [gamma]: draw the drafts
    accept_uniforms: Uniforms  # [gamma]: accept where u < p(x) / q(x)
    fallback: float  # draws the replacement, or the bonus token


class Ending(Enum):
    """What a round's last token is."""

    REPLACED = "replaced"  # a draft was rejected, the last token replaces it
    BONUS = "bonus"  # all drafts were accepted, the last token is the target's own
    BOUNDARY = "boundary"  # all drafts were accepted and no bonus was wanted


class ChainRun(NamedTuple):
    """What a round emits."""

    tokens: tuple[int, ...]  # accepted drafts, then the replacement or the bonus token
    accepted: int  # drafts kept
    ending: Ending


def propose(rows: Rows, draft_uniforms: Uniforms) -> ChainProposal:
    """Drafts drawn from known rows, floating [gamma, vocabulary]; draft i from row i with uniform i.

    For replays and fixtures: rows that do not depend on the tokens drawn before. See :func:`draft_chain` for a model.
    """
    q = as_rows(rows, "draft rows")
    uniforms = as_uniforms(draft_uniforms, "draft_uniforms", len(q))
    return ChainProposal(tuple(draw_token(row, u) for row, u in zip(q, uniforms, strict=True)), q)


def draft_chain(draft: Readout, context: Context, draft_uniforms: Uniforms) -> ChainProposal:
    """Drafts drawn one after another from a draft readout, each query containing the drafts before it."""
    uniforms = as_uniforms(draft_uniforms, "draft_uniforms", len(draft_uniforms))
    prefix, rows = tuple(context), []
    for uniform in uniforms:
        rows.append(draft.row(prefix))
        prefix += (draw_token(rows[-1], uniform),)
    return ChainProposal(prefix[len(context) :], tuple(rows))


def verify_chain(
    proposal: ChainProposal, target_rows: Rows, accept_uniforms: Uniforms, fallback: float, bonus: bool = True
) -> ChainRun:
    """Accept a prefix of the drafts, then replace or add one token.

    ``target_rows``: floating [gamma + 1, vocabulary], without ``bonus`` [gamma, vocabulary]; row i is the target's
    distribution p after the context and i drafts. ``accept_uniforms``: [gamma]. ``fallback``: one uniform.

    ``ValueError``: unequal vocabularies or counts; entries that are negative or not finite; mass other than 1; uniforms
    outside [0, 1); a draft to which its own row gives no probability; no drafts and no bonus. If max(p - q, 0) has no
    mass after a rejection, which only rounding does, the replacement is drawn from p.
    """
    gamma = len(proposal.tokens)
    if not gamma and not bonus:
        raise ValueError("a round without drafts and without the bonus token would emit nothing")
    p = as_rows(target_rows, "target rows", count=gamma + bonus)
    q = as_rows(proposal.rows, "draft rows", count=gamma, vocabulary=p.shape[1])
    tokens = [as_token(token, f"draft token {at}", p.shape[1]) for at, token in enumerate(proposal.tokens)]
    coins = as_uniforms(accept_uniforms, "accept_uniforms", gamma)
    last = as_uniform(fallback, "fallback")
    for at, token in enumerate(tokens):
        if q[at, token] == 0:
            raise ValueError(f"draft token {at} = {token} has probability 0 in the row that it was drawn from")
    for at, (token, coin) in enumerate(zip(tokens, coins, strict=True)):
        if coin < float(p[at, token] / q[at, token]):
            continue
        left = residual(p[at], q[at])
        replacement = draw_token(p[at] if left is None else left, last)
        return ChainRun((*tokens[:at], replacement), at, Ending.REPLACED)
    if not bonus:
        return ChainRun(tuple(tokens), gamma, Ending.BOUNDARY)
    return ChainRun((*tokens, draw_token(p[gamma], last)), gamma, Ending.BONUS)


def replay_round(draft_rows: Rows, target_rows: Rows, draws: SimulationRound, bonus: bool = True) -> ChainRun:
    """A recorded round again: the drafts are drawn from ``draft_rows`` by ``draws`` and verified; no model is asked.

    The rows of a context-dependent model belong to the draws that they were recorded with.
    """
    proposal = propose(draft_rows, draws.draft_uniforms)
    return verify_chain(proposal, target_rows, draws.accept_uniforms, draws.fallback, bonus)


def simulate_round(
    draft: Readout, target: Readout, context: Context, draws: SimulationRound, bonus: bool = True
) -> ChainRun:
    """One round on models: gamma draft queries in turn, then all target rows in one call."""
    proposal = draft_chain(draft, context, draws.draft_uniforms)
    ends = range(len(proposal.tokens) + bonus)
    rows = target.rows([tuple(context) + proposal.tokens[:end] for end in ends])
    return verify_chain(proposal, rows, draws.accept_uniforms, draws.fallback, bonus)
