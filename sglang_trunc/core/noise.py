"""Seeded noise: SGLang's, bit for bit, so that sampling is "greedy on perturbed logits".

The token at (seed, position) is the argmax over columns of logprob + G(seed, position, column), where G is a standard
Gumbel variable read from a 32-bit murmur hash in float64. The hash is the only source of chance: no stream, no state.
Any schedule that sees the same logprobs at a position draws the same token there, and a draft drawn with the same noise
agrees with full depth unless the two distributions themselves part.

Source: SGLang 0.5.23, ``multinomial_with_seed`` (``srt/layers/sampler.py``) and ``murmur_hash32``
(``kernels/ops/sampling/murmur_hash.py``). A column is a token id where nothing is filtered, else a rank in the sorted
order; ``core.sampling`` decides. Contract: a row's result depends on that row's inputs alone. Logarithms are the
device's own: two devices share every hash, but may differ in a last bit of G.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

WORD = 1 << 32  # hashes, positions and columns are numbers below this
PURPOSES = 1 << 16  # columns kept for `coin`, behind any vocabulary

# Below this many columns the dense formula is quicker than looking for those that could win.
PRUNE_FROM = 4096


def _signed(value: int) -> int:
    """The int32 with the same 32 bits as the unsigned `value`."""
    return (value ^ 0x80000000) - 0x80000000


# MurmurHash3 x86_32; int32 products wrap, which is the arithmetic it wants.
_BLOCK_1, _BLOCK_2 = _signed(0xCC9E2D51), _signed(0x1B873593)
_STATE_ADD = _signed(0xE6546B64)
_FINAL_1, _FINAL_2 = _signed(0x85EBCA6B), _signed(0xC2B2AE35)
_KEY_BYTES = 16  # seed 8, position 4, column 4

_LOWEST = torch.finfo(torch.float64).min
_LEAST_SURPRISE = 2.0**-32  # so that hash 2**32 - 1 counts like its neighbour


def murmur32(seeds: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """Hashes int64 [n, m] in [0, 2**32).

    ``seeds`` int64 [n]: all 64 bits count, negative ones too. ``positions`` int64 [n] and ``columns`` int64 [m] count
    modulo 2**32. Equal to SGLang's ``murmur_hash32``. ValueError unless the shapes are as said.
    """
    _check_keys(seeds, positions)
    if columns.dim() != 1:
        raise ValueError(f"columns must have one dimension, got shape {tuple(columns.shape)}")
    states = _row_states(seeds, positions)
    return _finish(states.unsqueeze(1), _block(_words(columns)[::2])).to(torch.int64).bitwise_and_(WORD - 1)


def gumbel(hashes: Tensor) -> Tensor:
    """Noise float64, same shape, from int64 hashes in [0, 2**32): -log(-log(h / (2**32 - 1))).

    Increasing in the hash, from -709.8 at 0 to 22.18 at 2**32 - 1, whose own noise would be infinite.
    """
    uniforms = hashes.to(torch.float64) / (WORD - 1)
    surprise = uniforms.log_().clamp_(min=_LOWEST, max=-_LEAST_SURPRISE).neg_()
    return surprise.log_().neg_()


def perturbed_argmax(logprobs: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """int64 [n]: the column of the largest ``logprobs`` + noise, in float64; the lowest one on ties.

    ``logprobs`` float [n, m], m >= 1, not changed; a constant added to a row changes nothing. ``seeds``, ``positions``
    int64 [n]. The twin of SGLang's ``multinomial_with_seed``, which returns [n, 1]. The first NaN wins, as in
    torch.argmax. ValueError unless the shapes are as said. Accelerators compute every column and never wait for the
    host; CPUs skip columns that cannot win.
    """
    _check_keys(seeds, positions)
    if logprobs.dim() != 2 or len(logprobs) != len(seeds) or not logprobs.shape[1]:
        raise ValueError(f"logprobs must be [{len(seeds)}, m >= 1], got shape {tuple(logprobs.shape)}")
    if logprobs.device.type != "cpu" or logprobs.shape[1] < PRUNE_FROM:
        return _dense_argmax(logprobs, seeds, positions)
    return _pruned_argmax(logprobs, seeds, positions)


def coin(seeds: Tensor, positions: Tensor, purpose: int) -> Tensor:
    """Uniforms float64 [n] in [0, 1), multiples of 2**-32: independent of the noise and of other purposes' coins.

    ``seeds``, ``positions`` int64 [n]. ``purpose`` in [0, 65536) names what the coin decides; ValueError otherwise. The
    coin is the hash of column 2**32 - 1 - purpose, which no vocabulary reaches. Used by the residual policy.
    """
    if not 0 <= purpose < PURPOSES:
        raise ValueError(f"purpose must be in [0, {PURPOSES}), got {purpose}")
    column = torch.full((1,), WORD - 1 - purpose, dtype=torch.int64, device=seeds.device)
    return murmur32(seeds, positions, column).squeeze(1).to(torch.float64) / WORD


def _check_keys(seeds: Tensor, positions: Tensor) -> None:
    if seeds.dim() != 1 or seeds.shape != positions.shape:
        raise ValueError(f"seeds and positions must be [n], got {tuple(seeds.shape)} and {tuple(positions.shape)}")


def _dense_argmax(logprobs: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    columns = torch.arange(logprobs.shape[1], dtype=torch.int32, device=logprobs.device)
    hashes = _finish(_row_states(seeds, positions).unsqueeze(1), _block(columns))
    return _perturbed(logprobs, hashes).argmax(1)


def _perturbed(logprobs: Tensor, hashes: Tensor) -> Tensor:
    """float64: ``logprobs`` plus the noise of int32 ``hashes``, elementwise."""
    return gumbel(hashes.to(torch.int64).bitwise_and_(WORD - 1)).add_(logprobs)


def _pruned_argmax(logprobs: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Equal to the dense formula, row by row: one row's columns stay in the processor's cache."""
    states = _row_states(seeds, positions)
    blocks = _block(torch.arange(logprobs.shape[1], dtype=torch.int32))
    winners = torch.empty(len(states), dtype=torch.int64)
    for row, (values, state) in enumerate(zip(logprobs, states, strict=True)):
        hashes = _finish(state, blocks)
        winner = _winner(values, hashes)
        if winner is None:
            winner = int(_perturbed(values, hashes).argmax())
        winners[row] = winner
    return winners


