"""Where a value comes from, the defaults, and which keys are known; what is refused: ``test_option_refusals``."""

import subprocess
import sys
import tomllib
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from sglang_trunc.core.option_fields import default_draft_depth
from sglang_trunc.core.options import (
    OPTIONS,
    ControlledOptions,
    DualOptions,
    SingleOptions,
    TruncOptions,
    algorithms_with,
    env_name,
    names_of,
)
from sglang_trunc.core.presets import Preset
from sglang_trunc.core.resolve import resolve_options
from tests.core.options_stand import (
    BLOCKS,
    CONTROL,
    DUAL,
    NAMES,
    OF_ALL,
    OVERRIDE,
    SHAPE,
    SINGLE,
    TRUNC,
    VARIABLE,
    every_kind,
    preset,
    refusal,
    resolve,
)

ROOT = Path(__file__).parents[2]


# Sources


def test_environment_beats_override_beats_preset_beats_default():
    given = preset(d1=2, max_width=8, d2=4)
    env = {"SGLANG_TRUNC_D1": "4", "HOME": "/root"}
    override = {"max_width": 6}

    def settled(*args) -> tuple:
        options = resolve(*args, recurrences=16).options
        return options.d1, options.d2, options.max_width

    assert settled() == (2, 8, 32)
    assert settled(None, None, [given]) == (2, 4, 8)
    assert settled(override, None, [given]) == (2, 4, 6)
    assert settled(override, env, [preset(d1=2, max_width=8)]) == (4, 12, 6)
    assert settled({**override, "d1": 1}, env) == (4, 12, 6)


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
    } | dict.fromkeys([*OF_ALL, *CONTROL], "default for 8 recurrences")


def test_every_value_names_its_source():
    got = resolve({"block_size": 2}, {"SGLANG_TRUNC_D1": "3"}, [preset(draft_threshold=0.5)])
    assert got.sources == {
        "d1": f"{VARIABLE}D1",
        "block_size": OVERRIDE,
        "draft_threshold": "preset a.json",
    } | dict.fromkeys(OF_ALL, "default for 4 recurrences")
    assert resolve().sources["d1"] == "default for 4 recurrences"


@every_kind
def test_every_option_of_the_class_has_a_source_and_no_other(algorithm, picked, kind):
    got = resolve(picked, algorithm=algorithm)
    assert set(got.sources) == {field.name for field in fields(kind)}


def test_a_preset_speaks_to_its_own_algorithm_only():
    given = Preset("a.json", {"hidden_size": 64}, {TRUNC: {"d1": 1}, SINGLE: {"d1": 2}})
    assert resolve(presets=[given]).options.d1 == 1
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
    assert isinstance(resolve({"min_survival": 0}).options.min_survival, float)


@every_kind
def test_options_are_frozen_and_of_a_class_of_their_algorithm(algorithm, picked, kind):
    options = resolve(picked, algorithm=algorithm).options
    assert type(options) is kind
    assert kind in OPTIONS[algorithm]
    assert options.algorithm == algorithm
    with pytest.raises(FrozenInstanceError):
        options.d1 = 2


# Defaults


@pytest.mark.parametrize(("recurrences", "depth"), [(1, 1), (2, 1), (4, 1), (8, 2), (15, 3), (16, 2), (32, 4)])
def test_default_draft_depth(recurrences, depth):
    assert default_draft_depth(recurrences) == depth
    assert resolve(BLOCKS, recurrences=recurrences).options == TruncOptions(depth, 4, 0.0)


@pytest.mark.parametrize(
    ("recurrences", "single", "dual"),
    [(2, 1, None), (3, 1, (1, 2)), (4, 1, (1, 2)), (6, 1, (1, 2)), (14, 2, (2, 4)), (16, 2, (2, 8)), (17, 1, (1, 4)),
     (32, 4, (4, 16))],
)  # fmt: skip
def test_default_depths_of_the_pipelines(recurrences, single, dual):
    assert resolve(algorithm=SINGLE, recurrences=recurrences).options == SingleOptions(single, 16, 0.02)
    if dual is not None:
        assert resolve(algorithm=DUAL, recurrences=recurrences).options == DualOptions(*dual, 16, 0.02)


@pytest.mark.parametrize(
    ("recurrences", "depths"),
    [(2, (1, 0)), (3, (1, 2)), (4, (1, 2)), (6, (1, 2)), (15, (3, 6)), (16, (2, 8)), (17, (1, 4)), (32, (4, 16))],
)
def test_defaults_of_trunc_as_it_comes(recurrences, depths):
    """A second depth where there is room for one; more rows than a fixed schedule has, since not all need be used."""
    want = ControlledOptions(*depths, max_width=32, min_survival=0.02, control="measured", lookup=8, lookup_min_match=3)
    assert resolve(recurrences=recurrences).options == want


