"""The batched cascade: its law on grids of coins and by counting draws, and row by row against the scalar reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from sglang_trunc.core.contract.cascade import CascadeCoins, Source, propose_second, residual_cascade, second_residual
from sglang_trunc.core.noise import coin, murmur32
from sglang_trunc.core.residual import (
    NONE,
    Drafts,
    Purpose,
    Remembered,
    ResidualMemory,
    _decide,
    _draw,
    _salted,
    _second_law,
    draw_first,
    draw_second,
    settle,
)
from tests.core.contract.toy import LAST_UNIFORM, grid, random_rows, row


def keys(count: int, seed: int = 0, position: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """Seeds as clients choose them, and one position."""
    return torch.arange(count) + 1000 * seed, torch.full((count,), position)


def spread(law: torch.Tensor, count: int) -> torch.Tensor:
    return law.expand(count, -1)


def inverse_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draws by coins that a grid can choose, ``rows.draw_token`` in bulk: int64 [n] from weights [n, V] of any mass."""
    cdf = weights.cumsum(1)
    last = weights.shape[1] - 1 - (weights > 0).flip(1).int().argmax(1)
    return torch.minimum((cdf <= (uniforms * cdf[:, -1]).unsqueeze(1)).sum(1), last)


def decided(p, drafts, u1, u2, u3) -> torch.Tensor:
    """``settle`` on coins of the test's choosing."""
    first, second, left = _decide(p, drafts, u1, u2)
    assert not (first & second).any()
    return torch.where(first, drafts.t1, torch.where(second, drafts.t2, inverse_cdf(left, u3)))


# The law, exactly: every coin on a grid


def grid_law(q1, q2, p, points: int) -> list[int]:
    """Tokens counted over all five coins."""
    coins = torch.tensor(list(grid(points, 5)), dtype=torch.float64).unbind(1)
    q1, q2, p = (spread(law, len(coins[0])) for law in (q1, q2, p))
    t1 = inverse_cdf(q1, coins[0])
    law, is_open = _second_law(q1, t1, q2)
    t2 = torch.where(is_open, inverse_cdf(law, coins[1]), NONE)
    return decided(p, Drafts(q1, t1, q2, t2), *coins[2:]).bincount(minlength=p.shape[1]).tolist()


@pytest.mark.parametrize(
    ("q1", "q2", "p", "points", "expected"),
    [
        # both proposals and the final draw take part: a third each
        (row(2 / 3, 1 / 6, 1 / 6), row(1 / 3, 1 / 2, 1 / 6), row(1 / 3, 1 / 3, 1 / 3), 6, [2592, 2592, 2592]),
        # the gate never opens
        (row(0.5, 0.5), row(0.5, 0.5), row(0.25, 0.75), 4, [256, 768]),
        # d2 takes away what p wants
        (row(0.75, 0.25, 0), row(0.25, 0.25, 0.5), row(0.75, 0.25, 0), 4, [768, 256, 0]),
        (row(0.5, 0.5, 0), row(0.25, 0.25, 0.5), row(0.25, 0.25, 0.5), 4, [256, 256, 512]),
        # laws that are all on one token
        (row(1, 0), row(0, 1), row(0.5, 0.5), 4, [512, 512]),
        (row(1, 0, 0), row(0, 1, 0), row(0, 0, 1), 2, [0, 0, 32]),
        (row(0.5, 0.5, 0), row(0.25, 0.75, 0), row(0, 0, 1), 4, [0, 0, 1024]),
        (row(1), row(1), row(1), 2, [32]),
    ],
)
def test_counts_on_a_grid_of_coins_are_exact(q1, q2, p, points, expected):
    assert grid_law(q1, q2, p, points) == expected


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [(False, False, [64, 64, 128]), (True, False, [64, 64, 128]), (False, True, [64, 64, 128])],
)
def test_a_missing_proposal_is_a_law_of_zeros(first, second, expected):
    """Also where there is a second one alone, drawn from q2. What stands in a missing one's rows does not matter."""
    coins = torch.tensor(list(grid(4, 4)), dtype=torch.float64).unbind(1)
    q1, q2, p = (spread(law, 256) for law in (row(0.5, 0.25, 0.25), row(0.5, 0.5, 0), row(0.25, 0.25, 0.5)))
    nothing = torch.full((256,), NONE)
    t1 = inverse_cdf(q1, coins[0]) if first else nothing
    t2 = inverse_cdf(q2, coins[0]) if second else nothing
    for junk in (0.0, 1.0):
        drafts = Drafts(q1 if first else q1 * 0 + junk, t1, q2 if second else q2 * 0 + junk, t2)
        assert decided(p, drafts, *coins[1:]).bincount(minlength=3).tolist() == expected


