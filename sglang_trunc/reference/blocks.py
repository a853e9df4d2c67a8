"""Pieces shared by both families, in the rounding order of the Hugging Face code.

RMSNorm: statistics in float32, result rounded to the input's dtype, then multiplied by the weight.
Rotary tables are float32 [S, head_dim/2] here; each family decides in which dtype they are applied:

    split_half_rounded   Ouro, retro-Llama: tables rounded to the model's dtype, product in that dtype
    split_half_float32   retro-OLMo: float32 tables, product in float32, one rounding
    adjacent_float32     Huginn: pairs are neighbours instead of halves, all in float32, one rounding

Tensors are [..., S, channels]; attention uses [..., heads, S, head_dim]. There is no cache and no padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class RotaryTables(NamedTuple):
    cos: torch.Tensor  # float32 [S, head_dim / 2]
    sin: torch.Tensor  # float32 [S, head_dim / 2]


Rotation = Callable[[torch.Tensor, RotaryTables], torch.Tensor]


def rotary_tables(
    positions: torch.Tensor, head_dim: int, theta: float, scaling: Mapping[str, Any] | None = None
) -> RotaryTables:
    exponents = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    frequencies = 1.0 / (theta**exponents)
    if scaling is not None:
        frequencies = llama3_frequencies(frequencies, scaling)
    angles = positions.float()[:, None] * frequencies[None, :]
    return RotaryTables(angles.cos(), angles.sin())


def llama3_frequencies(frequencies: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Llama 3 scaling: long wavelengths divided by `factor`, short ones kept, a blend between."""
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind != "llama3":
        raise ValueError(f"rope_scaling type {kind!r} is not supported, only 'llama3' is")
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / factor, frequencies)
    smooth = (original / wavelengths - low) / (high - low)
    blended = (1 - smooth) * scaled / factor + smooth * scaled
    between = ~(wavelengths < original / high) & ~(wavelengths > original / low)
    return torch.where(between, blended, scaled)


def split_half_rounded(x: torch.Tensor, tables: RotaryTables) -> torch.Tensor:
    return _rotate_halves(x, tables.cos.to(x.dtype), tables.sin.to(x.dtype))


def split_half_float32(x: torch.Tensor, tables: RotaryTables) -> torch.Tensor:
    return _rotate_halves(x, tables.cos, tables.sin).to(x.dtype)


def adjacent_float32(x: torch.Tensor, tables: RotaryTables) -> torch.Tensor:
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((first * tables.cos - second * tables.sin, second * tables.cos + first * tables.sin), dim=-1)
    return rotated.flatten(-2).to(x.dtype)


def _rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x * torch.cat((cos, cos), dim=-1) + turned * torch.cat((sin, sin), dim=-1)


def split_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[..., S, heads * hd] -> [..., heads, S, hd]"""
    return x.unflatten(-1, (heads, -1)).transpose(-3, -2)


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[B, H, S, hd] with [B, Hkv, S, hd] keys and values -> [B, S, H * hd]"""
    grouped = q.shape[-3] != k.shape[-3]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return out.transpose(-3, -2).flatten(-2)
