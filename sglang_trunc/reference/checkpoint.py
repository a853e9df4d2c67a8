"""Hugging Face checkpoints in and out: config.json plus (sharded) safetensors.

Module names are tensor names, so this file only decides three things: which family and block kind a
directory holds (Raven's by tensor names: q_norm -> olmo2, norm_3 -> huginn, else llama), what a tied head
means (stored once unless `keep_tied_copy`, accepted in either form), and that Huginn's persistent rotary
table `freqs_cis` is skipped on load. Loading is strict otherwise: a missing or surplus tensor is an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from sglang_trunc.reference.blocks import rotary_tables
from sglang_trunc.reference.configs import BlockKind, OuroReferenceConfig, RavenReferenceConfig
from sglang_trunc.reference.looped import LoopedReference
from sglang_trunc.reference.ouro import OuroReference
from sglang_trunc.reference.raven import RavenReference

EMBEDDING_OF_HEAD = {"ouro": "model.embed_tokens.weight", "huginn_raven": "transformer.wte.weight"}
SKIPPED_TENSORS = ("freqs_cis",)


def load_checkpoint(directory: str | Path, dtype: torch.dtype | None = None) -> LoopedReference:
    """The model of a local directory, in `dtype` or, by default, in the stored one; in eval mode."""
    directory = Path(directory)
    raw = json.loads((directory / "config.json").read_text())
    tensors = read_tensors(directory)
    model = build_model(raw, tensors)
    head, embedding = "lm_head.weight", EMBEDDING_OF_HEAD[raw["model_type"]]
    if head not in tensors and is_tied(model):
        tensors[head] = tensors[embedding]
    if dtype is None:
        dtype = tensors[embedding].dtype
    model.load_state_dict({name: tensor.to(dtype) for name, tensor in tensors.items()}, assign=False)
    # buffers do not exist, so a plain cast cannot spoil float32 rotary tables; they are computed per call
    return model.to(dtype).eval()


def build_model(raw: Mapping[str, Any], tensor_names: Iterable[str]) -> LoopedReference:
    """An uninitialised model for a config dictionary; tensor names settle Raven's block kind."""
    if raw["model_type"] == "ouro":
        return OuroReference(OuroReferenceConfig.from_hf(raw))
    if raw["model_type"] == "huginn_raven":
        return RavenReference(RavenReferenceConfig.from_hf(raw, block_kind(tensor_names)))
    raise ValueError(f"model_type {raw['model_type']!r} is not supported: expected 'ouro' or 'huginn_raven'")


def block_kind(tensor_names: Iterable[str]) -> BlockKind:
    names = tuple(tensor_names)
    if any(".q_norm." in name for name in names):
        return "olmo2"
    return "huginn" if any(".norm_3." in name for name in names) else "llama"


def is_tied(model: LoopedReference) -> bool:
    config = model.config
    return config.tie_word_embeddings if isinstance(config, OuroReferenceConfig) else config.tie_embeddings


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    index = directory / "model.safetensors.index.json"
    files = {"model.safetensors"}
    if index.exists():
        files = set(json.loads(index.read_text())["weight_map"].values())
    tensors = {}
    for name in sorted(files):
        with safe_open(directory / name, framework="pt") as shard:
            tensors.update({key: shard.get_tensor(key) for key in shard.keys()})  # noqa: SIM118
    return {name: tensor for name, tensor in tensors.items() if name not in SKIPPED_TENSORS}


def save_checkpoint(
    model: LoopedReference,
    directory: str | Path,
    dtype: torch.dtype | None = None,
    *,
    keep_tied_copy: bool = False,
    keep_rotary_table: bool = False,
) -> None:
    """Writes config.json and model.safetensors, weights in `dtype` (default: the model's own).

    The published Huginn stores both the tied head and its float32 rotary table; the two options do so too.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    dtype = dtype or next(model.parameters()).dtype
    tensors = {name: t.detach().to(dtype).contiguous().clone() for name, t in model.state_dict().items()}
    if is_tied(model) and not keep_tied_copy:
        del tensors["lm_head.weight"]
    if keep_rotary_table:
        tensors["freqs_cis"] = _huginn_rotary_table(model)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)  # safetensors creates files for the owner alone
    config = model.config.to_hf(str(dtype).removeprefix("torch."))
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _huginn_rotary_table(model: LoopedReference) -> torch.Tensor:
    if not isinstance(model, RavenReference) or model.config.block != "huginn":
        raise ValueError("only Huginn checkpoints carry a rotary table")
    config = model.config
    tables = rotary_tables(torch.arange(config.max_position_embeddings), config.head_dim, config.rope_theta)
    return torch.stack(tables, dim=-1)[None, :, None]  # [1, block_size, 1, hd / 2, 2]
