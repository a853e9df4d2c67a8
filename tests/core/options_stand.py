"""What the tests of options share: a shape that no shipped preset fits, and calls with nothing from outside."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_trunc.core.options import OPTIONS, ControlledOptions, DualOptions, OptionError, SingleOptions, TruncOptions
from sglang_trunc.core.presets import ModelShape, Preset
from sglang_trunc.core.resolve import Resolved, resolve_options

SHAPE = ModelShape("OuroForCausalLM", 64, 2, 4, 300, 2)
TRUNC, SINGLE, DUAL = OPTIONS
VARIABLE = "environment variable SGLANG_TRUNC_"
OVERRIDE = "--json-model-override-args"

OF_ALL = ["sampling_policy", "relax_top", "relax_tau", "lookup", "lookup_min_match", "lookup_corpus", "screen_top"]
CONTROL = ["control", "lookup_candidates"]
NAMES = {
    TRUNC: ["d1", "d2", "max_width", "min_survival", "block_size", "draft_threshold", *OF_ALL, *CONTROL],
    SINGLE: ["d1", "max_width", "min_survival", *OF_ALL, *CONTROL],
    DUAL: ["d1", "d2", "max_width", "min_survival", *OF_ALL, *CONTROL],
}
BLOCKS = {"block_size": 4}  # picks them, and is their default
# (algorithm, what picks the class, the class)
KINDS: list[tuple[str, dict[str, Any], type]] = [
    (TRUNC, {}, ControlledOptions),
    (TRUNC, BLOCKS, TruncOptions),
    (SINGLE, {}, SingleOptions),
    (DUAL, {}, DualOptions),
]
every_kind = pytest.mark.parametrize(("algorithm", "picked", "kind"), KINDS, ids=[kind.__name__ for *_, kind in KINDS])


def resolve(
    override=None, env=None, presets=(), shape=SHAPE, algorithm=TRUNC, recurrences: int | None = None, **more
) -> Resolved:
    if recurrences is not None:
        shape = shape._replace(recurrences=recurrences)
    return resolve_options(algorithm, shape, override, environ=env or {}, presets=list(presets), **more)


def refusal(*args, **kwargs) -> str:
    """The sentence of a ``resolve`` that is refused."""
    with pytest.raises(OptionError) as caught:
        resolve(*args, **kwargs)
    message = str(caught.value)
    assert message.endswith(".")
    assert message.count(". ") == 0
    return message


def preset(algorithm: str = TRUNC, **values) -> Preset:
    return Preset("a.json", {"hidden_size": 64}, {algorithm: values})
