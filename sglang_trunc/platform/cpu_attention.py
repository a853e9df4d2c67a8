"""Lane attention on the CPU: any rows, at any depth, of any requests, in one call.

Where in a round: once per layer and tick, after ``rope_store`` has written the K and V of all rows, and in
prefill and plain decoding alike. A row names its tokens by a stretch of SGLang's ``req_to_token`` table and its
step by an offset added to every slot; K and V are float32 rows of the pool (bfloat16 values when the model is
bfloat16), read in place, in any slot order.

Contract: a row's bits depend on its own query and tokens alone. Tokens are taken in blocks of 32 counted from
the row's token 0, with a running maximum and sum per (row, head); nothing in that order depends on the other
rows, on grouping, or on the number of threads. Consecutive rows of one request at one step share each K/V read.
Nothing past a row's length is used, so slots that hold NaN are harmless; length 0 gives zeros.
Not here: masks (trees are expressed by each row's own tokens), sliding windows, logit caps.
"""

from __future__ import annotations

import torch
from numba import float32, int64
from torch import Tensor

from sglang_trunc.platform.cpu_exp import vexp
from sglang_trunc.platform.cpu_kernel import Kernel, float_bits, next_task, parameter
from sglang_trunc.platform.cpu_tiles import BLOCK, SCORE_ROW, score_tile, value_tile
from sglang_trunc.platform.cpu_vector import (
    inlined,
    load_f32,
    load_i32,
    load_i64,
    store_f32,
    store_i64,
    vadd,
    vkeep,
    vload,
    vload_bf16,
    vload_bf16_first,
    vload_first,
    vmax,
    vmul,
    vsplat,
    vstore,
    vstore_bf16,
    vstore_bf16_first,
    vstore_first,
    vsub,
    vsum,
    vtop,
)

GROUP = 32  # most query vectors of one key head that share a pass over K and V
FEW = 8  # up to so many, all heads go through a block together: K and V rows are read from end to end
TILE = 4  # rows of the largest register tile
SPAN = 8  # tokens of V per visit: as many rows as a first-level cache keeps at a stride of 4 KiB
_NEVER = -3.0e38  # running maximum before any token

# Positions of the kernel's parameters.
_Q, _Q_STRIDE, _OUT, _OUT_STRIDE, _K, _V, _KV_STRIDE, _TABLE, _START, _LENGTH, _LENGTH_IS_32, _OFFSET = range(12)
_ROWS, _REPEATS, _KV_HEADS, _DIM, _SCALE, _BF16, _SCRATCH, _SCRATCH_SIZE, _HEAD_PARTS, _GROUP_ROWS = range(12, 22)

# A task's scratch, in bytes: addresses of the K and V rows of a block and of the one after, a spare float, then
# per query vector its length, and per (head, query vector) running maximum, sum, scores, query, weighted sum.
_KEYS, _VALUES, _SPARE = 0, 16 * BLOCK, 32 * BLOCK
_LENGTHS = _SPARE + 64


@inlined
def _length(block, row):
    if parameter(block, _LENGTH_IS_32):
        return load_i32(parameter(block, _LENGTH) + 4 * row)
    return load_i64(parameter(block, _LENGTH) + 8 * row)


@inlined
def _group_size(block, row):
    """How many rows from ``row`` on are rows of one request at one step."""
    start, offset = parameter(block, _START), parameter(block, _OFFSET)
    end = min(parameter(block, _ROWS), row + parameter(block, _GROUP_ROWS))
    last = row + 1
    while (
        last < end
        and load_i64(start + 8 * last) == load_i64(start + 8 * row)
        and load_i64(offset + 8 * last) == load_i64(offset + 8 * row)
    ):
        last += 1
    return last - row


@inlined
def _find_tokens(block, row, first, length, scratch, entry):
    """Addresses of the K and V rows of a block of tokens; past the length the last one repeats."""
    table = parameter(block, _TABLE) + 4 * load_i64(parameter(block, _START) + 8 * row)
    offset = load_i64(parameter(block, _OFFSET) + 8 * row)
    stride, k, v = parameter(block, _KV_STRIDE), parameter(block, _K), parameter(block, _V)
    for token in range(BLOCK):
        at = (load_i32(table + 4 * min(first + token, length - 1)) + offset) * stride
        store_i64(scratch + _KEYS + 8 * (entry + token), k + at)
        store_i64(scratch + _VALUES + 8 * (entry + token), v + at)