def test_trunc_of_a_model_with_one_recurrence_verifies_blocks():
    got = resolve(recurrences=1)
    assert got.options == TruncOptions(d1=1, block_size=4, draft_threshold=0.0, lookup=0)
    assert set(got.sources.values()) == {"default for 1 recurrences"}


@pytest.mark.parametrize(("d1", "d2"), [(1, 4), (2, 8), (4, 12)])
@pytest.mark.parametrize("algorithm", [TRUNC, DUAL])
def test_default_second_depth_follows_d1_and_stays_below_r(algorithm, d1, d2):
    assert resolve({"d1": d1}, algorithm=algorithm, recurrences=16).options.d2 == d2


def test_default_second_depth_is_none_where_d1_leaves_no_room():
    assert resolve({"d1": 8}, recurrences=16).options.d2 == 0
    assert resolve({"d1": 2}, recurrences=4).options.d2 == 0


@pytest.mark.parametrize("recurrences", range(1, 65))
@every_kind
def test_defaults_are_usable_at_every_depth(algorithm, picked, kind, recurrences):
    if algorithm != TRUNC and recurrences < kind.least_recurrences:
        assert refusal(algorithm=algorithm, recurrences=recurrences).startswith(f"R is {recurrences}, but {algorithm} ")
    else:
        resolve(picked, algorithm=algorithm, recurrences=recurrences).options.check(recurrences)


@every_kind
def test_who_controls_unless_told(algorithm, picked, kind):
    got = getattr(resolve(picked, algorithm=algorithm).options, "control", None)
    assert got == {ControlledOptions: "measured", TruncOptions: None}.get(kind, "fixed")


@pytest.mark.parametrize("value", ["measured", "fixed"])
@pytest.mark.parametrize("algorithm", OPTIONS)
def test_control_can_be_chosen_for_all_lanes(algorithm, value):
    for got in (
        resolve({"control": value}, algorithm=algorithm),
        resolve(env={"SGLANG_TRUNC_CONTROL": value}, algorithm=algorithm),
        resolve(presets=[preset(algorithm, control=value)], algorithm=algorithm),
    ):
        assert got.options.control == value
        got.options.check(4)


# Keys


@pytest.mark.parametrize("algorithm", OPTIONS)
def test_names_of_an_algorithm(algorithm):
    assert names_of(algorithm) == NAMES[algorithm]
    assert {name for name in set().union(*NAMES.values()) if algorithm in algorithms_with(name)} == {*NAMES[algorithm]}


@pytest.mark.parametrize("algorithm", OPTIONS)
def test_unknown_and_foreign_keys_are_named(algorithm):
    names = ", ".join(NAMES[algorithm])
    assert refusal({"d3": 2}, algorithm=algorithm) == (
        f"d3 is not an option (trunc of {OVERRIDE}), the options are {names}."
    )
    for foreign in set().union(*NAMES.values()) - {*NAMES[algorithm]}:
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
        "its options are d1, max_width, min_survival, sampling_policy, relax_top, relax_tau, lookup, "
        "lookup_min_match, lookup_corpus, screen_top, control, lookup_candidates."
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
        "SGLANG_TRUNC_CONTROL, SGLANG_TRUNC_D1, SGLANG_TRUNC_D2, SGLANG_TRUNC_DRAFT_THRESHOLD, SGLANG_TRUNC_LOOKUP, "
        "SGLANG_TRUNC_LOOKUP_CANDIDATES, SGLANG_TRUNC_LOOKUP_CORPUS, SGLANG_TRUNC_LOOKUP_MIN_MATCH, "
        "SGLANG_TRUNC_MAX_WIDTH, SGLANG_TRUNC_MIN_SURVIVAL, SGLANG_TRUNC_RELAX_TAU, SGLANG_TRUNC_RELAX_TOP, "
        "SGLANG_TRUNC_SAMPLING_POLICY, SGLANG_TRUNC_SCREEN_TOP, SGLANG_TRUNC_X."
    )
    env = {"SGLANG_TRUNC_THREADS": "2"}
    assert resolve(env=env, algorithm=algorithm, other_env=["SGLANG_TRUNC_THREADS"]).options.d1 == 1


# Packaging


def test_every_package_is_listed_for_the_wheel():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {".".join(file.parent.relative_to(ROOT).parts) for file in ROOT.glob("sglang_trunc/**/__init__.py")}
    assert set(settings["packages"]) == found | {"sglang_trunc.configs"}


def test_options_need_the_standard_library_only():
    code = (
        "import sys, sglang_trunc.core.resolve, sglang_trunc.core.presets as p; p.load_presets();"
        "print(sorted({'sglang', 'transformers', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
