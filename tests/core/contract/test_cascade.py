"""The residual cascade has the full depth's law, whatever d1 and d2 proposed; and everything that it refuses."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from sglang_trunc.core.contract.cascade import (
    CascadeCoins,
    CascadeRun,
    Source,
    propose_second,
    residual_cascade,
    second_residual,
)
from sglang_trunc.core.contract.rows import draw_token
from tests.core.contract.toy import LAST_UNIFORM, assert_law, grid, law_of, random_rows, row, step

Q1, Q2, P = row(0.5, 0.25, 0.25, 0), row(0.25, 0.5, 0, 0.25), row(0.25, 0.25, 0.25, 0.25)


# t1 = 0 is kept with 1/2; else rho = (0, 1/2, 1/2), and R = (0, 1, 0) is accepted with 1/2; token 2 is left.
SIXTHS_Q1, SIXTHS_Q2, SIXTHS_P = row(2 / 3, 1 / 6, 1 / 6), row(1 / 3, 1 / 2, 1 / 6), row(1 / 3, 1 / 3, 1 / 3)


def cascade_law(q1, q2, p, withhold=False):
    """The exact law: every (t1, t2), acceptance thresholds and final draws measured from outside by bisection."""
    vocabulary = len(p)
    law = torch.zeros(vocabulary, dtype=torch.float64)
    sources: Counter[Source] = Counter()

    def add(weight, t1, t2):
        def run(*coins):
            return residual_cascade(q1, t1, q2, t2, p, CascadeCoins(*coins))

        first = 0.0
        if run(0.0, 0.5, 0.5).source is Source.FIRST:
            first = step(lambda u: run(u, 0.5, 0.5).source, Source.FIRST)
        law[t1] += weight * first
        sources[Source.FIRST] += weight * first
        rest = weight * (1 - first)
        if rest < 1e-9:
            return
        second = 0.0
        if run(LAST_UNIFORM, 0.0, 0.5).source is Source.SECOND:
            second = step(lambda u: run(LAST_UNIFORM, u, 0.5).source, Source.SECOND)
            law[t2] += rest * second
            sources[Source.SECOND] += rest * second
        if second < 1 - 1e-9:
            final = law_of(lambda u: run(LAST_UNIFORM, LAST_UNIFORM, u).token, vocabulary)
            law.add_(final, alpha=rest * (1 - second))
            sources[Source.RESTART] += rest * (1 - second)

    for t1 in q1.nonzero().squeeze(1).tolist():
        seconds = None if q2 is None or withhold else second_residual(q1, t1, q2)
        if seconds is None:
            add(float(q1[t1]), t1, None)
            continue
        for t2 in seconds.nonzero().squeeze(1).tolist():
            add(float(q1[t1] * seconds[t2]), t1, t2)
    return law, sources


@pytest.mark.parametrize("seed", range(8))
def test_law_is_the_full_depths_law(seed):
    q1, q2, p = random_rows(seed, 3, 4, zeros=seed % 3)
    law, sources = cascade_law(q1, q2, p)
    assert torch.allclose(law, p, atol=1e-8)
    assert sum(sources.values()) == pytest.approx(1)


@pytest.mark.parametrize("seed", range(4))
def test_law_without_a_second_proposal(seed):
    q1, q2, p = random_rows(seed + 20, 3, 4, zeros=seed % 2)
    assert torch.allclose(cascade_law(q1, None, p)[0], p, atol=1e-8)
    assert torch.allclose(cascade_law(q1, q2, p, withhold=True)[0], p, atol=1e-8)


def test_grid_with_exact_counts():
    """All five draws on a grid: each token is exactly a third of them."""
    found: Counter[int] = Counter()
    sources: Counter[Source] = Counter()
    for draft, second, *coins in grid(6, 5):
        t1 = draw_token(SIXTHS_Q1, draft)
        t2 = propose_second(SIXTHS_Q1, t1, SIXTHS_Q2, second)
        run = residual_cascade(SIXTHS_Q1, t1, SIXTHS_Q2, t2, SIXTHS_P, CascadeCoins(*coins))
        found[run.token] += 1
        sources[run.source] += 1
    assert {token: count / 6**5 for token, count in found.items()} == {0: 1 / 3, 1: 1 / 3, 2: 1 / 3}
    assert set(sources) == set(Source)


def test_sampled_law_and_no_excluded_token():
    q1, q2, p = random_rows(40, 3, 6, zeros=2)
    uniforms = torch.rand(2000, 5, generator=torch.Generator().manual_seed(41), dtype=torch.float64).tolist()
    found: Counter[int] = Counter()
    for draft, second, *coins in uniforms:
        t1 = draw_token(q1, draft)
        found[residual_cascade(q1, t1, q2, propose_second(q1, t1, q2, second), p, CascadeCoins(*coins)).token] += 1
    assert_law(found, dict(enumerate(p.tolist())))


def test_steps_of_one_example():
    """q1 favours 0; p / q1 = 1/2; rho is all on 3; R = (1/2 on 1, 1/2 on 3)."""
    assert second_residual(Q1, 0, Q2).tolist() == [0, 0.5, 0, 0.5]
    assert residual_cascade(Q1, 0, Q2, 3, P, CascadeCoins(0.49, 0, 0)) == CascadeRun(0, Source.FIRST)
    assert residual_cascade(Q1, 0, Q2, 3, P, CascadeCoins(0.5, LAST_UNIFORM, 0)) == CascadeRun(3, Source.SECOND)
    assert residual_cascade(Q1, 0, Q2, 1, P, CascadeCoins(0.5, 0, 0)) == CascadeRun(3, Source.RESTART)
    assert residual_cascade(Q1, 0, Q2, None, P, CascadeCoins(0.5, 0, 0)) == CascadeRun(3, Source.RESTART)
    assert residual_cascade(Q1, 0, None, None, P, CascadeCoins(0.5, 0, 0)) == CascadeRun(3, Source.RESTART)


@pytest.mark.parametrize(
    ("q2", "t1"),
    [
        (Q1, 0),  # no mass moves
        (row(0.5, 0.5, 0, 0), 0),  # q2(t1) = q1(t1)
        (row(0.75, 0.25, 0, 0), 0),  # q2(t1) > q1(t1)
        (row(0.25, 0.5, 0, 0.25), 1),  # t1 gains
    ],
)
def test_the_gate_is_closed_unless_t1_loses_mass(q2, t1):
    assert second_residual(Q1, t1, q2) is None
    assert propose_second(Q1, t1, q2, 0.5) is None


def test_t1_is_never_proposed_twice():
    for seed in range(30):
        q1, q2 = random_rows(seed, 2, 5)
        for t1 in range(5):
            found = {propose_second(q1, t1, q2, u) for u in (0.0, 0.3, 0.6, LAST_UNIFORM)}
            assert t1 not in found
            assert (found == {None}) is not bool(q2[t1] < q1[t1])


def test_masses_that_rounding_leaves_at_zero():
    """q1 is p but for one last bit: rho is empty and p answers. rho is R but for last bits: rho answers."""
    p = row(0.5, 0.5, 0)
    run = residual_cascade(row(0.5 + 2**-53, 0.5, 0), 0, None, None, p, CascadeCoins(LAST_UNIFORM, 0.5, 0.9))
    assert run == CascadeRun(1, Source.RESTART)
    q1, tail = row(0.75, 0.25, 0, 0, 0), [0.08037685816988421, 0.15800645020563156, 0.26161669162448414]
    p = row(0.25, 0.25, *tail)
    q2 = row(0.375, 0.25, 0.06028264362741316, 0.11850483765422368, 0.1962125187183631)
    for final, token in ((0.1, 2), (0.4, 3), (0.9, 4)):
        run = residual_cascade(q1, 0, q2, 2, p, CascadeCoins(LAST_UNIFORM, LAST_UNIFORM, final))
        assert run == CascadeRun(token, Source.RESTART)


def test_inputs_are_left_alone():
    rows = [random_rows(50 + at, 1, 5)[0] for at in range(3)]
    before = [given.clone() for given in rows]
    for t1 in range(5):
        t2 = propose_second(rows[0], t1, rows[1], 0.5)
        residual_cascade(rows[0], t1, rows[1], t2, rows[2], CascadeCoins(0.99, 0.99, 0.5))
    assert all(torch.equal(a, b) for a, b in zip(rows, before, strict=True))


REFUSALS = [
    ({"p": row(0.5, 0.5)}, "q1: rows must have equal vocabularies, got sizes [2, 4]"),
    ({"q2": row(0.5, 0.5)}, "q2: rows must have equal vocabularies, got sizes [2, 4]"),
    ({"p": row(0.5, 0.25, 0, 0)}, "p[0] has mass 0.75, a distribution has 1 within 1e-05"),
    ({"q1": row(1.5, -0.5, 0, 0)}, "q1[0][1] = -0.5 is negative"),
    ({"q2": row(math.nan, 1, 0, 0)}, "q2[0][0] = nan is not finite"),
    ({"t1": 4}, "t1 = 4 is not a token id of a vocabulary of 4"),
    ({"t1": 3}, "t1 = 3 has probability 0 in q1, the row that it was drawn from"),
    ({"t2": -1}, "t2 = -1 is not a token id of a vocabulary of 4"),
    ({"t2": 0}, "t2 = 0 has probability 0 in the residual of q2, which it was drawn from"),
    ({"t2": 2}, "t2 = 2 has probability 0 in the residual of q2, which it was drawn from"),
    ({"q2": None}, "t2 = 3 without q2, the row that proposed it"),
    ({"t1": 1}, "t2 = 3 behind a closed gate: q2 must take mass from t1 = 1 and add it elsewhere"),
    ({"coins": CascadeCoins(1.0, 0, 0)}, "coins.first = 1.0 is outside [0, 1)"),
    ({"coins": CascadeCoins(0, math.nan, 0)}, "coins.second = nan is not finite, a uniform lies in [0, 1)"),
    ({"coins": CascadeCoins(0, 0, -0.5)}, "coins.final = -0.5 is outside [0, 1)"),
]


@pytest.mark.parametrize(("change", "sentence"), REFUSALS)
def test_refusals_although_t1_is_accepted(change, sentence):
    given = {"q1": Q1, "t1": 0, "q2": Q2, "t2": 3, "p": P, "coins": CascadeCoins(0, 0, 0)}
    assert residual_cascade(**given).source is Source.FIRST
    with pytest.raises(ValueError, match=r"\w") as refusal:
        residual_cascade(**(given | change))
    assert str(refusal.value) == sentence


def test_a_second_draw_is_checked_behind_a_closed_gate_as_well():
    with pytest.raises(ValueError, match=r"second draft uniform = 1.0 is outside \[0, 1\)"):
        propose_second(Q1, 0, Q1, 1.0)
