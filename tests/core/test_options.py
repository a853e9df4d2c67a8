"""Which options each algorithm has, where a value comes from, what is refused, and the presets that ship."""

import json
import subprocess
import sys
import tomllib
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_trunc.core.options import (
    OPTIONS,
    DualOptions,
    OptionError,
    SingleOptions,
    TruncOptions,
    default_draft_depth,
    env_name,
    options_table,
)
from sglang_trunc.core.presets import ModelShape, Preset, find_preset, load_presets, parse_preset, preset_folder
from sglang_trunc.core.resolve import resolve_options

ROOT = Path(__file__).parents[2]
SHAPE = ModelShape("OuroForCausalLM", 64, 2, 4, 300, 2)
TRUNC, SINGLE, DUAL = OPTIONS
OF_ALL = ["sampling_policy", "relax_top", "relax_tau", "lookup", "lookup_min_match"]
NAMES_OF_ALL = ", ".join(OF_ALL)
VARIABLE = "environment variable SGLANG_TRUNC_"
OVERRIDE = "--json-model-override-args"


def resolve(override=None, env=None, presets=(), shape=SHAPE, algorithm=TRUNC, recurrences=None, **more):
    if recurrences is not None:
        shape = shape._replace(recurrences=recurrences)
    return resolve_options(algorithm, shape, override, environ=env or {}, presets=list(presets), **more)


def refusal(*args, **kwargs) -> str:
    with pytest.raises(OptionError) as caught:
        resolve(*args, **kwargs)
    message = str(caught.value)
    assert message.endswith(".")
    assert message.count(". ") == 0
    return message


def preset(algorithm: str = TRUNC, **values) -> Preset:
    return Preset("a.json", {"hidden_size": 64}, {algorithm: values})


# Sources


def test_environment_beats_override_beats_preset_beats_default():
    given = preset(d1=2, block_size=8)
    env = {"SGLANG_TRUNC_D1": "4", "HOME": "/root"}
    override = {"block_size": 6}
    assert resolve().options == TruncOptions(d1=1, block_size=4, draft_threshold=0.0)
    assert resolve(presets=[given]).options == TruncOptions(2, 8, 0.0)
    assert resolve(override, presets=[given]).options == TruncOptions(2, 6, 0.0)
    assert resolve(override, env, [given]).options == TruncOptions(4, 6, 0.0)


def test_sources_are_mixed_option_by_option():
    given = preset(DUAL, d1=2, d2=4, max_width=16)
    env = {"SGLANG_TRUNC_D2": "6", "SGLANG_TRUNC_MIN_SURVIVAL": "0.1"}
    got = resolve({"max_width": 4}, env, [given], algorithm=DUAL, recurrences=8)
    assert got.options == DualOptions(d1=2, d2=6, max_width=4, min_survival=0.1)
    assert got.sources == {
        "d1": "preset a.json",
        "d2": f"{VARIABLE}D2",
        "max_width": OVERRIDE,
        "min_survival": f"{VARIABLE}MIN_SURVIVAL",
    } | dict.fromkeys(OF_ALL, "default for 8 recurrences")


def test_every_value_names_its_source():
    got = resolve({"block_size": 2}, {"SGLANG_TRUNC_D1": "3"}, [preset(draft_threshold=0.5)])
    assert got.sources == {
        "d1": f"{VARIABLE}D1",
        "block_size": OVERRIDE,
        "draft_threshold": "preset a.json",
    } | dict.fromkeys(OF_ALL, "default for 4 recurrences")
    assert resolve().sources["d1"] == "default for 4 recurrences"


def test_a_preset_speaks_to_its_own_algorithm_only():
    given = Preset("a.json", {"hidden_size": 64}, {TRUNC: {"d1": 4}, SINGLE: {"d1": 2}})
    assert resolve(presets=[given]).options.d1 == 4
    assert resolve(presets=[given], algorithm=SINGLE).options.d1 == 2
    assert resolve(presets=[given], algorithm=DUAL).sources["d1"] == "default for 4 recurrences"


def test_real_environment_is_the_default_one(monkeypatch):
    monkeypatch.setenv("SGLANG_TRUNC_BLOCK_SIZE", "7")
    assert resolve_options(TRUNC, SHAPE, presets=[]).options.block_size == 7


