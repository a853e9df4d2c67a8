"""LoopSpec's residual cascade for one position: proposals of two depths, then the full depth's law (arXiv 2609.17184).

* d1: t1 ~ q1.
* d2: R = normalise(max(q2 - q1, 0)) with t1's mass zeroed. The gate opens iff that mass is positive and
  q2(t1) < q1(t1); then t2 ~ R.
* full depth: accept t1 with min(1, p(t1) / q1(t1)). Else rho = normalise(max(p - q1, 0)), and t2 is accepted with
  min(1, rho(t2) / R(t2)). Else the token is drawn from normalise(max(rho - R, 0)); from rho if there was no second.

Lossless: t2 and the gate look neither at p nor at a coin of the acceptance, and given a rejected t1 the rest has
the law rho for every t1 and every R. Masses that only rounding makes zero: rho falls back to p, max(rho - R, 0) to rho.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from torch import Tensor

from sglang_trunc.core.contract.rows import as_row, as_token, as_uniform, draw_token, normalise, residual


class CascadeCoins(NamedTuple):
    """Independent uniforms in [0, 1); all three are checked, used or not."""

    first: float  # accept t1
    second: float  # accept t2
    final: float  # draw the token if neither is accepted


class Source(Enum):
    """Where a committed token comes from."""

    FIRST = "d1"
    SECOND = "d2"
    RESTART = "restart"  # drawn at full depth; no lane stands on it by right


class CascadeRun(NamedTuple):
    token: int
    source: Source


def second_residual(q1: Tensor, t1: int, q2: Tensor) -> Tensor | None:
    """R, the distribution of a second proposal: float64 [vocabulary]; None where the gate is closed.

    ``q1``, ``q2``: floating [vocabulary], the rows of depths d1 and d2. ``t1``: drawn from q1.
    """
    first = as_row(q1, "q1")
    second = as_row(q2, "q2", len(first))
    return _second_residual(first, _drawn(t1, first), second)


def propose_second(q1: Tensor, t1: int, q2: Tensor, uniform: float) -> int | None:
    """t2 drawn from R by one uniform of its own; None where the gate is closed."""
    coin = as_uniform(uniform, "second draft uniform")
    rest = second_residual(q1, t1, q2)
    return None if rest is None else draw_token(rest, coin)


def residual_cascade(
    q1: Tensor, t1: int, q2: Tensor | None, t2: int | None, p: Tensor, coins: CascadeCoins
) -> CascadeRun:
    """The committed token; its law is p if t1 ~ q1, t2 ~ R and the coins are independent.

    ``q1``, ``q2``, ``p``: floating [vocabulary]; ``q2`` None: d2 did not read this position. ``t2`` None: no second
    proposal, because the gate was closed or for any reason that looks neither at p nor at the coins.

    ``ValueError``: rows, tokens or coins as in ``rows``; t1 with q1(t1) = 0; t2 without q2, behind a closed gate, or
    with R(t2) = 0.
    """
    target = as_row(p, "p")
    first = as_row(q1, "q1", len(target))
    token = _drawn(t1, first)
    u1, u2, u3 = (as_uniform(coin, f"coins.{name}") for name, coin in zip(coins._fields, coins, strict=True))
    second = None if q2 is None else as_row(q2, "q2", len(target))
    other, rest = _checked_second(first, token, second, t2)
    if u1 < float(target[token] / first[token]):
        return CascadeRun(token, Source.FIRST)
    rho = residual(target, first)
    if rho is None:
        rho = target
    if other is None or rest is None:
        return CascadeRun(draw_token(rho, u3), Source.RESTART)
    if u2 < float(rho[other] / rest[other]):
        return CascadeRun(other, Source.SECOND)
    left = residual(rho, rest)
    return CascadeRun(draw_token(rho if left is None else left, u3), Source.RESTART)


def _drawn(t1: int, first: Tensor) -> int:
    """t1 as an id that q1 can have drawn."""
    token = as_token(t1, "t1", len(first))
    if first[token] == 0:
        raise ValueError(f"t1 = {token} has probability 0 in q1, the row that it was drawn from")
    return token


def _second_residual(first: Tensor, token: int, second: Tensor) -> Tensor | None:
    if not second[token] < first[token]:
        return None
    weights = (second - first).clamp_(min=0)
    weights[token] = 0
    return normalise(weights)


def _checked_second(
    first: Tensor, token: int, second: Tensor | None, t2: int | None
) -> tuple[int | None, Tensor | None]:
    """(t2, R), both or neither."""
    if t2 is None:
        return None, None
    if second is None:
        raise ValueError(f"t2 = {t2} without q2, the row that proposed it")
    other = as_token(t2, "t2", len(first))
    rest = _second_residual(first, token, second)
    if rest is None:
        raise ValueError(f"t2 = {other} behind a closed gate: q2 must take mass from t1 = {token} and add it elsewhere")
    if rest[other] == 0:
        raise ValueError(f"t2 = {other} has probability 0 in the residual of q2, which it was drawn from")
    return other, rest
