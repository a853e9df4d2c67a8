"""Config classes on the published config files' contents, through transformers and through SGLang."""

import json
import logging

import pytest
import torch
from transformers import AutoConfig

from sglang_trunc.models.configs import OuroConfig, RavenConfig, register
from sglang_trunc.models.layer_ids import LoopShape

OURO = {
    "architectures": ["OuroForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_ouro.OuroConfig", "AutoModel": "modeling_ouro.OuroModel"},
    "model_type": "ouro", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128, "vocab_size": 49152,
    "tie_word_embeddings": False, "total_ut_steps": 4, "early_exit_threshold": 1.0, "rope_theta": 1000000.0,
    "rope_scaling": None, "max_position_embeddings": 65536, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "attention_dropout": 0.0, "initializer_range": 0.02, "use_sliding_window": False, "sliding_window": None,
    "max_window_layers": 24, "layer_types": ["full_attention"] * 24, "bos_token_id": 0, "eos_token_id": 0,
    "torch_dtype": "bfloat16", "transformers_version": "4.55.0", "use_cache": True,
}  # fmt: skip
HUGINN = {
    "architectures": ["RavenForCausalLM"],
    "auto_map": {"AutoConfig": "raven_config_minimal.RavenConfig"},
    "model_type": "huginn_raven", "n_embd": 5280, "n_heads": 55, "n_layers": 8, "n_layers_in_prelude": 2,
    "n_layers_in_recurrent_block": 4, "n_layers_in_coda": 2, "intermediate_size": 17920,
    "vocab_size": 65536, "padded_vocab_size": 65536, "block_size": 4096, "norm_eps": 1e-6, "rope_base": 50000,
    "qk_bias": True, "bias": False, "tie_embeddings": True, "injection_type": "linear",
    "state_init": "like-init", "mean_recurrence": 32, "test_time_noise": 0, "test_time_noise_type": "fixed",
    "block_class_name": "SandwichBlock", "num_key_value_heads": 55, "head_dim": 96,
    "bos_token_id": 65504, "eos_token_id": 65505, "pad_token_id": 65509, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA3_SCALING = {
    "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
RETRO_LLAMA = HUGINN | {
    "n_embd": 2048, "n_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "n_layers": 14,
    "n_layers_in_prelude": 4, "n_layers_in_recurrent_block": 6, "n_layers_in_coda": 4,
    "intermediate_size": 8192, "vocab_size": 128256, "padded_vocab_size": 128256, "norm_eps": 1e-5,
    "rope_base": 500000.0, "rope_theta": 500000.0, "rope_scaling": LLAMA3_SCALING,
    "max_position_embeddings": 131072, "block_size": 1024, "tie_embeddings": False, "qk_bias": False,
    "init_values": {"std": 0.008703882797784892, "out_proj": 0.0005, "embed_scale": 1.0},
    "torch_dtype": "float32",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    register()
    register()

    def write(content: dict, **changes) -> str:
        (tmp_path / "config.json").write_text(json.dumps(content | changes))
        return str(tmp_path)

    return write


def load(path: str):
    return AutoConfig.from_pretrained(path)


@pytest.mark.parametrize("trust", [None, False, True])
@pytest.mark.parametrize(("content", "expected"), [(OURO, OuroConfig), (HUGINN, RavenConfig)])
def test_local_class_wins_over_the_repositorys_code(folder, content, expected, trust):
    assert type(AutoConfig.from_pretrained(folder(content), trust_remote_code=trust)) is expected


def test_ouro_names_that_sglang_reads(folder):
    config = load(folder(OURO))
    assert config.loop_shape == LoopShape(0, 24, 0, 4)
    assert (config.recurrences, config.dtype) == (4, torch.bfloat16)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1000000.0}
    assert not hasattr(config, "loop_num")
    assert not hasattr(config, "num_loops")


def test_raven_names_that_sglang_reads(folder):
    config = load(folder(RETRO_LLAMA))
    assert config.loop_shape == LoopShape(4, 6, 4, 32)
    assert (config.hidden_size, config.num_attention_heads, config.num_key_value_heads) == (2048, 32, 8)
    assert (config.num_hidden_layers, config.head_dim, config.rms_norm_eps) == (14, 64, 1e-5)
    assert (config.vocab_size, config.max_position_embeddings) == (128256, 131072)
    assert config.rope_parameters == LLAMA3_SCALING | {"rope_theta": 500000.0}
    assert (config.embed_scale, config.tie_word_embeddings) == (1.0, False)
    assert config.state_std == pytest.approx(0.0087038828)


def test_huginn_derives_what_its_file_leaves_out(folder):
    config = load(folder(HUGINN))
    assert config.max_position_embeddings == 4096
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 50000}
    assert config.embed_scale == pytest.approx(72.6636, abs=1e-4)
    assert config.state_std == pytest.approx((2 / 5) ** 0.5)
    assert config.tie_word_embeddings is True
    assert config.loop_shape.num_kv_layers == 132


def test_tinyllama_uses_rope_theta_and_not_the_left_over_rope_base(folder):
    config = load(folder(RETRO_LLAMA, rope_theta=10000.0, rope_scaling=None))
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}


