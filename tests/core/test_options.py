"""Where an option's value comes from, what is refused, and the presets that ship with the package."""

import json
import subprocess
import sys
import tomllib
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_trunc.core.options import (
    ModelShape,
    OptionError,
    Preset,
    TruncOptions,
    default_draft_depth,
    env_name,
    find_preset,
    load_presets,
    options_table,
    parse_preset,
    preset_folder,
    resolve_options,
)

ROOT = Path(__file__).parents[2]
SHAPE = ModelShape("OuroForCausalLM", 64, 2, 4, 300, 2)


def resolve(override=None, env=None, presets=(), shape=SHAPE, **more):
    return resolve_options(shape, override, environ=env or {}, presets=list(presets), **more)


def refusal(*args, **kwargs) -> str:
    with pytest.raises(OptionError) as caught:
        resolve(*args, **kwargs)
    return str(caught.value)


# Sources


def test_environment_beats_override_beats_preset_beats_default():
    preset = Preset("a.json", {"hidden_size": 64}, {"d1": 2, "block_size": 8})
    env = {"SGLANG_TRUNC_D1": "4", "HOME": "/root"}
    override = {"block_size": 6}
    assert resolve().options == TruncOptions(d1=1, block_size=4, draft_threshold=0.0)
    assert resolve(presets=[preset]).options == TruncOptions(2, 8, 0.0)
    assert resolve(override, presets=[preset]).options == TruncOptions(2, 6, 0.0)
    assert resolve(override, env, [preset]).options == TruncOptions(4, 6, 0.0)


def test_every_value_names_its_source():
    preset = Preset("a.json", {"hidden_size": 64}, {"draft_threshold": 0.5})
    got = resolve({"block_size": 2}, {"SGLANG_TRUNC_D1": "3"}, [preset])
    assert got.sources == {
        "d1": "environment variable SGLANG_TRUNC_D1",
        "block_size": "--json-model-override-args",
        "draft_threshold": "preset a.json",
    }
    assert resolve().sources["d1"] == "default for 4 recurrences"


def test_real_environment_is_the_default_one(monkeypatch):
    monkeypatch.setenv("SGLANG_TRUNC_BLOCK_SIZE", "7")
    assert resolve_options(SHAPE, presets=[]).options.block_size == 7


def test_numbers_from_text_get_their_type():
    options = resolve(env={"SGLANG_TRUNC_D1": " 2 ", "SGLANG_TRUNC_DRAFT_THRESHOLD": "1"}).options
    assert (options.d1, options.draft_threshold) == (2, 1.0)
    assert isinstance(options.draft_threshold, float)
    assert isinstance(resolve({"draft_threshold": 1}).options.draft_threshold, float)


@pytest.mark.parametrize(("recurrences", "depth"), [(1, 1), (2, 1), (4, 1), (8, 2), (15, 3), (16, 2), (32, 4)])
def test_default_draft_depth(recurrences, depth):
    assert default_draft_depth(recurrences) == depth
    assert resolve(shape=SHAPE._replace(recurrences=recurrences)).options.d1 == depth


def test_options_are_frozen():
    with pytest.raises(FrozenInstanceError):
        resolve().options.d1 = 2


# Refusals


@pytest.mark.parametrize(
    ("field", "text", "value", "accepted"),
    [
        ("d1", "0", "0", "an integer from 1 to 4"),
        ("d1", "5", "5", "an integer from 1 to 4"),
        ("d1", "x", "'x'", "an integer from 1 to 4"),
        ("d1", "1.5", "'1.5'", "an integer from 1 to 4"),
        ("d1", "", "''", "an integer from 1 to 4"),
        ("block_size", "65", "65", "an integer from 1 to 64"),
        ("block_size", "-1", "-1", "an integer from 1 to 64"),
        ("draft_threshold", "1.01", "1.01", "a number from 0 to 1"),
        ("draft_threshold", "nan", "nan", "a number from 0 to 1"),
        ("draft_threshold", "often", "'often'", "a number from 0 to 1"),
    ],
)
def test_environment_values_out_of_range(field, text, value, accepted):
    variable = env_name(field)
    assert refusal(env={variable: text}) == (
        f"{field} is {value} (from environment variable {variable}), but must be {accepted}."
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [("d1", 0), ("d1", 5), ("d1", "x"), ("d1", "2"), ("d1", 1.5), ("d1", True), ("d1", None), ("d1", [1]),
     ("block_size", 2.0), ("draft_threshold", "0.5"), ("draft_threshold", -0.1), ("draft_threshold", False)],
)  # fmt: skip
def test_override_values_out_of_range(field, value):
    message = refusal({field: value})
    assert message.startswith(f"{field} is {value!r} (from --json-model-override-args), but must be ")
    assert message.count(". ") == 0


