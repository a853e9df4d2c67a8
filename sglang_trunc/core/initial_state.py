"""Raven's initial recurrent state as a pure function of (seed, absolute position).

The published code draws a fresh truncated normal for every token from the global random stream, so its
greedy text depends on batch shape and prefill chunking. Here every element is a hash of (seed, position,
column) pushed through the inverse error function: plain decoding, any speculative schedule, chunked
prefill, a prefix-cache hit and a resumed request all see the same state, and a wider model sees the same
leading columns.

    stream(seed, position) = the splitmix64 sequence started at a mixed key; column c takes its element c
    u in (0, 1)            = the top 53 bits of that element, centred in their bucket
    value                  = std * sqrt(2) * erfinv((2u - 1) * erf(3 / sqrt(2))), so within 3 std

Computed in float64, rounded to float32, then to the requested dtype. Contract: the bits of a row depend on
nothing but its own (seed, position, std, dtype).
"""

from __future__ import annotations

import math

import torch

TRUNCATE_AT = 3.0  # in units of std, as in the published initialiser

_WORD = 1 << 64


def _signed(value: int) -> int:
    """The int64 with the same 64 bits as the unsigned `value`."""
    value %= _WORD
    return value - _WORD if value >= _WORD // 2 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MULTIPLY_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = _signed(0x94D049BB133111EB)


def _shift_right(bits: torch.Tensor, count: int) -> torch.Tensor:
    # int64 shifts are arithmetic; the mask makes this one logical
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """Finaliser of splitmix64; int64 products wrap, which is the arithmetic it wants."""
    bits = (bits ^ _shift_right(bits, 30)) * _MULTIPLY_1
    bits = (bits ^ _shift_right(bits, 27)) * _MULTIPLY_2
    return bits ^ _shift_right(bits, 31)


def hash_uniform(positions: torch.Tensor, seed: int, width: int) -> torch.Tensor:
    """float64 [n, width] in the open interval (0, 1), one row per int64 position [n]."""
    positions = positions.to(torch.int64)
    seeded = _mix(torch.full_like(positions, _signed(seed + 1)) * _GOLDEN)
    keys = _mix(seeded ^ _mix((positions + 1) * _GOLDEN))
    columns = torch.arange(1, width + 1, dtype=torch.int64, device=positions.device)
    bits = _mix(keys[:, None] + columns[None, :] * _GOLDEN)
    return (_shift_right(bits, 11).to(torch.float64) + 0.5) * 2.0**-53


def initial_state(positions: torch.Tensor, seed: int, width: int, std: float, dtype: torch.dtype) -> torch.Tensor:
    """[n, width] state rows for int64 positions [n]; all zeros when std is 0.

    `std` is the complete scale: init_values.std * init_scale * embed_scale in a Raven config's terms.
    """
    if positions.dim() != 1:
        raise ValueError(f"positions must have one dimension, got shape {tuple(positions.shape)}")
    if std < 0:
        raise ValueError(f"std must not be negative, got {std}")
    if std == 0:
        return torch.zeros(positions.shape[0], width, dtype=dtype, device=positions.device)
    inside = (2 * hash_uniform(positions, seed, width) - 1) * math.erf(TRUNCATE_AT / math.sqrt(2))
    values = torch.erfinv(inside) * (math.sqrt(2) * std)
    return values.to(torch.float32).to(dtype)