def test_common_spellings_reach_the_own_names():
    config = RavenConfig(num_attention_heads=4, hidden_size=64, num_hidden_layers=8, tie_word_embeddings=False)
    assert (config.n_heads, config.n_embd, config.n_layers, config.tie_embeddings) == (4, 64, 8, False)
    assert (config.head_dim, config.num_key_value_heads) == (16, 4)
    assert RavenConfig(tie_embeddings=False, tie_word_embeddings=True).tie_word_embeddings is False


def test_head_dim_and_kv_heads_default_from_the_heads():
    config = OuroConfig(hidden_size=256, num_attention_heads=4)
    assert (config.head_dim, config.num_key_value_heads) == (64, 4)
    assert OuroConfig(num_attention_heads=4, num_key_value_heads=2).num_key_value_heads == 2


def test_padded_vocabulary_is_the_served_one():
    assert RavenConfig(vocab_size=500, padded_vocab_size=512).vocab_size == 512


@pytest.mark.parametrize("stored", ["float32", None])
def test_auto_dtype_does_not_become_float16(folder, stored):
    assert load(folder(RETRO_LLAMA, torch_dtype=stored)).dtype == torch.bfloat16


@pytest.mark.parametrize("content", [OURO, HUGINN, RETRO_LLAMA])
def test_saved_config_reads_back_equal(folder, tmp_path, content):
    config = load(folder(content))
    config.save_pretrained(tmp_path / "saved")
    again = load(str(tmp_path / "saved"))
    volatile = ("transformers_version", "_name_or_path")
    first, second = ({k: v for k, v in c.to_dict().items() if k not in volatile} for c in (config, again))
    assert first == second


# Overrides, in the way of --json-model-override-args: assignment after construction


def test_recurrences_can_be_lowered_and_raised_with_a_warning(folder, caplog):
    config = load(folder(OURO))
    config.total_ut_steps = 2
    assert (config.recurrences, config.loop_shape.num_kv_layers) == (2, 48)
    config.recurrences = 4
    with caplog.at_level(logging.WARNING):
        assert not caplog.records
        config.total_ut_steps = 6
    assert "total_ut_steps is 6, more than the 4 recurrences" in caplog.text
    assert config.recurrences == 6


def test_zero_initial_state(folder):
    config = load(folder(HUGINN))
    config.init_scale = 0
    assert config.state_std == 0
    config.state_init_seed = 7
    assert config.state_init_seed == 7


def test_rope_theta_override_reaches_rope_parameters(folder):
    config = load(folder(OURO))
    config.rope_theta = 5e5
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}
    assert config.rope_theta == 5e5


@pytest.mark.parametrize(
    ("content", "field", "value", "sentence"),
    [
        (OURO, "total_ut_steps", 0, "total_ut_steps is 0, but must be an integer from 1 up."),
        (OURO, "total_ut_steps", "4", "total_ut_steps is '4', but must be an integer from 1 up."),
        (OURO, "total_ut_steps", 2.0, "total_ut_steps is 2.0, but must be"),
        (OURO, "total_ut_steps", True, "total_ut_steps is True, but must be"),
        (
            OURO,
            "early_exit_threshold",
            0.9,
            "early_exit_threshold is 0.9, but every token is read from the last",
        ),
        (OURO, "early_exit_threshold", "1", "so that only 1 or more (or null) is accepted"),
        (OURO, "early_exit_step", 1, "early_exit_step is 1, but only null can be served."),
        (OURO, "use_weighted_exit", True, "use_weighted_exit is True, but only False, null can be served."),
        (OURO, "use_sliding_window", True, "use_sliding_window is True"),
        (OURO, "hidden_act", "gelu", "hidden_act is 'gelu', but only 'silu' can be served."),
        (HUGINN, "mean_recurrence", 0, "mean_recurrence is 0, but must be an integer from 1 up."),
        (HUGINN, "state_init_seed", -1, "state_init_seed is -1, but must be an integer from 0 up."),
        (HUGINN, "init_scale", -0.5, "init_scale is -0.5, but must be a finite number from 0 up."),
        (HUGINN, "init_scale", float("nan"), "init_scale is nan"),
        (
            HUGINN,
            "block_kind",
            "gemma",
            "block_kind is 'gemma', but only null, 'huginn', 'llama', 'olmo2' can",
        ),
        (HUGINN, "injection_type", "add", "injection_type is 'add', but only 'linear' can be served."),
        (HUGINN, "state_init", "zero", "state_init is 'zero', but only 'like-init' can be served."),
        (HUGINN, "test_time_noise", 0.1, "test_time_noise is 0.1, but only 0, null can be served."),
    ],
)
def test_values_that_cannot_be_served_are_refused(folder, content, field, value, sentence):
    config = load(folder(content))
    with pytest.raises(ValueError, match=r"\.$") as assigned:
        setattr(config, field, value)
    with pytest.raises(ValueError, match=r"\.$") as stored:
        load(folder(content, **{field: value}))
    assert sentence in str(assigned.value)
    assert str(stored.value) == str(assigned.value)


