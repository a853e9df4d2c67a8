"""LoopSpec's residual cascade on seeded chance, row by row on any device: proposals of two depths, then the token.

A lane's readouts at d1 and d2 propose (``draw_first``, ``draw_second``). ``ResidualMemory`` keeps tokens and laws until
the lane's readout at R, where ``settle`` gives the token to commit: t1 or t2 exactly where that one was accepted, so
``core.pipeline``, which matches tokens, needs to know nothing of it. With q1, q2, p the laws of the next token at d1,
d2, R and coins u1, u2:

    t1 ~ q1
    t2 ~ R = normalise(max(q2 - q1, 0)), t1 left out, if that has mass and q2(t1) < q1(t1): the gate
    t1 if u1 < p(t1) / q1(t1); else, with rho = normalise(max(p - q1, 0)),
    t2 if u2 < rho(t2) / R(t2); else a draw from max(rho - R, 0)

A proposal that does not exist has a law of zeros, and the lines hold as they are: without t1, R is q2 and rho is p;
without t2, the draw is from rho. Source: arXiv 2609.17184; ``core.contract.cascade`` is the scalar reference.

**The law is p** if two things hold. Whether a readout takes place does not depend on the token it would propose, and
what it proposed is settled even where nothing ran on it (a draft under TRUNC's threshold, a child without a row). And
the five uses of chance at one (seed, position) are independent (``Purpose``): had t1 been drawn with the final draw's
noise, its rejection would say which tokens that noise favours. For the same reason none of them is the plain seeded
draw at that place: what that one drew may have been looked at, as a draft or as a text under the same seed, before this
module decides.

**What was rejected is never drawn.** t1 is rejected only where the computed p(t1) / q1(t1) is at most u1 < 1. Rounding
is monotone, so a computed quotient below 1 means p(t1) < q1(t1): max(p - q1, 0) is 0 there, so rho is, and so is
max(rho - R, 0). The same holds of t2 with rho and R, and log 0 = -inf never wins an argmax. Rounding could break it in
one place: where p is q1 but for last bits, nothing may be left of max(p - q1, 0). Then rho is p without t1; if that is
empty too, p is all on t1, which is accepted. ``_try`` writes the zero itself, and trusts no proof.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_trunc.core.noise import coin, perturbed_argmax

NONE = -1  # in place of a token: no proposal


class Purpose(IntEnum):
    """What chance at one (seed, position) is used for; the plain seeded draw would be 0."""

    FIRST_DRAFT = 1
    SECOND_DRAFT = 2
    ACCEPT_FIRST = 3
    ACCEPT_SECOND = 4
    FINAL_DRAW = 5


class Second(NamedTuple):
    tokens: Tensor  # int64 [n]: t2 where the gate is open, else t1
    open: Tensor  # bool [n]


class Remembered(NamedTuple):
    """What a lane has proposed so far, on the device of its laws."""

    q1: Tensor | None = None  # float64 [vocabulary]
    t1: int = NONE
    q2: Tensor | None = None  # float64 [vocabulary]
    t2: int = NONE


class Drafts(NamedTuple):
    """Proposals of n rows. Where a token is NONE, its row of the law is not looked at.

    A token that its law cannot have drawn counts as none, and so does a t2 behind a closed gate.
    """

    q1: Tensor  # float64 [n, vocabulary]
    t1: Tensor  # int64 [n]
    q2: Tensor  # float64 [n, vocabulary]
    t2: Tensor  # int64 [n]

    @classmethod
    def stack(cls, rows: Sequence[Remembered], p: Tensor) -> Drafts:
        """Proposals to go with the laws ``p``, float64 [n >= 1, vocabulary]; one of ``rows`` for each of them."""
        none = p.new_zeros(p.shape[1])
        q1 = torch.stack([none if row.q1 is None else row.q1 for row in rows])
        q2 = torch.stack([none if row.q2 is None else row.q2 for row in rows])
        tokens = torch.tensor([[row.t1 for row in rows], [row.t2 for row in rows]], device=p.device)
        return cls(q1, tokens[0], q2, tokens[1])


def draw_first(q1: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """t1 of each row, int64 [n], drawn from ``q1`` float64 [n, vocabulary].

    ``seeds``, ``positions`` int64 [n]: keys as for the plain draw, the same at all readouts of a lane.
    """
    _check(seeds, q1)
    return _draw(q1, torch.ones_like(seeds, dtype=torch.bool), seeds, positions, Purpose.FIRST_DRAFT)


def draw_second(q1: Tensor, t1: Tensor, q2: Tensor, seeds: Tensor, positions: Tensor) -> Second:
    """t2 of each row, which is never its t1; t1 again where the gate is closed.

    ``q1``, ``q2`` float64 [n, vocabulary]; ``t1`` int64 [n] drawn from q1, NONE where d1 did not propose: t2 is then
    drawn from q2. ``seeds``, ``positions`` as in ``draw_first``.
    """
    _check(seeds, q1, q2)
    law, is_open = _second_law(q1, t1, q2)
    drawn = _draw(law, is_open, seeds, positions, Purpose.SECOND_DRAFT)
    return Second(torch.where(is_open, drawn, t1), is_open)


def settle(p: Tensor, seeds: Tensor, positions: Tensor, drafts: Drafts | None = None) -> Tensor:
    """The token to commit of each row, int64 [n]; it is t1 or t2 only where that one was accepted, and never has p = 0.

    ``p`` float64 [n, vocabulary]; ``seeds``, ``positions`` as in ``draw_first``. Without ``drafts``: drawn from p.
    """
    if drafts is None:
        _check(seeds, p)
        return _draw(p, torch.ones_like(seeds, dtype=torch.bool), seeds, positions, Purpose.FINAL_DRAW)
    _check(seeds, p, drafts.q1, drafts.q2)
    u1, u2 = (coin(seeds, positions, purpose) for purpose in (Purpose.ACCEPT_FIRST, Purpose.ACCEPT_SECOND))
    first, second, left = _decide(p, drafts, u1, u2)
    drawn = _draw(left, ~(first | second), seeds, positions, Purpose.FINAL_DRAW)
    return torch.where(first, drafts.t1, torch.where(second, drafts.t2, drawn))


class ResidualMemory:
    """Laws and proposals between the readouts of a lane; a key is a lane, or whatever else can be hashed.

    Two rows a key at most, copied, so that no batch stays alive for them: 16 bytes for each token of the vocabulary,
    12.6 MB for 16 keys and 49152 tokens. Keys must be forgotten by whoever knows that they are gone.
    """

    def __init__(self, most: int):
        """``most`` keys at a time. To drop one here, unasked, could depend on what it had proposed: not lossless."""
        self.most = most
        self._kept: dict[Hashable, Remembered] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def first(self, key: Hashable, q1: Tensor, t1: int) -> None:
        """Remember what d1 proposed: t1 from ``q1``, float64 [vocabulary]. ValueError if the key has proposed already,
        or if there are too many."""
        if key in self._kept:
            raise ValueError(f"{key} has proposed already")
        self._keep(key, Remembered(q1.clone(), t1))

    def second(self, key: Hashable, q2: Tensor, t2: int) -> None:
        """Remember a second proposal, from ``q2``; not where the gate was closed. ValueError as in ``first``."""
        before = self.get(key)
        if before.t2 != NONE:
            raise ValueError(f"{key} has made its second proposal already")
        self._keep(key, before._replace(q2=q2.clone(), t2=t2))

    def get(self, key: Hashable) -> Remembered:
        """What is known of a key; all of it absent for one that has not proposed."""
        return self._kept.get(key, Remembered())

    def take(self, key: Hashable) -> Remembered:
        """The same, and forget it."""
        return self._kept.pop(key, Remembered())

    def forget(self, keys: Iterable[Hashable]) -> None:
        """These are gone; those that never proposed may be among them."""
        for key in keys:
            self._kept.pop(key, None)

    def keep(self, keys: Collection[Hashable]) -> None:
        """All others are gone."""
        self.forget([key for key in self._kept if key not in keys])

    def _keep(self, key: Hashable, row: Remembered) -> None:
        if key not in self._kept and len(self._kept) >= self.most:
            raise ValueError(f"{self.most} keys are remembered already, those that are gone must be forgotten")
        self._kept[key] = row


class _Verdict(NamedTuple):
    first: Tensor  # bool [n]: t1 is accepted
    second: Tensor  # bool [n]: t2 is accepted; never both
    left: Tensor  # float64 [n, vocabulary]: weights of the final draw where neither is


def _decide(p: Tensor, drafts: Drafts, u1: Tensor, u2: Tensor) -> _Verdict:
    """The cascade at full depth. ``u1``, ``u2`` float64 [n] in [0, 1): coins of the two acceptances."""
    there = _drawable(drafts.q1, drafts.t1)
    first, left = _try(p, drafts.q1, drafts.t1, there, u1)
    law, is_open = _second_law(drafts.q1, drafts.t1, drafts.q2)
    there = is_open & _drawable(law, drafts.t2)
    second, left = _try(_normalised(left), law, drafts.t2, there, u2)
    return _Verdict(first, second & ~first, left)


def _try(target: Tensor, law: Tensor, tokens: Tensor, there: Tensor, coins: Tensor) -> tuple[Tensor, Tensor]:
    """Accept tokens drawn from ``law`` against ``target``: bool [n], and what is left to draw from where rejected.

    Rows float64 [n, vocabulary] of mass 1. ``there`` bool [n]: rows that have a token; in the others nothing is
    accepted, and all of ``target`` is left.
    """
    accepted = there & (coins < _at(target, tokens) / _at(law, tokens))
    left = _without(tokens, there, (target - _only(law, there)).clamp_(min=0))
    left = torch.where(_has_mass(left).unsqueeze(1), left, _without(tokens, there, target))
    return accepted | (there & ~_has_mass(left)), left


def _second_law(q1: Tensor, t1: Tensor, q2: Tensor) -> tuple[Tensor, Tensor]:
    """R float64 [n, vocabulary], zeros where it has no mass, and whether the gate is open, bool [n]."""
    there = _drawable(q1, t1)
    loses = _at(q2, t1) < _at(q1, t1)
    rest = _without(t1, there, (q2 - _only(q1, there)).clamp_(min=0))
    return _normalised(rest), _has_mass(rest) & (loses | ~there)


def _drawable(law: Tensor, tokens: Tensor) -> Tensor:
    """bool [n]: whether there is a token, and its law can have drawn it."""
    return (tokens >= 0) & (_at(law, tokens) > 0)


def _at(rows: Tensor, tokens: Tensor) -> Tensor:
    """float64 [n]: the entry of each row's token; any entry where that is NONE."""
    return rows.gather(1, tokens.clamp(min=0).unsqueeze(1)).squeeze(1)


