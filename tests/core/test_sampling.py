"""Sampling row by row: against SGLang's own functions, against the laws by hand, and by counting draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_trunc.core import sampling
from sglang_trunc.core.sampling import SamplingRows, choose, laws

EVERY = 1 << 30  # SGLang's TOP_K_ALL
INF, NAN = float("inf"), float("nan")


def rows_of(specs, seeds=None, positions=None) -> SamplingRows:
    """Rows from (temperature, top-k, top-p, min-p); temperature 0 is greedy."""
    temperatures, top_ks, top_ps, min_ps = zip(*specs, strict=True)
    greedy = [temperature == 0 for temperature in temperatures]
    filtered = [k < EVERY or p < 1 or m > 0 for _, k, p, m in specs]
    open_rows = [not (g or f) for g, f in zip(greedy, filtered, strict=True)]
    gen = torch.Generator().manual_seed(len(specs))
    return SamplingRows(
        torch.tensor([temperature or 1.0 for temperature in temperatures]),
        torch.tensor(top_ks, dtype=torch.int32),
        torch.tensor(top_ps),
        torch.tensor(min_ps),
        torch.randint(-(2**63), 2**63 - 1, (len(specs),), generator=gen) if seeds is None else seeds,
        torch.randint(0, 40000, (len(specs),), generator=gen) if positions is None else positions,
        torch.tensor(greedy),
        torch.tensor(filtered),
        all(greedy),
        any(f and not g for f, g in zip(filtered, greedy, strict=True)),
        any(open_rows),
    )


OPEN = [(1.0, EVERY, 1.0, 0.0), (0.7, EVERY, 1.0, 0.0), (3.0, EVERY, 1.0, 0.0)]
TOP = [(1.0, 1, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.0, EVERY, 0.9, 0.0), (1.5, 40, 0.6, 0.0), (0.3, 1000, 0.999, 0.0)]
MIN_P = [(1.0, EVERY, 1.0, 0.1), (0.8, EVERY, 0.95, 0.02), (2.0, 30, 0.9, 0.2), (1.0, EVERY, 1.0, 1.0)]
GREEDY = [(0.0, EVERY, 1.0, 0.0), (0.0, 1, 1.0, 0.0)]
VOCABULARIES = [1, 2, 7, 40, 257, 1000, 4097, 5000]


def logits_of(vocabulary, count, seed=0, coarse=False):
    """Normal logits; ``coarse``: few different values, so ties at every boundary."""
    gen = torch.Generator().manual_seed(1000 * seed + vocabulary)
    logits = torch.randn(count, vocabulary, generator=gen) * 3
    return (logits * 2).round() / 2 if coarse else logits


def noisy_argmax(logprobs, seeds, positions):
    """SGLang's noise in numpy words: int64 [n, 1], every column, nothing of ``core.noise``."""
    columns = np.arange(logprobs.shape[1], dtype=np.uint32)

    def absorb(state, word):
        word = word * np.uint32(0xCC9E2D51)
        word = (word << np.uint32(15) | word >> np.uint32(17)) * np.uint32(0x1B873593)
        state = state ^ word
        return (state << np.uint32(13) | state >> np.uint32(19)) * np.uint32(5) + np.uint32(0xE6546B64)

    seed, position = seeds.numpy().astype(np.uint64), positions.numpy().astype(np.uint32)
    state = np.zeros(len(seed), dtype=np.uint32)
    for word in (seed.astype(np.uint32), (seed >> np.uint64(32)).astype(np.uint32), position):
        state = absorb(state, word)
    state = absorb(state[:, None], columns[None]) ^ np.uint32(16)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ state >> np.uint32(shift)) * np.uint32(factor)
    state = state ^ state >> np.uint32(16)
    log_uniform = (torch.from_numpy(state.astype(np.int64)).double() / (2**32 - 1)).log()
    surprise = -log_uniform.clamp(min=torch.finfo(torch.float64).min, max=-(2.0**-32))
    return (logprobs.double() - surprise.log()).argmax(1, keepdim=True)


@pytest.fixture
def stock(monkeypatch):
    """SGLang's sampler module with the noise above in place of its compiled one."""
    module = pytest.importorskip("sglang.srt.layers.sampler")
    monkeypatch.setattr(module, "multinomial_with_seed", noisy_argmax)
    return module


