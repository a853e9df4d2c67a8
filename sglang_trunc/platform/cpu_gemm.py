"""The product of rows with packed weights: one chain of fused steps per output, for any number of rows.

Decoding on a CPU reads every weight once per tick, so a product of few rows should run at memory speed; prefill
runs at arithmetic speed. One loop does both: a tile of up to 12 rows times 32 outputs stays in registers while the
weights stream by in the order in which they lie. Larger calls pass over a panel of weights again while it is
in the second-level cache.

Contract: output ``(row, n)`` starts at zero and takes K in order, two elements per step in bfloat16 (the
processor's ``vdpbf16ps`` where it has it, else two fused products) and one in float32, then bias, then one
rounding. Tiles, panels, K blocks and threads only decide when a step is done, never what it adds to what: a row
has the same bits in every call. The bits do depend on the kind of processor.

Packed layout: ``[N/32][K steps][32 outputs]`` of 32-bit entries, an entry holding two bfloat16 or one float32;
a row of x is read as 32-bit entries too, so both types share all addressing.
"""

from __future__ import annotations

import torch
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from sglang_trunc.platform.cpu_emit import (
    HAS_DOT,
    HAS_WIDE,
    I32,
    I64,
    LANES,
    VF32,
    VI32,
    by_case,
    fetch,
    read,
    splat,
    step,
    write,
)
from sglang_trunc.platform.cpu_kernel import Kernel, Scratch, next_task, parameter
from sglang_trunc.platform.cpu_vector import (
    inlined,
    load_i64,
    vadd,
    vload,
    vsplat,
    vstore,
    vstore_bf16_first,
    vstore_first,
)

PANEL = 32  # outputs that are computed together: two vectors
ENTRY = 4 * PANEL  # bytes of one step of a panel
# Rows whose 2 * rows sums fit the registers, beside what a step needs.
_MOST_ROWS = 12 if HAS_DOT else 8 if HAS_WIDE else 2
_STEPS = 1024  # of a panel between two looks at the sums: 128 KiB of weights
_ROW_BLOCK = 20 * _MOST_ROWS

# Positions of the kernel's parameters.
_X, _X_ROW, _W, _BIAS, _OUT, _OUT_ROW, _ROWS, _N, _COUNT, _BF16, _SCRATCH = range(11)


def _emit_tile(builder, bf16, rows, x, x_row, w, steps, sums, ahead):
    """``rows`` rows of sums (``ENTRY`` bytes each) through ``steps`` steps, kept in registers."""
    places = [builder.add(sums, I64(ENTRY * r + 64 * c)) for r in range(rows) for c in range(2)]
    starts = [builder.add(x, builder.mul(x_row, I64(r))) for r in range(rows)]
    cells = [cgutils.alloca_once(builder, VF32) for _ in places]
    for cell, place in zip(cells, places, strict=True):
        builder.store(read(builder, place), cell)
    with cgutils.for_range(builder, steps, intp=I64) as loop:
        entry = builder.add(w, builder.mul(loop.index, I64(ENTRY)))
        halves = [builder.add(entry, I64(64 * c)) for c in range(2)]
        weights = [read(builder, half, VI32) for half in halves]
        for half in halves:
            fetch(builder, builder.add(half, ahead))
        for r, start in enumerate(starts):
            x = splat(builder, read(builder, builder.add(start, builder.shl(loop.index, I64(2))), I32))
            for c, weight in enumerate(weights):
                cell = cells[2 * r + c]
                builder.store(step(builder, bf16, builder.load(cell), x, weight), cell)
    for cell, place in zip(cells, places, strict=True):
        write(builder, builder.load(cell), place)


@intrinsic
def product_tile(typing, bf16, rows, x, x_row, w, steps, sums, ahead):
    """Add ``steps`` steps to the sums of ``rows`` rows, at most ``_MOST_ROWS``; prefetch ``ahead`` bytes on."""

    def generate(context, builder, signature, args):
        cases = [(kind, count) for kind in (0, 1) for count in range(1, _MOST_ROWS + 1)]
        by_case(builder, args[:2], cases, lambda *case: _emit_tile(builder, *case, *args[2:]))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), generate