@pytest.mark.parametrize("threshold", [1, 1.0, 2.0, None])
def test_thresholds_that_never_fire_are_accepted(folder, threshold):
    assert load(folder(OURO, early_exit_threshold=threshold)).early_exit_threshold == threshold


@pytest.mark.parametrize(
    ("content", "changes", "sentence"),
    [
        (OURO, {"num_key_value_heads": 3}, "num_key_value_heads is 3, but must divide num_attention_heads"),
        (OURO, {"head_dim": 63}, "head_dim is 63, but must be even"),
        (OURO, {"layer_types": ["sliding_attention"] * 24}, "layer_types names ['sliding_attention']"),
        (
            HUGINN,
            {"n_layers": 9},
            "num_hidden_layers is 9, but prelude, core and coda have 2 + 4 + 2 layers.",
        ),
    ],
)
def test_fields_that_contradict_each_other_are_refused(folder, content, changes, sentence):
    with pytest.raises(ValueError, match="but") as caught:
        load(folder(content, **changes))
    assert sentence in str(caught.value)


def test_unused_sliding_window_does_not_cut_attention(folder):
    assert load(folder(OURO, sliding_window=4096)).sliding_window is None


# Through SGLang


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (OURO, {"num_hidden_layers": 24, "num_key_value_heads": 16, "head_dim": 128, "context_len": 65536}),
        (HUGINN, {"num_hidden_layers": 8, "num_key_value_heads": 55, "head_dim": 96, "context_len": 4096}),
        (
            RETRO_LLAMA,
            {"num_hidden_layers": 14, "num_key_value_heads": 8, "head_dim": 64, "context_len": 131072},
        ),
    ],
)
def test_sglang_model_config(folder, content, expected):
    pytest.importorskip("sglang")
    from sglang.srt.configs.model_config import ModelConfig

    overrides = json.dumps({"trunc": {"d1": 2}})
    got = ModelConfig(folder(content), trust_remote_code=False, model_override_args=overrides)
    assert {name: getattr(got, name) for name in expected} == expected
    assert got.num_attention_layers == got.num_hidden_layers
    assert (got.dtype, got.sliding_window_size) == (torch.bfloat16, None)
    assert got.hf_config.trunc == {"d1": 2}
    explicit = ModelConfig(folder(content), dtype="float32")
    assert explicit.dtype == torch.float32


@pytest.mark.parametrize(
    ("content", "override", "sentence"),
    [
        (OURO, {"early_exit_threshold": 0.5}, "early_exit_threshold is 0.5"),
        (OURO, {"total_ut_steps": 0}, "total_ut_steps is 0"),
        (HUGINN, {"mean_recurrence": "many"}, "mean_recurrence is 'many'"),
    ],
)
def test_sglang_launch_fails_with_the_sentence(folder, content, override, sentence):
    pytest.importorskip("sglang")
    from sglang.srt.configs.model_config import ModelConfig

    with pytest.raises(ValueError, match=sentence):
        ModelConfig(folder(content), model_override_args=json.dumps(override))


def test_sglang_serves_an_overridden_loop_count(folder):
    pytest.importorskip("sglang")
    from sglang.srt.configs.model_config import ModelConfig

    got = ModelConfig(folder(OURO), model_override_args='{"total_ut_steps": 3}')
    assert got.hf_config.loop_shape.num_kv_layers == 72