def test_preset_values_are_checked_with_the_launched_recurrences():
    preset = Preset("a.json", {"hidden_size": 64}, {"d1": 8})
    assert refusal(presets=[preset]) == "d1 is 8 (from preset a.json), but must be an integer from 1 to 4."


def test_overridden_bad_value_does_no_harm():
    preset = Preset("a.json", {"hidden_size": 64}, {"d1": 8})
    assert resolve({"d1": 1}, presets=[preset]).options.d1 == 1


def test_unknown_keys_are_named():
    assert refusal({"d2": 2}) == (
        "d2 is not an option (trunc of --json-model-override-args), the options are d1, block_size, draft_threshold."
    )


@pytest.mark.parametrize("override", [[1], "d1=2", 3])
def test_override_must_be_an_object(override):
    assert "trunc of --json-model-override-args is" in refusal(override)
    assert "must be an object" in refusal(override)


def test_unknown_variables_with_the_prefix_are_named():
    message = refusal(env={"SGLANG_TRUNC_DEPTH": "2"})
    assert message.startswith("Environment variable SGLANG_TRUNC_DEPTH is '2', but the plugin reads only ")
    assert "SGLANG_TRUNC_D1" in message
    assert resolve(env={"SGLANG_TRUNC_THREADS": "2"}, other_env=["SGLANG_TRUNC_THREADS"]).options.d1 == 1


def test_values_built_in_code_can_be_checked():
    TruncOptions(4, 1, 0.0).check(4)
    with pytest.raises(OptionError, match=r"d1 is 4 \(from the caller\)"):
        TruncOptions(4, 1, 0.0).check(2)


# Presets


def test_shape_is_read_from_a_model_config():
    config = SimpleNamespace(
        architectures=["RavenForCausalLM"], hidden_size=64, num_hidden_layers=8, recurrences=32,
        vocab_size=512, num_key_value_heads=2,
    )  # fmt: skip
    assert ModelShape.of(config) == ModelShape("RavenForCausalLM", 64, 8, 32, 512, 2)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "Preset p.json is not readable JSON"),
        ({"match": {"layers": 2}, "trunk": {}}, "trunk is not a key of preset p.json"),
        ({"match": {"depth": 2}}, "depth cannot be matched (preset p.json), only architecture, hidden_size"),
        ({"match": {"layers": 2}, "trunc": {"d3": 1}}, "d3 is not an option (preset p.json)"),
        ({"trunc": {"d1": 1}}, "match is empty in preset p.json"),
    ],
)
def test_preset_faults_are_named(content, sentence):
    text = content if isinstance(content, str) else json.dumps(content)
    with pytest.raises(OptionError) as caught:
        parse_preset("p.json", text)
    assert sentence in str(caught.value)


def test_more_exact_preset_wins_and_a_tie_is_an_error():
    wide = Preset("wide.json", {"layers": 2}, {"d1": 1})
    exact = Preset("exact.json", {"layers": 2, "hidden_size": 64}, {"d1": 2})
    other = Preset("other.json", {"layers": 3}, {"d1": 3})
    assert find_preset(SHAPE, [wide, other, exact]) is exact
    assert find_preset(SHAPE, [other]) is None
    with pytest.raises(OptionError, match=r"wide\.json and wide\.json both fit"):
        find_preset(SHAPE, [wide, wide])


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
def test_published_and_demo_models_find_their_preset(shape, name):
    presets = load_presets()
    assert find_preset(shape, presets).name == name
    assert find_preset(shape._replace(recurrences=3), presets) is None
    resolve_options(shape, environ={})


def test_shipped_presets_are_usable_and_of_one_kind():
    for preset in load_presets():
        shape = ModelShape(**{**SHAPE._asdict(), **preset.match})
        assert resolve_options(shape, environ={}).options.d1 <= shape.recurrences
        assert "architecture" in preset.match
        assert "recurrences" in preset.match


# Packaging


def test_presets_are_found_from_this_installation():
    names = {file.name for file in preset_folder().iterdir()}
    assert {path.name for path in (ROOT / "configs").glob("*.json")} <= names


def test_every_package_is_listed_for_the_wheel():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {".".join(file.parent.relative_to(ROOT).parts) for file in ROOT.glob("sglang_trunc/**/__init__.py")}
    assert set(settings["packages"]) == found | {"sglang_trunc.configs"}


# Documentation


def test_table_has_a_row_for_every_option():
    rows = options_table().splitlines()
    assert len(rows) == 2 + len(fields(TruncOptions))
    assert rows[2] == (
        "| `d1` | `SGLANG_TRUNC_D1` | an integer from 1 to R | depth (recurrences done) at which drafts are read out |"
    )


def test_module_needs_neither_sglang_nor_transformers():
    code = (
        "import sys, sglang_trunc.core.options as o; o.load_presets();"
        "print(sorted({'sglang', 'transformers', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
