"""SGLang attention backend of the GPU-less platform: every query row is a lane.

Plain prefill and plain decode run through it as ``RadixAttention`` calls; the engine's mixed-depth lanes call
the same kernel (``cpu_attention.lane_attention``) directly. One kernel, one order of summation a row: so a
row's bits do not depend on whether it was prefilled, decoded or verified, nor on its neighbours.

A row is described by where its slot ids start in the flat ``req_to_token`` table, how many there are, and
what is added to them (0 here: the pool's per-layer view already is one step's). Layers that the kernel does
not know (sliding window, cross attention, logit cap) are refused by name.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from torch import Tensor

from sglang_trunc.models.looped import LoopedCausalLM
from sglang_trunc.platform.cpu_attention import lane_attention
from sglang_trunc.platform.cpu_elementwise import store_rows
from sglang_trunc.platform.names import ATTENTION_BACKEND
from sglang_trunc.platform.sampling import refuse_deterministic


class RowPlan(NamedTuple):
    """Where the rows of one forward pass read; computed once, used by every layer."""

    kv_start: Tensor  # int64 [rows]: offset of the row's request in the flat req_to_token table
    kv_len: Tensor  # int64 [rows]
    kv_offset: Tensor  # int64 [rows]: zeros


class CpuLaneBackend(AttentionBackend):
    """Prefill and decode as independent rows."""

    needs_cpu_seq_lens = False

    def __init__(self, model_runner):
        super().__init__()
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.pool = model_runner.token_to_kv_pool
        self.plan: RowPlan | None = None

    def init_forward_metadata(self, forward_batch) -> None:
        requests = forward_batch.req_pool_indices.to(torch.int64) * self.req_to_token.shape[1]
        if forward_batch.forward_mode.is_decode_or_idle():
            lengths = forward_batch.seq_lens.to(torch.int64)
        else:
            counts = forward_batch.extend_seq_lens.to(torch.int64)
            requests = requests.repeat_interleave(counts)
            lengths = forward_batch.positions.to(torch.int64) + 1
        self.plan = RowPlan(requests, lengths, torch.zeros_like(lengths))

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **_):
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **_):
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, layer, forward_batch, save: bool) -> Tensor:
        _refuse_unknown(layer)
        assert self.plan is not None
        rows_k, rows_v = self.pool.rows(layer.layer_id)
        if save and k is not None:
            store_rows(k.flatten(1), v.flatten(1), rows_k, rows_v, forward_batch.out_cache_loc)
        q = q.reshape(q.shape[0], -1)
        out = torch.empty_like(q)
        lane_attention(
            q,
            rows_k,
            rows_v,
            self.req_to_token.view(-1),
            self.plan.kv_start,
            self.plan.kv_len,
            self.plan.kv_offset,
            out,
            layer.scaling,
            layer.tp_k_head_num,
        )
        return out

    def support_triton(self) -> bool:
        return False


def _refuse_unknown(layer) -> None:
    for name, unsupported in (
        ("sliding window", (layer.sliding_window_size or -1) > -1),
        ("cross attention", layer.is_cross_attention),
        ("logit cap", layer.logit_cap != 0.0),
        ("non-causal attention", layer.attn_type != AttentionType.DECODER),
        ("different K and V head sizes", layer.qk_head_dim != layer.v_head_dim),
    ):
        if unsupported:
            raise NotImplementedError(
                f"attention backend {ATTENTION_BACKEND!r} does not support {name} "
                f"(KV layer {layer.layer_id}); use --attention-backend torch_native."
            )


def create(model_runner) -> AttentionBackend:
    """The backend of this platform for the model at hand; torch's own attention for one that is not looped."""
    if isinstance(model_runner.model, LoopedCausalLM):
        return CpuLaneBackend(model_runner)
    refuse_deterministic(model_runner.model)
    return ATTENTION_BACKENDS["torch_native"](model_runner)


def register() -> None:
    """Make the backend known to SGLang in this process."""
    if ATTENTION_BACKEND not in ATTENTION_BACKENDS:
        register_attention_backend(ATTENTION_BACKEND)(create)
