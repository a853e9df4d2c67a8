"""Ouro: embedding, R passes through the same layers with the final norm closing each pass, head.

Two norms per branch: one on its input, one on its OUTPUT before the residual addition. The normed state of
a pass feeds the next one, so every depth is read out by the bare head. The exit gate is part of the
checkpoint and is never evaluated: the served model reads the last pass always, as every known server does.
Module names are the checkpoint's tensor names.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from sglang_trunc.reference.blocks import (
    RMSNorm,
    RotaryTables,
    causal_attention,
    rotary_tables,
    split_half_rounded,
    split_heads,
)
from sglang_trunc.reference.configs import OuroReferenceConfig
from sglang_trunc.reference.looped import Context, LoopedReference, batched


class OuroAttention(nn.Module):
    def __init__(self, config: OuroReferenceConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        queries, keys = self.heads * config.head_dim, self.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, rotary: RotaryTables) -> torch.Tensor:
        q = split_half_rounded(split_heads(self.q_proj(x), self.heads), rotary)
        k = split_half_rounded(split_heads(self.k_proj(x), self.kv_heads), rotary)
        v = split_heads(self.v_proj(x), self.kv_heads)
        return self.o_proj(causal_attention(q, k, v))


class OuroMLP(nn.Module):
    def __init__(self, config: OuroReferenceConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class OuroLayer(nn.Module):
    def __init__(self, config: OuroReferenceConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = OuroAttention(config)
        self.mlp = OuroMLP(config)
        self.input_layernorm = RMSNorm(width, eps)
        self.input_layernorm_2 = RMSNorm(width, eps)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.post_attention_layernorm_2 = RMSNorm(width, eps)

    def forward(self, h: torch.Tensor, rotary: RotaryTables) -> torch.Tensor:
        h = h + self.input_layernorm_2(self.self_attn(self.input_layernorm(h), rotary))
        return h + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(h)))


class OuroBody(nn.Module):
    def __init__(self, config: OuroReferenceConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(OuroLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.early_exit_gate = nn.Linear(config.hidden_size, 1)


class OuroReference(LoopedReference):
    config: OuroReferenceConfig

    def __init__(self, config: OuroReferenceConfig) -> None:
        super().__init__()
        self.config = config
        self.full_depth, self.vocab_size = config.full_depth, config.vocab_size
        self.width = config.hidden_size
        self.model = OuroBody(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def begin(self, ids: torch.Tensor, state: torch.Tensor | None = None) -> tuple[Context, torch.Tensor]:
        ids, state = batched(ids, state)
        positions = torch.arange(ids.shape[1], device=ids.device)
        rotary = rotary_tables(positions, self.config.head_dim, self.config.rope_theta)
        embedded = self.model.embed_tokens(ids) if state is None else state
        return Context(rotary, None), embedded

    def advance(self, context: Context, state: torch.Tensor) -> torch.Tensor:
        for layer in self.model.layers:
            state = layer(state, context.rotary)
        return self.model.norm(state)

    def readout(self, context: Context, state: torch.Tensor, last_only: bool = False) -> torch.Tensor:
        return self.lm_head(state[:, -1:] if last_only else state)
