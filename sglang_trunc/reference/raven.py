"""Raven: prelude, a core that is looped with the prelude's output injected each time, coda, head.

One class for the published block kinds, which share config class and model_type:

    huginn  sandwich norms with the residual inside the output norms, bias on q and k, adjacent rotary pairs,
            embeddings scaled by sqrt(width), one more norm between loop and coda, head tied to the embedding
    llama   pre-norm blocks (retrofitted Llama and TinyLlama), grouped queries, Llama 3 rotary scaling
    olmo2   norms on branch outputs, q and k normed over the whole projection before the heads are split

A recurrence is adapter(concat(state, prelude output)) followed by the core blocks. The entering state is
`core.initial_state`, a pure function of (seed, position). Module names are the checkpoint's tensor names.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from sglang_trunc.core.initial_state import initial_state
from sglang_trunc.reference.blocks import (
    RMSNorm,
    RotaryTables,
    Rotation,
    adjacent_float32,
    causal_attention,
    rotary_tables,
    split_half_float32,
    split_half_rounded,
    split_heads,
)
from sglang_trunc.reference.configs import BlockKind, RavenReferenceConfig
from sglang_trunc.reference.looped import Context, LoopedReference, batched

ROTATIONS: dict[BlockKind, Rotation] = {
    "huginn": adjacent_float32,
    "llama": split_half_rounded,
    "olmo2": split_half_float32,
}


class RavenAttention(nn.Module):
    def __init__(self, config: RavenReferenceConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.n_heads, config.num_key_value_heads
        self.queries, self.keys = self.heads * config.head_dim, self.kv_heads * config.head_dim
        self.rotate = ROTATIONS[config.block]
        self.Wqkv = nn.Linear(config.n_embd, self.queries + 2 * self.keys, bias=False)
        self.proj = nn.Linear(self.queries, config.n_embd, bias=False)
        self.qk_bias: nn.Parameter | None = None
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.block == "huginn":
            self.qk_bias = nn.Parameter(torch.zeros(2, 1, self.heads, config.head_dim))
        if config.block == "olmo2":
            self.q_norm = RMSNorm(self.queries, config.norm_eps)
            self.k_norm = RMSNorm(self.keys, config.norm_eps)

    def forward(self, x: torch.Tensor, rotary: RotaryTables) -> torch.Tensor:
        q, k, v = self.Wqkv(x).split((self.queries, self.keys, self.keys), dim=-1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = split_heads(q, self.heads), split_heads(k, self.kv_heads), split_heads(v, self.kv_heads)
        if self.qk_bias is not None:
            q_bias, k_bias = self.qk_bias.transpose(1, 2).unbind(0)  # each [H, 1, hd]
            q, k = (q + q_bias).to(q.dtype), (k + k_bias).to(k.dtype)
        return self.proj(causal_attention(self.rotate(q, rotary), self.rotate(k, rotary), v))


class RavenMLP(nn.Module):
    def __init__(self, config: RavenReferenceConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(config.n_embd, 2 * config.intermediate_size, bias=False)  # rows [gate | up]
        self.proj = nn.Linear(config.intermediate_size, config.n_embd, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.fc(x).chunk(2, dim=-1)
        return self.proj(F.silu(gate) * up)


class RavenBlock(nn.Module):
    def __init__(self, config: RavenReferenceConfig) -> None:
        super().__init__()
        self.kind = config.block
        self.norm_1 = RMSNorm(config.n_embd, config.norm_eps)
        self.norm_2 = RMSNorm(config.n_embd, config.norm_eps)
        if config.block == "huginn":
            self.norm_3 = RMSNorm(config.n_embd, config.norm_eps)
            self.norm_4 = RMSNorm(config.n_embd, config.norm_eps)
        self.attn = RavenAttention(config)
        self.mlp = RavenMLP(config)

    def forward(self, x: torch.Tensor, rotary: RotaryTables) -> torch.Tensor:
        if self.kind == "huginn":
            x = self.norm_2(self.attn(self.norm_1(x), rotary) + x)
            return self.norm_4(self.mlp(self.norm_3(x)) + x)
        if self.kind == "olmo2":
            x = x + self.norm_1(self.attn(x, rotary))
            return x + self.norm_2(self.mlp(x))
        x = x + self.attn(self.norm_1(x), rotary)
        return x + self.mlp(self.norm_2(x))


class RavenBody(nn.Module):
    def __init__(self, config: RavenReferenceConfig) -> None:
        super().__init__()

        def blocks(count: int) -> nn.ModuleList:
            return nn.ModuleList(RavenBlock(config) for _ in range(count))

        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.prelude = blocks(config.prelude_layers)
        self.adapter = nn.Linear(2 * config.n_embd, config.n_embd, bias=False)
        self.core_block = blocks(config.core_layers)
        self.coda = blocks(config.coda_layers)
        self.ln_f = RMSNorm(config.n_embd, config.norm_eps)


class RavenReference(LoopedReference):
    config: RavenReferenceConfig

    def __init__(self, config: RavenReferenceConfig) -> None:
        super().__init__()
        self.config = config
        self.full_depth, self.vocab_size, self.width = config.full_depth, config.vocab_size, config.n_embd
        self.transformer = RavenBody(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.transformer.wte.weight

    def entering_state(self, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        config = self.config
        return initial_state(positions, config.state_init_seed, config.n_embd, config.state_std, dtype)

    def begin(self, ids: torch.Tensor, state: torch.Tensor | None = None) -> tuple[Context, torch.Tensor]:
        ids, state = batched(ids, state)
        config = self.config
        positions = torch.arange(ids.shape[1], device=ids.device)
        rotary = rotary_tables(positions, config.head_dim, config.rope_theta, config.rope_scaling)
        x = self.transformer.wte(ids)
        if config.embed_scale != 1.0:
            x = x * config.embed_scale
        for block in self.transformer.prelude:
            x = block(x, rotary)
        if state is None:
            state = self.entering_state(positions, x.dtype)[None].expand_as(x)
        return Context(rotary, x), state

    def advance(self, context: Context, state: torch.Tensor) -> torch.Tensor:
        assert context.injected is not None
        x = self.transformer.adapter(torch.cat((state, context.injected), dim=-1))  # state first
        for block in self.transformer.core_block:
            x = block(x, context.rotary)
        return x

    def readout(self, context: Context, state: torch.Tensor, last_only: bool = False) -> torch.Tensor:
        ln_f = self.transformer.ln_f
        x = ln_f(state) if self.config.block == "huginn" else state
        for block in self.transformer.coda:
            x = block(x, context.rotary)
        return self.lm_head(ln_f(x[:, -1:] if last_only else x))
