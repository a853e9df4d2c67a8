"""Seeded noise in Triton: twins of ``core.noise.murmur32`` and ``core.noise.gumbel``.

``hash_of`` and ``gumbel_of`` are also what ``choice_triton`` perturbs logits with, so that no [n, V] noise is ever
stored in a round; the wrappers here serve tests and whoever wants the values.

Contract: hashes equal ``core.noise.murmur32`` bit for bit on every device, since they are integers modulo 2**32. Noise
is computed in float64 by the formula of SGLang 0.5.23 (``multinomial_with_seed`` in ``srt/layers/sampler.py``), with a
division, not a product with the reciprocal. The two logarithms are the device's own (libdevice on CUDA, numpy's in
Triton's interpreter), so noise of two devices may differ in a last bit or two. SGLang compiles its formula with
Inductor, which on CUDA multiplies by the reciprocal: the same caution holds there.
"""
# A kernel's parameters are pointers and scalars that only Triton can type.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_trunc.kernels.checks import check

BLOCK = 1024
LOWEST = tl.constexpr(-1.7976931348623157e308)  # the least float64, where SGLang clamps log(0)
LEAST_SURPRISE = tl.constexpr(2.0**-32)  # so that hash 2**32 - 1 counts like its neighbour
LARGEST_HASH = tl.constexpr(float(2**32 - 1))


@triton.jit
def _absorb(state, word):
    """MurmurHash3 x86_32: one more word of the key; all uint32, which wraps."""
    word = word * 0xCC9E2D51
    word = ((word << 15) | (word >> 17)) * 0x1B873593
    state ^= word
    return ((state << 13) | (state >> 19)) * 5 + 0xE6546B64


@triton.jit
def hash_of(seed, position, column):
    """uint32 hashes of one row: ``seed``, ``position`` int64 scalars, ``column`` an integer block."""
    seed = seed.to(tl.uint64)
    state = _absorb(tl.full([1], 0, tl.uint32), (seed & 0xFFFFFFFF).to(tl.uint32))
    state = _absorb(state, (seed >> 32).to(tl.uint32))
    state = _absorb(state, position.to(tl.uint32))
    state = _absorb(state, column.to(tl.uint32))
    state ^= 16  # bytes of the key
    state = (state ^ (state >> 16)) * 0x85EBCA6B
    state = (state ^ (state >> 13)) * 0xC2B2AE35
    return state ^ (state >> 16)


@triton.jit
def gumbel_of(hashes):
    """float64 noise of uint32 hashes: -log(-log(h / (2**32 - 1))), both ends finite."""
    uniform = hashes.to(tl.float64) / LARGEST_HASH
    surprise = -tl.minimum(tl.maximum(tl.log(uniform), LOWEST), -LEAST_SURPRISE)
    return -tl.log(surprise)


@triton.jit
def _noise(seeds, positions, columns, out, width, GUMBEL: tl.constexpr, BLOCK: tl.constexpr):
    """One row, ``BLOCK`` columns."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < width
    column = tl.load(columns + place, mask=inside, other=0)
    hashes = hash_of(tl.load(seeds + row), tl.load(positions + row), column)
    noise = gumbel_of(hashes) if GUMBEL else hashes.to(tl.int64)
    tl.store(out + row * width + place, noise, mask=inside)


def murmur32_triton(seeds: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """Hashes int64 [n, m] in [0, 2**32), equal to ``core.noise.murmur32``.

    ``seeds``, ``positions`` int64 [n]; ``columns`` int64 [m]; positions and columns count modulo 2**32. Raises
    ``ValueError`` for another shape, dtype or device.
    """
    return _launch(seeds, positions, columns, gumbel=False)


def gumbel_triton(seeds: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """Noise float64 [n, m]: ``core.noise.gumbel`` of ``murmur32_triton``, up to the device's logarithm.

    Arguments and errors as there.
    """
    return _launch(seeds, positions, columns, gumbel=True)


def _launch(seeds: Tensor, positions: Tensor, columns: Tensor, gumbel: bool) -> Tensor:
    check("seeds", seeds, torch.int64, (None,), seeds)
    check("positions", positions, torch.int64, seeds.shape, seeds)
    check("columns", columns, torch.int64, (None,), seeds)
    rows, width = len(seeds), len(columns)
    out = torch.empty(rows, width, dtype=torch.float64 if gumbel else torch.int64, device=seeds.device)
    if out.numel():
        _noise[rows, triton.cdiv(width, BLOCK)](seeds, positions, columns, out, width, GUMBEL=gumbel, BLOCK=BLOCK)
    return out