@inlined
def _next_tokens(block, row, first, length, scratch):
    """Make the block after the current one, and look up the one after that."""
    for at in range(0, 8 * BLOCK, 64):
        vstore(scratch + _KEYS + at, vload(scratch + _KEYS + 8 * BLOCK + at))
        vstore(scratch + _VALUES + at, vload(scratch + _VALUES + 8 * BLOCK + at))
    _find_tokens(block, row, first + BLOCK, length, scratch, BLOCK)


@inlined
def _soften(scores, count, top_at, total_at, sums, pitch, spare):
    """Turn a row's scores of one block into weights; update its running maximum, sum and weighted sum.

    ``count``: valid tokens of the block, at least one.
    """
    low, high = vkeep(vload(scores), count, _NEVER), vkeep(vload(scores + 64), count - 16, _NEVER)
    before = load_f32(top_at)
    top = max(before, vtop(vmax(low, high)))
    low = vkeep(vexp(vsub(low, vsplat(top))), count, 0.0)
    high = vkeep(vexp(vsub(high, vsplat(top))), count - 16, 0.0)
    vstore(scores, low)
    vstore(scores + 64, high)
    total = vsum(vadd(low, high))
    if top != before:
        fade = vexp(vsplat(before - top))
        vstore_first(spare, fade, 1)
        total += load_f32(total_at) * load_f32(spare)
        for at in range(0, pitch, 64):
            vstore(sums + at, vmul(vload(sums + at), fade))
    else:
        total += load_f32(total_at)
    store_f32(top_at, top)
    store_f32(total_at, total)


@inlined
def _add_values(rows, sums, pitch, scores, scratch, first, last, ahead, v, dim):
    """Values of tokens ``first <= t < last``, weighted, onto ``rows`` (1, 2 or 4) rows of one head."""
    table = scratch + _VALUES
    at = int64(0)
    while at + 64 <= dim:
        if rows == 1:
            value_tile(1, 4, sums + 4 * at, pitch, scores, table, first, last, ahead, v + 4 * at, 16)
        elif rows == 2:
            value_tile(2, 4, sums + 4 * at, pitch, scores, table, first, last, ahead, v + 4 * at, 16)
        else:
            value_tile(4, 4, sums + 4 * at, pitch, scores, table, first, last, ahead, v + 4 * at, 16)
        at += 64
    while at < dim:
        rest = min(dim - at, 16)
        if rows == 1:
            value_tile(1, 1, sums + 4 * at, pitch, scores, table, first, last, ahead, v + 4 * at, rest)
        elif rows == 2:
            value_tile(2, 1, sums + 4 * at, pitch, scores, table, first, last, ahead, v + 4 * at, rest)
        else:
            value_tile(4, 1, sums + 4 * at, pitch, scores, table, first, last, ahead, v + 4 * at, rest)
        at += 16


@inlined
def _score(lines, padded, count, longest, queries, pitch, scores, scratch, k, dim):
    """Scores of a block's first ``longest`` tokens for ``lines`` query vectors of each of ``count`` heads."""
    table = scratch + _KEYS
    q_head, s_head, k_head = padded * pitch, padded * SCORE_ROW, dim * 4
    for token in range(0, longest, 4):
        line = int64(0)
        while line < lines:
            left = lines - line
            q, s = queries + line * pitch, scores + line * SCORE_ROW
            head = int64(0)
            while head < count:
                extra = count - 1 - head
                place = k + head * k_head
                if left == 1:
                    score_tile(4, 1, q, q_head, pitch, table, token, 4, place, k_head, extra, dim, s, s_head)
                    step = 4
                elif left == 2:
                    score_tile(2, 2, q, q_head, pitch, table, token, 4, place, k_head, extra, dim, s, s_head)
                    step = 2
                else:
                    score_tile(1, 4, q, q_head, pitch, table, token, 4, place, k_head, extra, dim, s, s_head)
                    step = 1
                head += step
                q += step * q_head
                s += step * s_head
            line += TILE


@inlined
def _valid(lengths, line, first):
    """How many of the block's tokens a query vector sees."""
    return max(min(load_i64(lengths + 8 * line) - first, BLOCK), 0)


