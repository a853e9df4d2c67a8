"""Shapes of the two looped families, as their config.json files state them.

`from_hf` reads a Hugging Face config dictionary and ignores keys that do not change the forward pass;
`to_hf` writes one that SGLang and `from_hf` both understand. Raven configs do not name their block type
(Huginn and the retrofitted models share class and model_type), so `from_hf` takes it as an argument;
`checkpoint.load_checkpoint` infers it from tensor names.

Names: `full_depth` is R, the recurrences of plain decoding (total_ut_steps / mean_recurrence).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

BlockKind = Literal["huginn", "llama", "olmo2"]
BLOCK_KINDS: tuple[BlockKind, ...] = ("huginn", "llama", "olmo2")
HUGINN_STD = 0.008703882797784892  # what every published Raven config carries, retrofits included


@dataclass(frozen=True)
class OuroReferenceConfig:
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    full_depth: int = 4
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096
    tie_word_embeddings: bool = False
    bos_token_id: int | None = 0
    eos_token_id: int | tuple[int, ...] | None = 0

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> OuroReferenceConfig:
        rope = _rope_parameters(raw)
        if rope.get("rope_type", rope.get("type", "default")) != "default":
            raise ValueError(f"Ouro with scaled RoPE is not supported: {rope}")
        heads = raw["num_attention_heads"]
        return cls(
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_hidden_layers=raw["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            vocab_size=raw["vocab_size"],
            full_depth=raw.get("total_ut_steps", 4),
            rope_theta=float(rope.get("rope_theta", 1e6)),
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            max_position_embeddings=raw.get("max_position_embeddings", 4096),
            tie_word_embeddings=raw.get("tie_word_embeddings", False),
            bos_token_id=raw.get("bos_token_id"),
            eos_token_id=_ids(raw.get("eos_token_id")),
        )

    def to_hf(self, dtype_name: str) -> dict[str, Any]:
        return {
            "architectures": ["OuroForCausalLM"],
            "model_type": "ouro",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "total_ut_steps": self.full_depth,
            "early_exit_threshold": 1.0,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "use_sliding_window": False,
            "sliding_window": None,
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "tie_word_embeddings": self.tie_word_embeddings,
            "use_cache": True,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": _json_ids(self.eos_token_id),
            "torch_dtype": dtype_name,
        }


@dataclass(frozen=True)
class RavenReferenceConfig:
    block: BlockKind
    n_embd: int
    n_heads: int
    num_key_value_heads: int
    prelude_layers: int
    core_layers: int
    coda_layers: int
    intermediate_size: int
    vocab_size: int
    full_depth: int = 32
    norm_eps: float = 1e-6
    rope_theta: float = 5e4
    rope_scaling: Mapping[str, Any] | None = None
    max_position_embeddings: int = 4096
    tie_embeddings: bool = False
    embed_scale: float = 1.0
    init_std: float = HUGINN_STD
    init_scale: float = 1.0
    state_init_seed: int = 0
    bos_token_id: int | None = 0
    eos_token_id: int | tuple[int, ...] | None = 0

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_heads

    @property
    def state_std(self) -> float:
        """Complete scale of the initial state."""
        return self.init_std * self.init_scale * self.embed_scale

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], block: BlockKind) -> RavenReferenceConfig:
        if block not in BLOCK_KINDS:
            raise ValueError(f"block must be one of {BLOCK_KINDS}, got {block!r}")
        huginn = block == "huginn"
        init_values = raw.get("init_values") or {}
        rope = _rope_parameters(raw)
        # rope_base is what Huginn means; in the retrofits it is a leftover that is wrong for TinyLlama
        theta = raw.get("rope_base") if huginn else rope.get("rope_theta", raw.get("rope_base"))
        scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
        return cls(
            block=block,
            n_embd=raw["n_embd"],
            n_heads=raw["n_heads"],
            num_key_value_heads=raw.get("num_key_value_heads") or raw["n_heads"],
            prelude_layers=raw["n_layers_in_prelude"],
            core_layers=raw["n_layers_in_recurrent_block"],
            coda_layers=raw["n_layers_in_coda"],
            intermediate_size=raw["intermediate_size"],
            vocab_size=raw.get("padded_vocab_size") or raw["vocab_size"],
            full_depth=raw.get("mean_recurrence", 32),
            norm_eps=raw.get("norm_eps", 1e-6),
            rope_theta=float(theta if theta is not None else rope.get("rope_theta", 5e4)),
            rope_scaling=_without_theta(rope) if scaled and not huginn else None,
            max_position_embeddings=raw.get("max_position_embeddings") or raw.get("block_size", 4096),
            tie_embeddings=raw.get("tie_embeddings", huginn),
            embed_scale=init_values.get("embed_scale", math.sqrt(raw["n_embd"]) if huginn else 1.0),
            init_std=init_values.get("std", math.sqrt(2 / (5 * raw["n_embd"]))),
            init_scale=raw.get("init_scale", 1.0),
            state_init_seed=raw.get("state_init_seed", 0),
            bos_token_id=raw.get("bos_token_id"),
            eos_token_id=_ids(raw.get("eos_token_id")),
        )

    def to_hf(self, dtype_name: str) -> dict[str, Any]:
        huginn = self.block == "huginn"
        scaling = None if self.rope_scaling is None else dict(self.rope_scaling)
        expected = self.prelude_layers + self.coda_layers + self.core_layers * self.full_depth
        return {
            "architectures": ["RavenForCausalLM"],
            "model_type": "huginn_raven",
            "block_class_name": "SandwichBlock",
            "n_embd": self.n_embd,
            "n_heads": self.n_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "n_layers": self.prelude_layers + self.core_layers + self.coda_layers,
            "n_layers_in_prelude": self.prelude_layers,
            "n_layers_in_recurrent_block": self.core_layers,
            "n_layers_in_coda": self.coda_layers,
            "intermediate_size": self.intermediate_size,
            "vocab_size": self.vocab_size,
            "padded_vocab_size": self.vocab_size,
            "block_size": self.max_position_embeddings,
            "max_position_embeddings": self.max_position_embeddings,
            "norm_eps": self.norm_eps,
            "rope_base": self.rope_theta,
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling,
            "qk_bias": huginn,
            "bias": False,
            "tie_embeddings": self.tie_embeddings,
            "tie_word_embeddings": self.tie_embeddings,
            "injection_type": "linear",
            "state_init": "like-init",
            "init_values": {
                "std": self.init_std,
                "embedding": self.init_std,
                "out_proj": self.init_std / math.sqrt(2 * expected),
                "embed_scale": self.embed_scale,
            },
            "init_scale": self.init_scale,
            "state_init_seed": self.state_init_seed,
            "mean_recurrence": self.full_depth,
            "mean_backprop_depth": 8,
            "effective_expected_depth": expected,
            "test_time_noise": 0,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": _json_ids(self.eos_token_id),
            "torch_dtype": dtype_name,
        }


def _rope_parameters(raw: Mapping[str, Any]) -> dict[str, Any]:
    """rope_theta and rope_scaling, whether the file follows transformers 4 or 5."""
    merged = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    if raw.get("rope_theta") is not None:
        merged.setdefault("rope_theta", raw["rope_theta"])
    return merged


def _ids(value: int | list[int] | tuple[int, ...] | None) -> int | tuple[int, ...] | None:
    return tuple(value) if isinstance(value, list | tuple) else value


def _json_ids(value: int | tuple[int, ...] | None) -> int | list[int] | None:
    return list(value) if isinstance(value, tuple) else value


def _without_theta(rope: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in rope.items() if key != "rope_theta"}
