"""Options of the speculative schedules: where a value comes from and what is accepted.

Each field of `TruncOptions` is documented once, in its metadata; `options_table` renders the README's table
from that. Sources, first hit wins, field by field:

    environment       SGLANG_TRUNC_D1=2
    launch override   --json-model-override-args '{"trunc": {"d1": 2}}'
    preset            a file of configs/ whose "match" fits the model
    default           computed from the model's number of recurrences R

Whatever cannot be used is refused with one sentence that names the field, the value, its source and what is
accepted: values out of range, keys nobody knows, and SGLANG_TRUNC_ variables nobody reads. Runs once at
launch, in the launching process; workers receive the frozen result or resolve the same inputs again.
"""

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, NamedTuple

ENV_PREFIX = "SGLANG_TRUNC_"
OVERRIDE_KEY = "trunc"
PRESET_KEYS = ("model", "match", "trunc", "notes")


class OptionError(ValueError):
    """A value or key that cannot be used; the text is one sentence for the person who launched."""


def _option(doc: str, low: float, high: float | None, default: Callable[[int], float]) -> Any:
    # high None stands for R. No dataclass default: every value passes through resolve_options.
    return field(metadata={"doc": doc, "low": low, "high": high, "default": default})


def default_draft_depth(recurrences: int) -> int:
    """A quarter of the way for shallow loops; deep ones (Raven, R = 32) settle earlier."""
    return recurrences // 8 if recurrences >= 16 else max(1, recurrences // 4)


@dataclass(frozen=True)
class TruncOptions:
    d1: int = _option("depth (recurrences done) at which drafts are read out", 1, None, default_draft_depth)
    block_size: int = _option(
        "tokens verified together in a round, the bonus token included; 1 is plain decoding",
        1,
        64,
        lambda r: 4,
    )
    draft_threshold: float = _option(
        "drafting of a block stops when the draft's probability at d1 falls below this; 0 never stops it",
        0.0,
        1.0,
        lambda r: 0.0,
    )

    def check(self, recurrences: int) -> None:
        for spec in fields(self):
            _checked(spec, getattr(self, spec.name), "the caller", recurrences)


class ModelShape(NamedTuple):
    """What a preset's "match" may name; `layers` counts physical layers, `recurrences` is R as launched."""

    architecture: str
    hidden_size: int
    layers: int
    recurrences: int
    vocab_size: int
    kv_heads: int

    @classmethod
    def of(cls, hf_config: Any) -> "ModelShape":
        return cls(
            architecture=hf_config.architectures[0],
            hidden_size=hf_config.hidden_size,
            layers=hf_config.num_hidden_layers,
            recurrences=hf_config.recurrences,
            vocab_size=hf_config.vocab_size,
            kv_heads=hf_config.num_key_value_heads,
        )


class Preset(NamedTuple):
    name: str  # file name, for messages
    match: Mapping[str, Any]  # field of ModelShape -> value
    values: Mapping[str, Any]  # field of TruncOptions -> value


class Resolved(NamedTuple):
    options: TruncOptions
    sources: Mapping[str, str]  # field -> where its value came from, for `doctor` and the log


def resolve_options(
    shape: ModelShape,
    override: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    presets: Sequence[Preset] | None = None,
    other_env: Collection[str] = (),
) -> Resolved:
    """`override` is "trunc" of the launch override; `other_env` names further known variables."""
    environ = os.environ if environ is None else environ
    override = {} if override is None else override
    _refuse_unknown_env(environ, other_env)
    if not isinstance(override, Mapping):
        raise OptionError(f"{OVERRIDE_KEY} of --json-model-override-args is {override!r}, but must be an object.")
    _refuse_unknown_keys(override, f"{OVERRIDE_KEY} of --json-model-override-args")
    preset = find_preset(shape, load_presets() if presets is None else presets)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for spec in fields(TruncOptions):
        raw, source = _first_source(spec, shape, override, environ, preset)
        values[spec.name] = _checked(spec, raw, source, shape.recurrences)
        sources[spec.name] = source
    return Resolved(TruncOptions(**values), sources)


