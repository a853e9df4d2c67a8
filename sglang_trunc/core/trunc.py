"""TRUNC: draft a chain at depth d1, then take the whole chain from d1 to R in one widened pass.

One round of one batch, as a pure function over a ``LaneEngine``:

1. propose: each request's newest token runs steps [0, d1), and with it what was looked up behind it; the choices at d1
   keep the part of that which they agree with (screening; ``screen_top`` says how closely). The choice of the last kept
   node is the next draft, and so on, until the request's budget is full or the drafted token's probability falls under
   the threshold;
2. commit: every kept node continues from its state at d1 through [d1, R); one readout at R; the longest
   prefix of drafts equal to the choice at R is accepted, and the row after it gives the bonus token.

Choice = argmax, the lowest id on ties, unless the caller gives another (``choose``: sampling, request options). Draft
work is never repeated. A budget of 1 is plain decoding. Every
accepted node has run all R steps, so its KV is valid at every depth when it is counted.

Source: self-speculative early exit of looped models (Huginn, arXiv 2502.05171, section on zero-shot
self-speculation) with Leviathan et al. 2023 for the greedy acceptance rule; contract in ``notes/structure.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_trunc.core.counters import Counters
from sglang_trunc.core.looped import LaneEngine, Nodes
from sglang_trunc.core.options import TruncOptions


class Run(NamedTuple):
    """What one round gives every request; ``w`` is the batch's widest chain."""

    tokens: Tensor  # int64 [bs, w]: the run left-aligned: accepted drafts, then the bonus; rest is padding
    lengths: Tensor  # int64 [bs]: accepted drafts + 1
    logits: Tensor  # float32 [kept, vocabulary]: full-depth logits of the kept nodes, as they were chosen from
    kept: Nodes  # the nodes those rows belong to


class Readout(NamedTuple):
    """One readout, for whoever chooses from it; ``n`` rows, one a node."""

    nodes: Nodes
    depth: int
    logits: Tensor  # float32 [n, vocabulary]; may be changed in place
    chains: Tensor  # int64 [bs, w]: tokens so far, root first; valid up to each node's own offset
    drafts: Tensor | None  # int64 [n]: the draft that follows each node, -1 for none; only at full depth


def choose_greedily(readout: Readout) -> Tensor:
    """Best token of each row, the lowest id on ties: int64 [n]."""
    return readout.logits.argmax(-1)


def trunc_round(
    engine: LaneEngine,
    roots: Tensor,
    budgets: list[int],
    options: TruncOptions,
    counters: Counters,
    choose: Callable[[Readout], Tensor] = choose_greedily,
    lookups: Sequence[Sequence[int]] = (),
) -> Run:
    """One TRUNC round.

    ``roots`` int64 [bs]: each request's bonus token. ``budgets``: nodes each request may use, root included,
    at least 1 each. ``choose``: the token of each row of a readout, int64 [n]. ``lookups``: of each request, what may
    follow its root, below its budget; none if left out.
    """
    chains, lengths = _propose(engine, roots, budgets, lookups, options, counters, choose)
    kept = _chain_nodes(lengths)
    depth = options.d1
    if depth < engine.recurrences:
        engine.advance(kept, depth, engine.recurrences)
        counters.count_ticks(engine.recurrences - depth, len(kept), len(budgets))
    logits = engine.readout(kept)
    counters.count_readout(engine.recurrences, len(kept))
    choices = torch.zeros_like(chains)
    drafts = _drafts_behind(kept, chains, lengths)
    choices[kept.request, kept.offset] = choose(Readout(kept, engine.recurrences, logits, chains, drafts))
    accepted = count_accepted(chains, choices, lengths)
    counters.count_round(drafted=lengths - 1, accepted=accepted)
    return Run(choices, accepted + 1, logits, kept)


