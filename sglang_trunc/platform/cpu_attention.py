"""Lane attention on the CPU: any rows, at any depth, of any requests, in one call.

Where in a round: once per layer and tick, after ``rope_store`` has written the K and V of all rows, and in
prefill and plain decoding alike. A row names its tokens by a stretch of SGLang's ``req_to_token`` table, on a
branch of a tree followed by a tail (a list of its own), and its step by an offset added to every slot; K and V are
rows of the pool, float32 or of the model's dtype (half the memory and, on long contexts, nearly half the time),
read in place, in any slot order.

Contract: a row's bits depend on its own query and tokens alone. Tokens are taken in blocks of 32 counted from
the row's token 0, with a running maximum and sum per (row, head); nothing in that order depends on the other
rows, on grouping, on where the tail begins, or on the number of threads. Consecutive rows of one request at one
step share every read of K and V, unless they have tails. Nothing past a row's length is used, so slots that hold
NaN are harmless; length 0 gives zeros.
Not here: masks (trees are expressed by each row's own tokens), sliding windows, logit caps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_trunc.platform.cpu_attention_cells import FIXED, TILE
from sglang_trunc.platform.cpu_attention_kernel import KERNEL
from sglang_trunc.platform.cpu_kernel import Scratch, float_bits
from sglang_trunc.platform.cpu_tiles import SCORE_ROW

GROUP = 32  # most lines (rows times query heads of a key head) that share a pass over K and V
_WORTH_A_THREAD = 1 << 18  # bytes of K and V: about ten microseconds
_WORTH_BALANCING = 1 << 26


_SCRATCH = Scratch()


def _scratch_size(lines: int, heads: int, dim: int) -> int:
    """Bytes a task needs for ``lines`` lines in each of ``heads`` key heads."""
    cells, pitch = lines * heads, (dim + 31) // 32 * 128
    return (FIXED + 24 * lines + cells * (8 + SCORE_ROW + 2 * pitch) + 128 + 4095) // 4096 * 4096


def _split(rows: int, heads: int, kv_len: Tensor, row_bytes: int) -> tuple[int, int]:
    """Into how many parts the heads go, and into how many the groups."""
    threads = torch.get_num_threads()
    if threads == 1:
        return 1, 1
    read = int(kv_len.sum()) * 2 * row_bytes
    if read > _WORTH_BALANCING:  # more parts than threads: one that lost its core holds up little
        return min(heads, 4 * threads), max(1, min(threads // heads, rows))
    threads = max(1, min(threads, read // _WORTH_A_THREAD))
    parts = min(threads, heads)
    return parts, max(1, min(threads // parts, rows))


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
) -> Tensor:
    """Attention of every row over its own tokens; returns ``out``.

    q, out        bfloat16 or float32 [rows, Hq*D], rows may be strided
    k_rows/v_rows q's dtype or float32 [slots, Hkv*D], equal row strides
    kv_indices    int32, flat: slot ids
    kv_start      int64 [rows]: where a row's slot ids begin
    kv_len        int32 or int64 [rows]: how many tokens; 0 gives zeros
    kv_offset     int64 [rows]: added to every slot id
    kv_tails      int32 [rows, T], rows may be strided: slot ids of the tokens from kv_shared on; None: no tails
    kv_shared     int64 [rows]: tokens before the tail, >= kv_len - T; kv_len itself is no tail; None: no tails
    """
    rows, width = q.shape
    dim, stride, element = k_rows.shape[1] // num_kv_heads, k_rows.stride(0) * k_rows.element_size(), q.element_size()
    repeats = width // (num_kv_heads * dim)
    # The kernel sees addresses only: a wrong type would read other memory.
    assert k_rows.dtype is v_rows.dtype
    assert k_rows.dtype in (torch.float32, q.dtype)
    assert kv_start.dtype is kv_offset.dtype is torch.int64
    assert kv_indices.dtype is torch.int32
    assert out.dtype is q.dtype
    tails = (0, 0, 0)
    if kv_tails is not None or kv_shared is not None:
        assert kv_tails is not None
        assert kv_shared is not None
        assert kv_tails.dtype is torch.int32
        assert kv_shared.dtype is torch.int64
        assert kv_tails.stride(1) == 1
        assert kv_shared.is_contiguous()
        tails = (kv_tails.data_ptr(), 4 * kv_tails.stride(0), kv_shared.data_ptr())
    parts, shares = _split(rows, num_kv_heads, kv_len, stride)
    group_rows = max(1, GROUP // repeats)
    lines = (min(rows, group_rows) * repeats + TILE - 1) // TILE * TILE
    size = _scratch_size(lines, -(-num_kv_heads // parts), dim)
    KERNEL.start(
        parts * shares,
        q.data_ptr(),
        q.stride(0) * element,
        out.data_ptr(),
        out.stride(0) * element,
        k_rows.data_ptr(),
        v_rows.data_ptr(),
        stride,
        kv_indices.data_ptr(),
        kv_start.data_ptr(),
        kv_len.data_ptr(),
        int(kv_len.dtype is torch.int32),
        kv_offset.data_ptr(),
        rows,
        repeats,
        num_kv_heads,
        dim,
        float_bits(scale),
        int(q.dtype is torch.bfloat16),
        _SCRATCH.address(size * parts * shares),
        size,
        parts,
        group_rows,
        int(k_rows.dtype is torch.bfloat16),
        *tails,
    )
    return out
