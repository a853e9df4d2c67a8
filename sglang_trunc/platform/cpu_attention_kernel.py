"""The kernel behind ``cpu_attention.lane_attention``: its work on one task, in compiled code.

A task is a share of the key heads and of the groups of rows. A group goes through its tokens in blocks of 32:
scores, softmax update, weighted values. With few lines all heads take a block together, so that K and V rows are
read from end to end, at memory speed; with many, two heads take it at a time and their part of the block stays
in the first-level cache.

See ``cpu_attention_cells`` for lines and cells, ``cpu_tiles`` for the arithmetic and what fixes its order.
"""

from __future__ import annotations

from numba import int64

from sglang_trunc.platform.cpu_attention_cells import (
    GROUP_ROWS,
    HEAD_BYTES,
    HEAD_PARTS,
    IS_PAIRED,
    KEYS,
    KV_HEADS,
    LINES,
    NEVER,
    OFFSET,
    OUT,
    OUT_STRIDE,
    PADDED,
    PITCH,
    Q_STRIDE,
    QUERIES,
    REPEATS,
    ROWS,
    SCALE_FACTOR,
    SCORES,
    SCRATCH,
    SCRATCH_SIZE,
    SPARE,
    START,
    SUMS,
    TILE,
    TILES,
    TOPS,
    TOTALS,
    VALUES,
    Q,
    count_valid,
    field,
    find_tokens,
    has_tail,
    lay_out,
    load_lengths,
    load_query,
    next_tokens,
    store_output,
    valid_tokens,
    vector_address,
)
from sglang_trunc.platform.cpu_exp import vexp
from sglang_trunc.platform.cpu_kernel import Kernel, next_task, parameter
from sglang_trunc.platform.cpu_tiles import BLOCK, SCORE_ROW, score_tile, value_tile
from sglang_trunc.platform.cpu_vector import (
    inlined,
    load_f32,
    load_i64,
    store_f32,
    vadd,
    vkeep,
    vload,
    vmax,
    vmul,
    vsplat,
    vstore,
    vstore_first,
    vsub,
    vsum,
    vtop,
)

FEW = 8  # up to so many lines all heads take a block together
SPAN = 8  # tokens of V per visit: as many rows as a first-level cache keeps at a stride of 4 KiB


@inlined
def _tile_size(lines, line):
    left = lines - line
    return left if left <= 2 else TILE


@inlined
def _score(scratch, k, head, heads, tokens):
    """Scores of a block's first ``tokens`` tokens in ``heads`` heads from ``head`` on; ``k``: head 0 in a K row."""
    lines, pitch, k_head = field(scratch, LINES), field(scratch, PITCH), field(scratch, HEAD_BYTES)
    padded, queries, scores = field(scratch, PADDED), field(scratch, QUERIES), field(scratch, SCORES)
    paired = field(scratch, IS_PAIRED)
    for token in range(0, tokens, 4):
        for line in range(0, lines, TILE):
            rows, h = _tile_size(lines, line), head
            step = 4 if rows == 1 else 2 if rows == 2 else 1
            while h < head + heads:
                cell = h * padded + line
                score_tile(
                    paired, rows, queries + cell * pitch, padded * pitch, pitch,
                    scratch + KEYS, token, 4, k + h * k_head, k_head, head + heads - 1 - h,
                    scores + cell * SCORE_ROW, padded * SCORE_ROW,
                )  # fmt: skip
                h += step


@inlined
def _soften(scratch, cell, count):
    """Turn a cell's scores of ``count`` >= 1 tokens into weights; update its maximum, sum and weighted sum."""
    scores = field(scratch, SCORES) + cell * SCORE_ROW
    top_at, total_at = field(scratch, TOPS) + 4 * cell, field(scratch, TOTALS) + 4 * cell
    scale = vsplat(load_f32(scratch + SCALE_FACTOR))
    low = vkeep(vmul(vload(scores), scale), count, NEVER)
    high = vkeep(vmul(vload(scores + 64), scale), count - 16, NEVER)
    before = load_f32(top_at)
    top = max(before, vtop(vmax(low, high)))
    low = vkeep(vexp(vsub(low, vsplat(top))), count, 0.0)
    high = vkeep(vexp(vsub(high, vsplat(top))), count - 16, 0.0)
    vstore(scores, low)
    vstore(scores + 64, high)
    total, held = vsum(vadd(low, high)), load_f32(total_at)
    if top != before:
        fade = vexp(vsplat(before - top))
        vstore_first(scratch + SPARE, fade, 1)
        held *= load_f32(scratch + SPARE)
        sums, pitch = field(scratch, SUMS), field(scratch, PITCH)
        for at in range(sums + cell * pitch, sums + (cell + 1) * pitch, 64):
            vstore(at, vmul(vload(at), fade))
    store_f32(top_at, top)
    store_f32(total_at, total + held)


