"""The near-tie rule: when two greedy texts of the same weights may differ.

The promise: a speculative run gives plain greedy decoding's tokens up to the first *near tie*, a
position whose two best logits lie within one BF16 ulp of each other. There a batched sum may round
the other way, and both texts are correct greedy continuations of their own prefixes. Anything larger
is a fault. A back end with row-count invariance, or float32, has no exception at all (``Promise``).

Two things are stricter here than the sentence above. The gap that counts is the one between the best
token and the token that was *taken*, so that a third candidate cannot hide behind a tie of the first
two. And a position whose logits are unknown is never excused.

Positions are 0-based indices into the generated tokens. The answer ends with the first stop token of
the plain text, that position included; a difference after it is part of no served answer, is reported
apart, and is judged by the same rule.

Used by ``sglang-trunc verify``, ``bench/compare.py`` and the tests. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from enum import Enum
from typing import NamedTuple

# BF16 keeps 8 significant bits; 2**-133 is its smallest subnormal.
BF16_SIGNIFICANT_BITS = 8
BF16_SMALLEST_EXPONENT = -133
NEAR_TIE_ULPS = 1.0


class Promise(Enum):
    """What a back end promises about two schedules on the same weights."""

    BIT_EQUAL = "bit-equal"  # every difference is a fault
    NEAR_TIES = "near-ties"  # a difference at a near tie is allowed


class Verdict(Enum):
    """How a single difference is judged."""

    NEAR_TIE = "near tie"
    BROKEN_PROMISE = "near tie, but this back end promises equal bits"
    LARGE_GAP = "gap over one ulp"
    UNKNOWN_GAP = "gap unknown"


class TopLogits(NamedTuple):
    """Plain decoding's logits at one position; None where it could not be learned."""

    best: float  # logit of plain's own token: sets the size of an ulp
    second_gap: float  # best minus second best, >= 0
    taken_gap: float | None  # best minus the logit of the token taken instead, >= 0


class Difference(NamedTuple):
    """One position where the two texts part."""

    position: int
    expected: int | None  # plain's token; None where plain's text is shorter
    taken: int | None  # the other text's token; None where that text is shorter
    after_end: bool  # past the answer's first stop token
    gap_ulps: float | None  # between the two best tokens
    taken_ulps: float | None  # between the best token and the one taken: this is what is judged
    verdict: Verdict

    @property
    def passes(self) -> bool:
        return self.verdict is Verdict.NEAR_TIE


def bf16_ulp(x: float) -> float:
    """Distance between neighbouring BF16 numbers at the magnitude of ``x``."""
    if not math.isfinite(x):
        raise ValueError(f"an ulp needs a finite number, got {x}")
    _, exponent = math.frexp(x)  # |x| = m * 2**exponent, 0.5 <= m < 1
    if x == 0.0:
        return math.ldexp(1.0, BF16_SMALLEST_EXPONENT)
    return math.ldexp(1.0, max(exponent - BF16_SIGNIFICANT_BITS, BF16_SMALLEST_EXPONENT))


def gap_in_ulps(best: float, other: float) -> float:
    """How far ``other`` lies under ``best``, in BF16 ulps at the magnitude of ``best``."""
    if other > best:
        raise ValueError(f"the best logit {best} is smaller than {other}")
    return (best - other) / bf16_ulp(best)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """First index where the two differ; the shorter one's length where it is a prefix; None if equal."""
    for position, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return position
    return None if len(a) == len(b) else min(len(a), len(b))


def answer_end(tokens: Sequence[int], stop_ids: Collection[int]) -> int:
    """Number of tokens in the answer, its first stop token included."""
    for position, token in enumerate(tokens):
        if token in stop_ids:
            return position + 1
    return len(tokens)


def judge(ulps: float | None, promise: Promise) -> Verdict:
    """``ulps``: from the best token to the one taken; None if it could not be learned."""
    if ulps is None:
        return Verdict.UNKNOWN_GAP
    if not ulps <= NEAR_TIE_ULPS:  # a NaN is not a tie
        return Verdict.LARGE_GAP
    return Verdict.BROKEN_PROMISE if promise is Promise.BIT_EQUAL else Verdict.NEAR_TIE


def classify(
    plain: Sequence[int],
    other: Sequence[int],
    position: int,
    logits: TopLogits | None,
    stop_ids: Collection[int] = (),
    promise: Promise = Promise.NEAR_TIES,
) -> Difference:
    """Judge the difference at ``position`` (from :func:`first_difference`) between two texts."""
    gap = taken_gap = None
    if logits is not None:
        ulp = bf16_ulp(logits.best)
        gap = logits.second_gap / ulp
        taken_gap = None if logits.taken_gap is None else logits.taken_gap / ulp
    expected = plain[position] if position < len(plain) else None
    taken = other[position] if position < len(other) else None
    if expected is None or taken is None:
        # One text stopped early: no rounding does that in a fixed number of tokens.
        taken_gap = None
    after_end = any(token in stop_ids for token in plain[:position])
    return Difference(position, expected, taken, after_end, gap, taken_gap, judge(taken_gap, promise))
