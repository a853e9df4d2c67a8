"""The bugs a port is likely to have must be visible in tiny random checkpoints.

Each mutation is one plausible mistake; it has to change the argmax of a good share of positions, so that
a test that compares greedy tokens with the reference cannot pass by luck.
"""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from sglang_trunc.reference import blocks, raven
from sglang_trunc.reference.tiny import build_tiny

pytestmark = pytest.mark.usefixtures("one_thread")
MUST_CHANGE = 0.15


def ids():
    return torch.randint(0, 512, (128,), generator=torch.Generator().manual_seed(2))


def swap(a, b):
    a.weight.data, b.weight.data = b.weight.data, a.weight.data


def skip_step_norm(model):
    model.advance = lambda context, h: through(model.model.layers, h, context.rotary)
    model.readout = lambda context, h, last_only=False: model.lm_head(model.model.norm(h))


def through(layers, h, rotary):
    for layer in layers:
        h = layer(h, rotary)
    return h


def swap_branch_norms(model):
    for layer in model.model.layers:
        swap(layer.input_layernorm, layer.input_layernorm_2)


def swap_gate_up(model):
    for layer in model.model.layers:
        swap(layer.mlp.gate_proj, layer.mlp.up_proj)


def wrong_theta(model):
    name = "rope_theta"
    model.config = replace(model.config, **{name: 1e4})


def swap_adapter_order(model):
    weight = model.transformer.adapter.weight
    weight.data = torch.cat(weight.data.chunk(2, dim=1)[::-1], dim=1)


def swap_fc_halves(model):
    for part in ("prelude", "core_block", "coda"):
        for block in getattr(model.transformer, part):
            weight = block.mlp.fc.weight
            weight.data = torch.cat(weight.data.chunk(2, dim=0)[::-1], dim=0)


def norm_before_coda(model):
    inner = model.readout
    model.readout = lambda context, x, last_only=False: inner(context, model.transformer.ln_f(x))


def drop_norm_before_coda(model):
    model.config = replace(model.config, block="llama")


def drop_qk_norm(model):
    for part in ("prelude", "core_block", "coda"):
        for block in getattr(model.transformer, part):
            block.attn.q_norm = block.attn.k_norm = None


def drop_qk_bias(model):
    for part in ("prelude", "core_block", "coda"):
        for block in getattr(model.transformer, part):
            nn.init.zeros_(block.attn.qk_bias)


def swap_huginn_norms(model):
    for part in ("prelude", "core_block", "coda"):
        for block in getattr(model.transformer, part):
            swap(block.norm_1, block.norm_2)


def drop_embed_scale(model):
    model.config = replace(model.config, embed_scale=1.0)


def drop_rope_scaling(model):
    model.config = replace(model.config, rope_scaling=None)


@pytest.mark.parametrize(
    ("family", "mutate"),
    [
        ("ouro", skip_step_norm),
        ("ouro", swap_branch_norms),
        ("ouro-gqa", swap_gate_up),
        ("ouro-gqa", wrong_theta),
        ("retro-llama", swap_adapter_order),
        ("retro-llama", swap_fc_halves),
        ("retro-llama", norm_before_coda),
        ("retro-llama", drop_rope_scaling),
        ("retro-olmo2", norm_before_coda),
        ("retro-olmo2", drop_qk_norm),
        ("huginn", swap_adapter_order),
        ("huginn", drop_norm_before_coda),
        ("huginn", drop_qk_bias),
        ("huginn", swap_huginn_norms),
        ("huginn", drop_embed_scale),
    ],
)
@torch.inference_mode()
def test_mutation_changes_the_argmax(family, mutate):
    # dials that leave the loop enough to do for a mistake in it to show
    dial = {"ouro": 1.0, "ouro-gqa": 1.0}.get(family)
    model = build_tiny(family, dial=dial)
    mutant = copy.deepcopy(model)
    mutate(mutant)
    changed = (model(ids()).argmax(-1) != mutant(ids()).argmax(-1)).float().mean()
    assert changed > MUST_CHANGE


@pytest.mark.parametrize(("family", "wrong"), [("huginn", "llama"), ("retro-llama", "huginn")])
@torch.inference_mode()
def test_wrong_rotary_layout_changes_the_argmax(family, wrong):
    model = build_tiny(family)
    mutant = copy.deepcopy(model)
    for module in mutant.modules():
        if isinstance(module, raven.RavenAttention):
            module.rotate = raven.ROTATIONS[wrong]
    assert (model(ids()).argmax(-1) != mutant(ids()).argmax(-1)).float().mean() > MUST_CHANGE


def test_adjacent_rotation_is_complex_multiplication():
    x = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0))
    tables = blocks.rotary_tables(torch.arange(5), 8, 5e4)
    turned = torch.view_as_complex(x.unflatten(-1, (4, 2))) * torch.complex(tables.cos, tables.sin)
    expected = torch.view_as_real(turned).flatten(-2)
    torch.testing.assert_close(blocks.adjacent_float32(x, tables), expected)


def test_split_half_and_adjacent_agree_up_to_channel_order():
    x = torch.randn(1, 1, 7, 8, generator=torch.Generator().manual_seed(0))
    tables = blocks.rotary_tables(torch.arange(7), 8, 1e4)
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
    torch.testing.assert_close(
        blocks.split_half_float32(x, tables)[..., order], blocks.adjacent_float32(x[..., order], tables)
    )
