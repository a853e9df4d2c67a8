"""Where the schedules' options meet SGLang: the launch override and the model's config."""

from __future__ import annotations

import json

from sglang.srt.runtime_context import get_spec

from sglang_trunc.core.options import OVERRIDE_KEY, OptionError
from sglang_trunc.core.presets import ModelShape
from sglang_trunc.core.resolve import Resolved, resolve_options
from sglang_trunc.engine.names import MEASURE_ENV, POISON_ENV

OTHER_ENVIRONMENT = (POISON_ENV, MEASURE_ENV)


def resolve(hf_config, algorithm: str) -> Resolved:
    """Options of an algorithm (as spelt at launch) for a looped model, each with its source.

    Refuses what cannot be used with one sentence. SGLang has put ``--json-model-override-args`` onto the config as
    attributes, in every process.
    """
    override = getattr(hf_config, OVERRIDE_KEY, None)
    return resolve_options(algorithm.upper(), ModelShape.of(hf_config), override, other_env=OTHER_ENVIRONMENT)


def branch_slots(hf_config) -> int:
    """KV slots that the running server's algorithm needs beside those of its requests: 0 without branches."""
    algorithm = get_spec().speculative_algorithm
    if algorithm is None or algorithm.upper() != "LOOPSPEC_DUAL":
        return 0
    return resolve(hf_config, algorithm).options.max_width


def described(resolved: Resolved) -> str:
    """One line for the log: every option with where it came from."""
    return ", ".join(
        f"{name}={getattr(resolved.options, name)} ({source})" for name, source in resolved.sources.items()
    )


def override_args(server_args) -> dict:
    """The parsed ``--json-model-override-args``."""
    try:
        return json.loads(server_args.json_model_override_args or "{}")
    except ValueError as error:
        raise OptionError(f"--json-model-override-args is not readable JSON: {error}.") from error
