"""Whole decoders on the contract's parts: what a round is worth is only seen over many of them.

Each returns exactly ``new_tokens`` tokens whose law is the target's own, whatever the draft. The last round is capped
to the tokens left, so that no suffix is drafted or scored to be thrown away. Draft and target are readouts of one
looped model or of two models; both must be pure functions of the context.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sglang_trunc.core.contract.builder import AdaptiveTreePolicy, build_adaptive
from sglang_trunc.core.contract.chain import SimulationRound, simulate_round
from sglang_trunc.core.contract.readout import Context, LoopedModel, QueryCounts, Readout
from sglang_trunc.core.contract.rows import draw_token
from sglang_trunc.core.contract.scoring import Scorer, score_tree_from_batch_model
from sglang_trunc.core.contract.tree import evaluate_tree


class SeededUniforms:
    """A repeatable stream of uniforms. Repeatable is all it is: a seed gives no mathematical independence."""

    def __init__(self, seed: int):
        self._generator = torch.Generator().manual_seed(seed)

    def take(self, count: int) -> Tensor:
        """The next ``count``: float64 [count], in [0, 1)."""
        return torch.rand(count, generator=self._generator, dtype=torch.float64)

    def one(self) -> float:
        return float(self.take(1))


class DecodeRun(NamedTuple):
    """A continuation, and what it took."""

    tokens: Context  # exactly as many as asked for
    rounds: int
    drafted: int  # levels proposed: drafts of chains, depths of trees
    accepted: int  # of those
    draft: QueryCounts  # actual
    target_batches: int  # hypothetical: widened target passes, if each round's queries were one
    draft_batches: int  # hypothetical: draft passes, if each level's queries were one


class Decoder(Protocol):
    """One way to decode. ``target`` counts the target queries; draft queries are in the result."""

    def decode(self, target: Readout, prompt: Context, new_tokens: int, uniforms: SeededUniforms) -> DecodeRun:
        """``new_tokens``, at least 0, tokens after ``prompt``."""


@dataclass(frozen=True)
class PlainDecoder:
    """The baseline: one target query and one draw a token."""

    def decode(self, target: Readout, prompt: Context, new_tokens: int, uniforms: SeededUniforms) -> DecodeRun:
        tokens: Context = ()
        while len(tokens) < new_tokens:
            tokens += (draw_token(target.row(tuple(prompt) + tokens), uniforms.one()),)
        return DecodeRun(tokens, new_tokens, 0, 0, QueryCounts(), new_tokens, 0)


@dataclass(frozen=True)
class ChainDecoder:
    """Algorithm 1 round after round: ``gamma`` drafts of one depth, then verification."""

    draft: LoopedModel
    draft_depth: int
    gamma: int
    bonus: bool = True

    def __post_init__(self) -> None:
        if self.gamma < 1:
            raise ValueError(f"gamma = {self.gamma}, a chain has at least one draft")

    def decode(self, target: Readout, prompt: Context, new_tokens: int, uniforms: SeededUniforms) -> DecodeRun:
        draft = Readout(self.draft, self.draft_depth)
        tokens: Context = ()
        rounds = drafted = accepted = 0
        while (wanted := new_tokens - len(tokens)) > 0:
            gamma = min(self.gamma, wanted - self.bonus)  # 0: the bonus token alone, a plain step
            draws = SimulationRound(uniforms.take(gamma), uniforms.take(gamma), uniforms.one())
            run = simulate_round(draft, target, tuple(prompt) + tokens, draws, self.bonus)
            tokens += run.tokens
            rounds, drafted, accepted = rounds + 1, drafted + gamma, accepted + run.accepted
        return DecodeRun(tokens, rounds, drafted, accepted, draft.counts, rounds, drafted)


@dataclass(frozen=True)
class TreeDecoder:
    """Adaptive trees end to end: width by entropy, depth by what past rounds accepted."""

    draft: LoopedModel
    draft_depth: int
    policy: AdaptiveTreePolicy = field(default_factory=AdaptiveTreePolicy)
    score: Scorer = score_tree_from_batch_model

    def decode(self, target: Readout, prompt: Context, new_tokens: int, uniforms: SeededUniforms) -> DecodeRun:
        draft = Readout(self.draft, self.draft_depth)
        tokens: Context = ()
        rounds = drafted = accepted = 0
        depth = self.policy.start_depth
        while (wanted := new_tokens - len(tokens)) > 0:
            context = tuple(prompt) + tokens
            tree = build_adaptive(draft, context, self.policy, min(depth, wanted))
            scored = self.score(target, tree, context)
            coins, fallback = uniforms.take(len(tree)), uniforms.one()
            run = evaluate_tree(tree, scored.rows, coins, fallback, scored.prompt_row)
            tokens += run.tokens
            rounds, drafted, accepted = rounds + 1, drafted + tree.depth, accepted + len(run.path)
            depth = self.policy.next_depth(depth, tree.depth, len(run.path))
        return DecodeRun(tokens, rounds, drafted, accepted, draft.counts, rounds, drafted)
