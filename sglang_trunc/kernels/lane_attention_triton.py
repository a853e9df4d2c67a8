"""Lane attention in Triton: twin of ``lane_attention.lane_attention``, same arguments.

Runs in every layer of every tick, after ``store_rows`` has written the K/V of all rows. Two kernels, as in
flash-decoding: ``_partials`` attends to one *split* of a lane's tokens, ``_combine`` joins the splits of a lane.

Row-count invariance: a lane's splits are counted from its token 0, and their size follows its own length alone:
``SPLIT_TOKENS``, or the multiple of it that needs at most ``MAX_SPLITS`` splits. A program reads one lane, one K/V
head, one split; all splits of a lane are joined in one reduction of fixed extent. So a lane has the same bits alone,
in company, at any width and beside any padding. What changes bits is what changes the compiled kernel: dtype, head
dimension, heads per K/V head, and the alignment of the K/V pool, all fixed while a server runs. The compiler is not
shown the alignment of anything that a call brings along.

Shared prefixes: lanes of one request at one step read the same K/V rows, and no program knows. The row is the
fastest axis of the grid, so programs of neighbouring lanes run the same head and split at the same time and find
each other's rows in L2. Grouping such lanes in one program (as ``platform.cpu_attention`` does) is not done.

Nothing here reads a value on the host, and the grid depends on shapes alone, so a captured graph may replay it with
other lengths. Memory: ``rows * Hq * MAX_SPLITS * (D + 2)`` float32, allocated per call.
"""
# A kernel's parameters are pointers and scalars that only Triton can type.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_trunc.kernels.checks import FLOATS, INTEGERS, check, power_of_two

SPLIT_TOKENS = 256
MAX_SPLITS = 32
# Elements of one product [heads of a K/V head, tokens, dimension]: 32 float32 registers a thread at 4 warps.
TILE_ELEMENTS = 4096
BROUGHT_ALONG = ["q", "ids", "starts", "lengths", "offsets", "tails", "shares"]


@triton.jit
def _split_size(length, SPLIT: tl.constexpr, SPLITS: tl.constexpr):
    """Tokens of one split of a lane, by the lane's length alone."""
    return SPLIT * tl.maximum(tl.cdiv(tl.cdiv(length, SPLIT), SPLITS), 1)


@triton.jit
def _slot_ids(ids, tails, token, start, shared, end, HAS_TAILS: tl.constexpr):
    """Ids of a block of tokens, int64; 0 from ``end`` on. ``tails`` points at the lane's own list."""
    valid = token < end
    slots = tl.load(ids + start + token, mask=valid & (token < shared), other=0).to(tl.int64)
    if HAS_TAILS:
        own = tl.load(tails + token - shared, mask=valid & (token >= shared), other=0).to(tl.int64)
        slots = tl.where(token < shared, slots, own)
    return slots