def test_numbers_from_text_get_their_type():
    options = resolve(env={"SGLANG_TRUNC_D1": " 2 ", "SGLANG_TRUNC_DRAFT_THRESHOLD": "1"}).options
    assert (options.d1, options.draft_threshold) == (2, 1.0)
    assert isinstance(options.draft_threshold, float)
    assert isinstance(resolve({"draft_threshold": 1}).options.draft_threshold, float)
    assert isinstance(resolve({"min_survival": 0}, algorithm=SINGLE).options.min_survival, float)


@pytest.mark.parametrize("algorithm", OPTIONS)
def test_options_are_frozen_and_of_their_algorithms_class(algorithm):
    options = resolve(algorithm=algorithm).options
    assert type(options) is OPTIONS[algorithm]
    with pytest.raises(FrozenInstanceError):
        options.d1 = 2


# Defaults


@pytest.mark.parametrize(("recurrences", "depth"), [(1, 1), (2, 1), (4, 1), (8, 2), (15, 3), (16, 2), (32, 4)])
def test_default_draft_depth(recurrences, depth):
    assert default_draft_depth(recurrences) == depth
    assert resolve(recurrences=recurrences).options.d1 == depth


@pytest.mark.parametrize(
    ("recurrences", "single", "dual"),
    [(2, 1, None), (3, 1, (1, 2)), (4, 1, (1, 2)), (6, 1, (1, 2)), (14, 2, (2, 4)), (16, 2, (2, 8)), (17, 1, (1, 4)),
     (32, 4, (4, 16))],
)  # fmt: skip
def test_default_depths_of_the_pipelines(recurrences, single, dual):
    assert resolve(algorithm=SINGLE, recurrences=recurrences).options == SingleOptions(single, 16, 0.02)
    if dual is not None:
        assert resolve(algorithm=DUAL, recurrences=recurrences).options == DualOptions(*dual, 16, 0.02)


@pytest.mark.parametrize(("d1", "d2"), [(1, 4), (2, 8), (4, 12)])
def test_default_second_depth_follows_d1_and_stays_below_r(d1, d2):
    assert resolve({"d1": d1}, algorithm=DUAL, recurrences=16).options.d2 == d2


@pytest.mark.parametrize("recurrences", range(1, 65))
@pytest.mark.parametrize("algorithm", OPTIONS)
def test_defaults_are_usable_at_every_depth(algorithm, recurrences):
    if recurrences < OPTIONS[algorithm].least_recurrences:
        assert refusal(algorithm=algorithm, recurrences=recurrences).startswith(f"R is {recurrences}, but {algorithm} ")
    else:
        resolve(algorithm=algorithm, recurrences=recurrences).options.check(recurrences)


# Refused values


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


DIVISOR_OF_4 = "a divisor of R = 4 below it: 1, 2"
DUAL_DIVISOR_OF_12 = "a divisor of R = 12 below R / 2, so that d2 fits between d1 and R: 1, 2, 3, 4"


@pytest.mark.parametrize(
    ("algorithm", "recurrences", "field", "value", "accepted"),
    [
        (SINGLE, 4, "d1", 3, DIVISOR_OF_4),
        (SINGLE, 4, "d1", 4, DIVISOR_OF_4),
        (SINGLE, 4, "d1", 0, DIVISOR_OF_4),
        (SINGLE, 4, "d1", -1, DIVISOR_OF_4),
        (SINGLE, 4, "d1", "x", DIVISOR_OF_4),
        (SINGLE, 2, "d1", 2, "a divisor of R = 2 below it: 1"),
        (SINGLE, 4, "max_width", 0, "an integer from 1 to 256"),
        (SINGLE, 4, "max_width", 257, "an integer from 1 to 256"),
        (SINGLE, 4, "min_survival", 1.5, "a number from 0 to 1"),
        (DUAL, 4, "min_survival", -0.1, "a number from 0 to 1"),
        (DUAL, 4, "max_width", 0, "an integer from 1 to 256"),
        (DUAL, 12, "d1", 6, DUAL_DIVISOR_OF_12),
        (DUAL, 12, "d1", 5, DUAL_DIVISOR_OF_12),
        (DUAL, 4, "d1", 2, "a divisor of R = 4 below R / 2, so that d2 fits between d1 and R: 1"),
        (DUAL, 4, "d2", 4, "a multiple of d1 = 1 between d1 and R = 4: 2, 3"),
        (DUAL, 4, "d2", 1, "a multiple of d1 = 1 between d1 and R = 4: 2, 3"),
        (DUAL, 4, "d2", "x", "a multiple of d1 = 1 between d1 and R = 4: 2, 3"),
        (DUAL, 17, "d2", 17, f"a multiple of d1 = 1 between d1 and R = 17: {', '.join(map(str, range(2, 17)))}"),
        (DUAL, 19, "d2", 19, "a multiple of d1 = 1 between d1 and R = 19: 2, 3, 4, ..., 18"),
    ],
)
def test_pipeline_values_that_do_not_fit(algorithm, recurrences, field, value, accepted):
    def expected(source: str) -> str:
        return f"{field} is {value!r} (from {source}), but must be {accepted}."

    variable = env_name(field)
    where = {"algorithm": algorithm, "recurrences": recurrences}
    assert refusal(env={variable: str(value)}, **where) == expected(f"environment variable {variable}")
    assert refusal({field: value}, **where) == expected(OVERRIDE)
    assert refusal(presets=[preset(algorithm, **{field: value})], **where) == expected("preset a.json")


