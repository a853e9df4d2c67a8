"""Checkpoints come back as they were written, in the published form, and strictly."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sglang_trunc.reference.checkpoint import block_kind, load_checkpoint, save_checkpoint
from sglang_trunc.reference.configs import OuroReferenceConfig, RavenReferenceConfig
from sglang_trunc.reference.tiny import FAMILIES, build_tiny, write_tiny

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = torch.arange(40) * 7 % 512


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_round_trip(family, tmp_path):
    model = build_tiny(family)
    write_tiny(family, tmp_path)
    loaded = load_checkpoint(tmp_path)
    assert loaded.config == model.config
    assert torch.equal(loaded(IDS), model(IDS))
    half = load_checkpoint(tmp_path, torch.bfloat16)
    assert half.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(half(IDS), model.bfloat16()(IDS))


def test_stored_dtype_and_seed(tmp_path):
    write_tiny("ouro", tmp_path, dtype=torch.bfloat16)
    assert load_checkpoint(tmp_path).lm_head.weight.dtype == torch.bfloat16
    assert not torch.equal(build_tiny("ouro", seed=1).lm_head.weight, build_tiny("ouro").lm_head.weight)
    assert build_tiny("ouro", num_hidden_layers=3).config.num_hidden_layers == 3


def test_tensor_names_and_counts(tmp_path):
    counts = {"ouro": 11 * 2 + 5, "retro-llama": 6 * 4 + 4, "retro-olmo2": 8 * 4 + 4, "huginn": 9 * 8 + 5}
    for family, count in counts.items():
        write_tiny(family, tmp_path / family)
        with safe_open(tmp_path / family / "model.safetensors", "pt") as file:
            names = set(file.keys())
        assert len(names) == count, family
    assert {"freqs_cis", "transformer.prelude.1.attn.qk_bias", "lm_head.weight"} <= names  # Huginn's


@torch.inference_mode()
def test_tied_head_stored_once_or_twice(tmp_path):
    model = build_tiny("huginn")
    save_checkpoint(model, tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert torch.equal(load_checkpoint(tmp_path)(IDS), model(IDS))


def test_loading_is_strict(tmp_path):
    write_tiny("ouro", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "model.layers.9.mlp.up_proj.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match="Unexpected key"):
        load_checkpoint(tmp_path)
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match="Missing key"):
        load_checkpoint(tmp_path)


def test_block_kind_by_names():
    assert block_kind(["transformer.coda.0.attn.q_norm.weight", "x.norm_1.weight"]) == "olmo2"
    assert block_kind(["transformer.coda.0.norm_3.weight"]) == "huginn"
    assert block_kind(["transformer.coda.0.norm_2.weight"]) == "llama"


def test_published_config_forms():
    huginn = {
        "model_type": "huginn_raven", "n_embd": 5280, "n_heads": 55, "n_layers_in_prelude": 2,
        "n_layers_in_recurrent_block": 4, "n_layers_in_coda": 2, "intermediate_size": 17920,
        "vocab_size": 65536, "padded_vocab_size": 65536, "block_size": 4096, "rope_base": 50000,
        "tie_embeddings": True, "mean_recurrence": 32, "eos_token_id": [65505, 65508],
    }  # fmt: skip
    config = RavenReferenceConfig.from_hf(huginn, "huginn")
    assert config.head_dim == 96
    assert config.embed_scale == pytest.approx(72.6636, abs=1e-3)
    assert config.state_std == pytest.approx(0.4**0.5)
    assert config.rope_theta == 5e4
    assert config.eos_token_id == (65505, 65508)

    retro = {
        **huginn, "n_embd": 2048, "n_heads": 32, "num_key_value_heads": 4, "tie_embeddings": False,
        "rope_base": 500000, "rope_theta": 10000.0, "init_values": {"std": 0.0087, "embed_scale": 1.0},
    }  # fmt: skip
    config = RavenReferenceConfig.from_hf(retro, "llama")
    assert (config.rope_theta, config.embed_scale, config.state_std) == (1e4, 1.0, 0.0087)
    assert config.rope_scaling is None

    ouro = {
        "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16,
        "vocab_size": 49152, "total_ut_steps": 4, "rope_parameters": {"rope_theta": 1e6},
    }  # fmt: skip
    config = OuroReferenceConfig.from_hf(ouro)
    assert (config.head_dim, config.num_key_value_heads, config.rope_theta) == (128, 16, 1e6)
    with pytest.raises(ValueError, match="scaled RoPE"):
        OuroReferenceConfig.from_hf({**ouro, "rope_scaling": {"type": "yarn"}, "rope_parameters": None})


def test_config_file_states_what_servers_read(tmp_path):
    write_tiny("retro-llama", tmp_path, init_scale=0.0, state_init_seed=7)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["init_values"]["embed_scale"] == 1.0
    assert (raw["init_scale"], raw["state_init_seed"]) == (0.0, 7)
    assert not load_checkpoint(tmp_path).entering_state(torch.arange(4), torch.float32).any()


def test_tiny_tokenizer_has_a_text_for_every_id(tmp_path):
    transformers = pytest.importorskip("transformers")
    write_tiny("ouro", tmp_path)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    text = "def main():\n    return 'héllo'  # ok"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == 512
    assert all(tokenizer.decode([i]) for i in range(512))
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n"
