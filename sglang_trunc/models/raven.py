"""Raven: Huginn-0125 and the retrofitted Llama, TinyLlama and OLMo-2 (``RavenForCausalLM``).

Prelude: embedding and ``P`` blocks, giving the vector ``e`` that every step injects. Step: adapter over
``concat(state, e)``, then ``C`` core blocks. Readout: [``ln_f``,] ``D`` coda blocks, ``ln_f``, LM head. The
coda attends with KV of its own, written at each readout and valid at full depth once the token is verified.

Three kinds of block share these names; the published configs do not tell them apart, the checkpoint's
tensor names do (``tensor_names.detect_block_kind``):

* ``huginn``: ``x = n2(attn(n1 x) + x)``, ``x = n4(mlp(n3 x) + x)``; biases on q and k; RoPE on adjacent
  pairs; embeddings scaled by sqrt(d); ``ln_f`` before the coda as well;
* ``llama``: pre-norm blocks; RoPE on halves in the model's dtype;
* ``olmo2``: norms on the branches' outputs, RMS norms over the whole q and k projections.

The initial state is a pure function of (seed, absolute position), see ``core.initial_state``: chunked
prefill, prefix cache, retraction and every schedule then agree. Facts: arXiv 2502.05171 and 2511.07384.
"""

from __future__ import annotations

import torch
from sglang.srt.distributed import tensor_model_parallel_all_gather
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.runtime_context import get_parallel
from torch import Tensor, nn

from sglang_trunc.core.initial_state import initial_state
from sglang_trunc.models.checkpoint import load_strictly, raven_manifest
from sglang_trunc.models.layer_ids import LoopShape, Part
from sglang_trunc.models.looped import Attend, Attention, GatedMLP, LoopedCausalLM, LoopState, Norm
from sglang_trunc.models.ops import Ops, RopeTable
from sglang_trunc.models.rope import rope_table
from sglang_trunc.models.tensor_names import detect_block_kind

_NAMES = (("Wqkv", "proj"), ("fc", "proj"))


class HuginnAttention(Attention):
    """Adds the learned biases of q and k, in float32, rounded once."""

    def __init__(self, config, *args):
        super().__init__(config, *args)
        heads = config.num_attention_heads
        # Loaded whole on every rank; each rank uses its own heads.
        self.qk_bias = nn.Parameter(torch.zeros(2, 1, heads, config.head_dim))

    def adjust(self, q: Tensor, k: Tensor, ops: Ops) -> tuple[Tensor, Tensor]:
        first = get_parallel().tp_rank * self.q_size
        bias = self.qk_bias.view(2, -1)[:, first : first + self.q_size]
        return q + bias[0], k + bias[1]


class OlmoAttention(Attention):
    """RMS norms over the whole q and k projections (all heads together), before the rotation."""

    def __init__(self, config, *args):
        super().__init__(config, *args)
        self.q_norm = Norm(config.num_attention_heads * config.head_dim, config.norm_eps)
        self.k_norm = Norm(config.num_key_value_heads * config.head_dim, config.norm_eps)

    def adjust(self, q: Tensor, k: Tensor, ops: Ops) -> tuple[Tensor, Tensor]:
        return self._norm(q, self.q_norm, ops), self._norm(k, self.k_norm, ops)

    def _norm(self, x: Tensor, norm: Norm, ops: Ops) -> Tensor:
        parallel = get_parallel()
        if parallel.tp_size == 1:
            return ops.rms_norm(x.contiguous(), norm.weight, norm.eps)
        whole = tensor_model_parallel_all_gather(x.contiguous())
        whole = ops.rms_norm(whole, norm.weight, norm.eps)
        return whole.chunk(parallel.tp_size, dim=-1)[parallel.tp_rank].contiguous()


class HuginnBlock(nn.Module):
    """Sandwich block with the residual inside the output norms."""

    def __init__(self, config, shape: LoopShape, part: Part, index: int, rope: RopeTable):
        super().__init__()
        width, eps = config.hidden_size, config.norm_eps
        self.attn = HuginnAttention(config, shape, part, index, rope, _NAMES[0])
        self.mlp = GatedMLP(config, _NAMES[1])
        self.norm_1, self.norm_2 = Norm(width, eps), Norm(width, eps)
        self.norm_3, self.norm_4 = Norm(width, eps), Norm(width, eps)

    def forward(self, x: Tensor, positions: Tensor, attend: Attend, ops: Ops) -> Tensor:
        branch = self.attn(ops.rms_norm(x, self.norm_1.weight, self.norm_1.eps), positions, attend, ops)
        x = ops.norm_of_sum(branch, x, self.norm_2.weight, self.norm_2.eps)
        branch = self.mlp(ops.rms_norm(x, self.norm_3.weight, self.norm_3.eps), ops)
        return ops.norm_of_sum(branch, x, self.norm_4.weight, self.norm_4.eps)


