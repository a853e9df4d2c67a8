"""Inflates a demo checkpoint to the cost of a real shape while it keeps saying exactly the same.

    python bench/widen.py sglang_trunc/demos/ouro OUT --hidden 2048 --layers 12 --heads 32 \
        --intermediate 5632 --vocab 49152
    python bench/widen.py sglang_trunc/demos/raven OUT --hidden 1024 --prelude 2 --core 4 --coda 2 \
        --intermediate 4096

Speed depends on shapes, acceptance on what the model says: a widened demo has a real model's cost per token
and a trained model's agreement between depths, on a machine that cannot download either. widen_plan.py
explains why the function is preserved. The head dimension stays (rotary frequencies depend on it). Ouro and
Raven checkpoints with retrofitted-Llama blocks can be widened; Huginn's sandwich blocks cannot be the
identity, and OLMo's q and k norms span all heads.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import typer
import widen_plan as plan
from safetensors.torch import save_file
from widen_plan import Channels, plan_channels

from sglang_trunc.reference.checkpoint import load_checkpoint
from sglang_trunc.reference.configs import OuroReferenceConfig, RavenReferenceConfig
from sglang_trunc.reference.looped import LoopedReference
from sglang_trunc.reference.ouro import OuroLayer, OuroReference
from sglang_trunc.reference.raven import RavenBlock, RavenReference

SHARD_BYTES = 1 << 30
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
Named = Iterator[tuple[str, torch.Tensor]]


def widen(source: Path, target: Path, config: OuroReferenceConfig | RavenReferenceConfig) -> None:
    """Writes the checkpoint of `source` in the shape of `config`, bfloat16, with its tokenizer."""
    model = load_checkpoint(source, torch.float32)
    if isinstance(model, OuroReference) and isinstance(config, OuroReferenceConfig):
        tensors, config = ouro_tensors(model, config)
    elif isinstance(model, RavenReference) and isinstance(config, RavenReferenceConfig):
        tensors, config = raven_tensors(model, config)
    else:
        raise ValueError("source and target belong to different families")
    target.mkdir(parents=True, exist_ok=True)
    save_sharded(tensors, target)
    (target / "config.json").write_text(json.dumps(config.to_hf("bfloat16"), indent=2) + "\n")
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)


def check_vocab(channels: Channels, old: int, new: int) -> bool:
    """True if added vocabulary rows need the guard channel; raises where there is none."""
    if new < old:
        raise ValueError(f"vocab must be at least {old}, got {new}")
    if new > old and channels.spare is None:
        raise ValueError(
            f"vocab {new} needs a spare channel, and width {channels.wide} has none: "
            f"use a width of {channels.narrow} times 4, 8 or another multiple of 4"
        )
    return new > old


def ouro_tensors(model: OuroReference, config: OuroReferenceConfig) -> tuple[Named, OuroReferenceConfig]:
    old = model.config
    if old.tie_word_embeddings or config.head_dim != old.head_dim:
        raise ValueError("the head must be untied and head_dim must stay the same")
    group = old.num_attention_heads // old.num_key_value_heads
    channels = plan_channels(old.hidden_size, config.hidden_size)
    config = replace(
        config,
        num_key_value_heads=config.num_attention_heads // group,
        rms_norm_eps=old.rms_norm_eps * channels.norm_gain**2,
    )
    guard = check_vocab(channels, old.vocab_size, config.vocab_size)
    return _ouro_tensors(model, config, channels, guard), config


def _ouro_tensors(model: OuroReference, config: OuroReferenceConfig, channels: Channels, guard: bool) -> Named:
    body, head = model.model, model.lm_head.weight.detach()
    last_norm = body.norm.weight.detach()
    yield (
        "model.embed_tokens.weight",
        plan.widen_embedding(body.embed_tokens.weight.detach(), channels, config.vocab_size, guard),
    )
    real = len(body.layers)
    for index in range(config.num_hidden_layers):
        layer = body.layers[index % real]
        assert isinstance(layer, OuroLayer)
        yield from _ouro_layer(layer, config, channels, f"model.layers.{index}", index < real)
    norm = channels.norm(last_norm)
    if guard:
        # the guard passes this norm at every depth; a gain of at least the largest rms never shrinks it
        norm[channels.wide - 1] = plan.guard_norm_gain(_ouro_rms_limit(model)) * channels.norm_gain
    yield "model.norm.weight", norm
    yield "model.early_exit_gate.weight", channels.read(body.early_exit_gate.weight.detach())
    yield "model.early_exit_gate.bias", body.early_exit_gate.bias.detach()
    yield "lm_head.weight", plan.widen_head(head, channels, config.vocab_size, last_norm)


def _ouro_layer(layer: OuroLayer, config: OuroReferenceConfig, channels: Channels, prefix: str, real: bool) -> Named:
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    tensors = {name: tensor.detach() for name, tensor in layer.state_dict().items()}
    for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        weight = tensors[f"self_attn.{name}.weight"]
        yield f"{prefix}.self_attn.{name}.weight", plan.pad_heads(channels.read(weight), rows)
    out = plan.pad_columns(tensors["self_attn.o_proj.weight"], queries)
    yield f"{prefix}.self_attn.o_proj.weight", channels.write(out)
    for name in ("gate_proj", "up_proj"):
        weight = plan.pad_heads(channels.read(tensors[f"mlp.{name}.weight"]), config.intermediate_size)
        yield f"{prefix}.mlp.{name}.weight", weight
    down = plan.pad_columns(tensors["mlp.down_proj.weight"], config.intermediate_size)
    yield f"{prefix}.mlp.down_proj.weight", channels.write(down)
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{prefix}.{name}.weight", channels.norm(tensors[f"{name}.weight"])
        branch = channels.norm(tensors[f"{name}_2.weight"])
        yield f"{prefix}.{name}_2.weight", branch if real else torch.zeros_like(branch)


@torch.no_grad()
def _ouro_rms_limit(model: OuroReference) -> float:
    """No state before the final norm can have a larger rms: entering rms plus that of every branch."""
    peaks = [float(model.model.norm.weight.abs().max())]
    peaks.append(float(model.model.embed_tokens.weight.square().mean(1).sqrt().max()))
    branches = [p for name, p in model.model.layers.named_parameters() if "layernorm_2." in name]
    return max(peaks) + sum(float(p.abs().max()) for p in branches)


def raven_tensors(model: RavenReference, config: RavenReferenceConfig) -> tuple[Named, RavenReferenceConfig]:
    old = model.config
    if old.block != "llama" or old.tie_embeddings:
        raise ValueError(f"only untied Raven checkpoints with llama blocks can be widened, got {old.block!r}")
    if config.head_dim != old.head_dim:
        raise ValueError(f"n_heads must be n_embd / {old.head_dim}, got {config.n_heads}")
    for part in ("prelude_layers", "core_layers", "coda_layers"):
        if getattr(config, part) < getattr(old, part):
            raise ValueError(f"{part} must be at least {getattr(old, part)}, got {getattr(config, part)}")
    channels = plan_channels(old.n_embd, config.n_embd)
    config = replace(
        config,
        num_key_value_heads=config.n_heads * old.num_key_value_heads // old.n_heads,
        norm_eps=old.norm_eps * channels.norm_gain**2,
    )
    guard = check_vocab(channels, old.vocab_size, config.vocab_size)
    return _raven_tensors(model, config, channels, guard), config


def _raven_tensors(model: RavenReference, config: RavenReferenceConfig, channels: Channels, guard: bool) -> Named:
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    last_norm = tensors["transformer.ln_f.weight"]
    yield (
        "transformer.wte.weight",
        plan.widen_embedding(tensors["transformer.wte.weight"], channels, config.vocab_size, guard),
    )
    counts = {
        "prelude": config.prelude_layers,
        "core_block": config.core_layers,
        "coda": config.coda_layers,
    }
    for part, count in counts.items():
        blocks = getattr(model.transformer, part)
        for index in range(count):
            prefix = f"transformer.{part}.{index}"
            block = blocks[index % len(blocks)]
            yield from _raven_block(block, config, channels, prefix, index < len(blocks))
    from_state, from_prelude = tensors["transformer.adapter.weight"].chunk(2, dim=1)
    adapter = [channels.write(channels.read(half)) for half in (from_state, from_prelude)]
    if guard:
        adapter[1][channels.wide - 1, channels.wide - 1] = 1.0
    yield "transformer.adapter.weight", torch.cat(adapter, dim=1)
    norm = channels.norm(last_norm)
    if guard:
        norm[channels.wide - 1] = plan.guard_norm_gain(plan.RAVEN_RMS_LIMIT) * channels.norm_gain
    yield "transformer.ln_f.weight", norm
    yield "lm_head.weight", plan.widen_head(tensors["lm_head.weight"], channels, config.vocab_size, last_norm)


def _raven_block(block: RavenBlock, config: RavenReferenceConfig, channels: Channels, prefix: str, real: bool) -> Named:
    attention = block.attn
    queries, keys = config.n_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    parts = attention.Wqkv.weight.detach().split((attention.queries, attention.keys, attention.keys))
    padded = [plan.pad_heads(channels.read(w), n) for w, n in zip(parts, (queries, keys, keys), strict=True)]
    yield f"{prefix}.attn.Wqkv.weight", torch.cat(padded)
    joins = {
        "attn.proj": plan.pad_columns(attention.proj.weight.detach(), queries),
        "mlp.proj": plan.pad_columns(block.mlp.proj.weight.detach(), config.intermediate_size),
    }
    for name, weight in joins.items():
        yield f"{prefix}.{name}.weight", channels.write(weight if real else torch.zeros_like(weight))
    halves = block.mlp.fc.weight.detach().chunk(2)
    padded = [plan.pad_heads(channels.read(half), config.intermediate_size) for half in halves]
    yield f"{prefix}.mlp.fc.weight", torch.cat(padded)
    for name, norm in (("norm_1", block.norm_1), ("norm_2", block.norm_2)):
        yield f"{prefix}.{name}.weight", channels.norm(norm.weight.detach())


def save_sharded(tensors: Named, target: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes shards of about a gigabyte as they fill, then renames them and adds the index."""
    shards: list[tuple[Path, list[str]]] = []
    pending: dict[str, torch.Tensor] = {}
    total = 0

    def flush() -> None:
        path = target / f"shard-{len(shards):05d}.safetensors"
        save_file(pending, path, metadata={"format": "pt"})
        shards.append((path, list(pending)))
        pending.clear()

    for name, tensor in tensors:
        pending[name] = tensor.to(dtype).contiguous()
        total += pending[name].nbytes
        if sum(t.nbytes for t in pending.values()) >= SHARD_BYTES:
            flush()
    if pending:
        flush()
    weight_map = {}
    for index, (path, names) in enumerate(shards, start=1):
        final = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        path.rename(target / final)
        (target / final).chmod(0o644)
        weight_map.update(dict.fromkeys(names, final))
    listing = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(listing, indent=2) + "\n")


