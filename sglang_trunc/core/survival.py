"""How likely a proposed token is the one that full depth chooses.

A running share of kept proposals, by what is known of the proposal (``Standing``) and by the probability that the
proposing readout gave it; of one request, with that of all requests as its prior. Early readouts are not calibrated,
so their probability is only the first prior; a few dozen tokens outweigh it. Decides which lanes are worth a row,
never what is committed. Counts are integers and no clock is read: equal inputs give equal decisions on every rank.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum

BINS = 8
PRIOR_WEIGHT = 8.0  # proposals that a prior counts for
_ALMOST = 0.999  # a survival of 1 would tie a child with its parent


class Standing(Enum):
    """What the depths so far say of a proposal."""

    OPEN = "open"  # proposed at d1; d2 has not spoken, or there is none
    CONFIRMED = "confirmed"  # d2 chose the same token
    CONTESTED = "contested"  # d2 chose another
    SECOND = "second"  # proposed at d2
    LOOKED_UP = "looked up"  # continues an earlier occurrence; no depth has spoken
    BESIDE = "beside"  # looked up, too, but another continuation is the better guess


def _prior(standing: Standing, probability: float) -> float:
    match standing:
        case Standing.CONFIRMED:
            return 0.5 + 0.5 * probability
        case Standing.CONTESTED:
            return 0.1
        case Standing.BESIDE:
            return 0.5 * probability
        case _:
            return probability


class SurvivalEstimator:
    """Shares by standing and probability bin."""

    def __init__(self, general: SurvivalEstimator | None = None) -> None:
        """``general``: an estimator of wider experience, which is the prior of this one and learns with it."""
        self._general = general
        self._kept = {standing: [0] * BINS for standing in Standing}
        self._seen = {standing: [0] * BINS for standing in Standing}

    def estimate(self, standing: Standing, probability: float) -> float:
        """Chance in (0, 1) that the proposal is kept. ``probability``: of the token at the proposing readout."""
        at = _bin(probability)
        kept, seen = self._kept[standing][at], self._seen[standing][at]
        general = self._general
        prior = _prior(standing, probability) if general is None else general.estimate(standing, probability)
        share = (PRIOR_WEIGHT * prior + kept) / (PRIOR_WEIGHT + seen)
        return min(share, _ALMOST)

    def observe(self, outcomes: Collection[tuple[Standing, float, bool]]) -> None:
        """(standing, probability, kept) of every proposal of a lane that has been verified."""
        if self._general is not None:
            self._general.observe(outcomes)
        for standing, probability, kept in outcomes:
            at = _bin(probability)
            self._seen[standing][at] += 1
            self._kept[standing][at] += kept


def _bin(probability: float) -> int:
    return min(int(probability * BINS), BINS - 1)
