"""The torch reference of lane attention against one row at a time."""

from __future__ import annotations

import pytest
import torch

from sglang_trunc.kernels.lane_attention import lane_attention, store_rows

SLOTS, HEADS, KV_HEADS = 50, 4, 2


def one_row(q, keys, values, scale):
    """``q [Hq, D]`` against ``keys``, ``values [t, Hkv, D]``, head by head, in float64."""
    group = q.shape[0] // keys.shape[1]
    heads = []
    for head, query in enumerate(q.double()):
        weights = (keys[:, head // group].double() @ query * scale).softmax(0)
        heads.append(weights @ values[:, head // group].double())
    return torch.stack(heads).flatten()


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_rows_of_any_request_and_step(head_dim):
    gen = torch.Generator().manual_seed(head_dim)
    k_rows = torch.randn(3 * SLOTS, KV_HEADS * head_dim, generator=gen)
    v_rows = torch.randn(3 * SLOTS, KV_HEADS * head_dim, generator=gen)
    table = torch.stack([torch.randperm(SLOTS, generator=gen) for _ in range(3)]).int()
    starts = torch.tensor([0, 0, SLOTS, 2 * SLOTS])
    lengths = torch.tensor([7, 8, 1, 30])
    offsets = torch.tensor([0, SLOTS, 2 * SLOTS, SLOTS])
    q = torch.randn(4, HEADS * head_dim, generator=gen)
    out = torch.empty_like(q)
    lane_attention(q, k_rows, v_rows, table.view(-1), starts, lengths, offsets, out, 0.1, KV_HEADS)
    for row in range(4):
        slots = table.view(-1)[starts[row] : starts[row] + lengths[row]].long() + offsets[row]
        keys = k_rows[slots].view(-1, KV_HEADS, head_dim)
        values = v_rows[slots].view(-1, KV_HEADS, head_dim)
        expected = one_row(q[row].view(HEADS, head_dim), keys, values, 0.1)
        torch.testing.assert_close(out[row].double(), expected, rtol=1e-5, atol=1e-6)


def test_unread_slots_may_hold_nan_and_an_empty_row_gives_zeros():
    k_rows = torch.full((SLOTS, 2 * 64), float("nan"))
    v_rows = torch.full((SLOTS, 2 * 64), float("nan"))
    k, v = torch.randn(2, 128), torch.randn(2, 128)
    store_rows(k, v, k_rows, v_rows, torch.tensor([5, 9]))
    table = torch.tensor([5, 9, 3, 3], dtype=torch.int32)
    q, out = torch.randn(2, 2 * 64), torch.empty(2, 2 * 64)
    zeros = torch.zeros(2, dtype=torch.int64)
    lane_attention(q, k_rows, v_rows, table, zeros, torch.tensor([2, 0]), zeros, out, 0.125, 2)
    assert out[0].isfinite().all()
    assert (out[1] == 0).all()
