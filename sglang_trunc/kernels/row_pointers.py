"""Packed row lists for foreign attention kernels, in plain torch: the reference of ``row_pointers_triton``.

``lane_attention`` reads a lane's slots through (start, length, offset) and a tail. SGLang's Triton decode kernel
(``decode_attention_fwd``) wants ``kv_indptr`` and ``kv_indices`` instead, and K/V of a tick are written at slot +
step * N. This fills those three static buffers from the row buffers of ``engine.rows``, once a recurrence: they hold
for all its core layers.
"""

from __future__ import annotations

import torch
from torch import Tensor


def row_pointers(
    kv_indices: Tensor,
    kv_start: Tensor,
    kv_len: Tensor,
    kv_offset: Tensor,
    slots: Tensor,
    indptr: Tensor,
    indices: Tensor,
    write_locs: Tensor,
    kv_tails: Tensor | None = None,
    kv_shared: Tensor | None = None,
) -> None:
    """Fill ``indptr``, ``indices`` and ``write_locs``.

    kv_indices: integer, flat. kv_start, kv_len, kv_offset, slots: int64 ``[rows]``; kv_tails ``[rows, T]`` with
    kv_shared int64 ``[rows]``, both or neither: as in ``lane_attention.lane_attention``; slots: where each row's own
    K/V go. indptr: int32 ``[rows + 1]``, 0 and the running sums of kv_len. indices: int64 ``[capacity]``;
    ``indices[indptr[r] + t]`` is kv_offset[r] plus the id of row r's token t. Entries from indptr[rows] on stay as
    they are; tokens that would lie behind the capacity are left out. write_locs: int64 ``[rows]``, ``slots +
    kv_offset``.
    """
    assert (kv_tails is None) == (kv_shared is None)
    torch.add(slots, kv_offset, out=write_locs)
    indptr[0] = 0
    indptr[1:] = kv_len.cumsum(0)
    rows = torch.arange(len(kv_len), device=kv_len.device).repeat_interleave(kv_len)
    token = torch.arange(len(rows), device=kv_len.device) - (kv_len.cumsum(0) - kv_len)[rows]
    shared = (kv_len if kv_shared is None else kv_shared)[rows]
    in_stretch = token < shared
    ids = kv_indices[torch.where(in_stretch, kv_start[rows] + token, 0)].long()
    if kv_tails is not None and kv_tails.shape[1]:
        tail = (token - shared).clamp(0, kv_tails.shape[1] - 1)
        ids = torch.where(in_stretch, ids, kv_tails[rows, tail].long())
    listed = min(len(ids), len(indices))
    indices[:listed] = (ids + kv_offset[rows])[:listed]
