"""Seeded noise against SGLang's hash, against plain integers, and the pruned argmax against the dense one."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_trunc.core import noise
from sglang_trunc.core.noise import coin, gumbel, murmur32, perturbed_argmax

WORD = 2**32
INF, NAN = float("inf"), float("nan")

COLUMNS = [0, 1, 2, 128255, 2**31 - 1, 2**31, 2**32 - 1, 2**32 - 2]
# Seed, position, hashes of COLUMNS; written by SGLang 0.5.23's Triton kernel in the interpreter.
VECTORS = [
    (0, 0, "8134cdf8 00990201 907177d2 75e87f2a 2129348f 94f4c584 83149923 91a93c3e"),
    (42, 7, "661eb28d 860d65ec 1f1cc266 1db18e38 59bf200d bce1ca0a 921e6223 e5ae491f"),
    (-1, 131071, "803e25fe 670367f8 8648038c 56dc6131 1752d9a7 99d0466d 376595f4 a8d9655d"),
    (-(2**63), 2**31 - 1, "09474cac e5931f5f 4146345f 6b92fa22 19b21cc0 a74417df 35402100 a3a9e14e"),
    (2**32 + 42, 2**32 + 5, "d793ee76 d11b4926 4f901669 0214ab58 1cbefa1f a173796a 4d0ffd22 688df68d"),
    (1234567890123456789, 2**40 + 17, "4cb102b7 ddfec825 c0c79d7c 11f3fd7b f954ee31 a3f82034 bdb137ff c513a065"),
]


def plain_hash(seed: int, position: int, column: int) -> int:
    """MurmurHash3 of (seed's two words, position, column) in plain integers."""

    def turn(word, count):
        return (word << count | word >> (32 - count)) % WORD

    state = 0
    for word in (seed % WORD, (seed >> 32) % WORD, position % WORD, column % WORD):
        state ^= turn(word * 0xCC9E2D51 % WORD, 15) * 0x1B873593 % WORD
        state = (turn(state, 13) * 5 + 0xE6546B64) % WORD
    state ^= 16
    state = (state ^ state >> 16) * 0x85EBCA6B % WORD
    state = (state ^ state >> 13) * 0xC2B2AE35 % WORD
    return state ^ state >> 16


def dense(logprobs, seeds, positions):
    """``perturbed_argmax`` as one reads it: every column's noise, no bound, no pruning."""
    columns = range(logprobs.shape[1])
    keys = zip(seeds.tolist(), positions.tolist(), strict=True)
    hashes = torch.tensor([[plain_hash(seed, position, column) for column in columns] for seed, position in keys])
    log_uniform = (hashes.double() / (WORD - 1)).log().clamp(min=torch.finfo(torch.float64).min, max=-(2.0**-32))
    return (logprobs.double() - (-log_uniform).log()).argmax(1)


def keys(n: int, seed: int = 0):
    gen = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**63), 2**63 - 1, (n,), generator=gen), torch.randint(0, 2**20, (n,), generator=gen)


@pytest.mark.parametrize(("seed", "position", "expected"), VECTORS)
def test_hash_is_sglangs(seed, position, expected):
    hashes = murmur32(torch.tensor([seed]), torch.tensor([position]), torch.tensor(COLUMNS))
    assert hashes.dtype == torch.int64
    assert hashes[0].tolist() == [int(word, 16) for word in expected.split()]


SCRIPT = """
import json, sys, torch
from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32_kernel
seeds, positions, columns = (torch.tensor(numbers) for numbers in json.loads(sys.argv[1]))
out = torch.empty((len(seeds), len(columns)), dtype=torch.uint32)
grid = (len(seeds), (len(columns) + 63) // 64)
murmur_hash32_kernel[grid](seeds.to(torch.uint64), positions, columns, out, len(seeds), len(columns), BLOCK_SIZE=64)
print(json.dumps(out.to(torch.int64).tolist()))
"""


