"""Register tiles of lane attention: scores of rows against tokens, and rows' weighted sums of values.

A tile holds R query vectors (1, 2 or 4) that attend through the same K/V rows: rows of one request at one step,
times the query heads that share a key head. Loading a K or V vector once for R of them is all that a tile
does; the chain behind one (row, token) score and one (row, dimension) sum is the same for every R, so rows may be
tiled in any company without a change of bits:

* score: one fused chain per lane over the head's 16-wide chunks, then the tree of ``cpu_vector.folded``;
* value: one fused chain per dimension over the tokens, in token order.

Query vectors and sums are float32, padded with zeros to a multiple of 16; K and V rows lie in the pool, where
the last chunk of a head is read with a mask if the head size is no multiple of 16.
"""

from __future__ import annotations

from collections.abc import Callable

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
    fetch,
    folded,
    fused,
    read,
    read_first,
    splat,
    write,
)

BLOCK = 32  # tokens per block of scores
SCORE_ROW = 4 * BLOCK  # bytes of one query vector's scores
SIZES = (1, 2, 4)


def _for_each_size(builder, rows, emit: Callable[[int], None]) -> None:
    """One version of a tile per size, chosen at run time."""
    end = builder.append_basic_block("tiled")
    choice = builder.switch(rows, end)
    for count in SIZES:
        block = builder.append_basic_block(f"rows{count}")
        choice.add_case(I64(count), block)
        builder.position_at_end(block)
        emit(count)
        builder.branch(end)
    builder.position_at_end(end)


def _token_addresses(builder, table, first, count, offset):
    """Where ``count`` consecutive tokens have the bytes ``offset`` of their rows; ``table`` holds row addresses."""
    entry = builder.add(table, builder.shl(first, I64(3)))
    entries = [builder.add(entry, I64(8 * token)) for token in range(count)]
    return [builder.add(read(builder, at, I64, 8), offset) for at in entries]


def _accumulate(builder, cells, left, right):
    """``cells[i * len(right) + j] += left[i] * right[j]``, lane by lane."""
    for i, a in enumerate(left):
        for j, b in enumerate(right):
            cell = cells[i * len(right) + j]
            builder.store(fused(builder, a, b, builder.load(cell)), cell)


def _emit_scores(builder, rows, q, q_head, q_row, table, token, ahead, k, k_head, extra, dim, scores, s_head):
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
            starts = [builder.add(start, builder.mul(q_row, I64(r))) for r in range(rows)]
            vectors = [load(builder.add(key, place)) for key in keys]
            for key in later:
                fetch(builder, builder.add(key, place))
            part = cells[4 * rows * h : 4 * rows * (h + 1)]
            _accumulate(builder, part, [read(builder, at) for at in starts], vectors)

    whole = builder.lshr(dim, I64(4))
    with cgutils.for_range(builder, whole, intp=I64) as loop:
        chunk(builder.shl(loop.index, I64(6)), lambda address: read(builder, address))
    rest = builder.and_(dim, I64(15))
    with builder.if_then(builder.icmp_signed(">", rest, I64(0)), likely=False):
        chunk(builder.shl(whole, I64(6)), lambda address: read_first(builder, address, rest))
    result = folded(builder, [builder.load(cell) for cell in cells])
    target = builder.add(scores, builder.shl(token, I64(2)))
    for h, head in enumerate(heads):
        for r in range(rows):
            lanes = ir.Constant(ir.VectorType(I32, 4), [4 * (h * rows + r) + t for t in range(4)])
            place = builder.add(target, builder.add(builder.mul(head, s_head), I64(r * SCORE_ROW)))
            write(builder, builder.shuffle_vector(result, result, lanes), place)


@intrinsic
def score_tile(typing, rows, q, q_head, q_row, table, token, ahead, k, k_head, extra, dim, scores, s_head):
    """Scores of ``rows`` query vectors in ``4 / rows`` key heads against tokens ``token`` to ``token + 3``.

    q, q_head, q_row  queries of the first head, bytes to the next head and to the next query vector
    table, ahead      addresses of the tokens' K rows; how many tokens ahead to prefetch
    k, k_head, extra  where in a K row the first head is, bytes to the next, heads that follow the first (where
                      there are too few the last is done again)
    scores, s_head    where token 0's scores go, bytes to the next head; query vectors are SCORE_ROW apart
    """

    def generate(context, builder, signature, args):
        _for_each_size(builder, args[0], lambda count: _emit_scores(builder, count, *args[1:]))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 13), generate


def _emit_values(builder, rows, width, sums, row, weights, table, first, last, ahead, v, rest):
    starts = [builder.add(sums, builder.mul(row, I64(r))) for r in range(rows)]
    places = [builder.add(start, I64(64 * c)) for start in starts for c in range(width)]
    cells = [cgutils.alloca_once(builder, VF32) for _ in places]
    for cell, place in zip(cells, places, strict=True):
        builder.store(read(builder, place), cell)
    with cgutils.for_range_slice(builder, first, last, I64(1), intp=I64) as (token, _):
        (value,) = _token_addresses(builder, table, token, 1, v)
        (later,) = _token_addresses(builder, table, builder.add(token, ahead), 1, v)
        spots = [builder.add(value, I64(64 * c)) for c in range(width)]
        vectors = [read(builder, at) if width > 1 else read_first(builder, at, rest) for at in spots]
        for c in range(width):
            fetch(builder, builder.add(later, I64(64 * c)))
        entry = builder.add(weights, builder.shl(token, I64(2)))
        entries = [builder.add(entry, I64(SCORE_ROW * r)) for r in range(rows)]
        factors = [splat(builder, read(builder, at, F32)) for at in entries]
        _accumulate(builder, cells, factors, vectors)
    for cell, place in zip(cells, places, strict=True):
        write(builder, builder.load(cell), place)


@intrinsic(prefer_literal=True)
def value_tile(typing, width, rows, sums, row, weights, table, first, last, ahead, v, rest):
    """``sums[r] += sum of weights[r, t] * values[t]`` over tokens ``first <= t < last``, in that order.

    width, rest    16-wide chunks covered (a literal); lanes of the chunk when there is only one
    sums, row      float32 sums of ``rows`` query vectors, bytes to the next
    weights        where token 0's weights are
    table, ahead   as in ``score_tile``; ``v``: where in a V row the chunks are
    """
    chunks = width.literal_value

    def generate(context, builder, signature, args):
        _for_each_size(builder, args[1], lambda count: _emit_values(builder, count, chunks, *args[2:]))
        return context.get_dummy_value()

    return types.void(width, *[types.int64] * 10), generate
