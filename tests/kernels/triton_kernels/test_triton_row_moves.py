"""Triton's row moves against their torch twins, bit for bit; padding rows touch the spare row alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_trunc.kernels.lane_attention import store_rows
from sglang_trunc.kernels.row_moves import gather_rows, scatter_rows
from sglang_trunc.kernels.row_moves_triton import gather_rows_triton, scatter_rows_triton, store_rows_triton


def normal(*shape, seed=0, dtype=torch.float32, device="cpu"):
    """Random values; on the CPU such that bf16 holds them, since the interpreter cuts where compiled code rounds."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (values.bfloat16() if device == "cpu" else values).to(device, dtype)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.integers(1, 9), st.sampled_from([1, 64, 1024, 1500]), st.data())
def test_gather_and_scatter_equal_indexing(device, capacity, width, data):
    bank = normal(capacity + 1, width, device=device)
    real = data.draw(st.permutations(range(capacity)))[: data.draw(st.integers(0, capacity))]
    padding = data.draw(st.lists(st.sampled_from([capacity, -1]), max_size=1))
    index = torch.tensor(real + padding, dtype=torch.int64, device=device)
    assert torch.equal(gather_rows_triton(bank, index), gather_rows(bank, index))
    values = normal(len(index), width, seed=1, device=device)
    expected = bank.clone()
    scatter_rows(values, index, expected)
    scatter_rows_triton(values, index, bank)
    assert torch.equal(bank, expected)


def test_many_padding_rows_touch_the_spare_row_alone(device):
    bank = normal(6, 1100, device=device)
    before = bank.clone()
    index = torch.tensor([3, 5, -1, 5, -1], device=device)
    gathered = gather_rows_triton(bank, index)
    assert torch.equal(gathered[0], bank[3])
    assert torch.equal(gathered[1:], bank[5].expand(4, -1))
    values = normal(5, 1100, seed=1, device=device)
    scatter_rows_triton(values, index, bank)
    assert torch.equal(bank[3], values[0])
    assert torch.equal(bank[[0, 1, 2, 4]], before[[0, 1, 2, 4]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_stored_rows_are_cast_and_may_come_from_a_fused_product(device, dtype):
    fused = normal(4, 3 * 1200, device=device)
    k, v = fused[:, 1200:2400], fused[:, 2400:]
    locs = torch.tensor([7, 2, 0, 9], device=device)
    expected = normal(2, 12, 1200, seed=1, dtype=dtype, device=device)
    stored = expected.clone()
    store_rows(k, v, *expected, locs)
    store_rows_triton(k, v, *stored, locs)
    assert torch.equal(stored, expected)


def test_a_row_is_stored_alone_as_in_company_and_padding_goes_to_slot_zero(device):
    k, v = normal(2, 6, 96, device=device)
    pools = torch.zeros(2, 2, 20, 96, device=device)
    store_rows_triton(k, v, *pools[0], torch.tensor([4, 13, 8, 0, 0, 0], device=device))
    for row, place in enumerate((4, 13, 8)):
        store_rows_triton(k[row : row + 1], v[row : row + 1], *pools[1], torch.tensor([place], device=device))
    assert torch.equal(pools[0, :, 1:], pools[1, :, 1:])


def test_bank_rows_are_cast(device):
    bank = torch.zeros(3, 40, dtype=torch.bfloat16, device=device)
    values = normal(2, 80, device=device)[:, 40:]
    scatter_rows_triton(values, torch.tensor([1, 0], device=device), bank)
    assert torch.equal(bank[[1, 0]], values.bfloat16())
    assert gather_rows_triton(bank, torch.tensor([1], device=device)).dtype == torch.bfloat16


def test_no_rows(device):
    none = torch.zeros(0, dtype=torch.int64, device=device)
    bank, empty = torch.ones(2, 8, device=device), torch.zeros(0, 8, device=device)
    assert gather_rows_triton(bank, none).shape == (0, 8)
    scatter_rows_triton(empty, none, bank)
    store_rows_triton(empty, empty, bank, bank, none)
    assert (bank == 1).all()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda bank, index: gather_rows_triton(bank, index.int()), r"index: wanted int64 \[any\]"),
        (lambda bank, index: gather_rows_triton(bank.double(), index), "bank: wanted float32 or bfloat16 or float16"),
        (
            lambda bank, index: scatter_rows_triton(bank, index, bank),
            r"values: wanted .*\[2, 8\].*got float32 \[4, 8\]",
        ),
        (lambda bank, index: store_rows_triton(bank[:2], bank[:1], bank, bank, index), r"v: wanted .*\[2, 8\]"),
        (lambda bank, index: store_rows_triton(bank[:2], bank[:2], bank, bank[:, :4], index), r"v_rows: .*\[4, 8\]"),
    ],
)
def test_a_wrong_argument_is_named(device, call, words):
    with pytest.raises(ValueError, match=words):
        call(torch.zeros(4, 8, device=device), torch.tensor([0, 1], device=device))
