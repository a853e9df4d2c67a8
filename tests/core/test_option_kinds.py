"""Which of TRUNC's two classes is used: lanes as it comes, blocks where one of their options is set or R is 1."""

from dataclasses import fields

import pytest
from hypothesis import given, strategies

from sglang_trunc.core.options import OPTIONS, ControlledOptions, OptionError, TruncOptions, env_name
from sglang_trunc.core.resolve import kind_of
from tests.core.options_stand import (
    BLOCKS,
    CONTROL,
    DUAL,
    NAMES,
    OF_ALL,
    OVERRIDE,
    SINGLE,
    TRUNC,
    VARIABLE,
    preset,
    refusal,
    resolve,
)

OF_LANES = ["d2", "max_width", "min_survival", *CONTROL]
OF_BLOCKS = ["block_size", "draft_threshold"]
VALUES = {
    "d1": 1,
    "d2": 2,
    "max_width": 8,
    "min_survival": 0.5,
    "control": "fixed",
    "block_size": 3,
    "draft_threshold": 0.5,
    "sampling_policy": "seeded",
    "relax_top": 1,
    "relax_tau": 1.0,
    "lookup": 2,
    "lookup_min_match": 2,
    "lookup_corpus": __file__,
    "screen_top": 2,
    "lookup_candidates": 2,
}


def both_ways(names: list[str], **more) -> list:
    """Options with these names set by the launch override, and by the environment."""
    values = {name: VALUES[name] for name in names}
    env = {env_name(name): str(value) for name, value in values.items()}
    return [resolve(values, **more).options, resolve(env=env, **more).options]


def test_every_option_of_trunc_is_one_classes_or_both():
    own = {kind: {field.name for field in fields(kind)} for kind in OPTIONS[TRUNC]}
    assert own[ControlledOptions] - own[TruncOptions] == {*OF_LANES}
    assert own[TruncOptions] - own[ControlledOptions] == {*OF_BLOCKS}
    assert own[TruncOptions] & own[ControlledOptions] == {"d1", *OF_ALL}


@pytest.mark.parametrize("recurrences", [2, 3, 4, 16, 32])
@pytest.mark.parametrize(
    ("names", "kind"),
    [
        ([], ControlledOptions),
        (["d1"], ControlledOptions),
        *(([name], ControlledOptions) for name in [*OF_ALL, *CONTROL, "max_width", "min_survival"]),
        (["d1", "max_width", "lookup"], ControlledOptions),
        *(([name], TruncOptions) for name in OF_BLOCKS),
        (["d1", "block_size"], TruncOptions),
        (["lookup", "draft_threshold"], TruncOptions),
        (OF_BLOCKS, TruncOptions),
        (["d1", *OF_BLOCKS, *OF_ALL], TruncOptions),
    ],
)
def test_what_is_set_picks_the_class(names, kind, recurrences):
    for options in both_ways(names, recurrences=recurrences):
        assert type(options) is kind
        assert {name: getattr(options, name) for name in names} == {name: VALUES[name] for name in names}


def test_a_second_depth_asks_for_lanes():
    assert [type(options) for options in both_ways(["d2"])] == [ControlledOptions] * 2


def test_a_value_that_equals_the_default_picks_like_any_other():
    assert type(resolve({"block_size": 4}).options) is TruncOptions
    assert type(resolve({"draft_threshold": 0}).options) is TruncOptions


@pytest.mark.parametrize("one", OF_LANES)
@pytest.mark.parametrize("other", OF_BLOCKS)
def test_options_of_lanes_and_of_blocks_exclude_each_other(one, other):
    def sentence(one_source: str, other_source: str) -> str:
        return (
            f"{one} (from {one_source}) and {other} (from {other_source}) cannot both be set: "
            f"TRUNC runs lanes with {one} and blocks with {other}."
        )

    mine, theirs = {one: VALUES[one]}, {other: VALUES[other]}
    my_env, their_env = {env_name(one): str(VALUES[one])}, {env_name(other): str(VALUES[other])}
    my_variable, their_variable = (VARIABLE + name.upper() for name in (one, other))
    for recurrences in (1, 4):
        more = {"recurrences": recurrences}
        assert refusal({**mine, **theirs}, **more) == sentence(OVERRIDE, OVERRIDE)
        assert refusal({**theirs, **mine}, **more) == sentence(OVERRIDE, OVERRIDE)
        assert refusal(env=my_env | their_env, **more) == sentence(my_variable, their_variable)
        assert refusal(mine, their_env, **more) == sentence(OVERRIDE, their_variable)
        assert refusal(theirs, my_env, **more) == sentence(my_variable, OVERRIDE)


