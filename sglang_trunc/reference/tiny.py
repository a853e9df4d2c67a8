"""Random checkpoints of every family, small enough for float32 on a CPU.

Matrices are N(0, 0.055), norm weights 1 + 0.1 N(0, 1), biases non-zero: a swapped norm, a wrong rotary
layout or a missing bias changes most argmaxes (tests/reference checks that). One dial per family sets how
often early depths agree with the full one, that is, how many drafts are accepted:

    Ouro             scale of the branch output norms: smaller means more agreement  (default 0.15)
    Raven families   adapter = [dial * I | I] + noise: smaller means more agreement
                     (default 0.4; Huginn 0.2)

`write_tiny` writes config, weights and a 512-entry byte-level tokenizer; `build_tiny` returns the model.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sglang_trunc.reference.checkpoint import save_checkpoint
from sglang_trunc.reference.configs import HUGINN_STD, OuroReferenceConfig, RavenReferenceConfig
from sglang_trunc.reference.looped import LoopedReference
from sglang_trunc.reference.ouro import OuroReference
from sglang_trunc.reference.raven import RavenReference
from sglang_trunc.reference.tokenizer import TINY_VOCAB, byte_tokenizer, save_tokenizer

MATRIX_STD = 0.055
ADAPTER_NOISE = 0.01
HUGINN_MLP_GAIN = 3.0  # with a tied head and weaker branches the model would only repeat its input
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,  # small, so that all three frequency bands occur
}

_OURO = OuroReferenceConfig(
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=64,
    vocab_size=TINY_VOCAB,
)
_LLAMA = RavenReferenceConfig(
    block="llama",
    n_embd=256,
    n_heads=4,
    num_key_value_heads=2,
    prelude_layers=1,
    core_layers=2,
    coda_layers=1,
    intermediate_size=512,
    vocab_size=TINY_VOCAB,
    full_depth=8,
    norm_eps=1e-5,
    rope_theta=5e5,
    rope_scaling=LLAMA3_SCALING,
)
_OLMO = replace(_LLAMA, block="olmo2", n_heads=2, num_key_value_heads=2, norm_eps=1e-6, rope_scaling=None)
_HUGINN = RavenReferenceConfig(
    block="huginn",
    n_embd=192,
    n_heads=2,
    num_key_value_heads=2,
    prelude_layers=2,
    core_layers=4,
    coda_layers=2,
    intermediate_size=256,
    vocab_size=TINY_VOCAB,
    full_depth=8,
    max_position_embeddings=2048,
    tie_embeddings=True,
    embed_scale=192**0.5,
    init_std=(2 / (5 * 192)) ** 0.5,
)
TINY_CONFIGS: dict[str, OuroReferenceConfig | RavenReferenceConfig] = {
    "ouro": _OURO,
    "ouro-gqa": replace(_OURO, num_key_value_heads=2),
    "huginn": _HUGINN,
    "retro-llama": replace(_LLAMA, init_std=HUGINN_STD),
    "retro-olmo2": _OLMO,
}
FAMILIES = tuple(TINY_CONFIGS)
DEFAULT_DIAL = {"ouro": 0.15, "ouro-gqa": 0.15, "huginn": 0.2, "retro-llama": 0.4, "retro-olmo2": 0.4}


def build_tiny(family: str, seed: int = 0, dial: float | None = None, **overrides: Any) -> LoopedReference:
    """A random float32 model; `overrides` replace fields of its config dataclass."""
    if family not in TINY_CONFIGS:
        raise ValueError(f"family must be one of {FAMILIES}, got {family!r}")
    config = replace(TINY_CONFIGS[family], **overrides)
    dial = DEFAULT_DIAL[family] if dial is None else dial
    generator = torch.Generator().manual_seed(seed)
    if isinstance(config, OuroReferenceConfig):
        model: LoopedReference = OuroReference(config)
        _randomise(model, generator, embedding_std=1.0)
        _dial_ouro(model, dial)
    else:
        model = RavenReference(config)
        _randomise(model, generator, embedding_std=1.0 / config.embed_scale)
        _dial_raven(model, dial, generator)
    return model.eval()


def write_tiny(
    family: str,
    directory: str | Path,
    seed: int = 0,
    dial: float | None = None,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Path:
    """Writes config.json, model.safetensors and the tokenizer; returns the directory."""
    directory = Path(directory)
    model = build_tiny(family, seed, dial, **overrides)
    huginn = family == "huginn"  # stored as published: tied head twice, rotary table included
    save_checkpoint(model, directory, dtype, keep_tied_copy=huginn, keep_rotary_table=huginn)
    save_tokenizer(byte_tokenizer(model.vocab_size), directory, model.config.max_position_embeddings)
    return directory


@torch.no_grad()
def _randomise(model: LoopedReference, generator: torch.Generator, embedding_std: float) -> None:
    huginn = model.config.block == "huginn" if isinstance(model, RavenReference) else False
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith(("embed_tokens.weight", "wte.weight")):
            parameter.copy_(noise * embedding_std)
        elif parameter.dim() == 1 and name.endswith("weight"):
            parameter.copy_(1 + 0.1 * noise)
        elif name.endswith("bias"):  # exit gate, qk_bias
            parameter.copy_(0.3 * noise)
        else:
            parameter.copy_(MATRIX_STD * noise)
            if huginn and name.endswith("mlp.proj.weight"):
                parameter.mul_(HUGINN_MLP_GAIN)


@torch.no_grad()
def _dial_ouro(model: LoopedReference, dial: float) -> None:
    for name, parameter in model.named_parameters():
        if "layernorm_2." in name:
            parameter.mul_(dial)


@torch.no_grad()
def _dial_raven(model: LoopedReference, dial: float, generator: torch.Generator) -> None:
    adapter = model.get_parameter("transformer.adapter.weight")
    eye = torch.eye(model.width)
    noise = torch.randn(adapter.shape, generator=generator) * ADAPTER_NOISE
    adapter.copy_(torch.cat((dial * eye, eye), dim=1) + noise)