# Row by row against the scalar reference


@pytest.mark.parametrize("zeros", [0, 2])
def test_every_row_is_the_scalar_cascade(zeros):
    count, vocabulary = 600, 6
    q1, q2, p = (random_rows(seed + zeros, count, vocabulary, zeros) for seed in (1, 11, 21))
    coins = torch.rand(5, count, generator=torch.Generator().manual_seed(zeros), dtype=torch.float64)
    t1 = inverse_cdf(q1, coins[0])
    law, is_open = _second_law(q1, t1, q2)
    t2 = torch.where(is_open, inverse_cdf(law, coins[1]), NONE)
    first, second, _ = _decide(p, Drafts(q1, t1, q2, t2), coins[2], coins[3])
    tokens = decided(p, Drafts(q1, t1, q2, t2), *coins[2:])
    sources = set()
    for at in range(count):
        reference = second_residual(q1[at], int(t1[at]), q2[at])
        assert bool(is_open[at]) == (reference is not None)
        if reference is not None:
            assert torch.allclose(law[at], reference, atol=1e-15)
            assert int(t2[at]) == propose_second(q1[at], int(t1[at]), q2[at], float(coins[1, at]))
        other = None if t2[at] == NONE else int(t2[at])
        run = residual_cascade(q1[at], int(t1[at]), q2[at], other, p[at], CascadeCoins(*coins[2:, at].tolist()))
        said = Source.FIRST if first[at] else Source.SECOND if second[at] else Source.RESTART
        assert (int(tokens[at]), said) == (run.token, run.source)
        sources.add(said)
    assert sources == set(Source)


WEIGHT = st.sampled_from([0, 0, 1, 2, 3, 1e-17, 1e-300, 1 - 2**-53])


@st.composite
def cascades(draw):
    """Laws of equal vocabulary with zeros, tiny masses and last bits, a token that can have been drawn, coins."""
    size = draw(st.integers(1, 5))
    laws = []
    for _ in range(3):
        weights = row(*draw(st.lists(WEIGHT, min_size=size, max_size=size)))
        weights[draw(st.integers(0, size - 1))] += 1
        laws.append(weights / weights.sum())
    if draw(st.booleans()):
        laws[2] = laws[draw(st.integers(0, 1))].clone()  # identical, or but for a last bit
        laws[2][0] *= draw(st.sampled_from([1, 1 - 2**-53, 1 + 2**-52]))
    t1 = draw(st.sampled_from([NONE, *laws[0].nonzero().flatten().tolist()]))
    coins = st.sampled_from([0.0, 2.0**-32, 0.3, 0.5, 1 - 2.0**-32, LAST_UNIFORM])
    return laws, t1, draw(coins), draw(coins), draw(st.integers(0, 10**6))


@settings(max_examples=400, deadline=None)
@given(cascades())
def test_a_rejected_token_is_never_left_to_be_drawn(case):
    (q1, q2, p), t1, u1, u2, choice = case
    law, is_open = _second_law(q1[None], torch.tensor([t1]), q2[None])
    support = law[0].nonzero().flatten().tolist()
    t2 = support[choice % len(support)] if is_open else NONE
    assert t1 == NONE or (t1 not in support) or not is_open
    drafts = Drafts(q1[None], torch.tensor([t1]), q2[None], torch.tensor([t2]))
    first, second, left = _decide(p[None], drafts, torch.tensor([u1]).double(), torch.tensor([u2]).double())
    if first or second:
        assert p[t1 if first else t2] > 0
        assert not (first and second)
        return
    assert left.amax() > 0
    assert not left[0][p == 0].any()
    assert left.isfinite().all()
    for token in (t1, t2):
        assert token == NONE or left[0, token] == 0