def test_the_refusal_names_the_source_that_speaks():
    assert refusal({"max_width": 8}, {"SGLANG_TRUNC_MAX_WIDTH": "4", "SGLANG_TRUNC_BLOCK_SIZE": "2"}) == (
        f"max_width (from {VARIABLE}MAX_WIDTH) and block_size (from {VARIABLE}BLOCK_SIZE) cannot both be set: "
        "TRUNC runs lanes with max_width and blocks with block_size."
    )


def test_values_of_options_that_exclude_each_other_are_not_looked_at():
    assert "cannot both be set" in refusal({"block_size": "x", "d2": "y"})


# One recurrence


@pytest.mark.parametrize("name", ["d1", *OF_ALL, *OF_BLOCKS])
def test_one_recurrence_is_for_blocks(name):
    assert [type(options) for options in both_ways([name], recurrences=1)] == [TruncOptions] * 2


@pytest.mark.parametrize("name", OF_LANES)
def test_one_recurrence_is_not_for_lanes(name):
    sentence = (
        "R is 1, but TRUNC with lanes needs at least 2: with one there is no early depth, and d2, max_width, "
        "min_survival, control and lookup_candidates are for lanes."
    )
    assert refusal({name: VALUES[name]}, recurrences=1) == sentence
    assert refusal(env={env_name(name): str(VALUES[name])}, recurrences=1) == sentence


def test_what_is_for_lanes_is_said_in_full():
    assert all(name in ControlledOptions.why.replace(",", "").split() for name in OF_LANES)


# Presets


BOTH = {"d1": 2, "d2": 6, "max_width": 8, "control": "fixed", "block_size": 3, "draft_threshold": 0.5, "lookup": 2}


def test_a_preset_with_options_of_both_serves_both_and_picks_neither():
    more = {"presets": [preset(**BOTH)], "recurrences": 8}
    lanes = ControlledOptions(2, 6, 8, 0.02, control="fixed", lookup=2)
    assert resolve(**more).options == resolve({"d1": 2}, **more).options == lanes
    assert resolve(**more).sources["max_width"] == "preset a.json"
    assert resolve({"block_size": 5}, **more).options == TruncOptions(2, 5, 0.5, lookup=2)
    assert resolve(env={"SGLANG_TRUNC_DRAFT_THRESHOLD": "0.1"}, **more).options == TruncOptions(2, 3, 0.1, lookup=2)


def test_a_preset_of_blocks_alone_does_not_pick_them():
    options = resolve(presets=[preset(block_size=3, draft_threshold=0.5)]).options
    assert options == resolve().options
    assert type(options) is ControlledOptions


def test_a_preset_of_lanes_alone_keeps_nobody_from_blocks():
    given = [preset(d2=2, max_width=8)]
    assert resolve(BLOCKS, presets=given).options == TruncOptions(1, 4, 0.0)
    assert resolve(presets=given, recurrences=1).options == TruncOptions(1, 4, 0.0)


def test_a_preset_value_of_the_other_class_may_be_unusable():
    assert type(resolve(presets=[preset(block_size=1000)]).options) is ControlledOptions
    assert type(resolve(BLOCKS, presets=[preset(d2=1000)]).options) is TruncOptions


def test_a_depth_that_suits_blocks_only_says_so():
    assert refusal(presets=[preset(d1=3, block_size=3)]) == (
        "d1 is 3 (from preset a.json), but must be a divisor of R = 4 below it where no block_size is set: 1, 2."
    )
    assert resolve({"block_size": 2}, presets=[preset(d1=3)]).options == TruncOptions(3, 2, 0.0)


# Every combination


@given(
    names=strategies.lists(strategies.sampled_from(NAMES[TRUNC]), unique=True),
    recurrences=strategies.integers(1, 64),
)
def test_the_class_has_all_that_was_set(names, recurrences):
    """And is the first that has, of those that R suffices for; else two options of different classes are named."""
    lanes, blocks = ({*names} & {*own} for own in (OF_LANES, OF_BLOCKS))
    sources = {name: f"source {number}" for number, name in enumerate(names)}
    if lanes and blocks:
        with pytest.raises(OptionError) as caught:
            kind_of(TRUNC, recurrences, sources)
        said = str(caught.value)
        assert {name for name in lanes | blocks if f"{name} (from {sources[name]})" in said} & lanes
        assert {name for name in lanes | blocks if f"{name} (from {sources[name]})" in said} & blocks
        return
    kind = kind_of(TRUNC, recurrences, sources)
    assert {*names} <= {field.name for field in fields(kind)}
    assert (kind is TruncOptions) == bool(blocks or (recurrences == 1 and not lanes))


@pytest.mark.parametrize("algorithm", [SINGLE, DUAL])
@pytest.mark.parametrize("recurrences", [1, 2, 4])
def test_an_algorithm_with_one_class_has_no_choice(algorithm, recurrences):
    for names in ([], NAMES[algorithm]):
        assert kind_of(algorithm, recurrences, dict.fromkeys(names, "here")) is OPTIONS[algorithm][0]