@inlined
def _panel_product(bf16, x, x_row, w, count, sums, rows):
    """Sums of ``rows`` rows against one panel of ``count`` steps."""
    for at in range(sums, sums + rows * ENTRY, 64):
        vstore(at, vsplat(0.0))
    tiles = (rows + _MOST_ROWS - 1) // _MOST_ROWS
    for first in range(0, count, _STEPS):
        steps = min(_STEPS, count - first)
        for tile in range(tiles):
            row, end = rows * tile // tiles, rows * (tile + 1) // tiles
            # A lone pass streams; of several, the last asks for the weights that come after these.
            ahead = 4096 if end - row > 6 else 512
            if tiles > 1:
                ahead = steps * ENTRY if tile + 1 == tiles else 512
            start, weights = x + row * x_row + 4 * first, w + first * ENTRY
            product_tile(bf16, end - row, start, x_row, weights, steps, sums + row * ENTRY, ahead)


@inlined
def _finish(bf16, sums, bias, out, n):
    """Sums of one row of a panel, plus bias, to its first ``n`` outputs."""
    for c in range(2):
        value = vload(sums + 64 * c)
        if bias:
            value = vadd(value, vload(bias + 64 * c))
        left = min(n - LANES * c, LANES)
        if left > 0 and bf16:
            vstore_bf16_first(out + 2 * LANES * c, value, left)
        elif left > 0:
            vstore_first(out + 4 * LANES * c, value, left)


@inlined
def _panel(block, panel, top, rows, sums):
    """Rows ``top`` to ``top + rows`` times one panel of weights."""
    n, count, bf16, bias = (
        parameter(block, _N),
        parameter(block, _COUNT),
        parameter(block, _BF16),
        parameter(block, _BIAS),
    )
    x_row, out_row = parameter(block, _X_ROW), parameter(block, _OUT_ROW)
    w = parameter(block, _W) + panel * count * ENTRY
    _panel_product(bf16, parameter(block, _X) + top * x_row, x_row, w, count, sums, rows)
    if bias:
        bias += panel * ENTRY
    out = parameter(block, _OUT) + top * out_row + panel * (ENTRY // 2 if bf16 else ENTRY)
    for row in range(rows):
        _finish(bf16, sums + row * ENTRY, bias, out + row * out_row, n - panel * PANEL)


def _work(block):
    panels, tasks = (parameter(block, _N) + PANEL - 1) // PANEL, load_i64(block + 8)
    while True:
        task = next_task(block)
        if task < 0:
            return
        sums = parameter(block, _SCRATCH) + task * _ROW_BLOCK * ENTRY
        for top in range(0, parameter(block, _ROWS), _ROW_BLOCK):
            rows = min(parameter(block, _ROWS) - top, _ROW_BLOCK)
            for panel in range(panels * task // tasks, panels * (task + 1) // tasks):
                _panel(block, panel, top, rows, sums)


_KERNEL = Kernel(_work)
_SUMS = Scratch()


def pack(weight: Tensor) -> Tensor:
    """``[N, K]`` to the packed layout, N filled up with zeros."""
    n, k = weight.shape
    panels = -(-n // PANEL)
    full = weight
    if n % PANEL:
        full = weight.new_zeros(panels * PANEL, k)
        full[:n] = weight
    each = 4 // weight.element_size()
    return full.reshape(panels, PANEL, k // each, each).transpose(1, 2).contiguous()


def product(x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """``out = x @ weight.T + bias`` for rows of x and out that may be strided; bias float32, whole panels."""
    rows, n = out.shape
    panels, count = packed.shape[:2]
    element = x.element_size()
    tasks = _tasks(panels, count, rows)
    _KERNEL.start(
        tasks,
        x.data_ptr(),
        x.stride(0) * element,
        packed.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        out.stride(0) * element,
        rows,
        n,
        count,
        int(x.dtype == torch.bfloat16),
        _SUMS.address(tasks * _ROW_BLOCK * ENTRY),
    )
    return out


def _tasks(panels: int, count: int, rows: int) -> int:
    """Several tasks per thread, so that a thread that lost its core holds up little."""
    threads = torch.get_num_threads()
    # Starting a thread costs as much as reading some 250 KB of weights.
    worth = panels * count * ENTRY * max(1, rows // 8) >> 18
    return 1 if threads == 1 or worth < 2 else min(panels, worth, 4 * threads)