@inlined
def _weigh(lines, padded, count, first, lengths, sums, pitch, scores, scratch, v, dim):
    """Weighted values of a block, from its weights."""
    for start in range(0, BLOCK, SPAN):
        for head in range(count):
            place = v + head * dim * 4
            line = int64(0)
            while line < lines:
                real = min(lines - line, TILE)
                common, longest = _valid(lengths, line, first), int64(0)
                for r in range(real):
                    common = min(common, _valid(lengths, line + r, first))
                    longest = max(longest, _valid(lengths, line + r, first))
                cell = head * padded + line
                shared = min(start + SPAN, common)
                if shared > start:
                    size = real if real <= 2 else TILE
                    _add_values(
                        size, sums + cell * pitch, pitch, scores + cell * SCORE_ROW, scratch, start, shared, SPAN, place, dim
                    )
                if longest > common:  # rows of unequal length: what they do not share, each for itself
                    for r in range(real):
                        own, end = max(start, common), min(start + SPAN, _valid(lengths, line + r, first))
                        if end > own:
                            c = cell + r
                            _add_values(1, sums + c * pitch, pitch, scores + c * SCORE_ROW, scratch, own, end, 0, place, dim)
                line += TILE


@inlined
def _load_queries(block, row, rows, head, queries, pitch):
    """One key head's query vectors of ``rows`` rows as scaled float32, zeros behind the head size."""
    dim, repeats = parameter(block, _DIM), parameter(block, _REPEATS)
    bf16 = parameter(block, _BF16)
    size = 2 if bf16 else 4
    scale = vsplat(load_f32(block + 16 + 8 * _SCALE))
    for r in range(rows):
        for repeat in range(repeats):
            source = parameter(block, _Q) + (row + r) * parameter(block, _Q_STRIDE)
            source += (head * repeats + repeat) * dim * size
            target = queries + (r * repeats + repeat) * pitch
            at = int64(0)
            while at < dim:
                rest = min(dim - at, 16)
                vector = vload_bf16_first(source + 2 * at, rest) if bf16 else vload_first(source + 4 * at, rest)
                vstore(target + 4 * at, vmul(vector, scale))
                at += 16