@pytest.mark.parametrize(
    ("field", "value"),
    [("d1", 0), ("d1", 5), ("d1", "x"), ("d1", "2"), ("d1", 1.5), ("d1", True), ("d1", None), ("d1", [1]),
     ("block_size", 2.0), ("draft_threshold", "0.5"), ("draft_threshold", -0.1), ("draft_threshold", False)],
)  # fmt: skip
def test_override_values_out_of_range(field, value):
    assert refusal({field: value}).startswith(f"{field} is {value!r} (from {OVERRIDE}), but must be ")


@pytest.mark.parametrize("value", [True, 2.0, "2", None, [2], {}])
@pytest.mark.parametrize("field", ["d1", "d2"])
def test_depths_of_another_type_are_refused_even_where_they_equal_a_choice(field, value):
    message = refusal({field: value}, algorithm=DUAL, recurrences=8)
    assert message.startswith(f"{field} is {value!r} (from {OVERRIDE}), but must be ")


def test_preset_values_are_checked_with_the_launched_recurrences():
    assert refusal(presets=[preset(d1=8)]) == "d1 is 8 (from preset a.json), but must be an integer from 1 to 4."


def test_overridden_bad_value_does_no_harm():
    assert resolve({"d1": 1}, presets=[preset(d1=8)]).options.d1 == 1


@pytest.mark.parametrize(
    ("given", "env", "override", "message"),
    [
        # d2 does not fit a d1 from elsewhere
        ({"d1": 2, "d2": 8}, {"D2": "5"}, None, f"d2 is 5 (from {VARIABLE}D2), but must be a multiple of d1 = 2 "
         "between d1 and R = 16: 4, 6, 8, 10, 12, 14."),
        ({}, {"D2": "3"}, None, f"d2 is 3 (from {VARIABLE}D2), but must be a multiple of d1 = 2 "
         "between d1 and R = 16: 4, 6, 8, 10, 12, 14."),
        ({}, {"D2": "6"}, {"d1": 4}, f"d2 is 6 (from {VARIABLE}D2), but must be a multiple of d1 = 4 "
         "between d1 and R = 16: 8, 12."),
        # the preset's d2 does not fit the d1 that was asked for
        ({"d1": 2, "d2": 6}, {"D1": "4"}, None, "d2 is 6 (from preset a.json), but must be a multiple of d1 = 4 "
         "between d1 and R = 16: 8, 12."),
        ({"d1": 2, "d2": 4}, {}, {"d1": 4}, "d2 is 4 (from preset a.json), but must be a multiple of d1 = 4 "
         "between d1 and R = 16: 8, 12."),
        # no d2 would do
        ({"d1": 8}, {"D2": "12"}, None, "d1 is 8 (from preset a.json), but must be a divisor of R = 16 below R / 2, "
         "so that d2 fits between d1 and R: 1, 2, 4."),
    ],
)  # fmt: skip
def test_depths_from_different_sources_are_checked_together(given, env, override, message):
    env = {env_name(name): value for name, value in env.items()}
    assert refusal(override, env, [preset(DUAL, **given)], algorithm=DUAL, recurrences=16) == message


