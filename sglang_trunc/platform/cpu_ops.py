"""``models.ops.Ops`` over the fused CPU kernels; same values as ``TorchOps``, one call each."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_trunc.models.ops import RopeTable
from sglang_trunc.platform import cpu_elementwise as kernels


class CpuOps:
    """Definitions: ``models.ops.TorchOps``."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        kernels.rms_norm(x, weight, eps, out)
        return out

    def residual_plus_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        kernels.rms_norm_add(x, weight, eps, residual, out)
        return out

    def norm_of_sum(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        kernels.add_rms_norm(x, residual, weight, eps, out)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        kernels.silu_mul(gate_up, out)
        return out

    def rope(self, q: Tensor, k: Tensor, positions: Tensor, table: RopeTable) -> tuple[Tensor, Tensor]:
        kernels.rope(q, k, positions, table.cos, table.sin, table.head_dim, table.interleaved, table.round_products)
        return q, k
