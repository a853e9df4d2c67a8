"""Where an option's value comes from. Sources, first hit wins, option by option:

    environment       SGLANG_TRUNC_D1=2
    launch override   --json-model-override-args '{"trunc": {"d1": 2}}', for every algorithm
    preset            a file of configs/ whose "match" fits the model
    default           computed from the model's number of recurrences R

Nothing that was set is ignored: keys nobody knows, variables with our prefix that nobody reads, and options of
another algorithm are refused. Runs once at launch, in the launching process; workers receive the frozen result
or resolve the same inputs again.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import Field
from typing import Any, NamedTuple

from sglang_trunc.core.options import (
    ENV_PREFIX,
    OPTIONS,
    OVERRIDE_KEY,
    OptionError,
    checked,
    checked_keys,
    env_name,
    names_of,
    not_an_option,
    specs_of,
)
from sglang_trunc.core.presets import ModelShape, Preset, find_preset, load_presets


class Resolved(NamedTuple):
    options: Any  # the algorithm's class in OPTIONS
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
    kind = OPTIONS[algorithm]
    environ = os.environ if environ is None else environ
    _check_environment(algorithm, environ, other_env)
    where = f"{OVERRIDE_KEY} of --json-model-override-args"
    override = checked_keys(algorithm, {} if override is None else override, where)
    preset = find_preset(shape, load_presets() if presets is None else presets)
    kind.check_recurrences(shape.recurrences)
    preset_values = {} if preset is None else preset.values.get(algorithm, {})
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for spec in specs_of(kind):
        variable = env_name(spec.name)
        if variable in environ:
            value, source = _from_text(spec, environ[variable]), f"environment variable {variable}"
        elif spec.name in override:
            value, source = override[spec.name], "--json-model-override-args"
        elif preset is not None and spec.name in preset_values:
            value, source = preset_values[spec.name], f"preset {preset.name}"
        else:
            value = spec.metadata["default"](shape.recurrences, values)
            source = f"default for {shape.recurrences} recurrences"
        values[spec.name] = checked(spec, value, source, shape.recurrences, values)
        sources[spec.name] = source
    return Resolved(kind(**values), sources)


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
            raise not_an_option(options[variable], algorithm, f"environment variable {variable}")


def _from_text(spec: "Field[Any]", text: str) -> Any:
    """The number in an environment variable; other text stays as it is, for the check to refuse."""
    try:
        return spec.type(text)  # type: ignore[operator]
    except ValueError:
        return text
