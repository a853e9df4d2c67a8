from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_trunc.core.survival import BINS, PRIOR_WEIGHT, Standing, SurvivalEstimator

probabilities = st.floats(0, 1)


def test_without_history_the_readout_s_probability_is_the_estimate_and_d2_moves_it():
    estimate = SurvivalEstimator().estimate
    assert estimate(Standing.OPEN, 0.6) == estimate(Standing.SECOND, 0.6) == pytest.approx(0.6)
    assert estimate(Standing.CONFIRMED, 0.6) == pytest.approx(0.8)
    assert estimate(Standing.CONTESTED, 0.6) == pytest.approx(0.1)


def test_history_outweighs_the_prior():
    estimator = SurvivalEstimator()
    seen = int(PRIOR_WEIGHT)
    estimator.observe([(Standing.OPEN, 0.95, False)] * seen)
    assert estimator.estimate(Standing.OPEN, 0.95) == pytest.approx(0.475)
    estimator.observe([(Standing.OPEN, 0.95, True)] * 1000)
    assert estimator.estimate(Standing.OPEN, 0.95) > 0.98


def test_standings_and_bins_are_counted_apart():
    estimator = SurvivalEstimator()
    estimator.observe([(Standing.OPEN, 0.3, True)] * 50)
    fresh = SurvivalEstimator()
    for standing in Standing:
        for at in range(BINS):
            probability = (at + 0.5) / BINS
            same = estimator.estimate(standing, probability) == fresh.estimate(standing, probability)
            assert same == (standing is not Standing.OPEN or at != int(0.3 * BINS))


@given(
    st.sampled_from(Standing),
    probabilities,
    st.lists(st.tuples(st.sampled_from(Standing), probabilities, st.booleans())),
)
@settings(derandomize=True, deadline=None, max_examples=100)
def test_an_estimate_never_ties_a_child_with_its_parent(standing, probability, outcomes):
    """A probability a rounding above 1 is one of 1."""
    estimator = SurvivalEstimator()
    estimator.observe(outcomes)
    assert 0 <= estimator.estimate(standing, probability) < 1
    assert estimator.estimate(standing, 1.0000001) < 1


def test_only_counts_matter_not_their_order():
    outcomes = [(Standing.OPEN, 0.1, True), (Standing.SECOND, 0.9, False), (Standing.OPEN, 0.9, False)] * 5
    one, other = SurvivalEstimator(), SurvivalEstimator()
    one.observe(outcomes)
    for outcome in reversed(outcomes):
        other.observe([outcome])
    for standing in Standing:
        assert one.estimate(standing, 0.9) == other.estimate(standing, 0.9)
