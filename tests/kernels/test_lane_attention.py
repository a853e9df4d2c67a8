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


@pytest.mark.parametrize("kv_heads", [KV_HEADS, HEADS])
def test_a_tail_continues_the_stretch(kv_heads):
    """Branches of two requests; spare tail entries lead to NaN or nowhere."""
    dim, poison = 64, SLOTS - 1
    gen = torch.Generator().manual_seed(kv_heads)
    k_rows, v_rows = torch.randn(2, 2 * SLOTS, kv_heads * dim, generator=gen)
    k_rows[[poison, SLOTS + poison]] = v_rows[[poison, SLOTS + poison]] = float("nan")
    table = torch.randperm(SLOTS - 1, generator=gen).int()
    starts = torch.tensor([0, 0, 0, 20, 20, 20])
    offsets = torch.tensor([0, SLOTS, 0, 0, SLOTS, 0])
    shared = torch.tensor([9, 9, 12, 0, 4, 0])
    lengths = shared + torch.tensor([3, 1, 0, 5, 2, 0])
    buffer = torch.full((6, 11), poison, dtype=torch.int32)
    buffer[1::2] = 1 << 30
    tails = buffer[:, 2:7]
    lists = []
    for row in range(6):
        count = int(lengths[row] - shared[row])
        tails[row, :count] = torch.randint(SLOTS - 1, (count,), generator=gen).int()
        lists.append(torch.cat((table[starts[row] :][: shared[row]], tails[row, :count])).long() + offsets[row])
    q = torch.randn(6, HEADS * dim, generator=gen)
    out = torch.empty_like(q)
    lane_attention(q, k_rows, v_rows, table, starts, lengths, offsets, out, 0.1, kv_heads, tails, shared)
    for row, slots in enumerate(lists):
        keys, values = (pool[slots].view(-1, kv_heads, dim) for pool in (k_rows, v_rows))
        expected = one_row(q[row].view(HEADS, dim), keys, values, 0.1)
        torch.testing.assert_close(out[row].double(), expected, rtol=1e-5, atol=1e-6)
    # Nobody has a tail, and the lists have no room for one.
    for extra in ((), (tails[:, :0], lengths)):
        lane_attention(q, k_rows, v_rows, table, starts, lengths, offsets, out, 0.1, kv_heads, *extra)
        slots = table[:12].long() + offsets[0]
        keys, values = (pool[slots].view(-1, kv_heads, dim) for pool in (k_rows, v_rows))
        expected = one_row(q[0].view(HEADS, dim), keys, values, 0.1)
        torch.testing.assert_close(out[0].double(), expected, rtol=1e-5, atol=1e-6)


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
