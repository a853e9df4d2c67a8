"""The near-tie rule against torch's own BF16 arithmetic, and its table of verdicts."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_trunc.core import ties
from sglang_trunc.core.ties import Promise, TopLogits, Verdict

NORMAL = st.floats(min_value=1e-30, max_value=1e30)
TOKENS = st.lists(st.integers(0, 3), max_size=12)


@given(NORMAL, st.sampled_from([1.0, -1.0]))
def test_ulp_is_the_distance_to_torchs_next_bf16_number(x, sign):
    rounded_down = torch.tensor(x).view(torch.int32) >> 16 << 16  # cut the mantissa to BF16
    low = rounded_down.view(torch.float32)
    high = ((rounded_down >> 16) + 1 << 16).view(torch.float32)
    assert ties.bf16_ulp(sign * float(low)) == float(high) - float(low)


@pytest.mark.parametrize(
    ("x", "ulp"), [(1.0, 2**-7), (1.99, 2**-7), (2.0, 2**-6), (16.0, 0.125), (-31.9, 0.125), (0.0, 2.0**-133)]
)
def test_ulp_table(x, ulp):
    assert ties.bf16_ulp(x) == ulp


@pytest.mark.parametrize("x", [math.inf, -math.inf, math.nan])
def test_ulp_refuses_what_is_not_a_number(x):
    with pytest.raises(ValueError, match="finite"):
        ties.bf16_ulp(x)


@given(st.floats(-1e6, 1e6), st.floats(0, 10))
def test_gap_is_counted_at_the_best_logit(best, gap):
    other = best - gap
    assert ties.gap_in_ulps(best, other) == (best - other) / ties.bf16_ulp(best)
    if other < best:
        with pytest.raises(ValueError, match="smaller"):
            ties.gap_in_ulps(other, best)


def test_published_example_of_a_step_of_logits_between_16_and_32():
    assert ties.gap_in_ulps(20.0, 20.0 - 0.118) < 1 < ties.gap_in_ulps(20.0, 20.0 - 0.126)


@given(TOKENS, TOKENS)
def test_first_difference_is_the_longest_common_prefix(a, b):
    position = ties.first_difference(a, b)
    if position is None:
        assert a == b
    else:
        assert a[:position] == b[:position]
        assert a[position : position + 1] != b[position : position + 1]


@given(TOKENS, st.sets(st.integers(0, 3)))
def test_answer_ends_with_its_first_stop_token(tokens, stops):
    end = ties.answer_end(tokens, stops)
    assert not set(tokens[: end - 1]) & stops
    assert end == len(tokens) or tokens[end - 1] in stops


CASES = [
    # second gap, taken gap (nats at logit 20: ulp 0.125), promise, verdict
    (0.1, 0.1, Promise.NEAR_TIES, Verdict.NEAR_TIE),
    (0.125, 0.125, Promise.NEAR_TIES, Verdict.NEAR_TIE),
    (0.1, 0.1, Promise.BIT_EQUAL, Verdict.BROKEN_PROMISE),
    (0.13, 0.13, Promise.NEAR_TIES, Verdict.LARGE_GAP),
    (0.0, 0.5, Promise.NEAR_TIES, Verdict.LARGE_GAP),  # a third candidate behind a tie
    (0.0, None, Promise.NEAR_TIES, Verdict.UNKNOWN_GAP),
    (0.0, math.nan, Promise.NEAR_TIES, Verdict.LARGE_GAP),
]


@pytest.mark.parametrize(("second", "taken", "promise", "verdict"), CASES)
def test_verdicts(second, taken, promise, verdict):
    found = ties.classify([5, 6, 7], [5, 9, 1], 1, TopLogits(20.0, second, taken), promise=promise)
    assert found.verdict is verdict
    assert found.passes is (verdict is Verdict.NEAR_TIE)
    assert (found.position, found.expected, found.taken) == (1, 6, 9)
    assert found.gap_ulps == second / 0.125


def test_unknown_logits_are_never_excused():
    assert ties.classify([1], [2], 0, None).verdict is Verdict.UNKNOWN_GAP


def test_a_shorter_text_is_a_fault():
    found = ties.classify([1, 2], [1], 1, TopLogits(20.0, 0.0, 0.0))
    assert (found.expected, found.taken, found.passes) == (2, None, False)


@pytest.mark.parametrize(("position", "after"), [(0, False), (1, False), (2, True)])
def test_the_stop_token_itself_belongs_to_the_answer(position, after):
    plain, other = [1, 9, 3], [1, 9, 3]
    other[position] = 7
    found = ties.classify(plain, other, position, TopLogits(1.0, 0.0, 0.0), stop_ids={9})
    assert found.after_end is after
