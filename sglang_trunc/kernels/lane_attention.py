"""Lane attention in plain torch: the reference of every faster implementation.

A lane is one query row with its own list of K/V rows. The arguments are those that SGLang's Triton decode
kernel takes in another form: a flat array of slot ids, where each lane's ids start in it, how many there are,
and what is added to each id (``step * N`` in the pool of ``engine.kv_pool``). Lanes of one request share
their start, so they share the prefix; nothing requires it.
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
) -> None:
    """``out[r] = softmax(scale * q[r] K_r^T) V_r`` per head, in float32.

    q, out: ``[rows, Hq*D]``. k_rows, v_rows: ``[slots, Hkv*D]``. kv_indices: integer, flat. kv_start, kv_len,
    kv_offset: int64 ``[rows]``. Row r reads ``k_rows[kv_offset[r] + kv_indices[kv_start[r] + t]]``, t <
    kv_len[r]; a row of length 0 gives zeros.
    """
    rows = q.shape[0]
    head_dim = k_rows.shape[1] // num_kv_heads
    position = torch.arange(max(int(kv_len.max()), 1), device=q.device)
    valid = position < kv_len.unsqueeze(1)
    entry = torch.where(valid, kv_start.unsqueeze(1) + position, 0)
    slots = torch.where(valid, kv_indices[entry].long() + kv_offset.unsqueeze(1), 0)
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
