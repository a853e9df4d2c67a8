"""Where a lane attention task keeps what: parameters, row addresses, and the cells of a group.

A group is a stretch of rows of one request at one step, or one row with a tail; its *lines* are these rows times
the query heads of a key head. Per (key head, line) there is a *cell*: running maximum, running sum, a block's
scores, query and weighted sum, all float32. They lie in the task's scratch, behind the addresses of the K and V
rows of the current block of tokens and of the one after it (so that prefetches can look ahead), and a few fields
with sizes and addresses.

Cells are numbered ``head * padded + line``, ``padded`` being the lines rounded up to whole tiles; the lines that
do not exist keep zeros and are never stored. All addresses are integers in bytes.
"""

from __future__ import annotations

from numba import float32, int64

from sglang_trunc.platform.cpu_kernel import parameter
from sglang_trunc.platform.cpu_tiles import BLOCK, SCORE_ROW
from sglang_trunc.platform.cpu_vector import (
    inlined,
    load_f32,
    load_i32,
    load_i64,
    store_f32,
    store_i64,
    vload,
    vload_bf16_first,
    vload_first,
    vmul,
    vsplat,
    vstore,
    vstore_bf16_first,
    vstore_first,
    vstore_pairs_first,
)

TILE = 4  # lines of the largest register tile
NEVER = -3.0e38  # running maximum before any token

# Parameters.
Q, Q_STRIDE, OUT, OUT_STRIDE, K, V, KV_STRIDE, TABLE, START, LENGTH, LENGTH_IS_32, OFFSET = range(12)
ROWS, REPEATS, KV_HEADS, DIM, SCALE, BF16, SCRATCH, SCRATCH_SIZE, HEAD_PARTS, GROUP_ROWS, PAIRED = range(12, 23)
TAILS, TAIL_STRIDE, SHARED = range(23, 26)  # all 0 in a call without tails

# Scratch: row addresses, a spare float, fields (below), then lengths and cells.
KEYS, VALUES, SPARE = 0, 16 * BLOCK, 32 * BLOCK
SCALE_FACTOR = SPARE + 4
_FIELDS = SPARE + 64
FIXED = _FIELDS + 128
(
    LINES, PADDED, PITCH, HEAD_BYTES, IS_PAIRED,
    LENGTHS, VALID, TILES, TOPS, TOTALS, SCORES, QUERIES, SUMS,
) = range(13)  # fmt: skip


@inlined
def field(scratch, index):
    return load_i64(scratch + _FIELDS + 8 * index)


@inlined
def _set(scratch, index, value):
    store_i64(scratch + _FIELDS + 8 * index, value)


@inlined
def lay_out(block, scratch, lines, heads):
    """Divide the scratch among the cells of a group; ``cpu_attention`` knows how much that takes."""
    dim = parameter(block, DIM)
    padded, pitch = (lines + TILE - 1) // TILE * TILE, (dim + 31) // 32 * 128
    cells = padded * heads
    _set(scratch, LINES, lines)
    _set(scratch, PADDED, padded)
    _set(scratch, PITCH, pitch)
    _set(scratch, HEAD_BYTES, 2 * dim if parameter(block, PAIRED) else 4 * dim)
    _set(scratch, IS_PAIRED, parameter(block, PAIRED))
    store_f32(scratch + SCALE_FACTOR, load_f32(block + 16 + 8 * SCALE))
    at = scratch + FIXED
    _set(scratch, LENGTHS, at)
    _set(scratch, VALID, at + 8 * padded)
    _set(scratch, TILES, at + 16 * padded)
    at += 24 * padded
    _set(scratch, TOPS, at)
    _set(scratch, TOTALS, at + 4 * cells)
    at = (at + 8 * cells + 63) // 64 * 64
    _set(scratch, SCORES, at)
    at += cells * SCORE_ROW
    _set(scratch, QUERIES, at)
    _set(scratch, SUMS, at + cells * pitch)
    for cell in range(cells):
        store_f32(field(scratch, TOPS) + 4 * cell, NEVER)
        store_f32(field(scratch, TOTALS) + 4 * cell, 0.0)
    for place in range(at, at + 2 * cells * pitch, 64):
        vstore(place, vsplat(0.0))


@inlined
def _row_length(block, row):
    lengths = parameter(block, LENGTH)
    return load_i32(lengths + 4 * row) if parameter(block, LENGTH_IS_32) else load_i64(lengths + 8 * row)


@inlined
def has_tail(block, row):
    """Whether some of a row's slot ids are in its own list."""
    shared = parameter(block, SHARED)
    return shared != 0 and load_i64(shared + 8 * row) < _row_length(block, row)