def _winner(logprobs: Tensor, hashes: Tensor) -> int | None:
    """Column of the largest perturbed value; None where the bounds below say nothing (NaN, infinite, huge).

    ``logprobs`` float [m], ``hashes`` int32 [m]. With u = h / (2**32 - 1), the surprise -log(u) is at least 1 - u, so
    at least max(d, 1) / 2**32 for d = 2**32 - 1 - h. Hence noise <= log(2**32) - log(max(d, 1)): one float32 logarithm
    bounds every column from above, closely where the noise is large. A column bounded below a value that another one
    reaches is out; the few others are computed as the dense formula does, in the order of their columns.
    """
    bounds = _upper_bounds(logprobs, hashes)
    top = float(bounds.amax())
    if not abs(top) < 1e30:
        return None
    floor = top - 1  # most often the winner lies within 1 of its bound
    for _ in range(2):
        columns = (bounds >= floor).nonzero().squeeze(1)
        values = _perturbed(logprobs[columns], hashes[columns])
        best, index = values.max(0)
        reached = float(best)
        # float32 rounding of the bounds that matter, and of the floor, is under 6e-5 + 3e-7 * |reached|.
        safe = reached - 1e-4 - 1e-6 * abs(reached)
        if safe >= floor:
            break
        floor = safe  # the second time `reached` can only have grown
    return int(columns[index])


def _upper_bounds(logprobs: Tensor, hashes: Tensor) -> Tensor:
    """float32 [m]: at least logprob + noise, up to float32 rounding."""
    # Half of d fits a signed word; halving rounds down, so the bound stays one. At d < 2 it is max(d, 1) / 2.
    halves = _shift_right(~hashes, 1).to(torch.float32).clamp_(min=0.5)
    return torch.sub(logprobs.to(torch.float32), halves.log_()).add_(31 * math.log(2))


def _row_states(seeds: Tensor, positions: Tensor) -> Tensor:
    """int32 [n]: the hash after the seed's two words and the position."""
    low, high, position, _ = _block(_words(torch.stack((seeds, positions), dim=1))).unbind(1)
    return _absorb(_absorb(_absorb(torch.zeros_like(low), low), high), position)


def _words(numbers: Tensor) -> Tensor:
    """int32 [..., 2k]: the words of integers [..., k], low word first."""
    return numbers.to(torch.int64).contiguous().view(torch.int32)


def _finish(states: Tensor, blocks: Tensor) -> Tensor:
    """int32 hashes of ``states`` and one more ``blocks``, broadcast against each other."""
    bits = _absorb(states, blocks)
    bits ^= _KEY_BYTES
    bits ^= _shift_right(bits, 16)
    bits *= _FINAL_1
    bits ^= _shift_right(bits, 13)
    bits *= _FINAL_2
    bits ^= _shift_right(bits, 16)
    return bits


def _absorb(states: Tensor, blocks: Tensor) -> Tensor:
    bits = _rotate(states ^ blocks, 13)
    bits *= 5
    bits += _STATE_ADD
    return bits


def _block(words: Tensor) -> Tensor:
    """int32: key words scrambled for ``_absorb``."""
    return _rotate(words * _BLOCK_1, 15) * _BLOCK_2


def _rotate(bits: Tensor, count: int) -> Tensor:
    wrapped = _shift_right(bits, 32 - count)
    wrapped |= bits << count
    return wrapped


def _shift_right(bits: Tensor, count: int) -> Tensor:
    # int32 shifts are arithmetic; the mask makes this one logical
    shifted = bits >> count
    shifted &= (1 << (32 - count)) - 1
    return shifted