@pytest.mark.parametrize(
    ("algorithm", "recurrences", "message"),
    [
        (SINGLE, 1, "R is 1, but LOOPSPEC_SINGLE needs at least 2: a looped model with one recurrence has no early "
         "depth."),
        (DUAL, 1, "R is 1, but LOOPSPEC_DUAL needs at least 3: d2 must be a multiple of d1 between d1 and R, which for "
         "R = 3 are d1 = 1 and d2 = 2."),
        (DUAL, 2, "R is 2, but LOOPSPEC_DUAL needs at least 3: d2 must be a multiple of d1 between d1 and R, which for "
         "R = 3 are d1 = 1 and d2 = 2."),
    ],
)  # fmt: skip
def test_models_that_are_too_shallow(algorithm, recurrences, message):
    assert refusal(algorithm=algorithm, recurrences=recurrences) == message
    assert refusal({"d1": 1}, algorithm=algorithm, recurrences=recurrences) == message


@pytest.mark.parametrize(
    ("options", "recurrences", "message"),
    [
        (TruncOptions(4, 1, 0.0), 2, "d1 is 4 (from the caller), but must be an integer from 1 to 2."),
        (SingleOptions(2, 8, 0.05), 5, "d1 is 2 (from the caller), but must be a divisor of R = 5 below it: 1."),
        (SingleOptions(1, 8, 0.05), 1, "R is 1, but LOOPSPEC_SINGLE needs at least 2: a looped model with one "
         "recurrence has no early depth."),
        (DualOptions(2, 6, 8, 0.05), 6, "d2 is 6 (from the caller), but must be a multiple of d1 = 2 "
         "between d1 and R = 6: 4."),
    ],
)  # fmt: skip
def test_values_built_in_code_can_be_checked(options, recurrences, message):
    options.check(12)
    with pytest.raises(OptionError) as caught:
        options.check(recurrences)
    assert str(caught.value) == message


# Sampling policy and relaxed acceptance


@pytest.mark.parametrize("algorithm", OPTIONS)
def test_every_algorithm_samples_seeded_and_accepts_exactly_unless_told(algorithm):
    options = resolve(algorithm=algorithm).options
    assert (options.sampling_policy, options.relax_top, options.relax_tau) == ("seeded", 1, 1.0)
    assert not options.relaxed
    env = {"SGLANG_TRUNC_SAMPLING_POLICY": "residual"}
    got = resolve(env=env, algorithm=algorithm)
    assert (
        got.options.sampling_policy == resolve({"sampling_policy": "residual"}, algorithm=algorithm)[0].sampling_policy
    )
    assert got.options.sampling_policy == "residual"
    assert got.sources["sampling_policy"] == f"{VARIABLE}SAMPLING_POLICY"
    assert resolve({"sampling_policy": "seeded"}, env, algorithm=algorithm).options.sampling_policy == "residual"


@pytest.mark.parametrize("algorithm", OPTIONS)
@pytest.mark.parametrize(
    ("given", "relaxed"),
    [({}, False), ({"relax_top": 1, "relax_tau": 1}, False), ({"relax_top": 2}, True), ({"relax_tau": 0.999}, True),
     ({"relax_top": 64, "relax_tau": 0.0}, True)],
)  # fmt: skip
def test_options_know_whether_acceptance_is_relaxed(algorithm, given, relaxed):
    env = {env_name(name): str(value) for name, value in given.items()}
    for options in (resolve(given, algorithm=algorithm).options, resolve(env=env, algorithm=algorithm).options):
        assert options.relaxed is relaxed
        assert isinstance(options.relax_tau, float)
        options.check(4)


@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [
        ("sampling_policy", "greedy", "seeded or residual"),
        ("sampling_policy", "", "seeded or residual"),
        ("sampling_policy", "Residual", "seeded or residual"),
        ("relax_top", 0, "an integer from 1 to 64"),
        ("relax_top", 65, "an integer from 1 to 64"),
        ("relax_top", "x", "an integer from 1 to 64"),
        ("relax_tau", -0.1, "a number from 0 to 1"),
        ("relax_tau", 1.5, "a number from 0 to 1"),
        ("relax_tau", "x", "a number from 0 to 1"),
    ],
)
@pytest.mark.parametrize("algorithm", OPTIONS)
def test_values_of_sampling_and_relaxing_that_cannot_be_used(algorithm, field, value, accepted):
    variable = env_name(field)
    for source, given in (
        (f"environment variable {variable}", {"env": {variable: str(value)}}),
        (OVERRIDE, {"override": {field: value}}),
        ("preset a.json", {"presets": [preset(algorithm, **{field: value})]}),
    ):
        assert refusal(algorithm=algorithm, **given) == f"{field} is {value!r} (from {source}), but must be {accepted}."


