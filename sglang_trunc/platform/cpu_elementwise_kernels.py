"""Compiled code of ``cpu_elementwise``: norms, gated activation, rotation with store; one row after another.

Every value is computed in float32 lanes; ``_rounded`` rounds it to the model's dtype where the published code
does. Each kernel's parameters are listed above it, in the order in which the entry points pass them.
"""

from __future__ import annotations

import math

from numba import float32, int64

from sglang_trunc.platform.cpu_exp import vexp
from sglang_trunc.platform.cpu_kernel import Kernel, next_task, parameter
from sglang_trunc.platform.cpu_vector import (
    inlined,
    load_f32,
    load_i64,
    vadd,
    vdiv,
    vfirsts,
    vfma,
    vload,
    vload_bf16,
    vload_bf16_first,
    vload_first,
    vmul,
    vneg,
    vpairs_high,
    vpairs_low,
    vround,
    vseconds,
    vsplat,
    vstore,
    vstore_bf16,
    vstore_bf16_first,
    vstore_first,
    vsub,
    vsum,
)


@inlined
def _get(address, at, bf16, n):
    """Elements ``at`` to ``at + n`` as float32; masks are slow before AVX-512, so only where needed."""
    if n == 16:
        return vload_bf16(address + 2 * at) if bf16 else vload(address + 4 * at)
    return vload_bf16_first(address + 2 * at, n) if bf16 else vload_first(address + 4 * at, n)


@inlined
def _put(address, at, bf16, n, value):
    if n == 16 and bf16:
        vstore_bf16(address + 2 * at, value)
    elif n == 16:
        vstore(address + 4 * at, value)
    elif bf16:
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


NORM = Kernel(_norm_rows)


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


SILU = Kernel(_silu_rows)


# Rotation and store. Parameters: q, k, v, then their strides; k_rows, v_rows, their stride, locs; positions,
# cos, sin; rows, q width, k width, head size, interleaved, round_products, bf16, bf16 pool.
# ``positions`` 0: no rotation; ``locs`` 0: no store.


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
def _copy_row(source, target, width, bf16, bf16_target):
    for at in range(0, width, 16):
        n = min(width - at, 16)
        _put(target, at, bf16_target, n, _get(source, at, bf16, n))


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
                _copy_row(k, parameter(block, 6) + target, k_width, bf16, parameter(block, 20))
                _copy_row(v, parameter(block, 7) + target, k_width, bf16, parameter(block, 20))


ROPE = Kernel(_rope_rows)