def stock_probabilities(logits, rows):
    """As ``Sampler.forward`` makes them under deterministic inference."""
    logits = logits.clone()
    logits.div_(rows.temperatures.view(-1, 1))
    logits[:] = torch.softmax(logits, dim=-1)
    return logits


@pytest.mark.parametrize("coarse", [False, True], ids=["normal", "ties"])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_open_rows_are_sglangs(stock, vocabulary, coarse):
    specs = OPEN * 8
    rows, logits = rows_of(specs), logits_of(vocabulary, len(specs), coarse=coarse)
    expected = stock.sampling_from_probs_torch(stock_probabilities(logits, rows), rows.seeds, rows.positions)
    assert choose(logits, rows).tokens.tolist() == expected.tolist()


@pytest.mark.parametrize("coarse", [False, True], ids=["normal", "ties"])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_filtered_rows_are_sglangs(stock, vocabulary, coarse):
    specs = TOP * 8
    rows, logits = rows_of(specs), logits_of(vocabulary, len(specs), coarse=coarse)
    expected = stock.top_k_top_p_min_p_sampling_from_probs_torch(
        stock_probabilities(logits, rows), rows.top_ks, rows.top_ps, rows.min_ps, False, rows.seeds, rows.positions
    )
    assert choose(logits, rows).tokens.tolist() == expected.tolist()


@pytest.mark.parametrize("coarse", [False, True], ids=["normal", "ties"])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_min_p_keeps_what_sglang_keeps(stock, monkeypatch, vocabulary, coarse):
    """SGLang draws min-p without a seed only: its draw is replaced, its masks are its own."""
    specs = (MIN_P + TOP) * 4
    rows, logits = rows_of(specs), logits_of(vocabulary, len(specs), coarse=coarse)

    def seeded(weights, num_samples):
        assert num_samples == 1
        return noisy_argmax(weights.double().log(), rows.seeds, rows.positions)

    monkeypatch.setattr(torch, "multinomial", seeded)
    expected = stock.top_k_top_p_min_p_sampling_from_probs_torch(
        stock_probabilities(logits, rows), rows.top_ks, rows.top_ps, rows.min_ps, True, None, rows.positions
    )
    assert choose(logits, rows).tokens.tolist() == expected.tolist()


def sorted_formula(logits, rows):
    """The filtered formula over the whole sorted vocabulary."""
    return sampling._draw_attempt(stock_probabilities(logits, rows), rows, logits.shape[1])[0]


BIG = [
    (1.0, EVERY, 1.0, 1e-6),
    (1.0, EVERY, 0.5, 0.0),
    (1.0, EVERY, 0.999, 0.0),
    (0.5, 256, 1.0, 0.0),
    (0.5, 257, 1.0, 0.0),
    (3.0, 5000, 1.0, 0.0),
    (3.0, EVERY, 0.97, 0.0),
    (1.0, EVERY, 0.9999999, 0.0),
    (0.2, 50, 0.95, 0.05),
]


@pytest.mark.parametrize("grain", [0.0, 0.25, 2.0])
def test_leading_ranks_say_what_the_sort_says(grain):
    """Large vocabularies, logits on a grid as bf16 gives them, rows that need 256 ranks, 4096 and all."""
    specs = BIG * 4
    rows, logits = rows_of(specs), logits_of(20011, len(specs), seed=3)
    logits[:, ::500] += 10
    if grain:
        logits = (logits / grain).round() * grain
    assert torch.equal(choose(logits, rows).tokens, sorted_formula(logits, rows))
    probabilities = stock_probabilities(logits, rows)
    by_sort = sampling._law_attempt(probabilities, rows, logits.shape[1])[0]
    torch.testing.assert_close(laws(logits, rows), by_sort, rtol=1e-12, atol=0)
    assert torch.equal(laws(logits, rows) > 0, by_sort > 0)


def test_most_peaked_rows_need_no_sort(monkeypatch):
    seen = []
    attempt = sampling._draw_attempt

    def watched(probabilities, rows, width):
        seen.append((len(probabilities), width))
        return attempt(probabilities, rows, width)

    monkeypatch.setattr(sampling, "_draw_attempt", watched)
    logits = logits_of(20011, 50, seed=4)
    logits[:, ::500] += 15
    choose(logits, rows_of([(1.0, EVERY, 0.95, 0.0)] * 50))
    assert seen == [(50, 256)]


