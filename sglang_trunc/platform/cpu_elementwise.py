"""The looped blocks' elementwise operations on the CPU, each one pass over its rows.

Where in a round: between the linear layers of every recurrence: norms, rotation, gated activation. The values
are those of ``models.ops.TorchOps``, step for step: statistics in float32, the normalised row rounded to the
model's dtype, then every product and sum rounded on its own. Rounding to bfloat16 is explicit, to nearest even.

The one thing with an order of its own is the mean square: four chains over 16-wide chunks (chunk ``i`` in chain
``i mod 4``), added as ``(0 + 1) + (2 + 3)``, then the lanes by halves. torch uses another order, so a row's scale
may differ from torch's in the last float32 bit; SiLU's exponential is within one ulp of float32. After rounding
both agree with torch up to one bfloat16 ulp, nearly always exactly.

Contract: rows never mix and may be strided views (last dimension dense); results may overwrite inputs.
``rope_store`` also puts K and V into the pool as float32 rows, where ``lane_attention`` reads them.
"""

from __future__ import annotations

import math

import torch
from numba import float32, int64
from torch import Tensor

from sglang_trunc.platform.cpu_exp import vexp
from sglang_trunc.platform.cpu_kernel import Kernel, float_bits, next_task, parameter
from sglang_trunc.platform.cpu_vector import (
    inlined,
    load_f32,
    load_i64,
    vadd,
    vdiv,
    vfirsts,
    vfma,
    vload_bf16_first,
    vload_first,
    vmul,
    vneg,
    vpairs_high,
    vpairs_low,
    vround,
    vseconds,
    vsplat,
    vstore_bf16_first,
    vstore_first,
    vsub,
    vsum,
)

_WORTH_A_THREAD = 1 << 17  # elements; starting a thread costs as much as some 50 000 of them


@inlined
def _get(address, at, bf16, n):
    """Elements ``at`` to ``at + n`` as float32."""
    return vload_bf16_first(address + 2 * at, n) if bf16 else vload_first(address + 4 * at, n)


@inlined
def _put(address, at, bf16, n, value):
    if bf16:
        vstore_bf16_first(address + 2 * at, value, n)
    else:
        vstore_first(address + 4 * at, value, n)


@inlined
def _rounded(value, bf16):
    return vround(value) if bf16 else value


@inlined
def _task_rows(block, rows, task):
    tasks = load_i64(block + 8)
    return rows * task // tasks, rows * (task + 1) // tasks


# Norms: x, its stride, residual (0 when there is none), its stride, out, its stride, weight, rows, width, eps,
# whether bf16, and whether the residual is added before the norm.


@inlined
def _norm_input(x, residual, at, bf16, n):
    value = _get(x, at, bf16, n)
    if residual:
        value = _rounded(vadd(value, _get(residual, at, bf16, n)), bf16)
    return value