def count_accepted(chains: Tensor, choices: Tensor, lengths: Tensor) -> Tensor:
    """Drafts kept per request: int64 [bs].

    ``chains`` int64 [bs, w]: node tokens, root first. ``choices`` int64 [bs, w]: full-depth choice of each
    node. ``lengths`` int64 [bs]: nodes of each chain. Draft j+1 survives while it equals the choice of node
    j.
    """
    drafts, verdicts = chains[:, 1:], choices[:, :-1]
    position = torch.arange(drafts.shape[1], device=chains.device)
    agrees = (drafts == verdicts) & (position < lengths.unsqueeze(1) - 1)
    return agrees.cumprod(1).sum(1)


def _propose(
    engine: LaneEngine,
    roots: Tensor,
    budgets: list[int],
    lookups: Sequence[Sequence[int]],
    options: TruncOptions,
    counters: Counters,
    choose: Callable[[Readout], Tensor],
) -> tuple[Tensor, Tensor]:
    """Chains int64 [bs, w] and their lengths int64 [bs]; every node of a chain stands at depth d1."""
    room = torch.tensor(budgets, device=roots.device)
    chains = roots.new_zeros(len(budgets), max(budgets))
    chains[:, 0] = roots
    lengths = torch.ones_like(room)
    for request, tokens in enumerate(lookups):
        chains[request, 1 : 1 + len(tokens)] = torch.tensor(tokens, dtype=chains.dtype, device=chains.device)
        lengths[request] += len(tokens)
    counters.count_lookups(lengths - 1)
    choices = torch.zeros_like(chains)  # at d1
    nodes = _chain_nodes(lengths)
    while True:
        engine.start(nodes, chains[nodes.request, nodes.offset])
        engine.advance(nodes, 0, options.d1)
        counters.count_ticks(options.d1, len(nodes), len(budgets))
        nodes = _only(nodes, nodes.offset + 1 < room[nodes.request])
        if not len(nodes):
            break
        logits = engine.readout(nodes)
        counters.count_readout(options.d1, len(nodes))
        drafts = choose(Readout(nodes, options.d1, logits, chains, None))
        choices[nodes.request, nodes.offset] = _passed(drafts, _drafts_behind(nodes, chains, lengths), logits, options)
        screened = 1 + count_accepted(chains, choices, lengths)
        counters.screened_out += int((lengths - screened).sum())
        lengths = screened
        ends = nodes.offset + 1 == lengths[nodes.request]
        if options.draft_threshold > 0:
            ends &= _probability(logits, drafts) >= options.draft_threshold
        growing = nodes.request[ends]
        if not len(growing):
            break
        nodes = Nodes(growing, lengths[growing])
        chains[growing, nodes.offset] = drafts[ends]
        lengths[growing] += 1
    return chains, lengths


def _passed(choices: Tensor, behind: Tensor, logits: Tensor, options: TruncOptions) -> Tensor:
    """What d1 lets follow each node: the token behind it where that is good enough, else its own choice. All [n]."""
    if options.screen_top == 1:
        return choices
    passes = behind >= 0
    if options.screen_top:
        passes &= (logits.topk(min(options.screen_top, logits.shape[1])).indices == behind.unsqueeze(1)).any(1)
    return torch.where(passes, behind, choices)


def _only(nodes: Nodes, wanted: Tensor) -> Nodes:
    """``wanted`` bool [n]. The same object where all are: engines remember what they have loaded."""
    return nodes if bool(wanted.all()) else Nodes(nodes.request[wanted], nodes.offset[wanted])


def _drafts_behind(nodes: Nodes, chains: Tensor, lengths: Tensor) -> Tensor:
    """The draft that follows each node of its chain, -1 behind the last: int64 [n]."""
    following = nodes.offset + 1
    drafts = chains[nodes.request, following.clamp(max=chains.shape[1] - 1)]
    return drafts.where(following < lengths[nodes.request], -1)


def _probability(logits: Tensor, tokens: Tensor) -> Tensor:
    """Softmax probability of one token a row: float32 [n]."""
    picked = logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return (picked - logits.logsumexp(-1)).exp()


def _chain_nodes(lengths: Tensor) -> Nodes:
    """All nodes of chains with these lengths, ordered by request, then offset."""
    requests = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    first = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    return Nodes(requests, torch.arange(len(requests), device=lengths.device) - first)
