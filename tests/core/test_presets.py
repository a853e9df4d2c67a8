"""Preset files: their keys, which one fits a model, and those that ship."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_trunc.core.options import OPTIONS, ControlledOptions, OptionError, TruncOptions
from sglang_trunc.core.presets import ModelShape, Preset, find_preset, load_presets, parse_preset, preset_folder
from sglang_trunc.core.resolve import resolve_options
from tests.core.options_stand import DUAL, NAMES, OF_ALL, SHAPE, SINGLE, TRUNC

ROOT = Path(__file__).parents[2]


def test_shape_is_read_from_a_model_config():
    config = SimpleNamespace(
        architectures=["RavenForCausalLM"], hidden_size=64, num_hidden_layers=8, recurrences=32,
        vocab_size=512, num_key_value_heads=2,
    )  # fmt: skip
    assert ModelShape.of(config) == ModelShape("RavenForCausalLM", 64, 8, 32, 512, 2)


def test_a_preset_has_one_section_for_each_algorithm():
    match = {"layers": 2}
    content = {"model": "m", "match": match, "trunc": {"d1": 1}, "loopspec_dual": {"d2": 2}, "notes": "n"}
    assert parse_preset("p.json", json.dumps(content)) == Preset("p.json", match, {TRUNC: {"d1": 1}, DUAL: {"d2": 2}})


def test_a_section_may_have_options_of_all_classes_of_its_algorithm():
    section = dict.fromkeys(NAMES[TRUNC], 1)
    assert {"d2", "block_size"} <= set(section)
    text = json.dumps({"match": {"layers": 2}, "trunc": section})
    assert parse_preset("p.json", text).values == {TRUNC: section}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "Preset p.json is not readable JSON: Expecting property name enclosed in double quotes: line 1 column 2 "
         "(char 1)."),
        ([1], "preset p.json is [1], but must be an object."),
        ({"match": {"layers": 2}, "trunk": {}}, "trunk is not a key of preset p.json, the keys are model, match, "
         "trunc, loopspec_single, loopspec_dual, notes."),
        ({"match": {"depth": 2}}, "depth cannot be matched (preset p.json), only architecture, hidden_size, layers, "
         "recurrences, vocab_size, kv_heads."),
        ({"match": 2}, "match of preset p.json is 2, but must be an object."),
        ({"trunc": {"d1": 1}}, "match is empty in preset p.json, but must name the model's shape."),
        ({"match": {"layers": 2}, "trunc": {"d3": 1}}, "d3 is not an option (trunc of preset p.json), the options are "
         f"{', '.join(NAMES[TRUNC])}."),
        ({"match": {"layers": 2}, "loopspec_dual": {"d3": 1}}, "d3 is not an option (loopspec_dual of preset p.json), "
         f"the options are {', '.join(NAMES[DUAL])}."),
        ({"match": {"layers": 2}, "loopspec_single": {"d2": 1}}, "d2 is not an option of LOOPSPEC_SINGLE "
         f"(loopspec_single of preset p.json); its options are {', '.join(NAMES[SINGLE])}."),
        ({"match": {"layers": 2}, "loopspec_single": 3}, "loopspec_single of preset p.json is 3, but must be an "
         "object."),
    ],
)  # fmt: skip
def test_preset_faults_are_named(content, message):
    text = content if isinstance(content, str) else json.dumps(content)
    with pytest.raises(OptionError) as caught:
        parse_preset("p.json", text)
    assert str(caught.value) == message


def test_more_exact_preset_wins_and_a_tie_is_an_error():
    wide = Preset("wide.json", {"layers": 2}, {TRUNC: {"d1": 1}})
    exact = Preset("exact.json", {"layers": 2, "hidden_size": 64}, {TRUNC: {"d1": 2}})
    other = Preset("other.json", {"layers": 3}, {TRUNC: {"d1": 3}})
    assert find_preset(SHAPE, [wide, other, exact]) is exact
    assert find_preset(SHAPE, [other]) is None
    with pytest.raises(OptionError) as caught:
        find_preset(SHAPE, [wide, wide])
    assert str(caught.value) == "Presets wide.json and wide.json both fit this model, keep one."


# Those that ship


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        (ModelShape("OuroForCausalLM", 2048, 24, 4, 49152, 16), "ouro-1.4b.json"),
        (ModelShape("OuroForCausalLM", 2048, 48, 4, 49152, 16), "ouro-2.6b.json"),
        (ModelShape("RavenForCausalLM", 5280, 8, 32, 65536, 55), "huginn-0125.json"),
        (ModelShape("RavenForCausalLM", 2048, 14, 32, 128256, 8), "recurrent-llama-3.2.json"),
        (ModelShape("RavenForCausalLM", 2048, 14, 32, 100352, 16), "recurrent-olmo-2.json"),
        (ModelShape("RavenForCausalLM", 2048, 16, 32, 32000, 4), "recurrent-tinyllama.json"),
        (ModelShape("OuroForCausalLM", 128, 3, 4, 2048, 2), "demo-ouro.json"),
        (ModelShape("RavenForCausalLM", 128, 4, 16, 2048, 2), "demo-raven.json"),
    ],
)
@pytest.mark.parametrize("algorithm", OPTIONS)
def test_published_and_demo_models_find_their_preset(algorithm, shape, name):
    presets = load_presets()
    assert find_preset(shape, presets).name == name
    assert find_preset(shape._replace(recurrences=3), presets) is None
    assert resolve_options(algorithm, shape, environ={}).sources["d1"] == f"preset {name}"


@pytest.mark.parametrize("shipped", load_presets(), ids=lambda shipped: shipped.name)
def test_shipped_presets_are_usable_and_of_one_kind(shipped):
    shape = ModelShape(**{**SHAPE._asdict(), **shipped.match})
    for algorithm in OPTIONS:
        resolve_options(algorithm, shape, environ={}).options.check(shape.recurrences)
    assert set(shipped.values) == set(OPTIONS)
    assert "architecture" in shipped.match
    assert "recurrences" in shipped.match


@pytest.mark.parametrize("shipped", load_presets(), ids=lambda shipped: shipped.name)
def test_shipped_presets_serve_lanes_and_blocks(shipped):
    shape = ModelShape(**{**SHAPE._asdict(), **shipped.match})
    values = shipped.values[TRUNC]
    lanes = resolve_options(TRUNC, shape, environ={}).options
    blocks = resolve_options(TRUNC, shape, {"draft_threshold": 0.0}, environ={}).options
    assert (type(lanes), type(blocks)) == (ControlledOptions, TruncOptions)
    assert (lanes.d1, lanes.d2) == (values["d1"], values["d2"])
    assert (blocks.d1, blocks.block_size) == (values["d1"], values["block_size"])
    blocks.check(shape.recurrences)


def test_no_preset_chooses_a_policy_or_relaxes():
    presets = load_presets()
    assert len(presets) > 5
    for shipped in presets:
        for algorithm, values in shipped.values.items():
            assert not set(values) & set(OF_ALL), (shipped.name, algorithm)


def test_presets_are_found_from_this_installation():
    names = {file.name for file in preset_folder().iterdir()}
    assert {path.name for path in (ROOT / "configs").glob("*.json")} <= names


def test_cost_tables_are_no_presets(tmp_path):
    (tmp_path / "a.cost.json").write_text("{}")
    assert load_presets(tmp_path) == []
