"""The looped blocks' elementwise operations on the CPU, each one pass over its rows.

Where in a round: between the linear layers of every recurrence: norms, rotation, gated activation. The values
are those of ``models.ops.TorchOps``, step for step: statistics in float32, the normalised row rounded to the
model's dtype, then every product and sum rounded on its own. Rounding to bfloat16 is explicit, to nearest even.

The one thing with an order of its own is the mean square: four chains over 16-wide chunks (chunk ``i`` in chain
``i mod 4``), added as ``(0 + 1) + (2 + 3)``, then the lanes by halves. torch uses another order, so a row's scale
may differ from torch's in the last float32 bit; SiLU's exponential is within one ulp of float32. After rounding
both agree with torch up to one bfloat16 ulp, nearly always exactly.

Contract: rows never mix and may be strided views (last dimension dense); results may overwrite inputs.
``rope_store`` also puts K and V into the pool, as float32 or in the model's dtype, where ``lane_attention`` reads them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_trunc.platform.cpu_elementwise_kernels import NORM, ROPE, SILU
from sglang_trunc.platform.cpu_kernel import float_bits

_WORTH_A_THREAD = 1 << 17  # elements; starting a thread costs as much as some 50 000 of them


def _tasks(rows: int, width: int) -> int:
    if rows * width < 2 * _WORTH_A_THREAD:
        return 1
    return min(rows, torch.get_num_threads(), rows * width // _WORTH_A_THREAD)


def _place(x: Tensor) -> tuple[int, int]:
    """Address and row stride in bytes."""
    return x.data_ptr(), x.stride(0) * x.element_size()


def _norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, before: int, out: Tensor | None) -> Tensor:
    out = torch.empty_like(x) if out is None else out
    rows, width = x.shape
    NORM.start(
        _tasks(rows, width),
        *_place(x),
        *((0, 0) if residual is None else _place(residual)),
        *_place(out),
        weight.data_ptr(),
        rows,
        width,
        float_bits(eps),
        int(x.dtype == torch.bfloat16),
        before,
    )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """``weight * round(x / rms(x))`` per row of ``[rows, width]``; weight in x's dtype."""
    return _norm(x, weight, eps, None, 0, out)


def rms_norm_add(x: Tensor, weight: Tensor, eps: float, residual: Tensor, out: Tensor | None = None) -> Tensor:
    """``residual + rms_norm(x)``: a normalised branch joins the stream (Ouro, OLMo-2)."""
    return _norm(x, weight, eps, residual, 0, out)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """``rms_norm(round(x + residual))``: the residual is inside the norm (Huginn)."""
    return _norm(x, weight, eps, residual, 1, out)


def silu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """``round(silu(gate)) * up`` of ``[rows, 2 * inner]``, gate first; returns ``[rows, inner]``."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, inner) if out is None else out
    places = (*_place(gate_up), *_place(out))
    SILU.start(_tasks(rows, 4 * inner), *places, rows, inner, int(gate_up.dtype == torch.bfloat16))
    return out


def rope_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_rows: Tensor,
    v_rows: Tensor,
    locs: Tensor,
    head_dim: int,
    interleaved: bool = False,
    round_products: bool = True,
) -> None:
    """Rotate ``q [rows, Hq*D]`` and ``k [rows, Hkv*D]`` in place, then write k and v to the pool rows ``locs``.

    cos, sin      float32 [positions, D/2], contiguous
    positions     int64 [rows]
    k_rows/v_rows k's dtype or float32 [slots, Hkv*D], equal row strides; locs int64 [rows], distinct
    """
    _rotate_and_store(q, k, v, (positions, cos, sin), (k_rows, v_rows, locs), head_dim, interleaved, round_products)


def rope(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    head_dim: int,
    interleaved: bool = False,
    round_products: bool = True,
) -> None:
    """``rope_store`` without the store."""
    _rotate_and_store(q, k, None, (positions, cos, sin), None, head_dim, interleaved, round_products)


def store_rows(k: Tensor, v: Tensor, k_rows: Tensor, v_rows: Tensor, locs: Tensor) -> None:
    """``rope_store`` without the rotation."""
    _rotate_and_store(k, k, v, None, (k_rows, v_rows, locs), 2, False, False)


def _rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    turn: tuple[Tensor, Tensor, Tensor] | None,
    pool: tuple[Tensor, Tensor, Tensor] | None,
    head_dim: int,
    interleaved: bool,
    round_products: bool,
) -> None:
    rows, size = q.shape[0], q.element_size()
    bf16 = q.dtype == torch.bfloat16
    if pool is None:
        stored, bf16_pool = (0, 0, 0, 0), 0
    else:
        k_rows, v_rows, locs = pool
        assert k_rows.dtype is v_rows.dtype
        assert k_rows.dtype in (torch.float32, k.dtype)
        assert locs.dtype is torch.int64
        bf16_pool = int(k_rows.dtype is torch.bfloat16)
        stored = (k_rows.data_ptr(), v_rows.data_ptr(), k_rows.stride(0) * k_rows.element_size(), locs.data_ptr())
    ROPE.start(
        _tasks(rows, q.shape[1] + 2 * k.shape[1]),
        q.data_ptr(),
        k.data_ptr(),
        0 if v is None else v.data_ptr(),
        q.stride(0) * size,
        k.stride(0) * size,
        0 if v is None else v.stride(0) * size,
        *stored,
        *((0, 0, 0) if turn is None else (tensor.data_ptr() for tensor in turn)),
        rows,
        q.shape[1],
        k.shape[1],
        head_dim,
        int(interleaved),
        int(round_products and bf16),
        int(bf16),
        bf16_pool,
    )
