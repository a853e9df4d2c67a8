"""The noise kernel: hashes bit for bit, Gumbel values to a few last bits of float64."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from murmur_column import WORD, column_with_hash, rotate

from sglang_trunc.core.noise import gumbel, murmur32
from sglang_trunc.kernels.noise_triton import gumbel_triton, murmur32_triton

LONGS = st.integers(-(2**63), 2**63 - 1)


def murmur3(key: bytes) -> int:
    """MurmurHash3 x86_32 with seed 0, from its public description; whole words only."""
    state = 0
    for (word,) in struct.iter_unpack("<I", key):
        word = rotate(word * 0xCC9E2D51 % WORD, 15) * 0x1B873593 % WORD
        state = (rotate(state ^ word, 13) * 5 + 0xE6546B64) % WORD
    state ^= len(key)
    state = (state ^ state >> 16) * 0x85EBCA6B % WORD
    state = (state ^ state >> 13) * 0xC2B2AE35 % WORD
    return state ^ state >> 16


def longs(numbers, device):
    return torch.tensor(numbers, dtype=torch.int64, device=device)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.lists(st.tuples(LONGS, LONGS), min_size=1, max_size=4), st.lists(LONGS, min_size=1, max_size=5))
def test_hashes_of_any_keys(device, keys, columns):
    seeds, positions = (longs(part, device) for part in zip(*keys, strict=True))
    hashes = murmur32_triton(seeds, positions, longs(columns, device))
    assert torch.equal(hashes, murmur32(seeds, positions, longs(columns, device)))
    for row, (seed, position) in enumerate(keys):
        for place, column in enumerate(columns):
            key = struct.pack("<QII", seed % 2**64, position % WORD, column % WORD)
            assert int(hashes[row, place]) == murmur3(key)


def test_more_columns_than_a_block_and_a_row_alone(device):
    seeds, positions = longs([42, -1, 7], device), longs([0, 2**31, 9], device)
    columns = torch.arange(2500, device=device)
    hashes, noise = murmur32_triton(seeds, positions, columns), gumbel_triton(seeds, positions, columns)
    assert torch.equal(hashes, murmur32(seeds, positions, columns))
    torch.testing.assert_close(noise, gumbel(hashes), rtol=1e-14, atol=1e-15)
    assert torch.equal(murmur32_triton(seeds[1:2], positions[1:2], columns), hashes[1:2])
    assert torch.equal(gumbel_triton(seeds[1:2], positions[1:2], columns), noise[1:2])


def test_both_ends_of_the_hash_are_finite(device):
    """Columns whose hash is 0, 1, 2**32 - 2 and 2**32 - 1; the last two count alike but for rounding."""
    hashes = [0, 1, WORD - 2, WORD - 1]
    seeds, positions = longs([5], device), longs([3], device)
    columns = longs([column_with_hash(5, 3, value) for value in hashes], device)
    assert murmur32_triton(seeds, positions, columns)[0].tolist() == hashes
    noise = gumbel_triton(seeds, positions, columns)
    torch.testing.assert_close(noise, gumbel(longs([hashes], device)), rtol=1e-14, atol=1e-15)
    assert -710 < noise[0, 0] < -709
    assert 22.18 < noise[0, 2] <= noise[0, 3] < 22.19


def test_nothing_to_hash(device):
    none, one = longs([], device), longs([1], device)
    assert murmur32_triton(none, none, one).shape == (0, 1)
    assert gumbel_triton(one, one, none).shape == (1, 0)


@pytest.mark.parametrize(
    ("place", "wrong", "words"),
    [
        (0, torch.zeros(2, dtype=torch.int32), r"seeds: wanted int64 \[any\]"),
        (1, torch.zeros(3, dtype=torch.int64), r"positions: wanted int64 \[2\]"),
        (2, torch.zeros(2, 2, dtype=torch.int64), r"columns: wanted int64 \[any\]"),
    ],
)
def test_a_wrong_argument_is_named(device, place, wrong, words):
    arguments = [torch.zeros(2, dtype=torch.int64, device=device)] * 3
    arguments[place] = wrong.to(device)
    with pytest.raises(ValueError, match=words):
        murmur32_triton(*arguments)
