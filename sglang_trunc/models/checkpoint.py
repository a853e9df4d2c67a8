"""Which tensors a checkpoint must hold, where each one goes, and strict loading.

A *manifest* lists every tensor a configuration calls for, by its Hub name: full shape, the model parameter it
fills and the shard inside a fused parameter. `ouro_manifest` and `raven_manifest` build it from the config
alone, so that names and shapes are checked against the published layout and not against a rank's slice.

`load_strictly` is the body of the models' ``load_weights``: it hands each tensor to its parameter's
``weight_loader`` (SGLang's parallel layers bring one; a plain parameter is copied, which also turns float32
into bfloat16) and, at the end, raises ONE `WeightError` that names missing, unknown, repeated and ill-shaped
tensors. Block kinds, and reading names without loading tensors: `tensor_names`.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import Parameter

# Buffers that some files carry and that the model computes itself.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".freqs_cis")
IGNORED_NAMES = ("freqs_cis",)
LOADABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NAMES_SHOWN = 5


class WeightError(ValueError):
    """The checkpoint does not hold exactly the tensors that the configuration calls for."""


class Slot(NamedTuple):
    shape: tuple[int, ...]  # full shape in the checkpoint, before any tensor-parallel split
    param: str  # model parameter that takes it
    shard: str | int | None = None  # part of a fused parameter, as SGLang's weight loaders call it
    may_lack_param: bool = False  # True: the model may leave it out (Ouro's exit gate)
    tied_to: str | None = None  # another name under which files store the same tensor


Manifest = dict[str, Slot]


def ouro_manifest(config: Any) -> Manifest:
    width, inner = config.hidden_size, config.intermediate_size
    q_rows = config.num_attention_heads * config.head_dim
    kv_rows = config.num_key_value_heads * config.head_dim
    slots: Manifest = {}
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        for letter, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
            name = f"{layer}.self_attn.{letter}_proj.weight"
            slots[name] = Slot((rows, width), f"{layer}.self_attn.qkv_proj.weight", letter)
        _add(slots, f"{layer}.self_attn.o_proj.weight", width, q_rows)
        for shard, part in enumerate(("gate", "up")):
            name = f"{layer}.mlp.{part}_proj.weight"
            slots[name] = Slot((inner, width), f"{layer}.mlp.gate_up_proj.weight", shard)
        _add(slots, f"{layer}.mlp.down_proj.weight", width, inner)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            _add(slots, f"{layer}.{norm}.weight", width)
            _add(slots, f"{layer}.{norm}_2.weight", width)
    _add(slots, "model.norm.weight", width)
    for part, shape in (("weight", (1, width)), ("bias", (1,))):
        name = f"model.early_exit_gate.{part}"
        slots[name] = Slot(shape, name, may_lack_param=True)
    _add_embedding(slots, config, "model.embed_tokens.weight")
    return slots


def raven_manifest(config: Any, block_kind: str) -> Manifest:
    slots: Manifest = {}
    for group, layers in (
        ("prelude", config.prelude_layers),
        ("core_block", config.core_layers),
        ("coda", config.coda_layers),
    ):
        for i in range(layers):
            _add_raven_block(slots, f"transformer.{group}.{i}", config, block_kind)
    _add(slots, "transformer.adapter.weight", config.hidden_size, 2 * config.hidden_size)
    _add(slots, "transformer.ln_f.weight", config.hidden_size)
    _add_embedding(slots, config, "transformer.wte.weight")
    return slots


def _add_raven_block(slots: Manifest, block: str, config: Any, block_kind: str) -> None:
    width, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    dim, inner = config.head_dim, config.intermediate_size
    for number in range(1, 5 if block_kind == "huginn" else 3):
        _add(slots, f"{block}.norm_{number}.weight", width)
    _add(slots, f"{block}.attn.Wqkv.weight", (heads + 2 * kv_heads) * dim, width)
    _add(slots, f"{block}.attn.proj.weight", width, heads * dim)
    if block_kind == "huginn" and config.qk_bias:
        _add(slots, f"{block}.attn.qk_bias", 2, 1, heads, dim)
    if block_kind == "olmo2":
        _add(slots, f"{block}.attn.q_norm.weight", heads * dim)
        _add(slots, f"{block}.attn.k_norm.weight", kv_heads * dim)
    _add(slots, f"{block}.mlp.fc.weight", 2 * inner, width)
    _add(slots, f"{block}.mlp.proj.weight", width, inner)


def _add(slots: Manifest, name: str, *shape: int) -> None:
    slots[name] = Slot(shape, name)


def _add_embedding(slots: Manifest, config: Any, name: str) -> None:
    shape = (config.vocab_size, config.hidden_size)
    if config.tie_word_embeddings:
        # Files hold both copies, or either one.
        slots[name] = Slot(shape, name, tied_to="lm_head.weight")
    else:
        slots[name] = Slot(shape, name)
        slots["lm_head.weight"] = Slot(shape, "lm_head.weight")


def load_strictly(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]], manifest: Manifest) -> set[str]:
    """First call: the whole checkpoint; later ones: weight updates of a running server, in any portions."""
    complete = bool(getattr(model, "checkpoint_loaded", False))
    written = load_weights(dict(model.named_parameters()), weights, manifest, partial=complete)
    model.checkpoint_loaded = True  # type: ignore[assignment]
    return written


def load_weights(
    params: Mapping[str, Parameter],
    weights: Iterable[tuple[str, torch.Tensor]],
    manifest: Manifest,
    *,
    partial: bool = False,
) -> set[str]:
    """Fill `params`; returns the names of the parameters that were written."""
    ledger = WeightLedger(params, manifest)
    for name, tensor in weights:
        ledger.assign(name, tensor)
    ledger.finish(partial=partial)
    return ledger.written


class WeightLedger:
    """Book of one load: what came, what it filled, what was wrong with it."""

    def __init__(self, params: Mapping[str, Parameter], manifest: Manifest) -> None:
        self.params = params
        self.manifest = manifest
        self.written: set[str] = set()
        self._tied = {slot.tied_to: name for name, slot in manifest.items() if slot.tied_to}
        self._seen: set[str] = set()
        self._unknown: list[str] = []
        self._repeated: list[str] = []
        self._misfits: list[str] = []

    def assign(self, name: str, tensor: torch.Tensor) -> None:
        if name in IGNORED_NAMES or name.endswith(IGNORED_SUFFIXES):
            return
        own_name = self._tied.get(name, name)
        slot = self.manifest.get(own_name)
        if slot is None:
            self._unknown.append(name)
        elif own_name in self._seen:
            if not slot.tied_to:
                self._repeated.append(name)
        elif problem := _misfit(tensor, slot, self.params.get(slot.param)):
            self._seen.add(own_name)
            self._misfits.append(f"{name} {problem}")
        else:
            self._seen.add(own_name)
            self._write(name, slot, tensor)

    def _write(self, name: str, slot: Slot, tensor: torch.Tensor) -> None:
        param = self.params.get(slot.param)
        if param is None:
            return  # reported by finish() unless the model may leave it out
        loader = getattr(param, "weight_loader", None)
        if loader is not None:
            loader(param, tensor) if slot.shard is None else loader(param, tensor, slot.shard)
        elif slot.shard is None and param.shape == tensor.shape:
            param.data.copy_(tensor)
        else:
            raise TypeError(f"Parameter {slot.param} of shape {list(param.shape)} has no weight_loader for {name}.")
        self.written.add(slot.param)

    def finish(self, *, partial: bool = False) -> None:
        self._check_model()
        missing = [] if partial else [name for name in self.manifest if name not in self._seen]
        faults = [
            _listed(names, what)
            for names, what in (
                (missing, "missing"),
                (self._unknown, "unknown"),
                (self._repeated, "repeated"),
                (self._misfits, "not as configured"),
            )
            if names
        ]
        if faults:
            raise WeightError(f"The checkpoint's tensors do not match its config: {'; '.join(faults)}.")

    def _check_model(self) -> None:
        """The model class itself must agree with the manifest; a difference is our fault, not the file's."""
        filled = {slot.param for slot in self.manifest.values()}
        filled_ids = {id(self.params[name]) for name in filled if name in self.params}
        extra = [name for name, param in self.params.items() if id(param) not in filled_ids]
        lacking = sorted(
            {s.param for s in self.manifest.values() if s.param not in self.params and not s.may_lack_param}
        )
        if extra or lacking:
            raise TypeError(
                f"The model class does not match its manifest: parameters without a tensor "
                f"{extra[:NAMES_SHOWN]}, tensors without a parameter {lacking[:NAMES_SHOWN]}."
            )


def _misfit(tensor: torch.Tensor, slot: Slot, param: Parameter | None) -> str:
    if tuple(tensor.shape) != slot.shape:
        return f"(shape {list(tensor.shape)}, needs {list(slot.shape)})"
    if tensor.dtype not in LOADABLE_DTYPES and (param is None or tensor.dtype != param.dtype):
        return f"(dtype {str(tensor.dtype).removeprefix('torch.')}, needs a float of 16 bits or more)"
    return ""


def _listed(names: list[str], what: str) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"{len(names)} {what}: {', '.join(names[:NAMES_SHOWN])}{more}"