def test_masses_that_rounding_leaves_at_zero():
    """q1 is p but for a last bit and t1 is rejected: p without t1 is left. Where p has nothing else, t1 is accepted."""
    u, last = torch.tensor([0.5], dtype=torch.float64), torch.tensor([LAST_UNIFORM], dtype=torch.float64)
    none, zero = torch.tensor([NONE]), torch.tensor([0])
    q1 = row(0.5 + 2**-53, 0.5, 0)[None]
    first, _, left = _decide(row(0.5, 0.5, 0)[None], Drafts(q1, zero, q1, none), last, u)
    assert not first
    assert left.tolist() == [[0, 1, 0]]
    q1 = row(1, 0)[None]
    first, second, _ = _decide(row(1 - 2**-53, 0)[None], Drafts(q1, zero, q1, none), last, u)
    assert (bool(first), bool(second)) == (True, False)
    # The same of t2: rho is (0, 1, 0), R is (0, 1, 0) with t2 = 1, and its coin cannot fail.
    q1, q2, p = row(1, 0, 0)[None], row(0, 1, 0)[None], row(0, 1, 0)[None]
    first, second, _ = _decide(p, Drafts(q1, zero, q2, torch.tensor([1])), u, last)
    assert (bool(first), bool(second)) == (False, True)


def test_tokens_that_were_not_drawn_from_their_law_count_as_none():
    p, q1, q2 = row(0.25, 0.25, 0.5)[None], row(0.5, 0.5, 0)[None], row(0.25, 0.5, 0.25)[None]
    zero = torch.zeros(1, dtype=torch.float64)
    for t1, t2 in ((2, NONE), (0, 0), (0, 1), (1, 2)):  # q1 = 0; t1 again; R = 0; behind a closed gate
        first, second, _ = _decide(p, Drafts(q1, torch.tensor([t1]), q2, torch.tensor([t2])), zero + 0.99, zero)
        assert not first
        assert not second


# Draws from seeds


@pytest.mark.parametrize(
    ("q1", "t1", "q2"),
    [
        (row(0.5, 0.5, 0), 0, row(0.5, 0.5, 0)),  # no mass moves
        (row(0.5, 0.5, 0), 0, row(0.5, 0.25, 0.25)),  # t1 keeps its mass
        (row(0.25, 0.75, 0), 0, row(0.5, 0.25, 0.25)),  # t1 gains
        (row(1), 0, row(1)),
    ],
)
def test_a_closed_gate_repeats_t1(q1, t1, q2):
    seeds, positions = keys(50)
    t1 = torch.full((50,), t1)
    tokens, is_open = draw_second(spread(q1, 50), t1, spread(q2, 50), seeds, positions)
    assert torch.equal(tokens, t1)
    assert not is_open.any()


def test_an_open_gate_draws_from_the_residual():
    q1, q2 = row(0.5, 0.25, 0.25, 0), row(0.25, 0.5, 0, 0.25)
    seeds, positions = keys(20000)
    t1 = torch.zeros(20000, dtype=torch.int64)
    tokens, is_open = draw_second(spread(q1, 20000), t1, spread(q2, 20000), seeds, positions)
    assert is_open.all()
    assert chisquare(tokens.bincount(minlength=4)[[1, 3]].numpy()).pvalue > 1e-3
    assert set(tokens.tolist()) == {1, 3}
    tokens, is_open = draw_second(spread(q1, 20000), t1 + NONE, spread(q2, 20000), seeds, positions)
    assert is_open.all()
    expected = q2[q2 > 0].numpy() * 20000
    assert chisquare(tokens.bincount(minlength=4)[q2 > 0].numpy(), expected).pvalue > 1e-3


class LittleModel:
    """Laws of two tokens at three depths, the later ones closer to p; 40 tokens, a few of them impossible."""

    def __init__(self):
        noise = torch.Generator().manual_seed(3)
        first, second = (torch.randn(3, *shape, 40, generator=noise).double() for shape in ((), (40,)))
        self.first, self.second = (self._laws(logits) for logits in (first, second))

    @staticmethod
    def _laws(logits):
        logits = torch.stack((logits[2] + logits[0], logits[2] + logits[1] / 2, logits[2])) * 1.5
        logits[0, ..., 36:38] = -torch.inf  # not at d1
        logits[2, ..., 38:] = -torch.inf  # not at R
        return logits.softmax(-1)


def said(laws, seeds, positions, hears_first, hears_second, calls) -> torch.Tensor:
    """One token a row; a depth that does not hear proposes nothing."""
    q1, q2, p = laws
    t1 = draw_first(q1, seeds, positions).where(hears_first, NONE)
    second = draw_second(q1, t1, q2, seeds, positions)
    t2 = second.tokens.where(second.open & hears_second, NONE)
    tokens = settle(p, seeds, positions, Drafts(q1, t1, q2, t2))
    calls.update({"first": (tokens == t1).sum(), "second": (tokens == t2).sum()})
    return tokens


