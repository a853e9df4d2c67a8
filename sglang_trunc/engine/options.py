"""Where the schedules' options meet SGLang: the launch override and the model's config."""

from __future__ import annotations

import json
import os
from pathlib import Path

from sglang.srt.runtime_context import get_spec

from sglang_trunc.core.options import OPTIONS, OVERRIDE_KEY, OptionError
from sglang_trunc.core.presets import ModelShape
from sglang_trunc.core.resolve import Resolved, resolve_options
from sglang_trunc.engine.names import MEASURE_ENV, POISON_ENV, TRACE_ENV

OTHER_ENVIRONMENT = (POISON_ENV, MEASURE_ENV, TRACE_ENV)


def resolve(hf_config, algorithm: str) -> Resolved:
    """Options of an algorithm (as spelt at launch) for a looped model, each with its source.

    Refuses what cannot be used with one sentence. SGLang has put ``--json-model-override-args`` onto the config as
    attributes, in every process.
    """
    trace_file(algorithm)
    override = getattr(hf_config, OVERRIDE_KEY, None)
    return resolve_options(algorithm.upper(), ModelShape.of(hf_config), override, other_env=OTHER_ENVIRONMENT)


def branch_slots(hf_config) -> int:
    """KV slots that the running server's algorithm needs beside those of its requests: 0 without lanes of its own."""
    algorithm = get_spec().speculative_algorithm
    options = resolve(hf_config, algorithm).options if algorithm and algorithm.upper() in OPTIONS else None
    return getattr(options, "max_width", 0)


def trace_file(algorithm: str) -> Path | None:
    """Where an algorithm writes its trace (``core.trace``), if it was asked for one."""
    text = os.environ.get(TRACE_ENV)
    if text is None:
        return None
    asked = f"Environment variable {TRACE_ENV} is {text!r}, but"
    if algorithm.upper() == "TRUNC":
        raise OptionError(f"{asked} TRUNC writes no trace, only LOOPSPEC_SINGLE and LOOPSPEC_DUAL do.")
    path = Path(text)
    if not text or path.is_dir():
        raise OptionError(f"{asked} must name a file.")
    if not path.parent.is_dir():
        raise OptionError(f"{asked} there is no folder {path.parent}.")
    return path


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