@pytest.mark.parametrize("attempt", [sampling._draw_attempt, sampling._law_attempt])
@pytest.mark.parametrize("width", [1, 2, 3, 5, 8, 11])
def test_an_answer_from_leading_ranks_that_claims_to_be_final_is(attempt, width):
    """Top-p at, just under and just over a sum of leading probabilities; top-k and min-p at the edge; ties or none."""
    claims = 0
    for coarse in (False, True):
        logits = logits_of(12, 400, seed=6, coarse=coarse)
        logits[1::4] *= 0.2
        rows = rows_of([(1.0, EVERY, 1.0, 0.0)] * 400)
        ordered = logits.softmax(-1).sort(dim=-1, descending=True).values
        edge = (ordered.cumsum(-1) - ordered)[:, width - 1]
        top_ps = torch.stack((edge, edge - 1e-7, edge + 1e-7, edge + 1e-4, torch.ones(400)), 1)
        rows = rows._replace(
            top_ps=top_ps[range(400), torch.arange(400) % 5].clamp(min=1e-9),
            top_ks=torch.tensor([EVERY, EVERY, width, width + 1], dtype=torch.int32).repeat(100),
            min_ps=torch.where(torch.arange(400) % 3 == 0, ordered[:, width] / ordered[:, 0], 0.0),
        )
        answers, complete, split = attempt(logits.softmax(-1), rows, width)
        final = complete & ~split
        expected = attempt(logits.softmax(-1), rows, 12)[0]
        torch.testing.assert_close(answers[final], expected[final], rtol=1e-12, atol=0)
        claims += int(final.sum())
    assert claims > 50 or width == 1


def test_ranks_too_small_for_the_sum_stay_within_its_limit():
    """Behind 3/4 and 1/4 the running sum stands still in float32: if one rank is within top-p, all are."""
    probabilities = torch.tensor([[0.75, 0.25] + [1e-10] * 20])
    rows = rows_of([(1.0, EVERY, 1.0, 0.0)])
    for top_p, final in ((1.0, False), (1.0 - 2.0**-24, True)):
        ranks = sampling._leading(probabilities, rows._replace(top_ps=torch.tensor([top_p])), 8)
        assert ranks.complete.tolist() == [final]
        assert (ranks.kept > 0).sum() == (2 if final else 8)


@pytest.mark.parametrize("top_p", [0.25, 0.5, 0.75, 1.0])
def test_a_prefix_is_complete_only_when_later_ranks_are_masked(top_p):
    """Sums at the limit to a rounding: equal probabilities, some far more than top-p's share of them."""
    logits = torch.zeros(3, 8192)
    logits[1, :4096] = 1e-6
    logits[2, 100:] = -40.0
    rows = rows_of([(1.0, EVERY, top_p, 1e-30)] * 3)
    assert torch.equal(choose(logits, rows).tokens, sorted_formula(logits, rows))


MIXED = OPEN + TOP + MIN_P + GREEDY


@pytest.mark.parametrize("vocabulary", [40, 5000])
def test_a_row_chooses_alike_in_any_company(vocabulary):
    logits = logits_of(vocabulary, len(MIXED) * 3, seed=1, coarse=True)
    rows = rows_of(MIXED * 3)
    together, law = choose(logits, rows), laws(logits, rows)
    order = torch.randperm(len(logits), generator=torch.Generator().manual_seed(2))
    shuffled = choose(logits[order], rows.take(order))
    assert torch.equal(shuffled.tokens, together.tokens[order])
    assert torch.equal(shuffled.probabilities, together.probabilities[order])
    for row, spec in enumerate(MIXED):
        index = torch.tensor([row])
        alone = rows_of([spec], rows.seeds[index], rows.positions[index])
        one = choose(logits[index], alone)
        assert (one.tokens, one.probabilities) == (together.tokens[row], together.probabilities[row])
        assert torch.equal(laws(logits[index], alone)[0], law[row])
        # Flags wider than the truth, as a selection of rows has them.
        assert torch.equal(choose(logits[index], rows.take(index)).tokens, one.tokens)


def test_both_ways_to_treat_a_mixed_batch_agree(monkeypatch):
    logits, rows = logits_of(5000, len(MIXED), seed=5), rows_of(MIXED)
    tokens, law = choose(logits, rows).tokens, laws(logits, rows)
    monkeypatch.setattr(sampling, "_each_alone", sampling._everywhere)
    monkeypatch.setattr(sampling, "PREFIXES", ())
    assert torch.equal(choose(logits, rows).tokens, tokens)
    torch.testing.assert_close(laws(logits, rows), law, rtol=1e-12, atol=0)


