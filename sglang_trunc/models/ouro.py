"""Ouro (ByteDance/Ouro-*): the whole decoder is the recurrent block.

Prelude: the embedding. Core: every decoder layer, followed by the final norm, at every step; the normed
state feeds the next step and is what the LM head reads. Coda: nothing. So the readout at any depth is the
state itself.

Each layer has two norms around each branch, the second on the branch's output. The exit gate is loaded and
unused: SGLang serves the last step, as every server of these models does (``configs.OuroConfig`` refuses an
exit threshold that asks for something else).

Names follow the Hugging Face checkpoint; facts: arXiv 2510.25741 and the published ``config.json``.
"""

from __future__ import annotations

from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from torch import Tensor, nn

from sglang_trunc.models.checkpoint import load_strictly, ouro_manifest
from sglang_trunc.models.layer_ids import LoopShape
from sglang_trunc.models.looped import Attend, Attention, GatedMLP, LoopedCausalLM, LoopState, Norm
from sglang_trunc.models.ops import Ops
from sglang_trunc.models.rope import rope_table


class OuroLayer(nn.Module):
    """``h + norm2(attention(norm1(h)))``, then the same around the MLP."""

    def __init__(self, config, shape: LoopShape, index: int, rope):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config, shape, "core", index, rope, ("qkv_proj", "o_proj"))
        self.mlp = GatedMLP(config, ("gate_up_proj", "down_proj"))
        self.input_layernorm = Norm(width, eps)
        self.input_layernorm_2 = Norm(width, eps)
        self.post_attention_layernorm = Norm(width, eps)
        self.post_attention_layernorm_2 = Norm(width, eps)

    def forward(self, h: Tensor, positions: Tensor, attend: Attend, ops: Ops) -> Tensor:
        pre, post = self.input_layernorm, self.input_layernorm_2
        branch = self.self_attn(ops.rms_norm(h, pre.weight, pre.eps), positions, attend, ops)
        h = ops.residual_plus_norm(h, branch, post.weight, post.eps)
        pre, post = self.post_attention_layernorm, self.post_attention_layernorm_2
        branch = self.mlp(ops.rms_norm(h, pre.weight, pre.eps), ops)
        return ops.residual_plus_norm(h, branch, post.weight, post.eps)


class OuroModel(nn.Module):
    """Embedding, layers, final norm and the unused exit gate, under the checkpoint's names."""

    def __init__(self, config, shape: LoopShape):
        super().__init__()
        rope = rope_table(config, interleaved=False, round_tables=True, round_products=True)
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(OuroLayer(config, shape, i, rope) for i in range(shape.core))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.early_exit_gate = nn.Linear(config.hidden_size, 1)


class OuroForCausalLM(LoopedCausalLM):
    """Ouro behind SGLang's model interface and the engine's."""

    def __init__(self, config, quant_config=None, prefix: str = ""):
        if quant_config is not None:
            raise ValueError(
                f"quantization {quant_config.get_name()!r} is not supported for Ouro; use an unquantized checkpoint."
            )
        super().__init__(config, config.loop_shape)
        self.model = OuroModel(config, self.shape)
        if config.tie_word_embeddings:
            self.lm_head = self.model.embed_tokens
        else:
            self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)

    def embed(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> LoopState:
        return LoopState(self.model.embed_tokens(input_ids), None)

    def recur(self, state: LoopState, positions: Tensor, attend: Attend) -> LoopState:
        h = state.hidden
        for layer in self.model.layers:
            h = layer(h, positions, attend, self.ops)
        norm = self.model.norm
        return LoopState(self.ops.rms_norm(h, norm.weight, norm.eps), None)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def readout(self, state: LoopState, positions: Tensor, attend: Attend) -> Tensor:
        return state.hidden

    def load_weights(self, weights) -> set[str]:
        return load_strictly(self, weights, ouro_manifest(self.config))


EntryClass = OuroForCausalLM
