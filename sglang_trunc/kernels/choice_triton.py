"""Choices and acceptance on the device, without a host round trip.

``argmax_rows_triton`` is the twin of ``choice.argmax_rows``; ``perturbed_argmax_triton`` of
``core.noise.perturbed_argmax`` with ``choice.with_logprobs``; ``count_accepted_triton`` of
``core.trunc.count_accepted``. A round calls the first two after its readouts and the third at the end; the results
stay on the device, so a whole round may lie in a captured graph.

Two kernels a choice: ``_best_of_block`` over ``BLOCK`` columns of a row, ``_best_of_row`` over a row's blocks. Blocks
are counted from column 0 and joined in one reduction whose extent follows V alone: a row has the same bits in any
company.

Noise is added in float64 as SGLang 0.5.23 does (``multinomial_with_seed`` in ``srt/layers/sampler.py``): the sum
score + G decides, also where two sums differ by less than a float32 could show. Only the last bits of G's two
logarithms belong to the device (see ``noise_triton``). Triton's interpreter takes numpy's float64, so it checks
formula, order, ties and masks, not those bits.
"""
# A kernel's parameters are pointers and scalars that only Triton can type.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_trunc.kernels.checks import check, power_of_two
from sglang_trunc.kernels.choice import Choice
from sglang_trunc.kernels.noise_triton import gumbel_of, hash_of

# Float64 noise holds two registers a value; more columns would spill at 4 warps.
BLOCK = 1024
SCORES = (torch.float32, torch.float64)


@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["scores"])
def _best_of_block(
    scores, seeds, positions, bests, columns, tops, masses, width, stride, NOISE: tl.constexpr, BLOCK: tl.constexpr
):
    """One block of one row: the best key with its column, and maximum and mass of the scores without noise."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(scores + row * stride + column, mask=column < width, other=float("-inf"))
    key = score
    if NOISE:
        key = score.to(tl.float64) + gumbel_of(hash_of(tl.load(seeds + row), tl.load(positions + row), column))
    # Comparisons with NaN are false in any order of reduction; as +inf the first one wins.
    key = tl.where(key == key, key, float("inf"))
    best, local = tl.max(key, 0, return_indices=True, return_indices_tie_break_left=True)
    plain = score.to(tl.float32)
    top = tl.max(plain, 0)
    # A block without a finite score has no mass.
    base = tl.where(top == float("-inf"), 0.0, top)
    place = row * tl.num_programs(1) + block
    tl.store(bests + place, best)
    tl.store(columns + place, block * BLOCK + local)
    tl.store(tops + place, top)
    tl.store(masses + place, tl.sum(tl.exp(plain - base), 0))


@triton.jit
def _best_of_row(scores, bests, columns, tops, masses, ids, logprobs, blocks, stride, BLOCKS_PAD: tl.constexpr):
    """One row: the first of its best blocks, and the logprob of that block's column."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS_PAD)
    place = row * blocks + block
    inside = block < blocks
    best = tl.load(bests + place, mask=inside, other=float("-inf"))
    winner = tl.argmax(best, 0, tie_break_left=True)
    column = tl.load(columns + row * blocks + winner).to(tl.int64)
    top = tl.load(tops + place, mask=inside, other=float("-inf"))
    highest = tl.max(top, 0)
    mass = tl.sum(tl.load(masses + place, mask=inside, other=0.0) * tl.exp(top - highest), 0)
    chosen = tl.load(scores + row * stride + column).to(tl.float32)
    tl.store(ids + row, column)
    tl.store(logprobs + row, chosen - highest - tl.log(mass))


@triton.jit
def _count_accepted(chains, choices, lengths, accepted, width, chain_stride, choice_stride, WIDTH_PAD: tl.constexpr):
    """One chain: the place of the first draft that is missing or differs from the choice before it."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, WIDTH_PAD)
    drafted = place < tl.minimum(tl.load(lengths + row), width) - 1
    draft = tl.load(chains + row * chain_stride + place + 1, mask=drafted, other=0)
    verdict = tl.load(choices + row * choice_stride + place, mask=drafted, other=0)
    kept = drafted & (draft == verdict)
    tl.store(accepted + row, tl.min(tl.where(kept, WIDTH_PAD, place), 0).to(tl.int64))


def argmax_rows_triton(scores: Tensor) -> Choice:
    """The best column of each row, the lowest on ties, with its logprob: ``choice.argmax_rows``.

    ``scores`` float32 or float64 [n, V], V >= 1; rows may lie apart. A NaN counts as +inf. Raises ``ValueError`` for
    another shape, dtype or device.
    """
    return _choose(scores, None, None)


def perturbed_argmax_triton(scores: Tensor, seeds: Tensor, positions: Tensor) -> Choice:
    """The column of the largest score + G(seed, position, column) in float64, the lowest on ties, with its logprob.

    ``scores`` float32 or float64 [n, V], V >= 1. SGLang's seeded sampler perturbs log-softmax values; other
    normalisations give the same token up to the rounding of the scores. ``seeds``, ``positions`` int64 [n]. A NaN
    counts as +inf. The logprob is that of the scores without noise. Raises ``ValueError`` for another shape, dtype or
    device.
    """
    check("seeds", seeds, torch.int64, (len(scores),), scores)
    check("positions", positions, torch.int64, (len(scores),), scores)
    return _choose(scores, seeds, positions)


def _choose(scores: Tensor, seeds: Tensor | None, positions: Tensor | None) -> Choice:
    check("scores", scores, SCORES, (None, None), scores)
    rows, width = scores.shape
    if not width:
        raise ValueError("scores: wanted at least one column, got none.")
    device = scores.device
    choice = Choice(torch.empty(rows, dtype=torch.int64, device=device), torch.empty(rows, device=device))
    if not rows:
        return choice
    noisy = seeds is not None
    blocks = triton.cdiv(width, BLOCK)
    bests = torch.empty(rows, blocks, dtype=torch.float64 if noisy else scores.dtype, device=device)
    columns = torch.empty(rows, blocks, dtype=torch.int32, device=device)
    tops, masses = torch.empty(2, rows, blocks, dtype=torch.float32, device=device)
    stride = scores.stride(0)
    _best_of_block[rows, blocks](
        scores,
        seeds if noisy else columns,
        positions if noisy else columns,
        bests,
        columns,
        tops,
        masses,
        width,
        stride,
        NOISE=noisy,
        BLOCK=BLOCK,
    )
    _best_of_row[rows,](scores, bests, columns, tops, masses, *choice, blocks, stride, BLOCKS_PAD=power_of_two(blocks))
    return choice


def count_accepted_triton(chains: Tensor, choices: Tensor, lengths: Tensor) -> Tensor:
    """Drafts kept per request, int64 [bs]: ``core.trunc.count_accepted``.

    ``chains``, ``choices`` int64 [bs, w], w >= 1: node tokens, root first, and the full-depth choice of each node.
    ``lengths`` int64 [bs]: nodes of each chain; what lies behind them is not read. Raises ``ValueError`` for another
    shape, dtype or device.
    """
    check("chains", chains, torch.int64, (None, None), chains)
    check("choices", choices, torch.int64, chains.shape, chains)
    check("lengths", lengths, torch.int64, (len(chains),), chains)
    requests, width = chains.shape
    accepted = torch.empty(requests, dtype=torch.int64, device=chains.device)
    if requests:
        _count_accepted[requests,](
            chains,
            choices,
            lengths,
            accepted,
            width,
            chains.stride(0),
            choices.stride(0),
            WIDTH_PAD=power_of_two(width),
        )
    return accepted
