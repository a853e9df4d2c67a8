"""What the GPU-less platform does to a freshly loaded model: packed products and fused operations.

Called once by SGLang (``SRTPlatform.post_load_model``) in the worker. bf16 and float32 weights are repacked
(``cpu_linear``) and the unpacked copy is released, so memory does not grow. A model of another plugin or of
SGLang's own keeps its methods: only looped models are touched.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.linear import LinearBase
from torch import Tensor, nn

from sglang_trunc.models.looped import LoopedCausalLM
from sglang_trunc.platform.cpu_linear import PackedLinear
from sglang_trunc.platform.cpu_ops import CpuOps


class PackedLinearMethod:
    """A ``quant_method`` for SGLang's linear layers and LM head over one ``PackedLinear``."""

    packs_lm_head = True  # LogitsProcessor and LoopedCausalLM.logits then call ``apply``

    def __init__(self, weight: Tensor):
        self.packed = PackedLinear(weight)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if bias is not None:
            raise NotImplementedError("packed linear layers have no bias")
        return self.packed(x)

    def embedding(self, layer: Any, token_ids: Tensor) -> Tensor:
        """For a head that is the embedding as well; its weight is kept."""
        return F.embedding(token_ids, layer.weight)


def prepare_model(model: nn.Module) -> None:
    """Repack the linear layers of a looped model in place and give it the fused operations."""
    if not isinstance(model, LoopedCausalLM):
        return
    model.ops = CpuOps()
    for module in model.modules():
        if isinstance(module, LinearBase):
            _pack(module, keep_weight=False)
    tied = model.lm_head is model.get_input_embeddings()
    _pack(model.lm_head, keep_weight=tied)


def _pack(layer: Any, keep_weight: bool) -> None:
    weight = layer.weight.data
    if weight.dtype not in (torch.bfloat16, torch.float32) or weight.shape[1] % 2:
        return
    layer.quant_method = PackedLinearMethod(weight)
    if not keep_weight:
        # SGLang reads shape and dtype of the parameter in places; the data would be a second copy.
        layer.weight.data = torch.empty(0, dtype=weight.dtype)
