"""Where the schedules' options meet SGLang: the launch override and the model's config."""

from __future__ import annotations

import json

from sglang_trunc.core.options import OVERRIDE_KEY, ModelShape, OptionError, Resolved, resolve_options
from sglang_trunc.engine.cost import MEASURE_ENV
from sglang_trunc.engine.kv_pool import POISON_ENV

OTHER_ENVIRONMENT = (POISON_ENV, MEASURE_ENV)


def resolve(hf_config) -> Resolved:
    """Options of a looped model, each with its source; refuses what cannot be used with one sentence.

    SGLang has put ``--json-model-override-args`` onto the config as attributes, in every process.
    """
    override = getattr(hf_config, OVERRIDE_KEY, None)
    return resolve_options(ModelShape.of(hf_config), override, other_env=OTHER_ENVIRONMENT)


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
