"""Moves of whole rows in Triton: the state bank's (twins in ``row_moves``) and K/V (``lane_attention.store_rows``).

Used at both ends of a tick and in every layer of it. One launch each; a program moves ``BLOCK`` elements of one row.
Values are copied or cast, never computed, so results equal the twins' bit for bit. Two rows that name one place write
it in either order: only padding rows do, and nobody reads what they leave.
"""
# A kernel's parameters are pointers and scalars that only Triton can type.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_trunc.kernels.checks import FLOATS, check

BLOCK = 1024


@triton.jit(do_not_specialize_on_alignment=["index"])
def _gather(bank, index, out, bank_rows, width, bank_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(index + row)
    source = tl.where(source < 0, source + bank_rows, source)
    values = tl.load(bank + source * bank_stride + column, mask=column < width)
    tl.store(out + row * width + column, values, mask=column < width)


@triton.jit(do_not_specialize_on_alignment=["index"])
def _scatter(values, index, bank, bank_rows, width, value_stride, bank_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(index + row)
    target = tl.where(target < 0, target + bank_rows, target)
    moved = tl.load(values + row * value_stride + column, mask=column < width)
    tl.store(bank + target * bank_stride + column, moved.to(bank.dtype.element_ty), mask=column < width)


@triton.jit(do_not_specialize_on_alignment=["locs"])
def _store(k, v, k_rows, v_rows, locs, width, k_stride, v_stride, k_row_stride, v_row_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    target = tl.load(locs + row)
    key = tl.load(k + row * k_stride + column, mask=inside)
    value = tl.load(v + row * v_stride + column, mask=inside)
    tl.store(k_rows + target * k_row_stride + column, key.to(k_rows.dtype.element_ty), mask=inside)
    tl.store(v_rows + target * v_row_stride + column, value.to(v_rows.dtype.element_ty), mask=inside)


def gather_rows_triton(bank: Tensor, index: Tensor) -> Tensor:
    """``bank[index]``: ``row_moves.gather_rows``.

    bank: float ``[capacity + 1, H]``. index: int64 ``[rows]``; the last row, also named -1, is the spare of padding
    rows. Raises ``ValueError`` for another shape, dtype or device.
    """
    check("bank", bank, FLOATS, (None, None), bank)
    check("index", index, torch.int64, (None,), bank)
    rows, width = len(index), bank.shape[1]
    out = torch.empty(rows, width, dtype=bank.dtype, device=bank.device)
    if out.numel():
        _gather[_grid(rows, width)](bank, index, out, len(bank), width, bank.stride(0), BLOCK=BLOCK)
    return out


def scatter_rows_triton(values: Tensor, index: Tensor, bank: Tensor) -> None:
    """``bank[index] = values``: ``row_moves.scatter_rows``.

    values: float ``[rows, H]``, rows may lie apart; cast to the bank's dtype. index: int64 ``[rows]``, as in
    ``gather_rows_triton``. Raises ``ValueError`` for another shape, dtype or device.
    """
    check("bank", bank, FLOATS, (None, None), bank)
    check("index", index, torch.int64, (None,), bank)
    rows, width = len(index), bank.shape[1]
    check("values", values, FLOATS, (rows, width), bank)
    if values.numel():
        _scatter[_grid(rows, width)](
            values, index, bank, len(bank), width, values.stride(0), bank.stride(0), BLOCK=BLOCK
        )


def store_rows_triton(k: Tensor, v: Tensor, k_rows: Tensor, v_rows: Tensor, locs: Tensor) -> None:
    """``k_rows[locs] = k`` and the same for v, in one launch: ``lane_attention.store_rows``.

    k, v: float ``[rows, Hkv*D]``, rows may lie apart; cast to the pool's dtype. k_rows, v_rows: float ``[slots,
    Hkv*D]``. locs: int64 ``[rows]``, not negative; padding rows name slot 0. Raises ``ValueError`` for another shape,
    dtype or device.
    """
    check("k_rows", k_rows, FLOATS, (None, None), k_rows)
    check("v_rows", v_rows, FLOATS, k_rows.shape, k_rows)
    check("locs", locs, torch.int64, (None,), k_rows)
    rows, width = len(locs), k_rows.shape[1]
    check("k", k, FLOATS, (rows, width), k_rows)
    check("v", v, FLOATS, (rows, width), k_rows)
    if k.numel():
        _store[_grid(rows, width)](
            k,
            v,
            k_rows,
            v_rows,
            locs,
            width,
            k.stride(0),
            v.stride(0),
            k_rows.stride(0),
            v_rows.stride(0),
            BLOCK=BLOCK,
        )


def _grid(rows: int, width: int) -> tuple[int, int]:
    return rows, triton.cdiv(width, BLOCK)
