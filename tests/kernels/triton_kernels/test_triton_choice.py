"""Choices and acceptance on the device against ``core`` and torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_trunc.core.noise import gumbel, murmur32, perturbed_argmax
from sglang_trunc.core.trunc import count_accepted
from sglang_trunc.kernels.choice import argmax_rows, with_logprobs
from sglang_trunc.kernels.choice_triton import argmax_rows_triton, count_accepted_triton, perturbed_argmax_triton

INF = float("inf")


def scores(rows, width, seed=0, device="cpu"):
    return 4 * torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(device)


def keys(rows, device):
    """Seeds and positions, int64 [rows] each."""
    return torch.arange(rows, device=device) * 7919 - 3, torch.arange(rows, device=device) + 100


def agree(choice, expected):
    assert choice.ids.dtype == torch.int64
    assert choice.logprobs.dtype == torch.float32
    assert torch.equal(choice.ids, expected.ids)
    torch.testing.assert_close(choice.logprobs, expected.logprobs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [1, 5, 1024, 1025, 5000])
def test_best_columns_and_their_logprobs(device, width):
    rows = scores(3, width, device=device)
    choice = argmax_rows_triton(rows)
    agree(choice, argmax_rows(rows))
    logprobs = rows.double().log_softmax(-1).amax(-1)
    torch.testing.assert_close(choice.logprobs.double(), logprobs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [1, 5, 1025, 5000])
def test_best_perturbed_columns_and_their_logprobs(device, width):
    rows, (seeds, positions) = scores(4, width, device=device), keys(4, device)
    choice = perturbed_argmax_triton(rows, seeds, positions)
    agree(choice, with_logprobs(rows, perturbed_argmax(rows, seeds, positions)))
    if width == 5000:
        assert not torch.equal(choice.ids, rows.argmax(-1))


def test_the_lowest_column_wins_ties_inside_and_across_blocks(device):
    rows = torch.zeros(3, 3000, device=device)
    rows[0, [7, 8, 1030, 2999]] = 5
    rows[1, [1030, 1031, 2100]] = 5
    choice = argmax_rows_triton(rows)
    assert choice.ids.tolist() == [7, 1030, 0]
    agree(choice, argmax_rows(rows))


def test_masked_columns_and_whole_blocks_of_them(device):
    rows = scores(3, 2100, device=device)
    rows[0, :1500] = -INF
    rows[1, 5:] = -INF
    rows[2, :] = -INF
    choice = argmax_rows_triton(rows)
    assert torch.equal(choice.ids, rows.argmax(-1))
    torch.testing.assert_close(choice.logprobs[:2], argmax_rows(rows[:2]).logprobs, rtol=1e-5, atol=1e-6)
    assert choice.logprobs[2].isnan()
    drawn = perturbed_argmax_triton(rows, *keys(3, device)).ids
    assert torch.equal(drawn, perturbed_argmax(rows, *keys(3, device)))
    assert drawn[2] == 0


def test_nan_is_best(device):
    rows = scores(2, 1500, device=device)
    rows[0, [40, 1200]] = float("nan")
    rows[1, 1200] = float("nan")
    assert argmax_rows_triton(rows).ids.tolist() == [40, 1200]
    assert perturbed_argmax_triton(rows, *keys(2, device)).ids.tolist() == [40, 1200]


def test_noise_and_sum_are_float64(device):
    """Two sums differ by 1e-12, far under a float32's last bit: the larger one wins, whichever comes first."""
    (seeds, positions), width = keys(2, device), 1400
    noise = gumbel(murmur32(seeds, positions, torch.arange(width, device=device)))
    rows = -noise - 1
    rows[0, [3, 1300]] = -noise[0, [3, 1300]] + torch.tensor([0.0, 1e-12], dtype=torch.float64, device=device)
    rows[1, [3, 1300]] = -noise[1, [3, 1300]] + torch.tensor([1e-12, 0.0], dtype=torch.float64, device=device)
    choice = perturbed_argmax_triton(rows, seeds, positions)
    assert choice.ids.tolist() == [1300, 3]
    agree(choice, with_logprobs(rows, choice.ids))


@pytest.mark.parametrize("noisy", [False, True])
def test_company_changes_no_bit_and_rows_may_lie_apart(device, noisy):
    wide, (seeds, positions) = scores(4, 3001, device=device), keys(4, device)
    rows = wide[:, :2500]

    def choose(at):
        return perturbed_argmax_triton(rows[at], seeds[at], positions[at]) if noisy else argmax_rows_triton(rows[at])

    together = perturbed_argmax_triton(rows, seeds, positions) if noisy else argmax_rows_triton(rows)
    order = [2, 0, 0, 3, 1]
    shuffled = choose(order)
    for part, whole in zip(shuffled, together, strict=True):
        assert torch.equal(part, whole[order])
    for row in range(4):
        alone = slice(row, row + 1)  # a view: on a GPU its address is aligned otherwise
        for part, whole in zip(choose(alone), together, strict=True):
            assert torch.equal(part, whole[alone])


def test_no_rows_to_choose_from(device):
    assert argmax_rows_triton(torch.zeros(0, 9, device=device)).ids.shape == (0,)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(1, 9), st.data())
def test_accepted_drafts(device, width, data):
    """Tokens of two kinds make agreement likely; what lies behind a chain agrees too often to be read unnoticed."""
    requests = data.draw(st.integers(1, 4))
    rows = st.lists(st.lists(st.integers(0, 1), min_size=width, max_size=width), min_size=requests, max_size=requests)
    chains, choices = (torch.tensor(data.draw(rows), device=device) for _ in range(2))
    lengths = data.draw(st.lists(st.integers(1, width), min_size=requests, max_size=requests))
    arguments = chains, choices, torch.tensor(lengths, device=device)
    assert torch.equal(count_accepted_triton(*arguments), count_accepted(*arguments))


def test_whole_chains_are_accepted_alone_and_in_company(device):
    chains = torch.arange(5, device=device).expand(3, 5).contiguous()
    choices = chains + 1
    choices[2, 1] = 9
    lengths = torch.tensor([5, 1, 4], device=device)
    accepted = count_accepted_triton(chains, choices, lengths)
    assert accepted.tolist() == [4, 0, 1]
    for row in range(3):
        part = slice(row, row + 1)
        assert count_accepted_triton(chains[part], choices[part], lengths[part]) == accepted[row]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda ids: argmax_rows_triton(ids), r"scores: wanted float32 or float64 \[any, any\]"),
        (lambda ids: argmax_rows_triton(torch.zeros(2, 0, device=ids.device)), "at least one column"),
        (lambda ids: argmax_rows_triton(ids.float().t()), "scores: wanted .*strides"),
        (lambda ids: perturbed_argmax_triton(ids.float(), ids[0, :2], ids[0]), r"positions: wanted int64 \[2\]"),
        (lambda ids: perturbed_argmax_triton(ids.float(), ids[0, :2].int(), ids[0]), "seeds: wanted int64"),
        (lambda ids: count_accepted_triton(ids, ids[:, :2], ids[0, :2]), r"choices: wanted int64 \[2, 3\]"),
        (lambda ids: count_accepted_triton(ids, ids, ids[0]), r"lengths: wanted int64 \[2\]"),
    ],
)
def test_a_wrong_argument_is_named(device, call, words):
    with pytest.raises(ValueError, match=words):
        call(torch.zeros(2, 3, dtype=torch.int64, device=device))