@pytest.mark.parametrize("value", [True, 1, 1.0, None, ["seeded"], {}])
def test_a_policy_of_another_type_is_refused(value):
    assert refusal({"sampling_policy": value}) == (
        f"sampling_policy is {value!r} (from {OVERRIDE}), but must be seeded or residual."
    )


@pytest.mark.parametrize("algorithm", OPTIONS)
@pytest.mark.parametrize(("field", "value"), [("relax_top", 2), ("relax_tau", 0.5), ("relax_tau", 0.0)])
def test_the_residual_policy_cannot_be_relaxed(algorithm, field, value):
    accepted = "but must be 1 where sampling_policy is residual."
    env = {"SGLANG_TRUNC_SAMPLING_POLICY": "residual"}
    assert refusal({field: value}, env, algorithm=algorithm) == f"{field} is {value} (from {OVERRIDE}), {accepted}"
    given = {env_name(field): str(value)}
    assert refusal({"sampling_policy": "residual"}, given, algorithm=algorithm) == (
        f"{field} is {value} (from environment variable {env_name(field)}), {accepted}"
    )
    made = replace(resolve(algorithm=algorithm).options, sampling_policy="residual", **{field: value})
    with pytest.raises(OptionError) as caught:
        made.check(4)
    assert str(caught.value) == f"{field} is {value} (from the caller), {accepted}"
    exact = {"sampling_policy": "residual", "relax_top": 1, "relax_tau": 1}
    assert resolve(exact, algorithm=algorithm).options.sampling_policy == "residual"


def test_no_preset_chooses_a_policy_or_relaxes():
    presets = load_presets()
    assert len(presets) > 5
    for shipped in presets:
        for algorithm, values in shipped.values.items():
            assert not set(values) & set(OF_ALL), (shipped.name, algorithm)


# Refused keys


@pytest.mark.parametrize(
    ("algorithm", "names"),
    [
        (TRUNC, f"d1, block_size, draft_threshold, {NAMES_OF_ALL}"),
        (SINGLE, f"d1, max_width, min_survival, {NAMES_OF_ALL}"),
        (DUAL, f"d1, d2, max_width, min_survival, {NAMES_OF_ALL}"),
    ],
)
def test_unknown_and_foreign_keys_are_named(algorithm, names):
    assert refusal({"d3": 2}, algorithm=algorithm) == (
        f"d3 is not an option (trunc of {OVERRIDE}), the options are {names}."
    )
    all_names = {field.name for kind in OPTIONS.values() for field in fields(kind)}
    for foreign in all_names - set(names.split(", ")):
        assert refusal({foreign: 2}, algorithm=algorithm) == (
            f"{foreign} is not an option of {algorithm} (trunc of {OVERRIDE}); its options are {names}."
        )
        variable = env_name(foreign)
        assert refusal(env={variable: "2"}, algorithm=algorithm) == (
            f"{foreign} is not an option of {algorithm} (environment variable {variable}); its options are {names}."
        )


def test_foreign_variable_in_full():
    assert refusal(env={"SGLANG_TRUNC_BLOCK_SIZE": "4"}, algorithm=SINGLE) == (
        "block_size is not an option of LOOPSPEC_SINGLE (environment variable SGLANG_TRUNC_BLOCK_SIZE); "
        f"its options are d1, max_width, min_survival, {NAMES_OF_ALL}."
    )


@pytest.mark.parametrize("override", [[1], "d1=2", 3])
@pytest.mark.parametrize("algorithm", OPTIONS)
def test_override_must_be_an_object(algorithm, override):
    message = refusal(override, algorithm=algorithm)
    assert message == f"trunc of {OVERRIDE} is {override!r}, but must be an object."


