"""Lane attention in plain torch: the reference of every faster implementation.

A lane is one query row with its own list of K/V rows. The arguments are those that SGLang's Triton decode
kernel takes in another form: a flat array of slot ids, where each lane's ids start in it, how many there are,
and what is added to each id (``step * N`` in the pool of ``engine.kv_pool``). Lanes of one request share
their start, so they share the prefix; nothing requires it. A lane on a branch of a tree has a *tail*: its last
ids come from a short list of its own, its path on that branch.
"""

from __future__ import annotations

import torch
from torch import Tensor


def lane_attention(
    q: Tensor,
    k_rows: Tensor,
    v_rows: Tensor,
    kv_indices: Tensor,
    kv_start: Tensor,
    kv_len: Tensor,
    kv_offset: Tensor,
    out: Tensor,
    scale: float,
    num_kv_heads: int,
    kv_tails: Tensor | None = None,
    kv_shared: Tensor | None = None,
) -> None:
    """``out[r] = softmax(scale * q[r] K_r^T) V_r`` per head, in float32.

    q, out: ``[rows, Hq*D]``. k_rows, v_rows: ``[slots, Hkv*D]``. kv_indices: integer, flat. kv_start, kv_len,
    kv_offset: int64 ``[rows]``. Row r reads ``k_rows[kv_offset[r] + kv_indices[kv_start[r] + t]]``, t <
    kv_len[r]; a row of length 0 gives zeros.

    kv_tails: int32 ``[rows, T]``, with kv_shared: int64 ``[rows]``; both or neither. From token kv_shared[r] on
    the id is ``kv_tails[r, t - kv_shared[r]]``. kv_shared[r] <= kv_len[r] <= kv_shared[r] + T.
    """
    assert (kv_tails is None) == (kv_shared is None)
    rows = q.shape[0]
    head_dim = k_rows.shape[1] // num_kv_heads
    position = torch.arange(max(int(kv_len.max()), 1), device=q.device)
    valid = position < kv_len.unsqueeze(1)
    shared = (kv_len if kv_shared is None else kv_shared).unsqueeze(1)
    in_stretch = valid & (position < shared)
    entry = torch.where(in_stretch, kv_start.unsqueeze(1) + position, 0)
    ids = kv_indices[entry].long()
    if kv_tails is not None and kv_tails.shape[1]:
        tail = (position - shared).clamp(0, kv_tails.shape[1] - 1)
        ids = torch.where(in_stretch, ids, kv_tails.gather(1, tail).long())
    slots = torch.where(valid, ids + kv_offset.unsqueeze(1), 0)
    keys = k_rows[slots].view(rows, -1, num_kv_heads, head_dim).float()
    values = v_rows[slots].view(rows, -1, num_kv_heads, head_dim).float()
    # Padded entries may be anything, NaN included: they must not reach a product.
    values = values.masked_fill(~valid[..., None, None], 0)
    queries = q.view(rows, num_kv_heads, -1, head_dim).float()
    scores = torch.einsum("rhgd,rthd->rhgt", queries, keys) * scale
    scores = scores.masked_fill(~valid[:, None, None], float("-inf"))
    weights = scores.softmax(-1).nan_to_num(0.0)
    out.copy_(torch.einsum("rhgt,rthd->rhgd", weights, values).reshape(rows, -1))


def store_rows(k: Tensor, v: Tensor, k_rows: Tensor, v_rows: Tensor, locs: Tensor) -> None:
    """``k_rows[locs] = k`` and the same for v; k, v ``[rows, Hkv*D]``, locs int64 ``[rows]``."""
    k_rows[locs] = k.to(k_rows.dtype)
    v_rows[locs] = v.to(v_rows.dtype)