@pytest.mark.parametrize("heard", [(1.0, 1.0), (1.0, 0.5), (0.5, 0.5), (0.0, 1.0), (0.0, 0.0)])
def test_joint_law_of_two_tokens(heard):
    model, count = LittleModel(), 20000
    seeds, positions = keys(count, seed=3)
    dice = torch.rand(4, count, generator=torch.Generator().manual_seed(9))
    hears = [die < share for die, share in zip(dice, heard * 2, strict=True)]
    calls: dict[str, torch.Tensor] = {}
    one = said(tuple(spread(law, count) for law in model.first), seeds, positions, *hears[:2], calls)
    assert (calls["first"] > 1000) == (heard[0] > 0)
    assert (calls["second"] > 100) == (heard[1] > 0)
    two = said(tuple(model.second[:, one]), seeds, positions + 1, *hears[2:], calls)
    expected = (model.first[2].unsqueeze(1) * model.second[2]).flatten() * count
    found = (40 * one + two).bincount(minlength=1600)
    assert not found[expected == 0].any()
    rare = expected < 5
    assert rare.sum() < 1200
    merged = [torch.cat((cells[~rare], cells[rare].sum()[None])).double().numpy() for cells in (found, expected)]
    assert chisquare(*merged).pvalue > 1e-3


def test_no_token_without_mass_in_a_million_draws():
    q1, q2, p = row(0.3, 0.3, 0.2, 0.2, 0), row(0.1, 0.2, 0.3, 0.2, 0.2), row(0.2, 0, 0.5, 0, 0.3)
    calls: dict[str, torch.Tensor] = {}
    always = torch.ones(100000, dtype=torch.bool)
    found = torch.zeros(5, dtype=torch.int64)
    for part in range(10):
        seeds, positions = keys(100000, seed=100 * part)
        laws = tuple(spread(law, 100000) for law in (q1, q2, p))
        assert draw_first(laws[0], seeds, positions).max() < 4
        found += said(laws, seeds, positions, always, always, calls).bincount(minlength=5)
    assert found[[1, 3]].tolist() == [0, 0]
    assert chisquare(found[p > 0].numpy(), p[p > 0].numpy() * 1e6).pvalue > 1e-3


def test_tiny_masses_are_drawn_by_their_share():
    weights = torch.tensor([1e-300, 3e-300, 0], dtype=torch.float64).expand(8000, -1)
    seeds, positions = keys(8000)
    drawn = _draw(weights, torch.ones(8000, dtype=torch.bool), seeds, positions, Purpose.FINAL_DRAW)
    assert chisquare(drawn.bincount(minlength=2).numpy(), [2000, 6000]).pvalue > 1e-3


def test_purposes_are_independent_of_each_other_and_of_the_plain_draw():
    """Pairs of coins on an 8 x 8 board, with small seeds and positions as they occur."""
    seeds, positions = torch.arange(64).repeat_interleave(512), torch.arange(512).repeat(64)
    column = torch.tensor([5])
    hashes = [murmur32(_salted(seeds, purpose), positions, column)[:, 0].double() / 2**32 for purpose in Purpose]
    uniforms = [murmur32(seeds, positions, column)[:, 0].double() / 2**32, *hashes]
    uniforms += [coin(seeds, positions, purpose) for purpose in (Purpose.ACCEPT_FIRST, Purpose.ACCEPT_SECOND)]
    cells = [(8 * uniform).long() for uniform in uniforms]
    for at, one in enumerate(cells):
        for other in cells[:at]:
            assert chisquare((8 * one + other).bincount(minlength=64).numpy()).pvalue > 1e-4
            assert not torch.equal(one, other)


def test_a_hash_is_never_shared_by_two_purposes():
    seeds = torch.tensor([0, 1, -1, 42, 2**32, 2**63 - 1, -(2**63)])
    hashes = [murmur32(s, torch.arange(7), torch.arange(300)) for s in (seeds, *(_salted(seeds, p) for p in Purpose))]
    for at, one in enumerate(hashes):
        assert not any((one == other).any() for other in hashes[:at])