@pytest.mark.parametrize("algorithm", OPTIONS)
def test_unknown_variables_with_the_prefix_are_named(algorithm):
    assert refusal(env={"SGLANG_TRUNC_DEPTH": "2"}, algorithm=algorithm, other_env=["SGLANG_TRUNC_X"]) == (
        "Environment variable SGLANG_TRUNC_DEPTH is '2', but the plugin reads only SGLANG_TRUNC_BLOCK_SIZE, "
        "SGLANG_TRUNC_D1, SGLANG_TRUNC_D2, SGLANG_TRUNC_DRAFT_THRESHOLD, SGLANG_TRUNC_LOOKUP, "
        "SGLANG_TRUNC_LOOKUP_MIN_MATCH, SGLANG_TRUNC_MAX_WIDTH, "
        "SGLANG_TRUNC_MIN_SURVIVAL, SGLANG_TRUNC_RELAX_TAU, SGLANG_TRUNC_RELAX_TOP, SGLANG_TRUNC_SAMPLING_POLICY, "
        "SGLANG_TRUNC_X."
    )
    env = {"SGLANG_TRUNC_THREADS": "2"}
    assert resolve(env=env, algorithm=algorithm, other_env=["SGLANG_TRUNC_THREADS"]).options.d1 == 1


# Presets


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
         f"d1, block_size, draft_threshold, {NAMES_OF_ALL}."),
        ({"match": {"layers": 2}, "loopspec_dual": {"d3": 1}}, "d3 is not an option (loopspec_dual of preset p.json), "
         f"the options are d1, d2, max_width, min_survival, {NAMES_OF_ALL}."),
        ({"match": {"layers": 2}, "loopspec_single": {"d2": 1}}, "d2 is not an option of LOOPSPEC_SINGLE "
         f"(loopspec_single of preset p.json); its options are d1, max_width, min_survival, {NAMES_OF_ALL}."),
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


def test_shipped_presets_are_usable_and_of_one_kind():
    for shipped in load_presets():
        shape = ModelShape(**{**SHAPE._asdict(), **shipped.match})
        for algorithm in OPTIONS:
            resolve_options(algorithm, shape, environ={}).options.check(shape.recurrences)
        assert set(shipped.values) == set(OPTIONS)
        assert "architecture" in shipped.match
        assert "recurrences" in shipped.match


# Packaging


def test_presets_are_found_from_this_installation():
    names = {file.name for file in preset_folder().iterdir()}
    assert {path.name for path in (ROOT / "configs").glob("*.json")} <= names


def test_every_package_is_listed_for_the_wheel():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {".".join(file.parent.relative_to(ROOT).parts) for file in ROOT.glob("sglang_trunc/**/__init__.py")}
    assert set(settings["packages"]) == found | {"sglang_trunc.configs"}


# Documentation


def test_table_has_one_row_for_every_option():
    rows = options_table().splitlines()
    assert [row.split("`")[1] for row in rows[2:]] == [
        "d1",
        "block_size",
        "draft_threshold",
        "max_width",
        "min_survival",
        "d2",
        *OF_ALL,
    ]
    assert rows[2] == (
        "| `d1` | `SGLANG_TRUNC_D1` | all | TRUNC: an integer from 1 to R; LOOPSPEC_SINGLE: a divisor of R below it; "
        "LOOPSPEC_DUAL: a divisor of R below R / 2 | depth (recurrences done) at which drafts are read out |"
    )
    assert rows[5].startswith(
        "| `max_width` | `SGLANG_TRUNC_MAX_WIDTH` | LOOPSPEC_SINGLE, LOOPSPEC_DUAL | an integer from 1 to 256 | "
    )


def test_table_says_what_text_and_tied_options_accept():
    accepted = {row.split("`")[1]: row.split(" | ")[3] for row in options_table().splitlines()[2:]}
    assert [accepted[name] for name in OF_ALL] == [
        "seeded or residual",
        "an integer from 1 to 64; only 1 where sampling_policy is residual",
        "a number from 0 to 1; only 1 where sampling_policy is residual",
        "an integer from 0 to 64",
        "an integer from 1 to 32",
    ]


def test_an_option_of_several_algorithms_means_the_same_in_each():
    docs: dict[str, set[str]] = {}
    for kind in OPTIONS.values():
        for field in fields(kind):
            docs.setdefault(field.name, set()).add(field.metadata["doc"])
    assert all(len(texts) == 1 for texts in docs.values())


def test_readme_shows_the_table():
    assert f"\n{options_table()}\n" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_options_need_the_standard_library_only():
    code = (
        "import sys, sglang_trunc.core.resolve, sglang_trunc.core.presets as p; p.load_presets();"
        "print(sorted({'sglang', 'transformers', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
