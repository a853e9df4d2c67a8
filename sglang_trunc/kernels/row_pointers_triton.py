"""Packed row lists in Triton: twin of ``row_pointers.row_pointers``, same arguments.

Two kernels: ``_pointers`` sums the lengths in one program (rows are few) and names the write locations; ``_indices``
fills the list, ``CHUNKS`` programs a row. The grid depends on the number of rows alone and nothing waits for the
device, so the launches may be captured with a list of fixed capacity and replayed with other lengths.
"""
# A kernel's parameters are pointers and scalars that only Triton can type.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_trunc.kernels.checks import INTEGERS, check

ROWS_BLOCK = 256
TOKENS_BLOCK = 512
CHUNKS = 8


@triton.jit
def _pointers(lengths, offsets, slots, indptr, write_locs, rows, BLOCK: tl.constexpr):
    before = tl.full([], 0, tl.int64)
    tl.store(indptr, 0)
    for begin in range(0, rows, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        inside = row < rows
        length = tl.load(lengths + row, mask=inside, other=0)
        tl.store(indptr + row + 1, (before + tl.cumsum(length, 0)).to(tl.int32), mask=inside)
        before += tl.sum(length, 0)
        places = tl.load(slots + row, mask=inside) + tl.load(offsets + row, mask=inside)
        tl.store(write_locs + row, places, mask=inside)


@triton.jit
def _indices(
    ids,
    starts,
    lengths,
    offsets,
    tails,
    shares,
    indptr,
    indices,
    capacity,
    tail_stride,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_TAILS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(starts + row)
    length = tl.load(lengths + row)
    offset = tl.load(offsets + row)
    first = tl.load(indptr + row).to(tl.int64)
    shared = tl.load(shares + row) if HAS_TAILS else length
    for begin in range(tl.program_id(1) * BLOCK, length, CHUNKS * BLOCK):
        token = begin + tl.arange(0, BLOCK)
        valid = token < length
        slot = tl.load(ids + start + token, mask=valid & (token < shared), other=0).to(tl.int64)
        if HAS_TAILS:
            own = tails + row * tail_stride + token - shared
            slot = tl.where(token < shared, slot, tl.load(own, mask=valid & (token >= shared), other=0).to(tl.int64))
        tl.store(indices + first + token, slot + offset, mask=valid & (first + token < capacity))


def row_pointers_triton(
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
    """Fill ``indptr``, ``indices`` and ``write_locs``: ``row_pointers.row_pointers``.

    kv_indices: int32 or int64, flat. kv_start, kv_len, kv_offset, slots, kv_shared: int64 ``[rows]``. kv_tails: int32
    or int64 ``[rows, T]``. Filled: indptr int32 ``[rows + 1]``, indices int64 ``[capacity]``, write_locs int64
    ``[rows]``. Nothing is written behind the capacity; that it suffices is the caller's to see to. Raises
    ``ValueError`` for another shape, dtype or device.
    """
    rows = len(kv_len)
    for name, tensor in (("kv_start", kv_start), ("kv_len", kv_len), ("kv_offset", kv_offset), ("slots", slots)):
        check(name, tensor, torch.int64, (rows,), kv_indices)
    check("kv_indices", kv_indices, INTEGERS, (None,), kv_indices)
    check("indptr", indptr, torch.int32, (rows + 1,), kv_indices)
    check("indices", indices, torch.int64, (None,), kv_indices)
    check("write_locs", write_locs, torch.int64, (rows,), kv_indices)
    if (kv_tails is None) != (kv_shared is None):
        raise ValueError("kv_tails and kv_shared go together: give both or neither.")
    if kv_tails is not None and kv_shared is not None:
        check("kv_tails", kv_tails, INTEGERS, (rows, None), kv_indices)
        check("kv_shared", kv_shared, torch.int64, (rows,), kv_indices)
    has_tails = kv_tails is not None and kv_tails.shape[1] > 0
    tails = kv_tails if kv_tails is not None and has_tails else kv_indices
    _pointers[1,](kv_len, kv_offset, slots, indptr, write_locs, rows, BLOCK=ROWS_BLOCK)
    if rows:
        _indices[rows, CHUNKS](
            kv_indices,
            kv_start,
            kv_len,
            kv_offset,
            tails,
            kv_shared if kv_shared is not None else kv_len,
            indptr,
            indices,
            len(indices),
            tails.stride(0),
            CHUNKS=CHUNKS,
            BLOCK=TOKENS_BLOCK,
            HAS_TAILS=has_tails,
        )
