"""Linear layers on the CPU: weights packed once, and a row's result independent of the number of rows.

Where in a round: every projection of every recurrence, and the head. Decoding on a CPU reads all weights per
tick, so their layout decides the speed: oneDNN's packed bfloat16 layout is read two to three times faster than
the plain one.

Contract: in bfloat16 a row gets the same bits in a call of 1 row as in a call of 4096. oneDNN's product keeps
that from 2 rows on; a single row takes another kernel on some shapes, so calls of fewer than 4 rows are padded
to 4, which is also faster. float32 layers use ``F.linear`` and promise tolerance, not bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST_ROWS = 4


class PackedLinear:
    """``x @ weight.T + bias`` for ``weight [N, K]``; the original weight may be freed afterwards."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.dtype = weight.dtype
        self._padded = torch.zeros(LEAST_ROWS, self.in_features, dtype=weight.dtype)
        self._packed = self._weight = None
        if weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        else:
            self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if rows >= LEAST_ROWS or self.dtype != torch.bfloat16 or rows == 0:
            return self._product(x)
        self._padded[:rows] = x
        return self._product(self._padded)[:rows]

    def _product(self, x: Tensor) -> Tensor:
        if self._packed is None:
            return F.linear(x, self._weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
