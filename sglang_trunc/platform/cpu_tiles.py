"""Register tiles of lane attention: scores of rows against tokens, and rows' weighted sums of values.

A tile holds R query vectors (1, 2 or 4) that attend through the same K/V rows: rows of one request at one step,
times the query heads that share a key head. Loading a K or V vector once for R of them is all that a tile
does; the chain behind one (row, token) score and one (row, dimension) sum is the same for every R, so rows may be
tiled in any company without a change of bits:

* score: one chain per lane over the head's 64-byte chunks, then the tree of ``cpu_emit.folded``;
* value: one fused chain per dimension over the tokens, in token order.

K and V rows lie in the pool as float32, or as bfloat16 read in *paired* 32-bit entries of two: half the memory
traffic, and for scores the processor's bfloat16 dot product. Queries have the layout of K, filled up with zeros to
whole chunks; sums are float32, in the paired case 16 even dimensions, then 16 odd ones. A last partial chunk of a
head is read with a mask.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sglang_trunc.platform.cpu_emit import (
    F32,
    I32,
    I64,
    LANES,
    VF32,
    VI32,
    by_case,
    fetch,
    folded,
    fused,
    high_half,
    low_half,
    read,
    read_first,
    splat,
    step,
    write,
)

BLOCK = 32  # tokens per block of scores
SCORE_ROW = 4 * BLOCK  # bytes of one query vector's scores


def _token_addresses(builder, table, first, count, offset):
    """Where ``count`` consecutive tokens have the bytes ``offset`` of their rows; ``table`` holds row addresses."""
    entry = builder.add(table, builder.shl(first, I64(3)))
    entries = [builder.add(entry, I64(8 * token)) for token in range(count)]
    return [builder.add(read(builder, at, I64, 8), offset) for at in entries]


def _read_entries(builder, address):
    return read(builder, address, VI32)


def _read_some_entries(builder, address, count):
    return builder.bitcast(read_first(builder, address, count), VI32)


def _held(builder, places):
    """Registers that start with what is in memory."""
    cells = [cgutils.alloca_once(builder, VF32) for _ in places]
    for cell, place in zip(cells, places, strict=True):
        builder.store(read(builder, place), cell)
    return cells


def _emit_scores(builder, paired, rows, q, q_head, q_row, table, token, ahead, k, k_head, extra, scores, s_head):
    keys = _token_addresses(builder, table, token, 4, k)
    later = _token_addresses(builder, table, builder.add(token, ahead), 4, k)
    cells = [cgutils.alloca_once(builder, VF32) for _ in range(LANES)]
    for cell in cells:
        builder.store(ir.Constant(VF32, [0.0] * LANES), cell)
    heads = [I64(0)]
    for h in range(1, 4 // rows):
        heads.append(builder.select(builder.icmp_signed("<", I64(h), extra), I64(h), extra))

    def chunk(position, load):
        for h, head in enumerate(heads):
            place = builder.add(builder.mul(head, k_head), position)
            start = builder.add(q, builder.add(builder.mul(head, q_head), position))
            vectors = [load(builder.add(key, place)) for key in keys]
            for key in later:
                fetch(builder, builder.add(key, place))
            for r in range(rows):
                query = _read_entries(builder, builder.add(start, builder.mul(q_row, I64(r))))
                for t, vector in enumerate(vectors):
                    cell = cells[4 * (h * rows + r) + t]
                    builder.store(step(builder, paired, builder.load(cell), query, vector), cell)

    whole = builder.lshr(k_head, I64(6))
    with cgutils.for_range(builder, whole, intp=I64) as loop:
        chunk(builder.shl(loop.index, I64(6)), lambda address: _read_entries(builder, address))
    rest = builder.lshr(builder.and_(k_head, I64(63)), I64(2))
    with builder.if_then(builder.icmp_signed(">", rest, I64(0)), likely=False):
        chunk(builder.shl(whole, I64(6)), lambda address: _read_some_entries(builder, address, rest))
    result = folded(builder, [builder.load(cell) for cell in cells])
    target = builder.add(scores, builder.shl(token, I64(2)))
    for h, head in enumerate(heads):
        for r in range(rows):
            lanes = ir.Constant(ir.VectorType(I32, 4), [4 * (h * rows + r) + t for t in range(4)])
            place = builder.add(target, builder.add(builder.mul(head, s_head), I64(r * SCORE_ROW)))
            write(builder, builder.shuffle_vector(result, result, lanes), place)


@intrinsic
def score_tile(typing, paired, rows, q, q_head, q_row, table, token, ahead, k, k_head, extra, scores, s_head):
    """Scores of ``rows`` query vectors in ``4 / rows`` key heads against tokens ``token`` to ``token + 3``.

    q, q_head, q_row  queries of the first head, bytes to the next head and to the next query vector
    table, ahead      addresses of the tokens' K rows; how many tokens ahead to prefetch
    k, k_head, extra  where in a K row the first head is, bytes of a head, heads that follow the first (where
                      there are too few the last is done again)
    scores, s_head    where token 0's scores go, bytes to the next head; query vectors are SCORE_ROW apart
    """

    def generate(context, builder, signature, args):
        cases = [(kind, count) for kind in (0, 1) for count in (1, 2, 4)]
        by_case(builder, args[:2], cases, lambda *case: _emit_scores(builder, *case, *args[2:]))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 13), generate


def _emit_values(builder, paired, rows, width, sums, row, weights, table, first, last, ahead, v, rest):
    parts = 2 if paired else 1  # float32 vectors per 64 bytes of V
    starts = [builder.add(sums, builder.mul(row, I64(r))) for r in range(rows)]
    places = [builder.add(start, I64(64 * c)) for start in starts for c in range(width * parts)]
    cells = _held(builder, places)
    with cgutils.for_range_slice(builder, first, last, I64(1), intp=I64) as (token, _):
        (value,) = _token_addresses(builder, table, token, 1, v)
        (later,) = _token_addresses(builder, table, builder.add(token, ahead), 1, v)
        vectors = []
        for c in range(width):
            spot = builder.add(value, I64(64 * c))
            entry = _read_entries(builder, spot) if width > 1 else _read_some_entries(builder, spot, rest)
            vectors += (
                [low_half(builder, entry), high_half(builder, entry)] if paired else [builder.bitcast(entry, VF32)]
            )
            fetch(builder, builder.add(later, I64(64 * c)))
        entry = builder.add(weights, builder.shl(token, I64(2)))
        for r in range(rows):
            factor = splat(builder, read(builder, builder.add(entry, I64(SCORE_ROW * r)), F32))
            for c, vector in enumerate(vectors):
                cell = cells[r * len(vectors) + c]
                builder.store(fused(builder, factor, vector, builder.load(cell)), cell)
    for cell, place in zip(cells, places, strict=True):
        write(builder, builder.load(cell), place)


@intrinsic
def value_tile(typing, paired, rows, wide, sums, row, weights, table, first, last, ahead, v, rest):
    """``sums[r] += sum of weights[r, t] * values[t]`` over tokens ``first <= t < last``, in that order.

    wide, rest     1: 256 bytes of float32 or 128 of bfloat16; 0: 64 bytes, of which ``rest`` entries exist
    sums, row      float32 sums of ``rows`` query vectors, bytes to the next
    weights        where token 0's weights are
    table, ahead   as in ``score_tile``; ``v``: where in a V row the values are
    """

    def generate(context, builder, signature, args):
        def emit(kind, count, wide):
            width = (2 if kind else 4) if wide else 1
            _emit_values(builder, kind, count, width, *args[3:])

        cases = [(kind, count, wide) for kind in (0, 1) for count in (1, 2, 4) for wide in (0, 1)]
        by_case(builder, args[:3], cases, emit)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 12), generate