def test_hash_against_the_triton_kernel():
    """SGLang's kernel itself, in Triton's interpreter: a process of its own, because the switch is read at import."""
    pytest.importorskip("sglang")
    seeds, _ = keys(12, seed=1)
    seeds = torch.cat((seeds, torch.tensor([0, 1, -1, 2**32, -(2**32), 2**63 - 1, -(2**63)])))
    gen = torch.Generator().manual_seed(2)
    positions = torch.randint(0, 2**34, seeds.shape, generator=gen)
    columns = torch.cat((torch.arange(150), torch.tensor([2**31 - 1, 2**31, 2**32 - 1])))
    argument = json.dumps([numbers.tolist() for numbers in (seeds, positions, columns)])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, argument],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert murmur32(seeds, positions, columns).tolist() == json.loads(done.stdout.splitlines()[-1])


WORDS = st.integers(-(2**63), 2**63 - 1)


@given(WORDS, WORDS, st.lists(WORDS, min_size=1, max_size=5))
def test_hash_against_plain_integers(seed, position, columns):
    hashes = murmur32(torch.tensor([seed]), torch.tensor([position]), torch.tensor(columns))
    assert hashes[0].tolist() == [plain_hash(seed, position, column) for column in columns]


def test_gumbel_is_the_formula_at_every_size_of_hash():
    hashes = torch.tensor([1, 2, 1000, 2**16, 2**31, 2**32 - 2**20, 2**32 - 3, 2**32 - 2])
    expected = [-math.log(-math.log1p((h - (WORD - 1)) / (WORD - 1))) if h > 2 else None for h in hashes.tolist()]
    expected[:2] = [-math.log(math.log(WORD - 1)), -math.log(math.log((WORD - 1) / 2))]
    # Close to 1 the quotient has 2**-53 of rounding, which is 2**-21 of its distance from 1.
    torch.testing.assert_close(gumbel(hashes), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=2e-6)


