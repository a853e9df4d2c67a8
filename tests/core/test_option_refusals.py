"""Which values are refused, and in which words; ``test_option_kinds`` has options that exclude each other."""

import pytest

from sglang_trunc.core.options import (
    OPTIONS,
    ControlledOptions,
    DualOptions,
    OptionError,
    SingleOptions,
    TruncOptions,
    env_name,
)
from tests.core.options_stand import (
    BLOCKS,
    DUAL,
    OVERRIDE,
    SINGLE,
    TRUNC,
    VARIABLE,
    preset,
    refusal,
    resolve,
)

# Blocks


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
        ("block_size", "", "''", "an integer from 1 to 64"),
        ("draft_threshold", "1.01", "1.01", "a number from 0 to 1"),
        ("draft_threshold", "nan", "nan", "a number from 0 to 1"),
        ("draft_threshold", "often", "'often'", "a number from 0 to 1"),
    ],
)
def test_environment_values_out_of_range(field, text, value, accepted):
    variable = env_name(field)
    env = {"SGLANG_TRUNC_BLOCK_SIZE": "4", variable: text}
    assert refusal(env=env) == f"{field} is {value} (from environment variable {variable}), but must be {accepted}."


@pytest.mark.parametrize(
    ("field", "value"),
    [("d1", 0), ("d1", 5), ("d1", "x"), ("d1", "2"), ("d1", 1.5), ("d1", True), ("d1", None), ("d1", [1]),
     ("block_size", 2.0), ("draft_threshold", "0.5"), ("draft_threshold", -0.1), ("draft_threshold", False)],
)  # fmt: skip
def test_override_values_out_of_range(field, value):
    assert refusal({**BLOCKS, field: value}).startswith(f"{field} is {value!r} (from {OVERRIDE}), but must be ")


# Lanes

DIVISOR_OF_4 = "a divisor of R = 4 below it: 1, 2"
DUAL_DIVISOR_OF_12 = "a divisor of R = 12 below R / 2, so that d2 fits between d1 and R: 1, 2, 3, 4"
TRUNC_DIVISOR_OF_4 = "a divisor of R = 4 below it where no block_size is set: 1, 2"
OR_NONE = "a multiple of d1 = 1 between d1 and R = 4, or 0 for none: 0, 2, 3"


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
        (DUAL, 4, "d2", 0, "a multiple of d1 = 1 between d1 and R = 4: 2, 3"),
        (DUAL, 4, "d2", 4, "a multiple of d1 = 1 between d1 and R = 4: 2, 3"),
        (DUAL, 4, "d2", 1, "a multiple of d1 = 1 between d1 and R = 4: 2, 3"),
        (DUAL, 4, "d2", "x", "a multiple of d1 = 1 between d1 and R = 4: 2, 3"),
        (DUAL, 17, "d2", 17, f"a multiple of d1 = 1 between d1 and R = 17: {', '.join(map(str, range(2, 17)))}"),
        (DUAL, 19, "d2", 19, "a multiple of d1 = 1 between d1 and R = 19: 2, 3, 4, ..., 18"),
        (TRUNC, 4, "d1", 3, TRUNC_DIVISOR_OF_4),
        (TRUNC, 4, "d1", 4, TRUNC_DIVISOR_OF_4),
        (TRUNC, 4, "d1", 0, TRUNC_DIVISOR_OF_4),
        (TRUNC, 4, "d1", "x", TRUNC_DIVISOR_OF_4),
        (TRUNC, 4, "d2", 4, OR_NONE),
        (TRUNC, 4, "d2", 1, OR_NONE),
        (TRUNC, 4, "d2", -1, OR_NONE),
        (TRUNC, 4, "d2", "x", OR_NONE),
        (TRUNC, 2, "d2", 1, "a multiple of d1 = 1 between d1 and R = 2, or 0 for none: 0"),
        (TRUNC, 19, "d2", 19, "a multiple of d1 = 1 between d1 and R = 19, or 0 for none: 0, 2, 3, ..., 18"),
        (TRUNC, 4, "max_width", 257, "an integer from 1 to 256"),
        (TRUNC, 4, "min_survival", 1.5, "a number from 0 to 1"),
    ],
)
def test_values_of_lanes_that_do_not_fit(algorithm, recurrences, field, value, accepted):
    def expected(source: str) -> str:
        return f"{field} is {value!r} (from {source}), but must be {accepted}."

    variable = env_name(field)
    where = {"algorithm": algorithm, "recurrences": recurrences}
    assert refusal(env={variable: str(value)}, **where) == expected(f"environment variable {variable}")
    assert refusal({field: value}, **where) == expected(OVERRIDE)
    assert refusal(presets=[preset(algorithm, **{field: value})], **where) == expected("preset a.json")


@pytest.mark.parametrize("value", [True, False, 2.0, "2", None, [2], {}])
@pytest.mark.parametrize("field", ["d1", "d2"])
@pytest.mark.parametrize("algorithm", [TRUNC, DUAL])
def test_depths_of_another_type_are_refused_even_where_they_equal_a_choice(algorithm, field, value):
    message = refusal({field: value}, algorithm=algorithm, recurrences=8)
    assert message.startswith(f"{field} is {value!r} (from {OVERRIDE}), but must be ")