def test_a_row_does_not_see_its_neighbours():
    """Nor the order they come in; vocabularies on both sides of the noise's short cut."""
    for vocabulary in (5, 5000):
        q1, q2, p = (random_rows(seed, 12, vocabulary, zeros=2) for seed in (1, 2, 3))
        seeds, positions = torch.arange(12) - 5, torch.arange(12) * 3

        def tokens(rows, q1=q1, q2=q2, p=p, seeds=seeds, positions=positions):
            where = seeds[rows], positions[rows]
            t1 = draw_first(q1[rows], *where)
            second = draw_second(q1[rows], t1, q2[rows], *where)
            t2 = second.tokens.where(second.open, NONE)
            return torch.stack((t1, t2, settle(p[rows], *where, Drafts(q1[rows], t1, q2[rows], t2))))

        together = tokens(torch.arange(12))
        order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
        assert torch.equal(tokens(order), together[:, order])
        assert torch.equal(torch.cat([tokens(torch.tensor([at])) for at in range(12)], 1), together)


def test_inputs_are_left_alone():
    laws = [random_rows(seed, 6, 9, zeros=1) for seed in (4, 5, 6)]
    before = [law.clone() for law in laws]
    seeds, positions = keys(6)
    said((laws[0], laws[1], laws[2]), seeds, positions, *[torch.ones(6, dtype=torch.bool)] * 2, {})
    assert all(torch.equal(a, b) for a, b in zip(laws, before, strict=True))


def test_accelerators_never_wait_for_the_host():
    """A meta tensor has no values: whatever asks for one raises."""
    law = torch.zeros(3, 5000, dtype=torch.float64, device="meta")
    seeds = torch.zeros(3, dtype=torch.int64, device="meta")
    t1 = draw_first(law, seeds, seeds)
    second = draw_second(law, t1, law, seeds, seeds)
    assert settle(law, seeds, seeds, Drafts(law, t1, law, second.tokens)).shape == (3,)


def test_laws_of_another_shape_or_type_are_errors():
    seeds, positions = keys(2)
    good, t1 = random_rows(0, 2, 4), torch.zeros(2, dtype=torch.int64)
    for bad in (good[0], good[:1], good.float()):
        calls = (
            lambda bad: draw_first(bad, seeds, positions),
            lambda bad: draw_second(good, t1, bad, seeds, positions),
            lambda bad: settle(bad, seeds, positions),
            lambda bad: settle(good, seeds, positions, Drafts(good, t1, bad, t1)),
        )
        for call in calls:
            with pytest.raises(ValueError, match=r"laws must be float64 \[2, vocabulary\], got torch.float"):
                call(bad)


# Memory


def test_what_was_proposed_comes_back_as_it_was():
    q1, q2, p = (random_rows(seed, 2, 5) for seed in (7, 8, 9))
    memory = ResidualMemory(4)
    memory.first("a", q1[0], 3)
    memory.second("a", q2[0], 1)
    memory.first("b", q1[1], 2)
    kept = q1.clone(), q2.clone()
    q1.zero_()  # the caller's buffers are its own
    q2.zero_()
    drafts = Drafts.stack([memory.get("a"), memory.get("b"), memory.get("c")], torch.cat((p, p[:1])))
    assert torch.equal(drafts.q1, torch.cat((kept[0], torch.zeros(1, 5))))
    assert torch.equal(drafts.q2, torch.cat((kept[1][:1], torch.zeros(2, 5))))
    assert (drafts.t1.tolist(), drafts.t2.tolist()) == ([3, 2, NONE], [1, NONE, NONE])
    assert drafts.q1.dtype == torch.float64
    assert memory.get("a").q1.untyped_storage().nbytes() == 5 * 8  # not the batch it came in


def test_a_second_proposal_may_stand_alone():
    memory = ResidualMemory(1)
    memory.second("a", row(0.5, 0.5), 1)
    assert memory.get("a").t1 == NONE
    with pytest.raises(ValueError, match="a has proposed already"):
        memory.first("a", row(0.5, 0.5), 0)


def test_what_is_gone_is_forgotten():
    memory = ResidualMemory(3)
    for key in "abc":
        memory.first(key, row(1), 0)
    assert memory.take("a").t1 == 0
    assert memory.take("a") == Remembered()
    memory.keep(["c", "d"])
    assert len(memory) == 1
    memory.forget(["c", "d"])
    assert len(memory) == 0


def test_memory_is_bounded_and_each_key_speaks_once():
    memory = ResidualMemory(2)
    for key in (1, 2):
        memory.first(key, row(1), 0)
    for speak in (memory.first, memory.second):
        with pytest.raises(ValueError, match="2 keys are remembered already, those that are gone must be forgotten"):
            speak(3, row(1), 0)
    memory.second(2, row(1), 0)
    for speak in (memory.first, memory.second):
        with pytest.raises(ValueError, match="2 has .* already"):
            speak(2, row(1), 0)