def test_accelerators_never_wait_for_the_host():
    """A meta tensor has no values: whatever asks for one raises."""
    rows = rows_of(MIXED)
    rows = SamplingRows(*(field.to("meta") if isinstance(field, torch.Tensor) else field for field in rows))
    logits = torch.zeros(len(MIXED), 5000, device="meta")
    assert choose(logits, rows).tokens.shape == (len(MIXED),)
    assert laws(logits, rows).shape == logits.shape


def test_greedy_rows_take_the_lowest_of_the_highest():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, -1.0, 0.0, 0.0]])
    for rows in (rows_of(GREEDY), rows_of(GREEDY)._replace(all_greedy=False, any_open=True, any_filtered=True)):
        chosen = choose(logits, rows)
        assert chosen.tokens.tolist() == [1, 0]
        torch.testing.assert_close(chosen.probabilities, logits.softmax(-1)[[0, 1], [1, 0]])
        assert laws(logits, rows).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]


def test_logits_stay_and_probabilities_are_the_tempered_softmax():
    rows, logits = rows_of(MIXED), logits_of(300, len(MIXED))
    before = logits.clone()
    chosen = choose(logits, rows)
    laws(logits, rows)
    assert torch.equal(logits, before)
    assert chosen.tokens.dtype == torch.int64
    assert chosen.probabilities.dtype == torch.float32
    expected = stock_probabilities(logits, rows).gather(1, chosen.tokens[:, None])[:, 0]
    assert torch.equal(chosen.probabilities, expected)


@pytest.mark.parametrize("vocabulary", [12, 5000])
def test_an_overflowing_row_gets_a_token_and_no_probability(vocabulary):
    logits = logits_of(vocabulary, len(MIXED) * 3)
    logits[: len(MIXED), 3] = NAN
    logits[len(MIXED) : 2 * len(MIXED), 5:7] = INF
    rows = rows_of(MIXED * 3)
    chosen, law = choose(logits, rows), laws(logits, rows)
    bad = slice(0, 2 * len(MIXED))
    assert (chosen.probabilities[bad] == 0).all()
    assert ((chosen.tokens >= 0) & (chosen.tokens < vocabulary)).all()
    assert (law[bad].gather(1, chosen.tokens[bad, None]) == 1).all()
    torch.testing.assert_close(law.sum(-1), torch.ones(len(law), dtype=torch.float64))
    filtered = ~rows.greedy & rows.filtered
    index = filtered.nonzero()[:, 0]
    assert torch.equal(chosen.tokens[index], sorted_formula(logits[index], rows.take(index)))


def test_no_rows_at_all():
    logits, rows = torch.zeros(0, 5000), rows_of(MIXED).take(torch.zeros(0, dtype=torch.int64))
    assert choose(logits, rows).tokens.shape == choose(logits, rows).probabilities.shape == (0,)
    assert laws(logits, rows).shape == (0, 5000)


def test_laws_by_hand():
    """Probabilities 1/2, 1/4, 1/8, 1/16, 1/16 at ids 2, 0, 4, 1, 3."""
    logits = torch.tensor([[0.25, 0.0625, 0.5, 0.0625, 0.125]]).log()
    table = {
        (1.0, EVERY, 1.0, 0.0): [4, 1, 8, 1, 2],
        (0.5, EVERY, 1.0, 0.0): [16, 1, 64, 1, 4],
        (1.0, 2, 1.0, 0.0): [1, 0, 2, 0, 0],
        (1.0, EVERY, 0.6, 0.0): [1, 0, 2, 0, 0],
        (1.0, EVERY, 0.49, 0.0): [0, 0, 1, 0, 0],
        (1.0, EVERY, 0.8, 0.0): [2, 0, 4, 0, 1],
        (1.0, 3, 0.6, 0.0): [1, 0, 2, 0, 0],
        (1.0, EVERY, 1.0, 0.2): [2, 0, 4, 0, 1],
        (1.0, EVERY, 1.0, 0.3): [1, 0, 2, 0, 0],
        (1.0, EVERY, 0.3, 0.2): [0, 0, 1, 0, 0],
        (0.0, EVERY, 1.0, 0.0): [0, 0, 1, 0, 0],
        (0.0, 3, 0.6, 0.1): [0, 0, 1, 0, 0],
    }
    expected = torch.tensor(list(table.values()), dtype=torch.float64)
    expected /= expected.sum(1, keepdim=True)
    result = laws(logits.expand(len(table), -1), rows_of(list(table)))
    assert result.dtype == torch.float64
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=0)


