"""Depths in closed form, beside which the simulator's are printed.

If full depth's choice differs from depth r's in a share ``beta * r**-alpha`` of the tokens, LoopSpec's cost model has
its optimum at (a = alpha, b = beta, R large enough)

    d1 = (ab)^((a+1)/(a^2+a+1)) * (2aR)^(1/(a^2+a+1))
    d2 = (ab)^(a/(a^2+a+1)) * (2aR)^((a+1)/(a^2+a+1))

which counts ticks, not rows, and knows nothing of a width budget. ``fit`` finds alpha and beta from measured shares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import NamedTuple

from sglang_trunc.core.options import DualOptions, OneOf, Options, SingleOptions
from sglang_trunc.core.trace import Trace


class PowerLaw(NamedTuple):
    """``beta * depth**-alpha``: the share of tokens on which a depth differs from full depth."""

    alpha: float
    beta: float

    def at(self, depth: float) -> float:
        return self.beta * depth**-self.alpha


def wrong_shares(traces: Sequence[Trace]) -> dict[int, float]:
    """Depth -> share of verified tokens whose choice there is not full depth's."""
    full = traces[0].plan.recurrences
    verified = [one.says[node] for one in traces for text in one.texts for node in text.nodes]
    shares = {}
    for depth in traces[0].depths[:-1]:
        right = [says[depth].token == says[full].token for says in verified if depth in says]
        if right:
            shares[depth] = 1 - sum(right) / len(right)
    return shares


def fit(disagreement: Mapping[int, float]) -> PowerLaw | None:
    """Least squares in logarithms over the depths that differ at all; None where fewer than two do, or it rises."""
    points = [(math.log(depth), math.log(share)) for depth, share in disagreement.items() if share > 0]
    if len(points) < 2:
        return None
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return PowerLaw(-slope, math.exp(mean_y - slope * mean_x)) if slope < 0 else None


def closed_form(law: PowerLaw, recurrences: int) -> tuple[float, float]:
    """(d1, d2) as real numbers."""
    a, product = law.alpha, law.alpha * law.beta
    scale, width = 2 * a * recurrences, a * a + a + 1
    return product ** ((a + 1) / width) * scale ** (1 / width), product ** (a / width) * scale ** ((a + 1) / width)


def single_depths(recurrences: int) -> list[int]:
    """Every d1 that LOOPSPEC_SINGLE accepts."""
    return _choices(SingleOptions, "d1", recurrences, {})


def dual_depths(recurrences: int) -> list[tuple[int, int]]:
    """Every (d1, d2) that LOOPSPEC_DUAL accepts."""
    firsts = _choices(DualOptions, "d1", recurrences, {})
    return [(d1, d2) for d1 in firsts for d2 in _choices(DualOptions, "d2", recurrences, {"d1": d1})]


def nearest(wanted: tuple[float, float], recurrences: int) -> tuple[int, int] | None:
    """The accepted pair whose ratios to the wanted depths are closest to 1."""

    def distance(pair: tuple[int, int]) -> float:
        return sum(math.log(depth / want) ** 2 for depth, want in zip(pair, wanted, strict=True))

    return min(dual_depths(recurrences), key=distance, default=None)


def _choices(kind: type[Options], name: str, recurrences: int, chosen: dict[str, int]) -> list[int]:
    rule = next(spec.metadata["rule"] for spec in fields(kind) if spec.name == name)
    assert isinstance(rule, OneOf)
    return list(rule.choices(recurrences, chosen)) if recurrences >= kind.least_recurrences else []
