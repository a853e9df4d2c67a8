"""Strict loading: manifests of both families, and every kind of misfit named in one error."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import Module, Parameter
from transformers import AutoConfig

from sglang_trunc.models.checkpoint import (
    Manifest,
    Slot,
    WeightError,
    WeightLedger,
    load_strictly,
    load_weights,
    ouro_manifest,
    raven_manifest,
)
from sglang_trunc.models.configs import OuroConfig, RavenConfig, register
from sglang_trunc.models.tensor_names import block_kind_of, detect_block_kind, tensor_names
from sglang_trunc.reference.checkpoint import load_checkpoint
from sglang_trunc.reference.tiny import FAMILIES, write_tiny

OURO = OuroConfig(
    vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=2,
)  # fmt: skip
RAVEN = RavenConfig(
    vocab_size=11, n_embd=8, n_heads=2, n_layers=4, n_layers_in_prelude=1, n_layers_in_recurrent_block=2,
    n_layers_in_coda=1, intermediate_size=12, block_size=32, mean_recurrence=3, tie_embeddings=False,
)  # fmt: skip


def make_params(manifest: Manifest, dtype=torch.float32) -> dict[str, Parameter]:
    """One parameter per target; fused ones get a weight_loader as SGLang's linear layers have."""
    rows: dict[str, dict] = {}
    for slot in manifest.values():
        rows.setdefault(slot.param, {})[slot.shard] = slot.shape
    params = {}
    for name, shapes in rows.items():
        height, tail = sum(shape[0] for shape in shapes.values()), next(iter(shapes.values()))[1:]
        params[name] = Parameter(torch.full((height, *tail), torch.nan, dtype=dtype))
        if None not in shapes:
            params[name].weight_loader = fused_loader([(shard, shape[0]) for shard, shape in shapes.items()])
    return params


def fused_loader(parts):
    def load(param, loaded, shard):
        start = sum(height for _, height in parts[: [name for name, _ in parts].index(shard)])
        param.data[start : start + len(loaded)].copy_(loaded)

    return load


def make_weights(manifest: Manifest) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(slot.shape, generator=generator) for name, slot in manifest.items()}


def fault(params, weights, manifest) -> str:
    with pytest.raises(WeightError) as caught:
        load_weights(params, weights.items(), manifest)
    return str(caught.value)


def test_ouro_tensor_count_is_the_published_one():
    assert len(ouro_manifest(OuroConfig())) == 269
    assert len(ouro_manifest(OuroConfig(num_hidden_layers=48))) == 533


def test_ouro_parameter_count_is_the_published_one():
    manifest = ouro_manifest(OuroConfig())
    assert sum(torch.Size(slot.shape).numel() for slot in manifest.values()) == 1_434_652_673


def retro_llama(**changes) -> RavenConfig:
    fields = {
        "n_embd": 2048, "n_heads": 32, "num_key_value_heads": 8, "n_layers": 14, "n_layers_in_prelude": 4,
        "n_layers_in_recurrent_block": 6, "n_layers_in_coda": 4, "intermediate_size": 8192,
        "vocab_size": 128256, "tie_embeddings": False,
    }  # fmt: skip
    return RavenConfig(**(fields | changes))


def test_retrofit_tensor_and_parameter_counts():
    manifest = raven_manifest(retro_llama(), "llama")
    assert len(manifest) == 88
    assert sum(torch.Size(slot.shape).numel() for slot in manifest.values()) == 1_385_228_288
    olmo = raven_manifest(retro_llama(n_heads=16, num_key_value_heads=16, vocab_size=100352), "olmo2")
    assert len(olmo) == 14 * 8 + 4
    assert sum(torch.Size(slot.shape).numel() for slot in olmo.values()) == 1_359_071_232


def test_huginn_has_nine_tensors_per_block_and_one_stored_embedding():
    manifest = raven_manifest(RavenConfig(), "huginn")
    assert len(manifest) == 8 * 9 + 3
    assert manifest["transformer.coda.1.attn.qk_bias"].shape == (2, 1, 55, 96)
    assert "lm_head.weight" not in manifest


