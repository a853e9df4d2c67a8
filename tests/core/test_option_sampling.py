"""Options of all algorithms that say how tokens are drawn and kept: the policy, and relaxed acceptance."""

from dataclasses import replace

import pytest

from sglang_trunc.core.options import OptionError, env_name
from tests.core.options_stand import OVERRIDE, VARIABLE, every_kind, preset, refusal, resolve


@every_kind
def test_every_algorithm_samples_seeded_and_accepts_exactly_unless_told(algorithm, picked, kind):
    options = resolve(picked, algorithm=algorithm).options
    assert (options.sampling_policy, options.relax_top, options.relax_tau) == ("seeded", 1, 1.0)
    assert not options.relaxed
    env = {"SGLANG_TRUNC_SAMPLING_POLICY": "residual"}
    got = resolve(picked, env, algorithm=algorithm)
    asked = resolve({"sampling_policy": "residual", **picked}, algorithm=algorithm).options.sampling_policy
    assert got.options.sampling_policy == asked == "residual"
    assert got.sources["sampling_policy"] == f"{VARIABLE}SAMPLING_POLICY"
    given = {"sampling_policy": "seeded", **picked}
    assert resolve(given, env, algorithm=algorithm).options.sampling_policy == "residual"


@every_kind
@pytest.mark.parametrize(
    ("given", "relaxed"),
    [({}, False), ({"relax_top": 1, "relax_tau": 1}, False), ({"relax_top": 2}, True), ({"relax_tau": 0.999}, True),
     ({"relax_top": 64, "relax_tau": 0.0}, True)],
)  # fmt: skip
def test_options_know_whether_acceptance_is_relaxed(algorithm, picked, kind, given, relaxed):
    env = {env_name(name): str(value) for name, value in given.items()}
    overridden = resolve(given | picked, algorithm=algorithm).options
    for options in (overridden, resolve(picked, env, algorithm=algorithm).options):
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
@every_kind
def test_values_of_sampling_and_relaxing_that_cannot_be_used(algorithm, picked, kind, field, value, accepted):
    variable = env_name(field)
    for source, given in (
        (f"environment variable {variable}", {"override": picked, "env": {variable: str(value)}}),
        (OVERRIDE, {"override": {field: value, **picked}}),
        ("preset a.json", {"override": picked, "presets": [preset(algorithm, **{field: value})]}),
    ):
        assert refusal(algorithm=algorithm, **given) == f"{field} is {value!r} (from {source}), but must be {accepted}."


@pytest.mark.parametrize("value", [True, 1, 1.0, None, ["seeded"], {}])
def test_a_policy_of_another_type_is_refused(value):
    assert refusal({"sampling_policy": value}) == (
        f"sampling_policy is {value!r} (from {OVERRIDE}), but must be seeded or residual."
    )


@every_kind
@pytest.mark.parametrize(("field", "value"), [("relax_top", 2), ("relax_tau", 0.5), ("relax_tau", 0.0)])
def test_the_residual_policy_cannot_be_relaxed(algorithm, picked, kind, field, value):
    accepted = "but must be 1 where sampling_policy is residual."
    env = {"SGLANG_TRUNC_SAMPLING_POLICY": "residual"}
    overridden = {field: value, **picked}
    assert refusal(overridden, env, algorithm=algorithm) == f"{field} is {value} (from {OVERRIDE}), {accepted}"
    given = {env_name(field): str(value)}
    assert refusal({"sampling_policy": "residual", **picked}, given, algorithm=algorithm) == (
        f"{field} is {value} (from environment variable {env_name(field)}), {accepted}"
    )
    made = replace(resolve(picked, algorithm=algorithm).options, sampling_policy="residual", **{field: value})
    with pytest.raises(OptionError) as caught:
        made.check(4)
    assert str(caught.value) == f"{field} is {value} (from the caller), {accepted}"
    exact = {"sampling_policy": "residual", "relax_top": 1, "relax_tau": 1, **picked}
    assert resolve(exact, algorithm=algorithm).options.sampling_policy == "residual"
