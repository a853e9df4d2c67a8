"""Rows and uniforms: every refusal's sentence, and draws that never take a token of probability zero."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from sglang_trunc.core.contract.rows import (
    MASS_TOLERANCE,
    as_row,
    as_rows,
    as_token,
    as_uniform,
    as_uniforms,
    draw,
    draw_token,
    normalise,
    residual,
)
from tests.core.contract.toy import LAST_UNIFORM, assert_law, random_rows, row

GOOD = row(0.25, 0.75)

BAD_ROWS = [
    ([GOOD], {"count": 2}, "name: expected 2 rows, got 1"),
    ([GOOD, row(0.5, 0.25, 0.25)], {}, "name: rows must have equal vocabularies, got sizes [2, 3]"),
    ([GOOD], {"vocabulary": 3}, "name: rows must have equal vocabularies, got sizes [2, 3]"),
    (GOOD, {}, "name: a row has one dimension, the vocabulary, got shapes [()]"),
    ([row()], {}, "name: a row has one dimension, the vocabulary, got shapes [(0,)]"),
    ([GOOD.unsqueeze(0)], {}, "name: a row has one dimension, the vocabulary, got shapes [(1, 2)]"),
    ([torch.tensor([0, 1])], {}, "name: rows must be floating-point probabilities, got torch.int64"),
    ([GOOD, row(math.nan, 1)], {}, "name[1][0] = nan is not finite"),
    ([row(0, math.inf)], {}, "name[0][1] = inf is not finite"),
    ([row(1.25, -0.25)], {}, "name[0][1] = -0.25 is negative"),
    ([GOOD, row(0.5, 0.25)], {}, "name[1] has mass 0.75, a distribution has 1 within 1e-05"),
    ([row(0, 0)], {}, "name[0] has mass 0.0, a distribution has 1 within 1e-05"),
]


@pytest.mark.parametrize(("rows", "demands", "sentence"), BAD_ROWS)
def test_refused_rows(rows, demands, sentence):
    with pytest.raises(ValueError, match="name") as refusal:
        as_rows(rows, "name", **demands)
    assert str(refusal.value) == sentence


@pytest.mark.parametrize(("excess", "passes"), [(0.9, True), (-0.9, True), (1.1, False), (-1.1, False)])
def test_mass_tolerance(excess, passes):
    rows = [row(0.25, 0.75 + excess * MASS_TOLERANCE)]
    if passes:
        assert float(as_rows(rows, "p").sum()) == pytest.approx(1, abs=1e-15)
        return
    with pytest.raises(ValueError, match="has mass"):
        as_rows(rows, "p")


@pytest.mark.parametrize(("dtype", "passes"), [(torch.float32, True), (torch.float64, True), (torch.bfloat16, False)])
def test_softmax_rows_of_a_large_vocabulary(dtype, passes):
    logits = torch.randn(65536, generator=torch.Generator().manual_seed(1)) * 4
    probabilities = logits.to(dtype).softmax(-1)
    if passes:
        assert as_row(probabilities, "p").dtype == torch.float64
        return
    with pytest.raises(ValueError, match="has mass"):
        as_row(probabilities, "p")


def test_checked_rows_keep_no_buffer_of_the_caller():
    given = random_rows(0, 2, 4)
    before = given.clone()
    checked = as_rows(given, "p")
    given.zero_()
    assert torch.allclose(checked, before, atol=1e-15)


def test_equal_rows_stay_equal_in_any_company():
    rows = random_rows(1, 5, 1001)
    alone = as_row(rows[3], "p")
    assert torch.equal(as_rows(rows, "p")[3], alone)
    assert torch.equal(as_rows(list(rows.float().double()), "p")[3], as_row(rows[3].float(), "p"))


def test_no_rows():
    assert as_rows([], "p", count=0, vocabulary=7).shape == (0, 7)


BAD_UNIFORMS = [
    ([0.5], 2, "u: expected 2 uniforms, got shape (1,)"),
    (torch.zeros(1, 2), 2, "u: expected 2 uniforms, got shape (1, 2)"),
    ([0.5, 1.0], 2, "u[1] = 1.0 is outside [0, 1)"),
    ([-1e-300], 1, "u[0] = -1e-300 is outside [0, 1)"),
    ([0.0, math.nan], 2, "u[1] = nan is not finite, a uniform lies in [0, 1)"),
    (torch.tensor([math.inf]), 1, "u[0] = inf is not finite, a uniform lies in [0, 1)"),
]


@pytest.mark.parametrize(("uniforms", "count", "sentence"), BAD_UNIFORMS)
def test_refused_uniforms(uniforms, count, sentence):
    with pytest.raises(ValueError, match="u") as refusal:
        as_uniforms(uniforms, "u", count)
    assert str(refusal.value) == sentence


def test_uniforms_at_the_edges():
    assert as_uniforms([0, LAST_UNIFORM], "u", 2) == [0.0, LAST_UNIFORM]
    assert as_uniform(0.25, "u") == 0.25


@pytest.mark.parametrize("token", [-1, 3, 0.5])
def test_refused_tokens(token):
    with pytest.raises(ValueError, match="x = ") as refusal:
        as_token(token, "x", 3)
    assert str(refusal.value) == f"x = {token} is not a token id of a vocabulary of 3"


def test_draws_lie_between_the_steps_of_the_cdf():
    uniforms = [0.0, 0.2499, 0.25, 0.7499, 0.75, LAST_UNIFORM]
    assert draw(row(0.25, 0.5, 0.25), uniforms).tolist() == [0, 0, 1, 1, 2, 2]


def test_draws_follow_the_row():
    law = random_rows(2, 1, 7, zeros=2)[0]
    drawn = draw(law, torch.rand(40000, generator=torch.Generator().manual_seed(3), dtype=torch.float64))
    assert_law(Counter(drawn.tolist()), dict(enumerate(law.tolist())))


@pytest.mark.parametrize("place", ["first", "last", "both", "between"])
def test_a_million_draws_never_take_a_token_of_probability_zero(place):
    law = random_rows(4, 1, 50)[0]
    law[{"first": [0, 1], "last": [48, 49], "both": [0, 49], "between": list(range(1, 49, 2))}[place]] = 0
    law /= law.sum()
    uniforms = torch.rand(1_000_000, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    uniforms[:2] = torch.tensor([0.0, LAST_UNIFORM], dtype=torch.float64)
    assert law[draw(law, uniforms)].min() > 0


def test_the_end_of_the_cdf_is_guarded():
    """Rounded sums end above or below 1; the largest uniform must still find the last token that can be drawn."""
    for seed in range(300):
        law = random_rows(seed, 1, 97, zeros=40)[0] * (1 + 1e-6 * ((seed % 3) - 1))
        last = int(law.nonzero()[-1])
        assert draw(law, [0.0, LAST_UNIFORM]).tolist() == [int(law.nonzero()[0]), last]
        assert draw_token(law, LAST_UNIFORM) == last
    # the smallest number there is, times the largest uniform, is itself: one past the CDF's end
    assert draw_token(row(0, 5e-324, 0), LAST_UNIFORM) == 1


def test_one_certain_token():
    assert draw(row(0, 1, 0), [0.0, 0.5, LAST_UNIFORM]).tolist() == [1, 1, 1]


def test_residual_is_what_p_has_more_than_q():
    assert residual(row(0.5, 0.25, 0.25), row(0.25, 0.5, 0.25)).tolist() == [1, 0, 0]
    assert residual(row(0.25, 0.5, 0.25), row(0.75, 0, 0.25)).tolist() == [0, 1, 0]
    assert residual(row(0.5, 0.5), row(0.5, 0.5)) is None
    assert normalise(row(0, 0)) is None
    p, q = random_rows(6, 2, 9, zeros=3)
    left = residual(p, q)
    assert float(left.sum()) == pytest.approx(1)
    assert not left[p == 0].any()
