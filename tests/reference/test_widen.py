"""A widened checkpoint says exactly what its source says, and never an added vocabulary id.

Small targets of every kind of ratio; the shipped demo models are used where they are present, random models
of the same shape otherwise, so that the arithmetic is tested without training. In bfloat16 the padded sums
may be added in another order, so greedy tokens may differ at a near tie, and only there.
"""

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sglang_trunc.reference.checkpoint import load_checkpoint, save_checkpoint
from sglang_trunc.reference.decode import greedy, teacher_forced_check
from sglang_trunc.reference.tiny import build_tiny

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).resolve().parents[2]
SHAPE = {
    "ouro": ("ouro-gqa", "hidden_size", "num_attention_heads"),
    "raven": ("retro-llama", "n_embd", "n_heads"),
}


@pytest.fixture(scope="module")
def widen():
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        yield importlib.import_module("widen")
    finally:
        sys.path.remove(str(ROOT / "bench"))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """family -> directory of a 128-wide random checkpoint, stored as bfloat16 like the demos."""
    found = {}
    for family, (tiny, width, heads) in SHAPE.items():
        dial = 0.3 if family == "ouro" else 0.2
        sizes = {width: 128, heads: 2, "num_key_value_heads": 1, "vocab_size": 320, "full_depth": 4}
        model = build_tiny(tiny, dial=dial, intermediate_size=192, **sizes)
        found[family] = tmp_path_factory.mktemp(family)
        save_checkpoint(model, found[family], torch.bfloat16)
    return found


def ids(count=64, vocab=320):
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(4))


def make(widen, source, out, hidden, vocab=None, deeper=True):
    model = load_checkpoint(source, torch.float32)
    layers = model.config.num_hidden_layers + 2 if hasattr(model.config, "num_hidden_layers") else None
    parts = (2, 3, 2) if deeper else (None, None, None)
    config = widen.target_config(model, hidden, 512, vocab, None, layers if deeper else None, parts)
    widen.widen(source, out, config)
    return model, load_checkpoint(out, torch.float32)


@pytest.mark.parametrize("family", SHAPE)
@pytest.mark.parametrize(("hidden", "vocab"), [(256, None), (384, None), (512, 1000), (1024, 777)])
@torch.no_grad()
def test_logits_and_tokens_are_kept(widen, sources, tmp_path, family, hidden, vocab):
    model, wide = make(widen, sources[family], tmp_path, hidden, vocab)
    logits, wide_logits = model.all_depths(ids()), wide.all_depths(ids())
    torch.testing.assert_close(wide_logits[..., :320], logits, atol=1e-4, rtol=0)
    if vocab is not None:
        highest = wide_logits[..., 320:].amax(-1)
        assert (highest < logits.amin(-1) - 50).all()  # not merely unlikely: never sampled either
        mass = wide_logits.double().softmax(-1)[..., 320:].sum(-1)
        assert mass.max() < 1e-20
    prompt = ids(24).tolist()
    out = greedy(model, prompt, 64)
    assert teacher_forced_check(wide, prompt, out) is None


@pytest.mark.parametrize("family", SHAPE)
@torch.no_grad()
def test_bfloat16_tokens_differ_only_at_near_ties(widen, sources, tmp_path, family):
    make(widen, sources[family], tmp_path, 512, 1000)
    model = load_checkpoint(sources[family])
    wide = load_checkpoint(tmp_path)
    assert wide.lm_head.weight.dtype == torch.bfloat16
    prompt = ids(24).tolist()
    mismatch = teacher_forced_check(wide, prompt, greedy(model, prompt, 32))
    assert mismatch is None or mismatch.margin <= 2.0**-6


@pytest.mark.parametrize("family", SHAPE)
def test_added_parts_have_the_asked_shape(widen, sources, tmp_path, family):
    _, wide = make(widen, sources[family], tmp_path, 512, 1000)
    config = wide.config
    assert (wide.width, wide.vocab_size, config.intermediate_size, config.head_dim) == (512, 1000, 512, 64)
    assert wide.lm_head.weight.shape == (1000, 512)
    if family == "ouro":
        assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (4, 8, 4)
    else:
        assert (config.prelude_layers, config.core_layers, config.coda_layers) == (2, 3, 2)
        assert (config.n_heads, config.num_key_value_heads) == (8, 4)
    assert len(list(tmp_path.glob("model-*.safetensors"))) == 1


@torch.no_grad()
def test_widened_matrices_are_exact_in_bfloat16(widen, sources, tmp_path):
    make(widen, sources["ouro"], tmp_path, 512, 1000)
    narrow, wide = load_checkpoint(sources["ouro"]), load_checkpoint(tmp_path)
    assert wide.config.rms_norm_eps == narrow.config.rms_norm_eps / 4
    old, new = narrow.model.layers[0], wide.model.layers[0]
    assert torch.equal(new.self_attn.q_proj.weight[:128, :128], old.self_attn.q_proj.weight)
    assert torch.equal(new.input_layernorm.weight[:128] * 2, old.input_layernorm.weight)
    assert torch.equal(new.mlp.down_proj.weight[:128, :192], old.mlp.down_proj.weight)


@torch.no_grad()
def test_ids_beyond_the_source_vocabulary_are_sane_inputs(widen, sources, tmp_path):
    model, wide = make(widen, sources["ouro"], tmp_path, 512, 1000)
    beyond = wide(ids() + 640)[..., :320]
    torch.testing.assert_close(beyond, model((ids() + 640) % 320), atol=1e-4, rtol=0)


def test_sharding(widen, sources, tmp_path, monkeypatch):
    monkeypatch.setattr(widen, "SHARD_BYTES", 100_000)
    model, wide = make(widen, sources["raven"], tmp_path, 256)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    torch.testing.assert_close(wide(ids()), model(ids()), atol=1e-4, rtol=0)


def test_refusals(widen, sources, tmp_path):
    ouro = load_checkpoint(sources["ouro"], torch.float32)
    raven = load_checkpoint(sources["raven"], torch.float32)
    huginn = build_tiny("huginn")
    with pytest.raises(ValueError, match="spare channel"):
        widen.ouro_tensors(ouro, replace(ouro.config, hidden_size=256, num_attention_heads=4, vocab_size=999))
    with pytest.raises(ValueError, match="multiple of 128"):
        widen.ouro_tensors(ouro, replace(ouro.config, hidden_size=300))
    with pytest.raises(ValueError, match="huginn"):
        widen.raven_tensors(huginn, huginn.config)
    with pytest.raises(ValueError, match="core_layers must be at least 2"):
        widen.raven_tensors(raven, replace(raven.config, core_layers=1))
    with pytest.raises(ValueError, match="different families"):
        widen.widen(sources["ouro"], tmp_path, raven.config)


@pytest.mark.parametrize("family", SHAPE)
@torch.no_grad()
def test_shipped_demo(widen, tmp_path, family):
    demo = ROOT / "sglang_trunc" / "demos" / family
    if not (demo / "model.safetensors").exists():
        pytest.skip("the demo checkpoints have not been trained here")
    model, wide = make(widen, demo, tmp_path, 512, 4096, deeper=False)
    prompt = ids(24, model.vocab_size).tolist()
    out = greedy(model, prompt, 48)
    assert teacher_forced_check(wide, prompt, out) is None
    sequence = torch.tensor(prompt + out)
    assert (wide(sequence)[:, model.vocab_size :] < model(sequence).amin(-1, keepdim=True) - 50).all()
    assert (tmp_path / "tokenizer.json").exists()
