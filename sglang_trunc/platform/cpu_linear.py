"""Linear layers on the CPU: weights packed once, and a row's result independent of the number of rows.

Where in a round: every projection of every recurrence, and the head.

Contract: a row gets the same bits in a call of 1 row as in a call of 4096, in bfloat16 and in float32; see
``cpu_gemm`` for the order of its sum. Rows of x may be strided. The weight is copied into the packed layout, so
the original may be freed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_trunc.platform.cpu_gemm import PANEL, pack, product


class PackedLinear:
    """``x @ weight.T + bias`` for ``weight [N, K]``, bfloat16 (K even) or float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        if self.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"PackedLinear has weight dtype {self.dtype}; it takes bfloat16 and float32.")
        if self.dtype == torch.bfloat16 and self.in_features % 2:
            raise ValueError(f"PackedLinear has {self.in_features} inputs; bfloat16 needs an even number.")
        self._packed = pack(weight)
        self._bias = None
        if bias is not None:
            self._bias = torch.zeros(self._packed.shape[0] * PANEL)
            self._bias[: self.out_features] = bias

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """``[rows, K]`` to ``[rows, N]``."""
        if x.dtype is not self.dtype or x.stride(-1) != 1:
            raise ValueError(f"PackedLinear of {self.dtype} got x of {x.dtype} with strides {x.stride()}.")
        if out is None:
            out = x.new_empty(x.shape[0], self.out_features)
        return product(x, self._packed, self._bias, out)