@triton.jit(do_not_specialize=["q_stride", "tail_stride"], do_not_specialize_on_alignment=BROUGHT_ALONG)
def _partials(
    q,
    keys,
    values,
    ids,
    starts,
    lengths,
    offsets,
    tails,
    shares,
    sums,
    tops,
    masses,
    q_stride,
    key_stride,
    value_stride,
    tail_stride,
    log2_scale,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_TAILS: tl.constexpr,
):
    """One lane, one K/V head, one split: unnormalised sum [DIM], maximum and mass of each of its query heads."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths + row)
    size = _split_size(length, SPLIT, SPLITS)
    first = split * size
    if first < length:
        end = tl.minimum(first + size, length)
        start = tl.load(starts + row)
        offset = tl.load(offsets + row)
        shared = tl.load(shares + row) if HAS_TAILS else length
        dim = tl.arange(0, DIM_PAD)
        head = tl.arange(0, GROUP_PAD)
        cell = head[:, None] * DIM + dim[None, :]
        in_cell = (head[:, None] < GROUP) & (dim[None, :] < DIM)
        query = tl.load(q + row * q_stride + kv_head * GROUP * DIM + cell, mask=in_cell, other=0.0)
        query = query.to(tl.float32) * log2_scale
        top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
        mass = tl.zeros([GROUP_PAD], tl.float32)
        total = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
        for begin in range(first, end, BLOCK):
            token = begin + tl.arange(0, BLOCK)
            slots = _slot_ids(ids, tails + row * tail_stride, token, start, shared, end, HAS_TAILS) + offset
            # Entries behind the end are not read: they may be anything, NaN included.
            seen = (token < end)[:, None] & (dim < DIM)[None, :]
            column = kv_head * DIM + dim[None, :]
            key = tl.load(keys + slots[:, None] * key_stride + column, mask=seen, other=0.0).to(tl.float32)
            value = tl.load(values + slots[:, None] * value_stride + column, mask=seen, other=0.0).to(tl.float32)
            scores = tl.sum(query[:, None, :] * key[None, :, :], 2)
            scores = tl.where((token < end)[None, :], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            kept = tl.exp2(top - higher)
            weights = tl.exp2(scores - higher[:, None])
            mass = mass * kept + tl.sum(weights, 1)
            total = total * kept[:, None] + tl.sum(weights[:, :, None] * value[None, :, :], 1)
            top = higher
        place = ((row * tl.num_programs(1) + kv_head) * GROUP + head) * SPLITS + split
        tl.store(tops + place, top, mask=head < GROUP)
        tl.store(masses + place, mass, mask=head < GROUP)
        tl.store(sums + place[:, None] * DIM + dim[None, :], total, mask=in_cell)


@triton.jit(do_not_specialize=["out_stride"], do_not_specialize_on_alignment=["lengths", "out"])
def _combine(
    sums,
    tops,
    masses,
    lengths,
    out,
    out_stride,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One lane, one query head: joins the splits that the lane has. A lane of length 0 has none and gives zeros."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    length = tl.load(lengths + row)
    split = tl.arange(0, SPLITS)
    used = split < tl.cdiv(length, _split_size(length, SPLIT, SPLITS))
    dim = tl.arange(0, DIM_PAD)
    place = (row * tl.num_programs(1) + head) * SPLITS + split
    top = tl.load(tops + place, mask=used, other=float("-inf"))
    highest = tl.where(length > 0, tl.max(top, 0), 0.0)
    scale = tl.exp2(top - highest)
    mass = tl.sum(scale * tl.load(masses + place, mask=used, other=0.0), 0)
    seen = used[:, None] & (dim < DIM)[None, :]
    parts = tl.load(sums + place[:, None] * DIM + dim[None, :], mask=seen, other=0.0)
    total = tl.sum(scale[:, None] * parts, 0)
    result = tl.where(length > 0, total / tl.where(length > 0, mass, 1.0), 0.0)
    tl.store(out + row * out_stride + head * DIM + dim, result.to(out.dtype.element_ty), mask=dim < DIM)


def lane_attention_triton(
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
    *,
    split_tokens: int = SPLIT_TOKENS,
    max_splits: int = MAX_SPLITS,
) -> None:
    """``out[r] = softmax(scale * q[r] K_r^T) V_r`` per head, in float32; see ``lane_attention.lane_attention``.

    q, out: float ``[rows, Hq*D]``. k_rows, v_rows: float ``[slots, Hkv*D]``. kv_indices: int32 or int64, flat.
    kv_start, kv_len, kv_offset, kv_shared: int64 ``[rows]``. kv_tails: int32 or int64 ``[rows, T]``. Rows of q,
    k_rows, v_rows, kv_tails and out may lie apart. Reads slots of tokens below kv_len only; a row of length 0 gives
    zeros. ``split_tokens`` and ``max_splits`` (a power of two) fix the order of summation, so calls that are to
    agree in bits share them.

    Raises ``ValueError`` for a shape, dtype, device or stride that differs from this.
    """
    rows = q.shape[0]
    dim = k_rows.shape[-1] // num_kv_heads
    heads = q.shape[-1] // dim
    group = heads // num_kv_heads
    _check_pool(q, k_rows, v_rows, out, num_kv_heads)
    _check_lists(rows, kv_indices, kv_start, kv_len, kv_offset, kv_tails, kv_shared, q)
    if max_splits != power_of_two(max_splits) or split_tokens < 1:
        raise ValueError(f"max_splits must be a power of two, split_tokens positive; got {max_splits}, {split_tokens}.")
    if not rows:
        return
    has_tails = kv_tails is not None and kv_tails.shape[1] > 0
    tails = kv_tails if kv_tails is not None and has_tails else kv_indices
    sums = torch.empty(rows, heads, max_splits, dim, dtype=torch.float32, device=q.device)
    tops, masses = torch.empty(2, rows, heads, max_splits, dtype=torch.float32, device=q.device)
    group_pad, dim_pad = power_of_two(group), power_of_two(dim)
    _partials[rows, num_kv_heads, max_splits](
        q,
        k_rows,
        v_rows,
        kv_indices,
        kv_start,
        kv_len,
        kv_offset,
        tails,
        kv_shared if kv_shared is not None else kv_len,
        sums,
        tops,
        masses,
        q.stride(0),
        k_rows.stride(0),
        v_rows.stride(0),
        tails.stride(0),
        scale * math.log2(math.e),
        GROUP=group,
        GROUP_PAD=group_pad,
        DIM=dim,
        DIM_PAD=dim_pad,
        BLOCK=block_tokens(group_pad, dim_pad),
        SPLIT=split_tokens,
        SPLITS=max_splits,
        HAS_TAILS=has_tails,
    )
    _combine[rows, heads](
        sums,
        tops,
        masses,
        kv_len,
        out,
        out.stride(0),
        DIM=dim,
        DIM_PAD=dim_pad,
        SPLIT=split_tokens,
        SPLITS=max_splits,
    )


def block_tokens(group_pad: int, dim_pad: int) -> int:
    """Tokens in one step of a split's loop: by the shape of a head alone, never by rows or lengths."""
    return min(max(TILE_ELEMENTS // (group_pad * dim_pad), 4), 64)


def _check_pool(q: Tensor, k_rows: Tensor, v_rows: Tensor, out: Tensor, num_kv_heads: int) -> None:
    check("k_rows", k_rows, FLOATS, (None, None), q)
    check("v_rows", v_rows, k_rows.dtype, k_rows.shape, q)
    check("q", q, FLOATS, (None, None), q)
    check("out", out, FLOATS, q.shape, q)
    dim, rest = divmod(k_rows.shape[1], num_kv_heads)
    if rest or not 0 < dim <= 256 or q.shape[1] % k_rows.shape[1]:
        raise ValueError(
            f"q [rows, {q.shape[1]}] and k_rows [slots, {k_rows.shape[1]}] do not divide into {num_kv_heads} K/V heads "
            "of one dimension (at most 256) and the same number of query heads each."
        )


def _check_lists(
    rows: int,
    kv_indices: Tensor,
    kv_start: Tensor,
    kv_len: Tensor,
    kv_offset: Tensor,
    kv_tails: Tensor | None,
    kv_shared: Tensor | None,
    like: Tensor,
) -> None:
    if (kv_tails is None) != (kv_shared is None):
        raise ValueError("kv_tails and kv_shared go together: give both or neither.")
    check("kv_indices", kv_indices, INTEGERS, (None,), like)
    check("kv_start", kv_start, torch.int64, (rows,), like)
    check("kv_len", kv_len, torch.int64, (rows,), like)
    check("kv_offset", kv_offset, torch.int64, (rows,), like)
    if kv_tails is not None and kv_shared is not None:
        check("kv_tails", kv_tails, INTEGERS, (rows, None), like)
        check("kv_shared", kv_shared, torch.int64, (rows,), like)