def _without(tokens: Tensor, there: Tensor, rows: Tensor) -> Tensor:
    """Rows with 0 for their tokens."""
    left = _at(rows, tokens).masked_fill(there, 0)
    return rows.scatter(1, tokens.clamp(min=0).unsqueeze(1), left.unsqueeze(1))


def _only(rows: Tensor, wanted: Tensor) -> Tensor:
    """Rows of zeros where they are not wanted."""
    return rows.masked_fill(~wanted.unsqueeze(1), 0)


def _has_mass(weights: Tensor) -> Tensor:
    return weights.amax(1) > 0


def _normalised(weights: Tensor) -> Tensor:
    """Rows of mass 1; rows of zeros stay."""
    mass = weights.cumsum(1)[:, -1]  # in order: a sum's order may depend on the number of rows
    return weights / mass.masked_fill(mass == 0, 1).unsqueeze(1)


def _draw(weights: Tensor, wanted: Tensor, seeds: Tensor, positions: Tensor, purpose: Purpose) -> Tensor:
    """One token a row by the noise of this purpose, from ``weights`` float64 [n, vocabulary] of any mass.

    Where it is not wanted, any token: a CPU spares the work, an accelerator is not asked which rows those are.
    """
    if weights.device.type == "cpu" and not wanted.all():
        drawn = torch.zeros_like(seeds)
        rows = wanted.nonzero().squeeze(1)
        drawn[rows] = _draw(weights[rows], wanted[rows], seeds[rows], positions[rows], purpose)
        return drawn
    return perturbed_argmax(weights.log(), _salted(seeds, purpose), positions)


def _salted(seeds: Tensor, purpose: Purpose) -> Tensor:
    """Seeds of one purpose, int64 [n].

    The hash takes a seed as two words, the high one last, and all later steps are bijections: with another high word, a
    column at a (seed, position) never has the hash of another purpose or of the plain draw, whatever the seed.
    """
    return seeds ^ (int(purpose) << 32)


def _check(seeds: Tensor, *laws: Tensor) -> None:
    for law in laws:
        if law.dim() != 2 or len(law) != len(seeds) or law.dtype != torch.float64:
            shape = f"[{len(seeds)}, vocabulary]"
            raise ValueError(f"laws must be float64 {shape}, got {law.dtype} {tuple(law.shape)}")