@inlined
def _mean_square(x, residual, width, bf16):
    zero = vsplat(0.0)
    a, b, c, d = zero, zero, zero, zero
    at = int64(0)
    while at < width:
        value = _norm_input(x, residual, at, bf16, min(width - at, 16))
        a, b, c, d = b, c, d, vfma(value, value, a)
        at += 16
    # The chains have been rotated once per chunk: bring chunk 0's chain to the front again.
    for _ in range((4 - (width + 15) // 16 % 4) % 4):
        a, b, c, d = b, c, d, a
    return vsum(vadd(vadd(a, b), vadd(c, d))) / float32(width)


def _norm_rows(block):
    rows, width = parameter(block, 7), parameter(block, 8)
    eps, bf16 = load_f32(block + 16 + 8 * 9), parameter(block, 10)
    weight, before = parameter(block, 6), parameter(block, 11)
    while True:
        task = next_task(block)
        if task < 0:
            return
        first, last = _task_rows(block, rows, task)
        for row in range(first, last):
            x = parameter(block, 0) + row * parameter(block, 1)
            residual = parameter(block, 2) + row * parameter(block, 3)
            inside = residual if before else int64(0)
            out = parameter(block, 4) + row * parameter(block, 5)
            scale = vsplat(float32(1.0) / float32(math.sqrt(_mean_square(x, inside, width, bf16) + eps)))
            at = int64(0)
            while at < width:
                n = min(width - at, 16)
                value = _rounded(vmul(_norm_input(x, inside, at, bf16, n), scale), bf16)
                value = vmul(value, _get(weight, at, bf16, n))
                if parameter(block, 2) and not before:
                    value = vadd(_get(residual, at, bf16, n), _rounded(value, bf16))
                _put(out, at, bf16, n, value)
                at += 16


_NORM = Kernel(_norm_rows)


def _silu_rows(block):
    rows, width, bf16 = parameter(block, 4), parameter(block, 5), parameter(block, 6)
    size = 2 if bf16 else 4
    one = vsplat(1.0)
    while True:
        task = next_task(block)
        if task < 0:
            return
        first, last = _task_rows(block, rows, task)
        for row in range(first, last):
            gate = parameter(block, 0) + row * parameter(block, 1)
            out = parameter(block, 2) + row * parameter(block, 3)
            at = int64(0)
            while at < width:
                n = min(width - at, 16)
                value = _get(gate, at, bf16, n)
                value = _rounded(vdiv(value, vadd(one, vexp(vneg(value)))), bf16)
                _put(out, at, bf16, n, vmul(value, _get(gate + width * size, at, bf16, n)))
                at += 16


_SILU = Kernel(_silu_rows)


# Rotation and store. Parameters: q, k, v, then their strides; k_rows, v_rows, their stride, locs; positions,
# cos, sin; rows, q width, k width, head size, interleaved, round_products, bf16. ``positions`` 0: no rotation;
# ``locs`` 0: no store.


@inlined
def _rotate_head(head, cos, sin, half, interleaved, products, bf16):
    at = int64(0)
    while at < half:
        n = min(half - at, 16)
        c, s = vload_first(cos + 4 * at, n), vload_first(sin + 4 * at, n)
        if interleaved:
            low, high = _get(head, 2 * at, bf16, min(2 * n, 16)), _get(head, 2 * at + 16, bf16, 2 * n - 16)
            x, y = vfirsts(low, high), vseconds(low, high)
        else:
            x, y = _get(head, at, bf16, n), _get(head, half + at, bf16, n)
        xc, ys, yc, xs = vmul(x, c), vmul(y, s), vmul(y, c), vmul(x, s)
        if products:
            xc, ys, yc, xs = vround(xc), vround(ys), vround(yc), vround(xs)
        x, y = vsub(xc, ys), vadd(yc, xs)
        if interleaved:
            _put(head, 2 * at, bf16, min(2 * n, 16), vpairs_low(x, y))
            _put(head, 2 * at + 16, bf16, 2 * n - 16, vpairs_high(x, y))
        else:
            _put(head, at, bf16, n, x)
            _put(head, half + at, bf16, n, y)
        at += 16


@inlined
def _rotate_row(row, width, cos, sin, dim, interleaved, products, bf16):
    size = 2 if bf16 else 4
    for head in range(width // dim):
        _rotate_head(row + head * dim * size, cos, sin, dim // 2, interleaved, products, bf16)


@inlined
def _copy_row(source, target, width, bf16):
    at = int64(0)
    while at < width:
        n = min(width - at, 16)
        vstore_first(target + 4 * at, _get(source, at, bf16, n), n)
        at += 16


def _rope_rows(block):
    rows, q_width, k_width, dim = parameter(block, 13), parameter(block, 14), parameter(block, 15), parameter(block, 16)
    interleaved, products, bf16 = parameter(block, 17), parameter(block, 18), parameter(block, 19)
    while True:
        task = next_task(block)
        if task < 0:
            return
        first, last = _task_rows(block, rows, task)
        for row in range(first, last):
            q = parameter(block, 0) + row * parameter(block, 3)
            k = parameter(block, 1) + row * parameter(block, 4)
            v = parameter(block, 2) + row * parameter(block, 5)
            if parameter(block, 10):
                turn = load_i64(parameter(block, 10) + 8 * row) * (dim // 2) * 4
                cos, sin = parameter(block, 11) + turn, parameter(block, 12) + turn
                _rotate_row(q, q_width, cos, sin, dim, interleaved, products, bf16)
                _rotate_row(k, k_width, cos, sin, dim, interleaved, products, bf16)
            if parameter(block, 9):
                target = load_i64(parameter(block, 9) + 8 * row) * parameter(block, 8)
                _copy_row(k, parameter(block, 6) + target, k_width, bf16)
                _copy_row(v, parameter(block, 7) + target, k_width, bf16)


_ROPE = Kernel(_rope_rows)


# Entry points -------------------------------------------------------------------------------------------


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
    _NORM.start(
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
    _SILU.start(_tasks(rows, 4 * inner), *places, rows, inner, int(gate_up.dtype == torch.bfloat16))
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
    k_rows/v_rows float32 [slots, Hkv*D], equal row strides; locs int64 [rows], distinct
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
        stored = (0, 0, 0, 0)
    else:
        stored = (pool[0].data_ptr(), pool[1].data_ptr(), pool[0].stride(0) * 4, pool[2].data_ptr())
    _ROPE.start(
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
    )
