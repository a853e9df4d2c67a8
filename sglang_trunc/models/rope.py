"""Rotation tables from a config, with the scaling rules of the published checkpoints.

One table a model, shared by all layers. Covers ``max_position_embeddings`` and, where the server was started
with a longer ``--context-length``, that length.
"""

from __future__ import annotations

import math

import torch
from sglang.srt.runtime_context import get_model
from torch import Tensor

from sglang_trunc.models.ops import RopeTable


def inverse_frequencies(head_dim: int, theta: float, scaling: dict | None) -> Tensor:
    """float32 ``[head_dim/2]``; ``scaling`` None/"default" or Llama 3's (``rope_type`` "llama3")."""
    inv = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
    if kind == "default":
        return inv
    if kind != "llama3":
        raise ValueError(f"rope_scaling type {kind!r} is not supported; accepted: default, llama3.")
    assert scaling is not None
    factor, low, high = (float(scaling[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(scaling["original_max_position_embeddings"])
    wavelength = 2 * math.pi / inv
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * inv / factor + smooth * inv
    scaled = torch.where(wavelength > original / low, inv / factor, inv)
    medium = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(medium, blended, scaled)


def rope_table(config, *, interleaved: bool, round_tables: bool, round_products: bool) -> RopeTable:
    """The table of a model whose config names ``rope_theta`` and ``rope_parameters`` (see ``configs``)."""
    length = max(config.max_position_embeddings, get_model().context_length or 0)
    dtype = torch.get_default_dtype()
    inv = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_parameters)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inv.to("cpu"))
    cos, sin = angles.cos(), angles.sin()
    if round_tables:
        cos, sin = cos.to(dtype).float(), sin.to(dtype).float()
    device = torch.get_default_device()
    return RopeTable(cos.to(device), sin.to(device), config.head_dim, interleaved, round_products)