@inlined
def _store_outputs(block, row, rows, head, lengths, totals, sums, pitch):
    """Weighted sums over totals, rounded to the model's dtype."""
    dim, repeats = parameter(block, _DIM), parameter(block, _REPEATS)
    bf16 = parameter(block, _BF16)
    size = 2 if bf16 else 4
    for line in range(rows * repeats):
        target = parameter(block, _OUT) + (row + line // repeats) * parameter(block, _OUT_STRIDE)
        target += (head * repeats + line % repeats) * dim * size
        filled = load_i64(lengths + 8 * line) > 0
        scale = vsplat(float32(1.0) / load_f32(totals + 4 * line) if filled else float32(0.0))
        at = int64(0)
        while at < dim:
            rest = min(dim - at, 16)
            vector = vmul(vload(sums + line * pitch + 4 * at), scale)
            if bf16:
                vstore_bf16_first(target + 2 * at, vector, rest)
            else:
                vstore_first(target + 4 * at, vector, rest)
            at += 16


@inlined
def _attend_group(block, row, rows, head, heads, scratch):
    """``rows`` rows of one request at one step, key heads ``head <= h < heads``."""
    dim, repeats = parameter(block, _DIM), parameter(block, _REPEATS)
    lines, count = rows * repeats, heads - head
    padded = (lines + TILE - 1) // TILE * TILE
    pitch = (dim + 15) // 16 * 64
    lengths = scratch + _LENGTHS
    longest = int64(0)
    for line in range(lines):
        length = _length(block, row + line // repeats)
        store_i64(lengths + 8 * line, length)
        longest = max(longest, length)
    cells = padded * count
    tops = lengths + 8 * padded
    totals = tops + 4 * cells
    scores = (totals + 4 * cells + 63) // 64 * 64
    queries = scores + cells * SCORE_ROW
    sums = queries + cells * pitch
    for cell in range(cells):
        store_f32(tops + 4 * cell, _NEVER)
        store_f32(totals + 4 * cell, 0.0)
    for at in range(scores, sums + cells * pitch, 64):
        vstore(at, vsplat(0.0))
    for h in range(count):
        _load_queries(block, row, rows, head + h, queries + h * padded * pitch, pitch)
    together = count if lines <= FEW else int64(1)
    first = int64(0)
    if longest > 0:
        _find_tokens(block, row, 0, longest, scratch, BLOCK)
    while first < longest:
        _next_tokens(block, row, first, longest, scratch)
        for h in range(0, count, together):
            cell, offset = h * padded, (head + h) * dim * 4
            _score(lines, padded, together, min(longest - first, BLOCK), queries + cell * pitch, pitch,
                   scores + cell * SCORE_ROW, scratch, offset, dim)
            for c in range(cell, cell + together * padded):
                valid = _valid(lengths, c % padded, first) if c % padded < lines else int64(0)
                if valid > 0:
                    _soften(scores + c * SCORE_ROW, valid, tops + 4 * c, totals + 4 * c, sums + c * pitch, pitch, scratch + _SPARE)
            _weigh(lines, padded, together, first, lengths, sums + cell * pitch, pitch,
                   scores + cell * SCORE_ROW, scratch, offset, dim)
        first += BLOCK
    for h in range(count):
        cell = h * padded
        _store_outputs(block, row, rows, head + h, lengths, totals + 4 * cell, sums + cell * pitch, pitch)


def _work(block):
    parts, heads = parameter(block, _HEAD_PARTS), parameter(block, _KV_HEADS)
    while True:
        task = next_task(block)
        if task < 0:
            return
        scratch = parameter(block, _SCRATCH) + task * parameter(block, _SCRATCH_SIZE)
        shares = load_i64(block + 8) // parts  # of the groups, per share of the heads
        part, share = task % parts, task // parts
        row, group = int64(0), int64(0)
        while row < parameter(block, _ROWS):
            rows = _group_size(block, row)
            if group % shares == share:
                _attend_group(block, row, rows, heads * part // parts, heads * (part + 1) // parts, scratch)
            row += rows
            group += 1


_KERNEL = Kernel(_work)


def _scratch_size(lines: int, heads: int, dim: int) -> int:
    """Bytes a task needs for ``lines`` query vectors of each of ``heads`` key heads."""
    pitch = (dim + 15) // 16 * 64
    return (_LENGTHS + 8 * lines + lines * heads * (8 + SCORE_ROW + 2 * pitch) + 128 + 4095) // 4096 * 4096


class _Scratch:
    """The kernel's working memory; grows to the largest call and is kept."""

    def __init__(self):
        self.memory = torch.empty(0, dtype=torch.uint8)

    def address(self, size: int) -> int:
        if self.memory.numel() < size + 64:
            self.memory = torch.empty(size + 64, dtype=torch.uint8)
        return (self.memory.data_ptr() + 63) // 64 * 64


_SCRATCH_MEMORY = _Scratch()


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
) -> Tensor:
    """Attention of every row over its own tokens; returns ``out``.

    q, out        bf16 or float32 [rows, Hq*D], rows may be strided
    k_rows/v_rows float32 [slots, Hkv*D], equal row strides
    kv_indices    int32, flat: slot ids
    kv_start      int64 [rows]: where a row's slot ids begin
    kv_len        int32 or int64 [rows]: how many tokens; 0 gives zeros
    kv_offset     int64 [rows]: added to every slot id
    """
    rows, width = q.shape
    dim = k_rows.shape[1] // num_kv_heads
    repeats = width // (num_kv_heads * dim)
    group_rows = max(1, GROUP // repeats)
    lines = (min(rows, group_rows) * repeats + TILE - 1) // TILE * TILE
    threads = torch.get_num_threads()
    parts = min(threads, num_kv_heads)
    shares = max(1, min(threads // parts, rows))
    size = _scratch_size(lines, -(-num_kv_heads // parts), dim)
    element = q.element_size()
    _KERNEL.start(
        parts * shares,
        q.data_ptr(),
        q.stride(0) * element,
        out.data_ptr(),
        out.stride(0) * element,
        k_rows.data_ptr(),
        v_rows.data_ptr(),
        k_rows.stride(0) * 4,
        kv_indices.data_ptr(),
        kv_start.data_ptr(),
        kv_len.data_ptr(),
        int(kv_len.dtype == torch.int32),
        kv_offset.data_ptr(),
        rows,
        repeats,
        num_kv_heads,
        dim,
        float_bits(scale),
        int(q.dtype == torch.bfloat16),
        _SCRATCH_MEMORY.address(size * parts * shares),
        size,
        parts,
        group_rows,
    )
    return out