@inlined
def _add_values(scratch, rows, cell, first, last, ahead, v):
    """Weighted values of tokens ``first <= t < last`` onto ``rows`` cells; ``v``: their head in a V row."""
    paired, size, pitch = field(scratch, IS_PAIRED), field(scratch, HEAD_BYTES), field(scratch, PITCH)
    sums, weights = field(scratch, SUMS) + cell * pitch, field(scratch, SCORES) + cell * SCORE_ROW
    table, wide = scratch + VALUES, 128 if paired else 256
    at = int64(0)
    while at + wide <= size:
        value_tile(paired, rows, 1, sums, pitch, weights, table, first, last, ahead, v + at, 16)
        at += wide
        sums += 256
    while at < size:
        value_tile(paired, rows, 0, sums, pitch, weights, table, first, last, ahead, v + at, min(size - at, 64) // 4)
        at += 64
        sums += 128 if paired else 64


@inlined
def _weigh(scratch, v, head, heads, line, start):
    """A tile of lines, tokens ``start`` to ``start + SPAN``: together as far as all lines go, then each alone."""
    padded, size = field(scratch, PADDED), field(scratch, HEAD_BYTES)
    lines, end = field(scratch, LINES), start + SPAN
    real, rows = min(lines - line, TILE), _tile_size(lines, line)
    tile = field(scratch, TILES) + 16 * (line // TILE)
    common, longest = load_i64(tile), load_i64(tile + 8)
    for h in range(head, head + heads):
        cell = h * padded + line
        if common > start:
            _add_values(scratch, rows, cell, start, min(end, common), SPAN, v + h * size)
        if longest > common and longest > start:
            for r in range(real):
                own, last = max(start, common), min(end, valid_tokens(scratch, line + r))
                if last > own:
                    _add_values(scratch, 1, cell + r, own, last, 0, v + h * size)


@inlined
def _attend_block(scratch, base, head, heads, tokens):
    """One block of tokens in ``heads`` heads from ``head`` on; ``base``: head 0 in a K or V row."""
    lines, padded = field(scratch, LINES), field(scratch, PADDED)
    _score(scratch, base, head, heads, tokens)
    for line in range(lines):
        count = valid_tokens(scratch, line)
        if count > 0:
            for h in range(head, head + heads):
                _soften(scratch, h * padded + line, count)
    for start in range(0, tokens, SPAN):
        for line in range(0, lines, TILE):
            _weigh(scratch, base, head, heads, line, start)


@inlined
def _attend_group(block, scratch, row, rows, head, heads):
    """``rows`` rows of one group in ``heads`` key heads from ``head`` on."""
    lines = rows * parameter(block, REPEATS)
    lay_out(block, scratch, lines, heads)
    longest, pitch, padded = load_lengths(block, scratch, row), field(scratch, PITCH), field(scratch, PADDED)
    for h in range(heads):
        for line in range(lines):
            source = vector_address(block, Q, Q_STRIDE, row, head + h, line)
            load_query(block, source, field(scratch, QUERIES) + (h * padded + line) * pitch)
    together = heads if lines <= FEW else int64(2)
    if longest > 0:
        find_tokens(block, scratch, row, 0, longest, BLOCK)
    for first in range(0, longest, BLOCK):
        next_tokens(block, scratch, row, first, longest)
        count_valid(scratch, first)
        base = head * field(scratch, HEAD_BYTES)
        for h in range(0, heads, together):
            _attend_block(scratch, base, h, min(together, heads - h), min(longest - first, BLOCK))
    for h in range(heads):
        for line in range(lines):
            cell = h * padded + line
            target = vector_address(block, OUT, OUT_STRIDE, row, head + h, line)
            store_output(
                block, field(scratch, SUMS) + cell * pitch, load_f32(field(scratch, TOTALS) + 4 * cell), target
            )


@inlined
def _group_size(block, row):
    """How many rows from ``row`` on are rows of one request at one step; a row with a tail is alone."""
    start, offset = parameter(block, START), parameter(block, OFFSET)
    end = min(parameter(block, ROWS), row + parameter(block, GROUP_ROWS))
    last = row + 1
    if has_tail(block, row):
        return int64(1)
    while (
        last < end
        and load_i64(start + 8 * last) == load_i64(start + 8 * row)
        and load_i64(offset + 8 * last) == load_i64(offset + 8 * row)
        and not has_tail(block, last)
    ):
        last += 1
    return last - row


def _work(block):
    parts, heads = parameter(block, HEAD_PARTS), parameter(block, KV_HEADS)
    while True:
        task = next_task(block)
        if task < 0:
            return
        scratch = parameter(block, SCRATCH) + task * parameter(block, SCRATCH_SIZE)
        part, share, shares = task % parts, task // parts, load_i64(block + 8) // parts
        head, end = heads * part // parts, heads * (part + 1) // parts
        row, group = int64(0), int64(0)
        while row < parameter(block, ROWS):
            rows = _group_size(block, row)
            if group % shares == share:
                _attend_group(block, scratch, row, rows, head, end - head)
            row += rows
            group += 1


KERNEL = Kernel(_work)