@inlined
def load_lengths(block, scratch, row):
    """A length per line; returns the longest."""
    longest, repeats = int64(0), parameter(block, REPEATS)
    for line in range(field(scratch, LINES)):
        length = _row_length(block, row + line // repeats)
        store_i64(field(scratch, LENGTHS) + 8 * line, length)
        longest = max(longest, length)
    return longest


@inlined
def vector_address(block, base, stride, row, head, line):
    """Address of a line's head vector in q or out."""
    repeats, size = parameter(block, REPEATS), 2 if parameter(block, BF16) else 4
    vector = head * repeats + line % repeats
    start = parameter(block, base) + (row + line // repeats) * parameter(block, stride)
    return start + vector * parameter(block, DIM) * size


@inlined
def load_query(block, source, target):
    """A query vector in the layout of K rows: bfloat16 pairs as they are, or float32."""
    dim, widen = parameter(block, DIM), parameter(block, BF16) and not parameter(block, PAIRED)
    entries = dim // 2 if parameter(block, PAIRED) else dim
    for at in range(0, entries, 16):
        rest = min(entries - at, 16)
        vstore(
            target + 4 * at, vload_bf16_first(source + 2 * at, rest) if widen else vload_first(source + 4 * at, rest)
        )


@inlined
def store_output(block, sums, total, target):
    """A weighted sum over its total (nothing over nothing is zero), rounded to the model's dtype."""
    dim, bf16 = parameter(block, DIM), parameter(block, BF16)
    scale = vsplat(float32(1.0) / total if total > 0.0 or total != total else float32(0.0))
    if parameter(block, PAIRED):
        for at in range(0, dim // 2, 16):
            low, high = vmul(vload(sums + 8 * at), scale), vmul(vload(sums + 8 * at + 64), scale)
            vstore_pairs_first(target + 4 * at, low, high, min(dim // 2 - at, 16))
        return
    for at in range(0, dim, 16):
        rest, vector = min(dim - at, 16), vmul(vload(sums + 4 * at), scale)
        if bf16:
            vstore_bf16_first(target + 2 * at, vector, rest)
        else:
            vstore_first(target + 4 * at, vector, rest)


@inlined
def find_tokens(block, scratch, row, first, length, entry):
    """Addresses of the K and V rows of a block of tokens; past the length the last one repeats."""
    table = parameter(block, TABLE) + 4 * load_i64(parameter(block, START) + 8 * row)
    offset = load_i64(parameter(block, OFFSET) + 8 * row)
    # Without a tail the stretch counts to the group's length, which may exceed this row's own.
    shared, tail = length, table
    if has_tail(block, row):
        shared = load_i64(parameter(block, SHARED) + 8 * row)
        tail = parameter(block, TAILS) + row * parameter(block, TAIL_STRIDE) - 4 * shared
    for token in range(BLOCK):
        index = min(first + token, length - 1)
        slot = load_i32((table if index < shared else tail) + 4 * index) + offset
        at = slot * parameter(block, KV_STRIDE)
        store_i64(scratch + KEYS + 8 * (entry + token), parameter(block, K) + at)
        store_i64(scratch + VALUES + 8 * (entry + token), parameter(block, V) + at)


@inlined
def next_tokens(block, scratch, row, first, length):
    """The block that was next becomes the current one, and the one after it is looked up."""
    for at in range(0, 8 * BLOCK, 64):
        vstore(scratch + KEYS + at, vload(scratch + KEYS + 8 * BLOCK + at))
        vstore(scratch + VALUES + at, vload(scratch + VALUES + 8 * BLOCK + at))
    find_tokens(block, scratch, row, first + BLOCK, length, BLOCK)


@inlined
def count_valid(scratch, first):
    """How many of a block's tokens each line sees, and per tile (16 bytes) the fewest and the most of its lines."""
    lines, lengths = field(scratch, LINES), field(scratch, LENGTHS)
    for line in range(0, lines, TILE):
        common, longest = int64(BLOCK), int64(0)
        for r in range(line, min(lines, line + TILE)):
            count = max(min(load_i64(lengths + 8 * r) - first, BLOCK), 0)
            store_i64(field(scratch, VALID) + 8 * r, count)
            common, longest = min(common, count), max(longest, count)
        tile = field(scratch, TILES) + 16 * (line // TILE)
        store_i64(tile, common)
        store_i64(tile + 8, longest)


@inlined
def valid_tokens(scratch, line):
    return load_i64(field(scratch, VALID) + 8 * line)
