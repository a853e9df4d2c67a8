"""Blocks against code written by others: transformers' Llama, OLMo 2 and Gemma 2.

A Raven model whose adapter passes the prelude through, run for one recurrence, is a plain decoder of
prelude + core + coda layers; one Ouro pass is a decoder whose branches are normed on both sides, as Gemma 2's
are. Both can therefore be compared with independent implementations, float32, tiny shapes.
"""

import pytest
import torch

from sglang_trunc.reference.tiny import LLAMA3_SCALING, build_tiny

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")


def ids():
    return torch.randint(0, 512, (150,), generator=torch.Generator().manual_seed(3))


def raven_layers(model):
    return [block for part in ("prelude", "core_block", "coda") for block in getattr(model.transformer, part)]


def pass_through(model):
    eye = torch.eye(model.width)
    model.transformer.adapter.weight.data = torch.cat((torch.zeros_like(eye), eye), dim=1)


def copy_projections(theirs, ours, config):
    q, k, v = ours.attn.Wqkv.weight.split(
        [n * config.head_dim for n in (config.n_heads, config.num_key_value_heads, config.num_key_value_heads)]
    )
    gate, up = ours.mlp.fc.weight.chunk(2)
    weights = {"q": q, "k": k, "v": v, "o": ours.attn.proj.weight}
    for name, weight in weights.items():
        getattr(theirs.self_attn, f"{name}_proj").weight.data = weight.data
    for name, weight in {"gate": gate, "up": up, "down": ours.mlp.proj.weight}.items():
        getattr(theirs.mlp, f"{name}_proj").weight.data = weight.data


@pytest.mark.parametrize("family", ["retro-llama", "retro-olmo2"])
@torch.inference_mode()
def test_raven_block_kinds(family):
    ours = build_tiny(family)
    pass_through(ours)
    config = ours.config
    shared = {
        "hidden_size": config.n_embd,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 4,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "tie_word_embeddings": False,
        "attn_implementation": "sdpa",
    }
    if family == "retro-llama":
        shared["rope_parameters"] = {"rope_theta": config.rope_theta, **LLAMA3_SCALING}
        theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shared))
        norms = ("input_layernorm", "post_attention_layernorm")
    else:
        theirs = transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**shared))
        norms = ("post_attention_layernorm", "post_feedforward_layernorm")
    theirs.model.embed_tokens.weight.data = ours.transformer.wte.weight.data
    theirs.model.norm.weight.data = ours.transformer.ln_f.weight.data
    theirs.lm_head.weight.data = ours.lm_head.weight.data
    for layer, block in zip(theirs.model.layers, raven_layers(ours), strict=True):
        copy_projections(layer, block, config)
        for name, norm in zip(norms, (block.norm_1, block.norm_2), strict=True):
            getattr(layer, name).weight.data = norm.weight.data
        if family == "retro-olmo2":
            layer.self_attn.q_norm.weight.data = block.attn.q_norm.weight.data
            layer.self_attn.k_norm.weight.data = block.attn.k_norm.weight.data
    theirs.eval()
    torch.testing.assert_close(ours(ids(), depth=1), theirs(ids()[None]).logits[0], atol=1e-4, rtol=0)


@torch.inference_mode()
def test_one_ouro_pass():
    ours = build_tiny("ouro-gqa", dial=1.0)
    config = ours.config
    theirs = transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            query_pre_attn_scalar=config.head_dim,
            vocab_size=config.vocab_size,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_theta": config.rope_theta, "rope_type": "default"},
            hidden_activation="silu",
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            tie_word_embeddings=False,
            attn_implementation="sdpa",
        )
    ).eval()
    pairs = {
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "input_layernorm_2",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "post_attention_layernorm_2",
    }
    # Gemma scales embeddings by sqrt(width) and stores norm weights minus one
    theirs.model.embed_tokens.weight.data = ours.model.embed_tokens.weight.data / config.hidden_size**0.5
    theirs.model.norm.weight.data = ours.model.norm.weight.data - 1
    theirs.lm_head.weight.data = ours.lm_head.weight.data
    for layer, block in zip(theirs.model.layers, ours.model.layers, strict=True):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            getattr(layer.self_attn, name).weight.data = getattr(block.self_attn, name).weight.data
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(layer.mlp, name).weight.data = getattr(block.mlp, name).weight.data
        for name, source in pairs.items():
            getattr(layer, name).weight.data = getattr(block, source).weight.data - 1
    torch.testing.assert_close(ours(ids(), depth=1), theirs(ids()[None]).logits[0], atol=2e-4, rtol=0)