def _first_source(
    spec: "Field[Any]",
    shape: ModelShape,
    override: Mapping[str, Any],
    environ: Mapping[str, str],
    preset: Preset | None,
) -> tuple[Any, str]:
    variable = env_name(spec.name)
    if variable in environ:
        return _from_text(spec, environ[variable]), f"environment variable {variable}"
    if spec.name in override:
        return override[spec.name], "--json-model-override-args"
    if preset is not None and spec.name in preset.values:
        return preset.values[spec.name], f"preset {preset.name}"
    return spec.metadata["default"](shape.recurrences), f"default for {shape.recurrences} recurrences"


def env_name(option: str) -> str:
    return ENV_PREFIX + option.upper()


def _from_text(spec: "Field[Any]", text: str) -> Any:
    """The number in an environment variable; other text stays as it is, for the range check to refuse."""
    try:
        return spec.type(text)  # type: ignore[operator]
    except ValueError:
        return text


def _checked(spec: "Field[Any]", value: Any, source: str, recurrences: int) -> Any:
    low, high = spec.metadata["low"], spec.metadata["high"]
    high = recurrences if high is None else high
    kinds = (int,) if spec.type is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        raise OptionError(
            f"{spec.name} is {value!r} (from {source}), but must be {_kind(spec)} from {low:g} to {high:g}."
        )
    return spec.type(value)  # type: ignore[operator]


def _kind(spec: "Field[Any]") -> str:
    return "an integer" if spec.type is int else "a number"


def _refuse_unknown_env(environ: Mapping[str, str], other_env: Collection[str]) -> None:
    known = {env_name(spec.name) for spec in fields(TruncOptions)} | set(other_env)
    for name in sorted(environ):
        if name.startswith(ENV_PREFIX) and name not in known:
            raise OptionError(
                f"Environment variable {name} is {environ[name]!r}, but the plugin reads only "
                f"{', '.join(sorted(known))}."
            )


def _refuse_unknown_keys(values: Mapping[str, Any], where: str) -> None:
    known = [spec.name for spec in fields(TruncOptions)]
    for key in values:
        if key not in known:
            raise OptionError(f"{key} is not an option ({where}), the options are {', '.join(known)}.")


def load_presets(folder: Traversable | None = None) -> list[Preset]:
    files = {file.name: file for file in (folder or preset_folder()).iterdir() if file.name.endswith(".json")}
    return [parse_preset(name, files[name].read_text(encoding="utf-8")) for name in sorted(files)]


def preset_folder() -> Traversable:
    """configs/ is part of the package in a wheel, and lies beside it in a checkout or editable install."""
    package = resources.files("sglang_trunc")
    inside = package / "configs"
    return inside if inside.is_dir() else package / ".." / "configs"


def parse_preset(name: str, text: str) -> Preset:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise OptionError(f"Preset {name} is not readable JSON: {error}.") from error
    for key in content:
        if key not in PRESET_KEYS:
            raise OptionError(f"{key} is not a key of preset {name}, the keys are {', '.join(PRESET_KEYS)}.")
    match, values = content.get("match", {}), content.get("trunc", {})
    for key in match:
        if key not in ModelShape._fields:
            raise OptionError(f"{key} cannot be matched (preset {name}), only {', '.join(ModelShape._fields)}.")
    if not match:
        raise OptionError(f"match is empty in preset {name}, but must name the model's shape.")
    _refuse_unknown_keys(values, f"preset {name}")
    return Preset(name, match, values)


def find_preset(shape: ModelShape, presets: Sequence[Preset]) -> Preset | None:
    """The fitting preset that names the most fields; two equally exact ones are an error in configs/."""
    fitting = [p for p in presets if all(getattr(shape, key) == value for key, value in p.match.items())]
    fitting.sort(key=lambda preset: -len(preset.match))
    if len(fitting) > 1 and len(fitting[0].match) == len(fitting[1].match):
        raise OptionError(f"Presets {fitting[0].name} and {fitting[1].name} both fit this model, keep one.")
    return fitting[0] if fitting else None


def options_table() -> str:
    """Markdown table of all options, for the README."""
    lines = ["| option | environment variable | accepted | meaning |", "|---|---|---|---|"]
    for spec in fields(TruncOptions):
        low, high = spec.metadata["low"], spec.metadata["high"]
        accepted = f"{_kind(spec)} from {low:g} to {'R' if high is None else format(high, 'g')}"
        lines.append(f"| `{spec.name}` | `{env_name(spec.name)}` | {accepted} | {spec.metadata['doc']} |")
    return "\n".join(lines)