def target_config(
    model: LoopedReference,
    hidden: int | None,
    intermediate: int | None,
    vocab: int | None,
    heads: int | None,
    layers: int | None,
    parts: tuple[int | None, int | None, int | None],
) -> OuroReferenceConfig | RavenReferenceConfig:
    """The source's config with the given sizes; None keeps the source's."""
    old = model.config
    if isinstance(old, OuroReferenceConfig):
        hidden = hidden or old.hidden_size
        return replace(
            old,
            hidden_size=hidden,
            intermediate_size=intermediate or old.intermediate_size,
            vocab_size=vocab or old.vocab_size,
            num_attention_heads=heads or max(old.num_attention_heads, hidden // old.head_dim),
            num_hidden_layers=layers or old.num_hidden_layers,
        )
    hidden = hidden or old.n_embd
    prelude, core, coda = parts
    return replace(
        old,
        n_embd=hidden,
        intermediate_size=intermediate or old.intermediate_size,
        vocab_size=vocab or old.vocab_size,
        n_heads=heads or hidden // old.head_dim,
        prelude_layers=prelude or old.prelude_layers,
        core_layers=core or old.core_layers,
        coda_layers=coda or old.coda_layers,
    )


def main(
    demo: Path,
    out: Path,
    hidden: int | None = None,
    intermediate: int | None = None,
    vocab: int | None = None,
    heads: int | None = None,
    layers: int | None = None,
    prelude: int | None = None,
    core: int | None = None,
    coda: int | None = None,
) -> None:
    """Write DEMO in a larger shape to OUT. --layers is Ouro's, --prelude, --core and --coda are Raven's."""
    model = load_checkpoint(demo, torch.float32)
    config = target_config(model, hidden, intermediate, vocab, heads, layers, (prelude, core, coda))
    widen(demo, out, config)
    written = json.loads((out / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    typer.echo(f"wrote {out}: {written / 2e6:.1f} million parameters, {written / 1e9:.2f} GB in bfloat16")


if __name__ == "__main__":
    typer.run(main)
