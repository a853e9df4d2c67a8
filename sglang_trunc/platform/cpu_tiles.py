"""Register tiles of lane attention: scores of R rows against T tokens, and R rows' weighted sums of values.

A tile is R query rows that attend through the same K/V rows: rows of one request at one step, times the query
heads that share a key head. Loading a K or V vector once for R rows is all that a tile does; the chain of
operations behind one (row, token) score and one (row, dimension) sum is the same for every R, so rows may be
tiled in any company without a change of bits:

* score: one fused chain per lane over the head's 16-wide chunks, then the tree of ``cpu_vector.folded``;
* value: one fused chain per dimension over the tokens, in token order.

Rows live in padded float32 scratch (head size rounded up to 16, zeros behind); K and V rows are float32 in the
pool, and their last chunk is read with a mask where the head size is no multiple of 16.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sglang_trunc.platform.cpu_vector import (
    F32,
    I64,
    LANES,
    VF32,
    fetch,
    folded,
    fused,
    read,
    read_first,
    splat,
    write,
)


BLOCK = 32  # tokens per block of scores
SCORE_ROW = 4 * BLOCK  # bytes of one row's scores


def _offset(builder, address, amount):
    return builder.add(address, I64(amount) if isinstance(amount, int) else amount)


def _zeros(builder, count):
    cells = [cgutils.alloca_once(builder, VF32) for _ in range(count)]
    for cell in cells:
        builder.store(ir.Constant(VF32, [0.0] * LANES), cell)
    return cells


def _token_addresses(builder, table, first, count, offset):
    """Addresses of ``count`` consecutive tokens' head vectors; ``table`` holds row addresses."""
    entry = builder.add(table, builder.shl(first, I64(3)))
    return [builder.add(read(builder, _offset(builder, entry, 8 * t), I64, 8), offset) for t in range(count)]


def _accumulate(builder, cells, left, right):
    """``cells[i * len(right) + j] += left[i] * right[j]``, lane by lane."""
    for i, a in enumerate(left):
        for j, b in enumerate(right):
            cell = cells[i * len(right) + j]
            builder.store(fused(builder, a, b, builder.load(cell)), cell)


@intrinsic(prefer_literal=True)
def score_tile(typing, heads, rows, q, q_head, q_row, table, token, ahead, k, k_head, extra, dim, scores, s_head):
    """Scores of ``rows`` rows in ``heads`` key heads (4 pairs in all) against tokens ``token`` to ``token + 3``.

    ``q``/``q_head``/``q_row``: queries of the first pair, bytes to the next head and row. ``table``: addresses of K
    rows; ``k``/``k_head``: where in a K row the first head is, and its bytes. ``extra``: heads behind the first
    that exist; the others repeat the last. ``ahead``: tokens ahead to prefetch. ``scores``/``s_head``: where
    token 0's scores go, and bytes to the next head; rows are ``SCORE_ROW`` apart.
    """
    pairs, count = heads.literal_value, rows.literal_value

    def generate(context, builder, signature, args):
        _, _, q, q_head, q_row, table, token, ahead, k, k_head, extra, dim, scores, s_head = args
        keys = _token_addresses(builder, table, token, 4, k)
        later = _token_addresses(builder, table, builder.add(token, ahead), 4, k)
        cells = _zeros(builder, LANES)
        which = [
            builder.select(builder.icmp_signed("<", I64(h), extra), I64(h), extra) if h else I64(0)
            for h in range(pairs)
        ]

        def chunk(position, load):
            for h, head in enumerate(which):
                place = builder.add(builder.mul(head, k_head), position)
                at_head = builder.add(q, builder.add(builder.mul(head, q_head), position))
                queries = [read(builder, builder.add(at_head, builder.mul(q_row, I64(r)))) for r in range(count)]
                vectors = [load(builder.add(key, place)) for key in keys]
                for key in later:
                    fetch(builder, builder.add(key, place))
                _accumulate(builder, cells[h * count * 4 : (h + 1) * count * 4], queries, vectors)

        whole = builder.lshr(dim, I64(4))
        with cgutils.for_range(builder, whole, intp=I64) as loop:
            chunk(builder.shl(loop.index, I64(6)), lambda address: read(builder, address))
        rest = builder.and_(dim, I64(15))
        with builder.if_then(builder.icmp_signed(">", rest, I64(0)), likely=False):
            chunk(builder.shl(whole, I64(6)), lambda address: read_first(builder, address, rest))
        result = folded(builder, [builder.load(cell) for cell in cells])
        target = builder.add(scores, builder.shl(token, I64(2)))
        for h, head in enumerate(which):
            for r in range(count):
                lanes = [(h * count + r) * 4 + t for t in range(4)]
                four = builder.shuffle_vector(result, result, ir.Constant(ir.VectorType(ir.IntType(32), 4), lanes))
                write(builder, four, builder.add(target, builder.add(builder.mul(head, s_head), I64(r * SCORE_ROW))))
        return context.get_dummy_value()

    return types.void(heads, rows, *[types.int64] * 12), generate


@intrinsic(prefer_literal=True)
def value_tile(typing, rows, chunks, sums, sum_row, weights, table, first, last, ahead, v, rest):
    """``sums[row] += sum of weights[row, t] * values[t]`` over tokens ``first <= t < last``, in that order.

    Covers ``chunks`` 16-wide chunks from ``sums`` on; ``v``: where in a V row they are. ``weights``: where token 0's
    weights are. ``rest``: lanes of the chunk when there is only one. The others as in ``score_tile``.
    """
    count, width = rows.literal_value, chunks.literal_value

    def generate(context, builder, signature, args):
        _, _, sums, sum_row, weights, table, first, last, ahead, v, rest = args
        cells = _zeros(builder, count * width)
        places = [
            builder.add(builder.add(sums, builder.mul(sum_row, I64(r))), I64(64 * c))
            for r in range(count)
            for c in range(width)
        ]
        for cell, place in zip(cells, places, strict=True):
            builder.store(read(builder, place), cell)
        with cgutils.for_range_slice(builder, first, last, I64(1), intp=I64) as (token, _):
            (value,) = _token_addresses(builder, table, token, 1, v)
            (later,) = _token_addresses(builder, table, builder.add(token, ahead), 1, v)
            spots = [builder.add(value, I64(64 * c)) for c in range(width)]
            vectors = [read(builder, spot) if width > 1 else read_first(builder, spot, rest) for spot in spots]
            for c in range(width):
                fetch(builder, builder.add(later, I64(64 * c)))
            entry = builder.add(weights, builder.shl(token, I64(2)))
            factors = [
                splat(builder, read(builder, builder.add(entry, I64(SCORE_ROW * r)), F32)) for r in range(count)
            ]
            _accumulate(builder, cells, factors, vectors)
        for cell, place in zip(cells, places, strict=True):
            write(builder, builder.load(cell), place)
        return context.get_dummy_value()

    return types.void(rows, chunks, *[types.int64] * 9), generate