@pytest.mark.parametrize("value", ["auto", "", "Measured", "True"])
@pytest.mark.parametrize("algorithm", OPTIONS)
def test_control_is_one_of_two_words(algorithm, value):
    accepted = "but must be measured or fixed."
    assert refusal({"control": value}, algorithm=algorithm) == f"control is {value!r} (from {OVERRIDE}), {accepted}"
    assert refusal(env={"SGLANG_TRUNC_CONTROL": value}, algorithm=algorithm) == (
        f"control is {value!r} (from {VARIABLE}CONTROL), {accepted}"
    )


@pytest.mark.parametrize("value", [True, 1, None, ["fixed"]])
def test_a_control_of_another_type_is_refused(value):
    assert refusal({"control": value}) == f"control is {value!r} (from {OVERRIDE}), but must be measured or fixed."


# Values that depend on others


def test_preset_values_are_checked_with_the_launched_recurrences():
    given = [preset(d1=8)]
    assert refusal(presets=given).startswith("d1 is 8 (from preset a.json), but must be a divisor of R = 4 below it")
    assert refusal(BLOCKS, presets=given) == "d1 is 8 (from preset a.json), but must be an integer from 1 to 4."


@pytest.mark.parametrize("picked", [{}, BLOCKS])
def test_overridden_bad_value_does_no_harm(picked):
    assert resolve({"d1": 1, **picked}, presets=[preset(d1=8)]).options.d1 == 1


BELOW_16 = "between d1 and R = 16"


@pytest.mark.parametrize(
    ("given", "env", "override", "message"),
    [
        # d2 does not fit a d1 from elsewhere
        ({"d1": 2, "d2": 8}, {"D2": "5"}, None, f"d2 is 5 (from {VARIABLE}D2), but must be a multiple of d1 = 2 "
         f"{BELOW_16}{{}}4, 6, 8, 10, 12, 14."),
        ({}, {"D2": "3"}, None, f"d2 is 3 (from {VARIABLE}D2), but must be a multiple of d1 = 2 "
         f"{BELOW_16}{{}}4, 6, 8, 10, 12, 14."),
        ({}, {"D2": "6"}, {"d1": 4}, f"d2 is 6 (from {VARIABLE}D2), but must be a multiple of d1 = 4 "
         f"{BELOW_16}{{}}8, 12."),
        # the preset's d2 does not fit the d1 that was asked for
        ({"d1": 2, "d2": 6}, {"D1": "4"}, None, "d2 is 6 (from preset a.json), but must be a multiple of d1 = 4 "
         f"{BELOW_16}{{}}8, 12."),
        ({"d1": 2, "d2": 4}, {}, {"d1": 4}, "d2 is 4 (from preset a.json), but must be a multiple of d1 = 4 "
         f"{BELOW_16}{{}}8, 12."),
    ],
)  # fmt: skip
def test_depths_from_different_sources_are_checked_together(given, env, override, message):
    env = {env_name(name): value for name, value in env.items()}
    dual, trunc = message.format(": "), message.format(", or 0 for none: 0, ")
    assert refusal(override, env, [preset(DUAL, **given)], algorithm=DUAL, recurrences=16) == dual
    assert refusal(override, env, [preset(TRUNC, **given)], recurrences=16) == trunc


def test_a_first_depth_without_room_for_a_second():
    env, given = {"SGLANG_TRUNC_D2": "12"}, {"d1": 8}
    assert refusal(None, env, [preset(DUAL, **given)], algorithm=DUAL, recurrences=16) == (
        "d1 is 8 (from preset a.json), but must be a divisor of R = 16 below R / 2, so that d2 fits between d1 and R: "
        "1, 2, 4."
    )
    assert refusal(None, env, [preset(**given)], recurrences=16) == (
        f"d2 is 12 (from {VARIABLE}D2), but must be a multiple of d1 = 8 between d1 and R = 16, or 0 for none: 0."
    )


@pytest.mark.parametrize("recurrences", [2, 3, 4, 16])
def test_no_second_depth_can_be_asked_for(recurrences):
    for got in (
        resolve({"d2": 0}, recurrences=recurrences),
        resolve(env={"SGLANG_TRUNC_D2": "0"}, recurrences=recurrences),
        resolve(presets=[preset(d2=0)], recurrences=recurrences),
    ):
        assert got.options.d2 == 0
        got.options.check(recurrences)


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
        (ControlledOptions(2, 6, 8, 0.05), 6, "d2 is 6 (from the caller), but must be a multiple of d1 = 2 "
         "between d1 and R = 6, or 0 for none: 0, 4."),
        (ControlledOptions(1, 0, 8, 0.05), 1, "R is 1, but TRUNC with lanes needs at least 2: with one there is no "
         "early depth, and d2, max_width, min_survival, control and lookup_candidates are for lanes."),
    ],
)  # fmt: skip
def test_values_built_in_code_can_be_checked(options, recurrences, message):
    options.check(12)
    with pytest.raises(OptionError) as caught:
        options.check(recurrences)
    assert str(caught.value) == message
