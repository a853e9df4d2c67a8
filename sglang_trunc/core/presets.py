"""Preset files: options for models of a known shape.

A file of configs/ names a model, the shape it is told by and, for each algorithm, the options that suit it:

    {"model": "...", "match": {"architecture": "...", "recurrences": 4, ...},
     "trunc": {"d1": 1}, "loopspec_single": {...}, "loopspec_dual": {...}, "notes": "..."}

Files that end in ``COSTS`` hold cost tables instead (``engine.cost_store``).

A section may be partial or missing, and TRUNC's may speak of its blocks and of its lanes. Keys are checked when a
file is read, values when it is used, since they depend on R.
"""

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, NamedTuple

from sglang_trunc.core.options import OPTIONS, OptionError, as_object, checked_keys

SECTIONS = {algorithm.lower(): algorithm for algorithm in OPTIONS}
COSTS = ".cost.json"
PRESET_KEYS = ("model", "match", *SECTIONS, "notes")


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
    values: Mapping[str, Mapping[str, Any]]  # algorithm -> option -> value


def load_presets(folder: Traversable | None = None) -> list[Preset]:
    found = (folder or preset_folder()).iterdir()
    files = {file.name: file for file in found if file.name.endswith(".json") and not file.name.endswith(COSTS)}
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
    for key in as_object(content, f"preset {name}"):
        if key not in PRESET_KEYS:
            raise OptionError(f"{key} is not a key of preset {name}, the keys are {', '.join(PRESET_KEYS)}.")
    match = as_object(content.get("match", {}), f"match of preset {name}")
    for key in match:
        if key not in ModelShape._fields:
            raise OptionError(f"{key} cannot be matched (preset {name}), only {', '.join(ModelShape._fields)}.")
    if not match:
        raise OptionError(f"match is empty in preset {name}, but must name the model's shape.")
    values = {
        algorithm: checked_keys(algorithm, content[section], f"{section} of preset {name}")
        for section, algorithm in SECTIONS.items()
        if section in content
    }
    return Preset(name, match, values)


def find_preset(shape: ModelShape, presets: Sequence[Preset]) -> Preset | None:
    """The fitting preset that names the most fields; two equally exact ones are an error in configs/."""
    fitting = [p for p in presets if all(getattr(shape, key) == value for key, value in p.match.items())]
    fitting.sort(key=lambda preset: -len(preset.match))
    if len(fitting) > 1 and len(fitting[0].match) == len(fitting[1].match):
        raise OptionError(f"Presets {fitting[0].name} and {fitting[1].name} both fit this model, keep one.")
    return fitting[0] if fitting else None