def test_limits_are_part_of_what_is_kept():
    """Sixteenths, exact in float32: a rank goes when more than top-p lies before it, or when it is under min-p."""
    rows = rows_of([(1.0, EVERY, 0.5, 0.0), (1.0, 9, 1.0, 0.0), (1.0, EVERY, 1.0, 1.0)])
    assert (laws(torch.zeros(3, 16), rows) > 0).sum(-1).tolist() == [9, 9, 16]


SPECS = st.tuples(
    st.sampled_from([0.0, 0.4, 1.0, 2.0]),
    st.sampled_from([1, 2, 3, 8, EVERY]),
    st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.05, 0.5]),
)


@settings(max_examples=150)
@given(st.lists(st.tuples(SPECS, st.integers(0, 999)), min_size=1, max_size=6), st.integers(1, 30), st.booleans())
def test_a_token_comes_from_its_law(drawn, vocabulary, coarse):
    specs, seeds = zip(*drawn, strict=True)
    rows = rows_of(list(specs), seeds=torch.tensor(seeds))
    logits = logits_of(vocabulary, len(specs), seed=seeds[0], coarse=coarse)
    law, tokens = laws(logits, rows), choose(logits, rows).tokens
    assert (law.gather(1, tokens[:, None]) > 0).all()
    torch.testing.assert_close(law.sum(-1), torch.ones(len(specs), dtype=torch.float64))
    # The kept ids are the likeliest ones.
    probabilities = stock_probabilities(logits, rows).double()
    dropped = torch.where(law > 0, -INF, probabilities).amax(-1)
    assert (torch.where(law > 0, probabilities, INF).amin(-1) >= dropped).all()


def critical(degrees: int) -> float:
    """Chi-square at p = 0.001, by Wilson and Hilferty (1931); up to 0.3 too large from 3 degrees of freedom on."""
    return degrees * (1 - 2 / (9 * degrees) + 3.0902 * (2 / (9 * degrees)) ** 0.5) ** 3


@pytest.mark.parametrize("keyed_by", ["seeds", "positions"])
@pytest.mark.parametrize("spec", [*OPEN[:2], (1.0, 12, 1.0, 0.0), (1.3, EVERY, 0.8, 0.0), (1.0, EVERY, 1.0, 0.1)])
def test_twenty_thousand_draws_follow_the_law(spec, keyed_by):
    draws = 20000
    varied, fixed = torch.arange(draws), torch.full((draws,), 11)
    seeds, positions = (varied, fixed) if keyed_by == "seeds" else (fixed, varied)
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(9)) * 1.2
    rows = rows_of([spec]).take(torch.zeros(draws, dtype=torch.int64))
    rows = rows._replace(seeds=seeds, positions=positions)
    counts = choose(logits.expand(draws, -1), rows).tokens.bincount(minlength=40).double()
    expected = laws(logits, rows.take(torch.tensor([0])))[0] * draws
    possible = expected > 0
    assert (counts[~possible] == 0).all()
    statistic = ((counts - expected) ** 2 / expected)[possible].sum()
    assert statistic < critical(int(possible.sum()) - 1)


def test_what_has_no_probability_is_never_drawn():
    """A million draws of open, top-k, top-p and min-p rows; masked logits as a grammar leaves them."""
    logits = torch.tensor([[-INF, 2.0, -INF, 1.0, 0.0, -400.0, 1.5, -INF]])
    specs = [(1.0, EVERY, 1.0, 0.0), (1.0, 6, 1.0, 0.0), (2.0, EVERY, 0.95, 0.0), (1.0, EVERY, 1.0, 0.01)]
    for number, spec in enumerate(specs):
        rows = rows_of([spec]).take(torch.zeros(250000, dtype=torch.int64))
        rows = rows._replace(seeds=torch.arange(250000) - 125000, positions=torch.full((250000,), number))
        counts = choose(logits.expand(250000, -1), rows).tokens.bincount(minlength=8)
        assert counts[[0, 2, 5, 7]].sum() == 0
        assert (counts[[1, 3, 4, 6]] > 0).all()
