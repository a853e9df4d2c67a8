"""Elementwise operations of the looped blocks, in the rounding order of the published models.

Every block computes through one ``Ops`` object, so that a platform can replace the arithmetic's
*implementation* (fused CPU kernels, see ``platform``) without touching a model, while its *values*
stay: statistics in float32, the result rounded to the model's dtype, then each further product and sum
rounded on its own, as the Hugging Face files do it.

``TorchOps`` runs on any device and is the definition the fused kernels are tested against.

Shapes: ``n`` rows, ``d`` model width, ``D`` head size. Rows never mix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class RopeTable:
    """Rotation tables and the two conventions that differ between the families.

    ``cos``/``sin``: float32 ``[positions, D/2]``, already rounded to the model's dtype where the published
    code rounds them. ``interleaved``: pairs (0,1), (2,3)... instead of halves. ``round_products``: each
    product is rounded to the model's dtype before the sum, as arithmetic in that dtype does.
    """

    cos: Tensor
    sin: Tensor
    head_dim: int
    interleaved: bool
    round_products: bool


class Ops(Protocol):
    """What a looped block needs; see ``TorchOps`` for the definitions."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def residual_plus_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def norm_of_sum(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def silu_mul(self, gate_up: Tensor) -> Tensor: ...

    def rope(self, q: Tensor, k: Tensor, positions: Tensor, table: RopeTable) -> tuple[Tensor, Tensor]: ...


class TorchOps:
    """The definitions, in plain torch."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``weight * round(x / rms(x))`` over the last dimension."""
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * (wide * scale).to(x.dtype)

    def residual_plus_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``residual + rms_norm(x)``: Ouro and OLMo-2 normalise a branch before adding it."""
        return residual + self.rms_norm(x, weight, eps)

    def norm_of_sum(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``rms_norm(x + residual)``: Huginn keeps the residual inside the norm."""
        return self.rms_norm(x + residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) * up`` of ``[n, 2i]``, gate first."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def rope(self, q: Tensor, k: Tensor, positions: Tensor, table: RopeTable) -> tuple[Tensor, Tensor]:
        """Rotated ``q`` ``[n, Hq*D]`` and ``k`` ``[n, Hkv*D]``; the inputs may be views and may be overwritten."""
        cos = table.cos[positions].unsqueeze(1)
        sin = table.sin[positions].unsqueeze(1)
        return _rotate(q, cos, sin, table), _rotate(k, cos, sin, table)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, table: RopeTable) -> Tensor:
    heads = x.reshape(x.shape[0], -1, table.head_dim)
    if table.interleaved:
        first, second = heads[..., 0::2], heads[..., 1::2]
    else:
        first, second = heads.chunk(2, dim=-1)
    if table.round_products:
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    else:
        first, second = first.float(), second.float()
    low, high = first * cos - second * sin, second * cos + first * sin
    rotated = torch.stack((low, high), -1).flatten(-2) if table.interleaved else torch.cat((low, high), -1)
    return rotated.to(x.dtype).flatten(1)