class LlamaBlock(nn.Module):
    """Pre-norm block."""

    def __init__(self, config, shape: LoopShape, part: Part, index: int, rope: RopeTable):
        super().__init__()
        self.attn = Attention(config, shape, part, index, rope, _NAMES[0])
        self.mlp = GatedMLP(config, _NAMES[1])
        self.norm_1 = Norm(config.hidden_size, config.norm_eps)
        self.norm_2 = Norm(config.hidden_size, config.norm_eps)

    def forward(self, x: Tensor, positions: Tensor, attend: Attend, ops: Ops) -> Tensor:
        x = x + self.attn(ops.rms_norm(x, self.norm_1.weight, self.norm_1.eps), positions, attend, ops)
        return x + self.mlp(ops.rms_norm(x, self.norm_2.weight, self.norm_2.eps), ops)


class OlmoBlock(nn.Module):
    """Norms on the branches' outputs."""

    def __init__(self, config, shape: LoopShape, part: Part, index: int, rope: RopeTable):
        super().__init__()
        self.attn = OlmoAttention(config, shape, part, index, rope, _NAMES[0])
        self.mlp = GatedMLP(config, _NAMES[1])
        self.norm_1 = Norm(config.hidden_size, config.norm_eps)
        self.norm_2 = Norm(config.hidden_size, config.norm_eps)

    def forward(self, x: Tensor, positions: Tensor, attend: Attend, ops: Ops) -> Tensor:
        branch = self.attn(x, positions, attend, ops)
        x = ops.residual_plus_norm(x, branch, self.norm_1.weight, self.norm_1.eps)
        branch = self.mlp(x, ops)
        return ops.residual_plus_norm(x, branch, self.norm_2.weight, self.norm_2.eps)


_BLOCKS = {"huginn": HuginnBlock, "llama": LlamaBlock, "olmo2": OlmoBlock}
# (interleaved, round_tables, round_products) of the rotation.
_ROPE = {"huginn": (True, False, False), "llama": (False, True, True), "olmo2": (False, False, False)}


class RavenTransformer(nn.Module):
    """All weights but the LM head, under the checkpoint's names."""

    def __init__(self, config, shape: LoopShape, kind: str):
        super().__init__()
        width = config.hidden_size
        interleaved, round_tables, round_products = _ROPE[kind]
        rope = rope_table(config, interleaved=interleaved, round_tables=round_tables, round_products=round_products)
        self.wte = VocabParallelEmbedding(config.vocab_size, width)

        def blocks(part: Part, count: int) -> nn.ModuleList:
            return nn.ModuleList(_BLOCKS[kind](config, shape, part, i, rope) for i in range(count))

        self.prelude = blocks("prelude", shape.prelude)
        self.core_block = blocks("core", shape.core)
        self.coda = blocks("coda", shape.coda)
        self.adapter = ReplicatedLinear(2 * width, width, bias=False)
        self.ln_f = Norm(width, config.norm_eps)


class RavenForCausalLM(LoopedCausalLM):
    """Raven behind SGLang's model interface and the engine's."""

    injects = True

    def __init__(self, config, quant_config=None, prefix: str = ""):
        if quant_config is not None:
            raise ValueError(
                f"quantization {quant_config.get_name()!r} is not supported for Raven; use an unquantized checkpoint."
            )
        super().__init__(config, config.loop_shape)
        self.kind = detect_block_kind(config)
        self.transformer = RavenTransformer(config, self.shape, self.kind)
        if config.tie_word_embeddings:
            self.lm_head = self.transformer.wte
        else:
            self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)

    def embed(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> LoopState:
        config = self.config
        e = self.transformer.wte(input_ids)
        if self.kind == "huginn":
            e = e * config.embed_scale
        for block in self.transformer.prelude:
            e = block(e, positions, attend, self.ops)
        start = initial_state(
            positions,
            seed=config.state_init_seed,
            width=config.hidden_size,
            std=config.state_std,
            dtype=e.dtype,
        )
        return LoopState(start, e)

    def recur(self, state: LoopState, positions: Tensor, attend: Attend) -> LoopState:
        assert state.injected is not None
        x, _ = self.transformer.adapter(torch.cat((state.hidden, state.injected), dim=-1))
        for block in self.transformer.core_block:
            x = block(x, positions, attend, self.ops)
        return LoopState(x, state.injected)

    def get_input_embeddings(self) -> nn.Module:
        return self.transformer.wte

    def readout(self, state: LoopState, positions: Tensor, attend: Attend) -> Tensor:
        norm = self.transformer.ln_f
        x = state.hidden
        if self.kind == "huginn":
            x = self.ops.rms_norm(x, norm.weight, norm.eps)
        for block in self.transformer.coda:
            x = block(x, positions, attend, self.ops)
        return self.ops.rms_norm(x, norm.weight, norm.eps)

    def load_weights(self, weights) -> set[str]:
        return load_strictly(self, weights, raven_manifest(self.config, self.kind))


EntryClass = RavenForCausalLM