@pytest.mark.parametrize("kind", ["ouro", "huginn", "llama", "olmo2"])
def test_complete_checkpoint_fills_every_parameter(kind):
    manifest = ouro_manifest(OURO) if kind == "ouro" else raven_manifest(RAVEN, kind)
    params = make_params(manifest)
    assert load_weights(params, make_weights(manifest).items(), manifest) == set(params)
    assert not any(torch.isnan(param).any() for param in params.values())


def test_fused_shards_land_in_order():
    manifest = ouro_manifest(OURO)
    params, weights = make_params(manifest), make_weights(manifest)
    load_weights(params, weights.items(), manifest)
    attention = [weights[f"model.layers.1.self_attn.{letter}_proj.weight"] for letter in "qkv"]
    assert torch.equal(params["model.layers.1.self_attn.qkv_proj.weight"], torch.cat(attention))
    mlp = [weights[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(params["model.layers.0.mlp.gate_up_proj.weight"], torch.cat(mlp))


def test_branch_norms_are_not_mixed_up():
    manifest = ouro_manifest(OURO)
    params, weights = make_params(manifest), make_weights(manifest)
    load_weights(params, weights.items(), manifest)
    for norm in ("input_layernorm", "input_layernorm_2", "post_attention_layernorm_2"):
        name = f"model.layers.0.{norm}.weight"
        assert torch.equal(params[name], weights[name])


def test_whole_tensor_loader_is_called_without_a_shard():
    manifest = raven_manifest(RAVEN, "llama")
    params = make_params(manifest)
    calls = []
    param = params["transformer.coda.0.attn.Wqkv.weight"]
    param.weight_loader = lambda target, tensor: calls.append(tensor.shape)
    load_weights(params, make_weights(manifest).items(), manifest)
    assert calls == [torch.Size([24, 8])]


def test_float32_checkpoint_loads_into_bfloat16():
    manifest = ouro_manifest(OURO)
    params, weights = make_params(manifest, torch.bfloat16), make_weights(manifest)
    load_weights(params, weights.items(), manifest)
    assert torch.equal(params["model.norm.weight"], weights["model.norm.weight"].to(torch.bfloat16))


def test_missing_tensors_are_named_five_at_most():
    manifest = ouro_manifest(OURO)
    weights = make_weights(manifest)
    del weights["model.layers.1.self_attn.k_proj.weight"]
    assert "1 missing: model.layers.1.self_attn.k_proj.weight." in fault(make_params(manifest), weights, manifest)
    kept = {name: tensor for name, tensor in weights.items() if "layers.0" not in name}
    message = fault(make_params(manifest), kept, manifest)
    assert "12 missing: " in message
    assert "and 7 more" in message
    assert message.count(".weight") == 5


def test_unknown_tensor_is_named():
    manifest = ouro_manifest(OURO)
    weights = make_weights(manifest) | {"model.layers.7.mlp.up_proj.weight": torch.zeros(2)}
    message = fault(make_params(manifest), weights, manifest)
    assert message == (
        "The checkpoint's tensors do not match its config: 1 unknown: model.layers.7.mlp.up_proj.weight."
    )


def test_wrong_shape_is_named_with_both_shapes_and_not_called_missing():
    manifest = ouro_manifest(OURO)
    weights = make_weights(manifest) | {"model.norm.weight": torch.zeros(9)}
    message = fault(make_params(manifest), weights, manifest)
    assert "1 not as configured: model.norm.weight (shape [9], needs [8])." in message
    assert "missing" not in message


def test_oversized_tensor_is_refused_although_a_sharded_loader_would_cut_it():
    manifest = raven_manifest(RAVEN, "llama")
    params = make_params(manifest)
    params["transformer.adapter.weight"].weight_loader = lambda param, tensor: param.data.copy_(tensor[:8])
    weights = make_weights(manifest) | {"transformer.adapter.weight": torch.zeros(10, 16)}
    assert "transformer.adapter.weight (shape [10, 16]" in fault(params, weights, manifest)


def test_quantised_tensor_is_not_cast_silently():
    manifest = ouro_manifest(OURO)
    weights = make_weights(manifest) | {"model.norm.weight": torch.zeros(8, dtype=torch.int8)}
    assert "model.norm.weight (dtype int8, needs a float of 16 bits or more)" in fault(
        make_params(manifest), weights, manifest
    )


def test_all_faults_come_in_one_error():
    manifest = ouro_manifest(OURO)
    weights = make_weights(manifest) | {"extra": torch.zeros(1), "model.norm.weight": torch.zeros(9)}
    del weights["lm_head.weight"]
    message = fault(make_params(manifest), weights, manifest)
    assert re.search(r"1 missing: lm_head.weight; 1 unknown: extra; 1 not as configured: model.norm", message)


def test_repeated_tensor_is_named():
    manifest = ouro_manifest(OURO)
    weights = make_weights(manifest)
    pairs = [*weights.items(), ("model.norm.weight", weights["model.norm.weight"])]
    with pytest.raises(WeightError, match=r"1 repeated: model\.norm\.weight\."):
        load_weights(make_params(manifest), pairs, manifest)


def test_stored_buffers_are_ignored():
    manifest = raven_manifest(RAVEN, "huginn")
    weights = make_weights(manifest) | {
        "freqs_cis": torch.zeros(1, 32, 1, 2, 2),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(1),
        "transformer.freqs_cis": torch.zeros(1),
    }
    load_weights(make_params(manifest), weights.items(), manifest)


@pytest.mark.parametrize(
    "stored", [("transformer.wte.weight",), ("lm_head.weight",), ("transformer.wte.weight", "lm_head.weight")]
)
def test_tied_embedding_under_either_name_or_both(stored):
    tied = RavenConfig(**{**RAVEN.to_dict(), "tie_embeddings": True})
    manifest = raven_manifest(tied, "huginn")
    params, weights = make_params(manifest), make_weights(manifest)
    table = weights.pop("transformer.wte.weight")
    load_weights(params, (weights | dict.fromkeys(stored, table)).items(), manifest)
    assert torch.equal(params["transformer.wte.weight"], table)
    params["lm_head.weight"] = params["transformer.wte.weight"]
    load_weights(params, (weights | dict.fromkeys(stored, table)).items(), manifest)


def test_untied_head_is_required():
    manifest = raven_manifest(RAVEN, "llama")
    weights = make_weights(manifest)
    del weights["lm_head.weight"]
    assert "1 missing: lm_head.weight" in fault(make_params(manifest), weights, manifest)


def test_exit_gate_may_be_left_out_of_the_model_but_not_of_the_checkpoint():
    manifest = ouro_manifest(OURO)
    params, weights = make_params(manifest), make_weights(manifest)
    del params["model.early_exit_gate.weight"], params["model.early_exit_gate.bias"]
    load_weights(params, weights.items(), manifest)
    del weights["model.early_exit_gate.bias"]
    assert "1 missing: model.early_exit_gate.bias" in fault(params, weights, manifest)


def test_partial_update_accepts_absent_but_not_unknown_tensors():
    manifest = ouro_manifest(OURO)
    params = make_params(manifest)
    one = {"model.norm.weight": torch.ones(8)}
    assert load_weights(params, one.items(), manifest, partial=True) == {"model.norm.weight"}
    with pytest.raises(WeightError, match="1 unknown: other"):
        load_weights(params, {"other": torch.ones(8)}.items(), manifest, partial=True)


def test_model_is_loaded_whole_first_and_updated_in_portions_later():
    model = Module()
    model.table = Parameter(torch.zeros(2))
    manifest = {"table": Slot((2,), "table")}
    with pytest.raises(WeightError, match="1 missing: table"):
        load_strictly(model, [], manifest)
    assert load_strictly(model, [("table", torch.ones(2))], manifest) == {"table"}
    assert load_strictly(model, [], manifest) == set()


def test_model_that_does_not_match_its_manifest_is_a_programming_error():
    manifest = ouro_manifest(OURO)
    params = make_params(manifest)
    params["model.extra"] = Parameter(torch.zeros(1))
    del params["model.norm.weight"]
    ledger = WeightLedger(params, manifest)
    with pytest.raises(TypeError, match=r"\['model.extra'\].*\['model.norm.weight'\]"):
        ledger.finish()


# Against the reference implementation's files


@pytest.mark.parametrize("family", FAMILIES)
def test_manifest_is_what_the_reference_stores(tmp_path, family):
    register()
    write_tiny(family, tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    kind = None if config.model_type == "ouro" else detect_block_kind(config, tmp_path)
    manifest = ouro_manifest(config) if kind is None else raven_manifest(config, kind)
    stored = load_file(tmp_path / "model.safetensors")
    beside = {"freqs_cis", "lm_head.weight"} if kind == "huginn" else set()
    assert {name: slot.shape for name, slot in manifest.items()} == {
        name: tuple(tensor.shape) for name, tensor in stored.items() if name not in beside
    }
    params = make_params(manifest)
    load_weights(params, stored.items(), manifest)
    reference = load_checkpoint(tmp_path).config
    assert config.recurrences == reference.full_depth
    assert config.rope_theta == reference.rope_theta
    assert config.head_dim == reference.head_dim
    if kind is not None:
        assert (kind, config.embed_scale) == (reference.block, pytest.approx(reference.embed_scale))


# Block kinds and tensor names


@pytest.mark.parametrize("kind", ["huginn", "llama", "olmo2"])
def test_block_kind_from_a_single_file_and_from_an_index(tmp_path, kind):
    weights = make_weights(raven_manifest(RAVEN, kind))
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert tensor_names(str(tmp_path)) == set(weights)
    assert detect_block_kind(RAVEN, tmp_path) == kind
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "model-00001-of-00001.safetensors")}
    indexed = tmp_path / "indexed"
    indexed.mkdir()
    (indexed / "model.safetensors.index.json").write_text(json.dumps(index))
    assert detect_block_kind(RAVEN, indexed) == kind


def test_several_files_without_an_index_are_read_together(tmp_path):
    save_file({"transformer.core_block.0.norm_1.weight": torch.zeros(1)}, tmp_path / "a.safetensors")
    save_file({"transformer.core_block.0.norm_3.weight": torch.zeros(1)}, tmp_path / "b.safetensors")
    assert detect_block_kind(RAVEN, tmp_path) == "huginn"


def test_explicit_block_kind_is_taken_unread():
    config = RavenConfig(block_kind="olmo2")
    assert detect_block_kind(config, "/no/such/folder") == "olmo2"


def test_folder_without_tensors_asks_for_block_kind(tmp_path):
    with pytest.raises(ValueError, match="set block_kind to one of huginn, llama, olmo2"):
        detect_block_kind(RAVEN, tmp_path)


def test_path_defaults_to_where_the_config_was_read(tmp_path):
    save_file(make_weights(raven_manifest(RAVEN, "olmo2")), tmp_path / "model.safetensors")
    RAVEN.save_pretrained(tmp_path)
    register()
    assert detect_block_kind(AutoConfig.from_pretrained(tmp_path)) == "olmo2"


def test_other_checkpoints_are_not_guessed():
    with pytest.raises(ValueError, match=r"no transformer\.core_block tensors"):
        block_kind_of(["model.embed_tokens.weight"])


@pytest.mark.parametrize("content", [b"", b"\x10", b"\xff" * 64, b"\x08" + b"\0" * 7 + b"not json"])
def test_damaged_file_is_named(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors is not a readable safetensors file"):
        tensor_names(str(tmp_path))
