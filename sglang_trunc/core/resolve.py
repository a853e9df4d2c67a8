"""Where an option's value comes from. Sources, first hit wins, option by option:

    environment       SGLANG_TRUNC_D1=2
    launch override   --json-model-override-args '{"trunc": {"d1": 2}}', for every algorithm
    preset            a file of configs/ whose "match" fits the model
    default           computed from the model's number of recurrences R

What the environment and the launch override set also picks the class, where an algorithm has several: TRUNC runs
lanes, or blocks where one of their options is set. A preset may hold options of both, and picks nothing.

Nothing that was set is ignored: keys nobody knows, variables with our prefix that nobody reads, and options of
another algorithm are refused. Runs once at launch, in the launching process; workers receive the frozen result
or resolve the same inputs again.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import Field
from typing import Any, NamedTuple

from sglang_trunc.core.option_rules import checked, specs_of
from sglang_trunc.core.options import (
    ENV_PREFIX,
    OPTIONS,
    OVERRIDE_KEY,
    OptionError,
    Options,
    checked_keys,
    env_name,
    names_of,
    not_an_option,
)
from sglang_trunc.core.presets import ModelShape, Preset, find_preset, load_presets

OVERRIDE_SOURCE = "--json-model-override-args"


class Resolved(NamedTuple):
    options: Any  # of a class of the algorithm's in OPTIONS
    sources: Mapping[str, str]  # option -> where its value came from, for `doctor` and the log


def resolve_options(
    algorithm: str,
    shape: ModelShape,
    override: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    presets: Sequence[Preset] | None = None,
    other_env: Collection[str] = (),
) -> Resolved:
    """`algorithm` is a key of OPTIONS, `override` "trunc" of the launch override; `other_env` names further
    known variables."""
    environ = os.environ if environ is None else environ
    _check_environment(algorithm, environ, other_env)
    where = f"{OVERRIDE_KEY} of {OVERRIDE_SOURCE}"
    override = checked_keys(algorithm, {} if override is None else override, where)
    preset = find_preset(shape, load_presets() if presets is None else presets)
    variables = {name: _variable(name) for name in names_of(algorithm) if env_name(name) in environ}
    kind = kind_of(algorithm, shape.recurrences, dict.fromkeys(override, OVERRIDE_SOURCE) | variables)
    kind.check_recurrences(shape.recurrences)
    preset_values = {} if preset is None else preset.values.get(algorithm, {})
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for spec in specs_of(kind):
        if spec.name in variables:
            value, source = _from_text(spec, environ[env_name(spec.name)]), variables[spec.name]
        elif spec.name in override:
            value, source = override[spec.name], OVERRIDE_SOURCE
        elif preset is not None and spec.name in preset_values:
            value, source = preset_values[spec.name], f"preset {preset.name}"
        else:
            value = spec.metadata["default"](shape.recurrences, values)
            source = f"default for {shape.recurrences} recurrences"
        values[spec.name] = checked(spec, value, source, shape.recurrences, values)
        sources[spec.name] = source
    return Resolved(kind(**values), sources)


def kind_of(algorithm: str, recurrences: int, given: Mapping[str, str]) -> type[Options]:
    """The first class of the algorithm's that has all the options in `given`, and that R suffices for.

    `given` maps options of the algorithm to where they were set. Where R suffices for no class that has them all, one
    of these is returned, for its ``check_recurrences`` to refuse. Raises ``OptionError`` where no class has them all.
    """
    kinds = OPTIONS[algorithm]
    lacking = [[name for name in given if name not in {spec.name for spec in specs_of(kind)}] for kind in kinds]
    fitting = [kind for kind, names in zip(kinds, lacking, strict=True) if not names]
    if not fitting:
        first, last = lacking[-1][0], lacking[0][0]
        raise OptionError(
            f"{first} (from {given[first]}) and {last} (from {given[last]}) cannot both be set: {algorithm} runs "
            f"{kinds[0].schedule} with {first} and {kinds[-1].schedule} with {last}."
        )
    return next((kind for kind in fitting if recurrences >= kind.least_recurrences), fitting[-1])


def _variable(option: str) -> str:
    return f"environment variable {env_name(option)}"


def _check_environment(algorithm: str, environ: Mapping[str, str], other_env: Collection[str]) -> None:
    options = {env_name(name): name for known in OPTIONS for name in names_of(known)}
    for variable in sorted(environ):
        if not variable.startswith(ENV_PREFIX) or variable in other_env:
            continue
        if variable not in options:
            raise OptionError(
                f"Environment variable {variable} is {environ[variable]!r}, but the plugin reads only "
                f"{', '.join(sorted({*options, *other_env}))}."
            )
        if options[variable] not in names_of(algorithm):
            raise not_an_option(options[variable], algorithm, _variable(options[variable]))


def _from_text(spec: "Field[Any]", text: str) -> Any:
    """The number in an environment variable; other text stays as it is, for the check to refuse."""
    try:
        return spec.type(text)  # type: ignore[operator]
    except ValueError:
        return text
