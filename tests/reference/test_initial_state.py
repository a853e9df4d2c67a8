"""Raven's entering state: same bits whatever is asked for with it, and the right distribution."""

import math

import pytest
import torch

from sglang_trunc.core.initial_state import hash_uniform, initial_state


def test_rows_do_not_depend_on_batch_order_or_width():
    positions = torch.tensor([5, 0, 123456, 7, 5])
    whole = initial_state(torch.arange(300), seed=3, width=97, std=0.6, dtype=torch.float32)
    some = initial_state(positions, seed=3, width=97, std=0.6, dtype=torch.float32)
    assert torch.equal(some[0], whole[5])
    assert torch.equal(some[0], some[4])
    assert torch.equal(some[1], whole[0])
    for position in (0, 1, 7, 299):
        alone = initial_state(torch.tensor([position]), seed=3, width=97, std=0.6, dtype=torch.float32)
        assert torch.equal(alone[0], whole[position])
    wider = initial_state(torch.arange(300), seed=3, width=400, std=0.6, dtype=torch.float32)
    assert torch.equal(wider[:, :97], whole)


def test_known_values():
    """Pins the definition: changing the hash changes every served text."""
    uniform = hash_uniform(torch.tensor([0, 1]), seed=0, width=2)
    expected = torch.tensor(
        [[0.8833108082136427, 0.43152799704851], [0.8234569604494177, 0.37151286413524615]],
        dtype=torch.float64,
    )
    assert torch.equal(uniform, expected)


def test_matches_integer_arithmetic_of_splitmix64():
    mask = (1 << 64) - 1

    def mix(z):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    golden, seed = 0x9E3779B97F4A7C15, 2**63 + 11
    got = hash_uniform(torch.tensor([4, 9]), seed=seed, width=3)
    for row, position in enumerate((4, 9)):
        key = mix(mix((seed + 1) * golden & mask) ^ mix((position + 1) * golden & mask))
        for column in range(3):
            bits = mix((key + (column + 1) * golden) & mask)
            assert float(got[row, column]) == ((bits >> 11) + 0.5) * 2.0**-53


@pytest.mark.parametrize("std", [0.00870388, 0.632])
def test_truncated_normal_statistics(std):
    rows = initial_state(torch.arange(4000), seed=1, width=256, std=std, dtype=torch.float32).double() / std
    inside = math.erf(3 / math.sqrt(2))
    variance = 1 - 2 * 3 * math.exp(-4.5) / math.sqrt(2 * math.pi) / inside
    assert rows.abs().max() <= 3.0001
    assert abs(rows.mean()) < 4 / math.sqrt(rows.numel())
    assert abs(rows.var() - variance) < 0.01
    assert abs((rows.abs() < 1).double().mean() - math.erf(1 / math.sqrt(2)) / inside) < 0.003
    assert rows.mean(0).abs().max() < 5 / math.sqrt(4000)  # no column has a bias of its own
    neighbours = (rows[1:] * rows[:-1]).mean(), (rows[:, 1:] * rows[:, :-1]).mean()
    assert max(abs(float(x)) for x in neighbours) < 0.005


def test_seeds_differ_and_dtype_is_one_rounding():
    positions = torch.arange(50)
    first = initial_state(positions, 0, 64, 0.6, torch.float32)
    assert (first != initial_state(positions, 1, 64, 0.6, torch.float32)).float().mean() > 0.99
    assert torch.equal(initial_state(positions, 0, 64, 0.6, torch.bfloat16), first.bfloat16())


def test_zero_std_and_refusals():
    assert not initial_state(torch.arange(3), 0, 8, 0.0, torch.float32).any()
    assert initial_state(torch.arange(0), 0, 8, 1.0, torch.float32).shape == (0, 8)
    with pytest.raises(ValueError, match="std"):
        initial_state(torch.arange(3), 0, 8, -1.0, torch.float32)
    with pytest.raises(ValueError, match="positions"):
        initial_state(torch.zeros(2, 2, dtype=torch.int64), 0, 8, 1.0, torch.float32)