def test_gumbel_ends_are_finite_and_it_never_falls():
    low, high = gumbel(torch.tensor([0, WORD - 1])).tolist()
    assert low == pytest.approx(-math.log(torch.finfo(torch.float64).max), rel=1e-15)
    assert high == pytest.approx(32 * math.log(2), rel=1e-15)
    gen = torch.Generator().manual_seed(3)
    some = torch.randint(0, WORD, (20000,), generator=gen)
    hashes = torch.cat((torch.arange(3000), some, torch.arange(WORD - 3000, WORD))).unique(sorted=True)
    assert (gumbel(hashes).diff() > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_of_a_column_has_the_same_bits_in_any_company(dtype):
    """What lets a few columns be computed alone."""
    gen = torch.Generator().manual_seed(4)
    hashes = torch.randint(0, WORD, (20011,), generator=gen)
    whole = gumbel(hashes)
    for size in (1, 2, 3, 7, 8, 9, 31, 100, 4097):
        some = torch.randint(0, len(hashes), (size,), generator=gen)
        assert torch.equal(gumbel(hashes[some]), whole[some])
        assert torch.equal(gumbel(hashes[size : 2 * size]), whole[size : 2 * size])
    values = torch.rand(20011, generator=gen, dtype=dtype)
    assert torch.equal(values[5:5000].log(), values.log()[5:5000])


HASHES = st.one_of(st.integers(0, WORD - 1), st.sampled_from([0, 1, 2, 3, WORD // 2, WORD - 3, WORD - 2, WORD - 1]))
LOGPROBS = st.one_of(
    st.floats(-30, 0, width=32),
    st.sampled_from([-INF, 0.0, -0.5, -1e-30, -25.0, -700.0, -1e4, 2.0**60, -(2.0**60)]),
)


@given(st.lists(st.tuples(LOGPROBS, HASHES), min_size=1, max_size=40))
def test_bounds_hold_up_to_rounding(columns):
    logprobs = torch.tensor([max(value, -1e37) for value, _ in columns], dtype=torch.float64)
    hashes = torch.tensor([word for _, word in columns])
    bounds = noise._upper_bounds(logprobs, hashes.to(torch.int32)).double()
    assert (bounds + 1e-5 + 3e-7 * logprobs.abs() >= logprobs + gumbel(hashes)).all()


def test_a_bound_rounded_down_hides_no_winner():
    """A column that reaches little for its bound, and one behind it by less than float32 resolves."""
    gen = torch.Generator().manual_seed(8)
    gains = []
    for distance in torch.randint(0, 4000, (500,), generator=gen).tolist():
        hashes = torch.tensor([1, WORD - 1 - distance])
        noises = gumbel(hashes)
        logprobs = torch.tensor([5.0, 5.0 + float(noises[0] - noises[1]) + 1e-9], dtype=torch.float64)
        gains.append(float(logprobs.add(noises).diff()))
        assert noise._winner(logprobs, hashes.to(torch.int32)) == 1
    assert min(gains) > 0


ODD = st.sampled_from([INF, NAN, 1e31, -1e31, 1e300, -1e300, -3e38])


@settings(max_examples=400)
@given(st.lists(st.tuples(LOGPROBS, HASHES), min_size=1, max_size=40), st.sampled_from([torch.float32, torch.float64]))
def test_the_winner_among_given_hashes(columns, dtype):
    """Extreme and repeated hashes, ties by rounding and by equality, one column."""
    logprobs = torch.tensor([value for value, _ in columns], dtype=dtype)
    hashes = torch.tensor([word for _, word in columns])
    winner = noise._winner(logprobs, hashes.to(torch.int32))
    values = gumbel(hashes) + logprobs
    assert winner == int(values.argmax()) or (winner is None and bool((values == -INF).all()))


@settings(max_examples=200)
@given(st.lists(st.one_of(LOGPROBS, ODD), min_size=1, max_size=30), WORDS, st.integers(0, 2**31))
def test_pruned_is_dense(values, seed, position):
    """NaN, infinities and numbers beyond float32 included."""
    logprobs = torch.tensor([values], dtype=torch.float64)
    seeds, positions = torch.tensor([seed]), torch.tensor([position])
    expected = dense(logprobs, seeds, positions)
    assert torch.equal(noise._pruned_argmax(logprobs, seeds, positions), expected)
    assert torch.equal(noise._dense_argmax(logprobs, seeds, positions), expected)


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 3.0, 10.0, 100.0])
def test_pruned_is_dense_on_whole_vocabularies(spread):
    gen = torch.Generator().manual_seed(5)
    logprobs = torch.log_softmax(torch.randn(12, 20000, generator=gen) * spread, -1)
    logprobs[3, 5:] = -INF
    logprobs[4] = -INF
    logprobs[5] = -INF
    logprobs[5, 12345] = -2.0
    logprobs[6, 777] = NAN
    logprobs[7] = logprobs[7].bfloat16()
    seeds, positions = keys(12)
    before = logprobs.clone()
    result = perturbed_argmax(logprobs, seeds, positions)
    assert torch.equal(result, noise._dense_argmax(logprobs, seeds, positions))
    assert torch.equal(result[:2], dense(logprobs[:2], seeds[:2], positions[:2]))
    assert result[4:7].tolist() == [0, 12345, 777]
    assert torch.equal(logprobs.nan_to_num(1.0), before.nan_to_num(1.0))


@pytest.mark.parametrize("columns", [1, 2, 100, noise.PRUNE_FROM - 1, noise.PRUNE_FROM, noise.PRUNE_FROM + 1])
def test_argmax_at_every_size(columns):
    logprobs = torch.log_softmax(torch.randn(5, columns, generator=torch.Generator().manual_seed(6)), -1)
    seeds, positions = keys(5, seed=columns)
    result = perturbed_argmax(logprobs, seeds, positions)
    assert result.dtype == torch.int64
    assert torch.equal(result, dense(logprobs, seeds, positions))
    assert torch.equal(result, perturbed_argmax(logprobs.double(), seeds, positions))
    assert perturbed_argmax(logprobs[:0], seeds[:0], positions[:0]).shape == (0,)


@pytest.mark.parametrize("columns", [50, 5000])
def test_equal_values_go_to_the_lowest_column(columns):
    logprobs = torch.full((1, columns), -(2.0**70), dtype=torch.float64)
    logprobs[0, :10] *= 2
    assert perturbed_argmax(logprobs, *keys(1)).item() == 10


def test_a_row_does_not_see_its_neighbours():
    logprobs = torch.randn(6, 5000, generator=torch.Generator().manual_seed(7))
    seeds, positions = keys(6)
    together = perturbed_argmax(logprobs, seeds, positions)
    alone = [perturbed_argmax(logprobs[r : r + 1], seeds[r : r + 1], positions[r : r + 1]) for r in range(6)]
    assert torch.equal(together, torch.cat(alone))


def test_seed_position_and_column_all_matter():
    seeds, positions = torch.arange(64).repeat_interleave(64), torch.arange(64).repeat(64)
    drawn = perturbed_argmax(torch.zeros(4096, 64), seeds, positions)
    counts = drawn.bincount(minlength=64).double()
    assert ((counts - 64) ** 2 / 64).sum() < 103.5  # chi-square, 63 degrees of freedom, p = 0.001
    assert len(murmur32(seeds, positions, torch.arange(4)).unique()) > 16380  # 4 * 4096 hashes, hardly one twice


def test_coins_are_fair_and_of_their_own():
    seeds, positions = keys(20000)
    coins = [coin(seeds, positions, purpose) for purpose in (0, 1, 65535)]
    for purpose, uniforms in zip((0, 1, 65535), coins, strict=True):
        assert uniforms.dtype == torch.float64
        assert ((uniforms >= 0) & (uniforms < 1)).all()
        column = torch.tensor([WORD - 1 - purpose])
        assert torch.equal(uniforms * WORD, murmur32(seeds, positions, column)[:, 0].double())
        counts = (uniforms * 20).long().bincount(minlength=20).double()
        assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # 19 degrees of freedom, p = 0.001
    drawn = murmur32(seeds, positions, torch.tensor([5]))[:, 0].double() / WORD
    for one, other in ((coins[0], coins[1]), (coins[0], coins[2]), (coins[0], drawn)):
        assert abs(float(torch.corrcoef(torch.stack((one, other)))[0, 1])) < 0.03


def test_wrong_shapes_and_purposes_are_errors():
    seeds, positions = keys(3)
    for call in (
        lambda: perturbed_argmax(torch.zeros(2, 5), seeds, positions),
        lambda: perturbed_argmax(torch.zeros(3), seeds, positions),
        lambda: perturbed_argmax(torch.zeros(3, 0), seeds, positions),
        lambda: perturbed_argmax(torch.zeros(3, 5), seeds, positions[:1]),
        lambda: murmur32(seeds, positions, torch.zeros(1, 3, dtype=torch.int64)),
        lambda: murmur32(seeds[None], positions[None], torch.arange(3)),
    ):
        with pytest.raises(ValueError, match="must"):
            call()
    for purpose in (-1, noise.PURPOSES):
        with pytest.raises(ValueError, match="purpose"):
            coin(seeds, positions, purpose)


def test_accelerators_never_wait_for_the_host():
    """A meta tensor has no values: whatever asks for one raises."""
    seeds = torch.zeros(4, dtype=torch.int64, device="meta")
    assert perturbed_argmax(torch.zeros(4, 50000, device="meta"), seeds, seeds).shape == (4,)
    assert coin(seeds, seeds, 1).shape == (4,)
    with pytest.raises((RuntimeError, NotImplementedError)):
        noise._pruned_argmax(torch.zeros(4, 50000, device="meta"), seeds, seeds)
