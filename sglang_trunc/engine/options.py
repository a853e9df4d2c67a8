"""Where the schedules' options meet SGLang: the launch override and the model's config."""

from __future__ import annotations

import json
import os
from pathlib import Path

from sglang.srt.runtime_context import get_spec

from sglang_trunc.core.cycle_cost import CostTable, table_from
from sglang_trunc.core.options import FIXED, MEASURED, OPTIONS, OVERRIDE_KEY, OptionError, Options, TruncOptions
from sglang_trunc.core.presets import ModelShape
from sglang_trunc.core.resolve import Resolved, resolve_options
from sglang_trunc.engine.names import CACHE_ENV, COST_ENV, DECISIONS_ENV, MEASURE_ENV, POISON_ENV, TRACE_ENV

OTHER_ENVIRONMENT = (CACHE_ENV, COST_ENV, DECISIONS_ENV, POISON_ENV, MEASURE_ENV, TRACE_ENV)


def resolve(hf_config, algorithm: str) -> Resolved:
    """Options of an algorithm (as spelt at launch) for a looped model, each with its source.

    Refuses what cannot be used with one sentence. SGLang has put ``--json-model-override-args`` onto the config as
    attributes, in every process.
    """
    override = getattr(hf_config, OVERRIDE_KEY, None)
    resolved = resolve_options(algorithm.upper(), ModelShape.of(hf_config), override, other_env=OTHER_ENVIRONMENT)
    trace_file(resolved.options)
    decisions_file(resolved.options)
    check_cost_file(resolved.options)
    return resolved


def branch_slots(hf_config) -> int:
    """KV slots that the running server's algorithm needs beside those of its requests: 0 without lanes of its own."""
    algorithm = get_spec().speculative_algorithm
    options = resolve(hf_config, algorithm).options if algorithm and algorithm.upper() in OPTIONS else None
    return getattr(options, "max_width", 0)


def trace_file(options: Options) -> Path | None:
    """Where a schedule writes its trace (``core.trace``), if it was asked for one."""
    refusal = None
    if isinstance(options, TruncOptions):
        refusal = "TRUNC with a block size writes no trace, only schedules of lanes do"
    elif options.lookup:
        refusal = f"lookup is {options.lookup}, and a trace knows lanes that a depth proposed only; set it to 0"
    return _file_to_write(TRACE_ENV, refusal)


def decisions_file(options: Options) -> Path | None:
    """Where the controller writes its decisions (``decision_log``), if it was asked to."""
    return _file_to_write(DECISIONS_ENV, _uncontrolled(options))


def check_cost_file(options: Options) -> None:
    """Refuse a cost table (``cost_store``) that cannot be read, or that nobody would read."""
    if (text := os.environ.get(COST_ENV)) is None:
        return
    if (refusal := _uncontrolled(options)) is not None:
        raise OptionError(f"Environment variable {COST_ENV} is {text!r}, but {refusal}.")
    read_table(Path(text))


def is_controlled(options: Options) -> bool:
    return getattr(options, "control", FIXED) == MEASURED


def _uncontrolled(options: Options) -> str | None:
    return None if is_controlled(options) else f"{options.algorithm} decides by it only where control is {MEASURED}"


def _file_to_write(variable: str, refusal: str | None) -> Path | None:
    text = os.environ.get(variable)
    if text is None:
        return None
    asked = f"Environment variable {variable} is {text!r}, but"
    if refusal is not None:
        raise OptionError(f"{asked} {refusal}.")
    path = Path(text)
    if not text or path.is_dir():
        raise OptionError(f"{asked} must name a file.")
    if not path.parent.is_dir():
        raise OptionError(f"{asked} there is no folder {path.parent}.")
    return path


def read_table(path: Path) -> CostTable:
    """A cost table that was named by ``SGLANG_TRUNC_COST_TABLE``; ``OptionError`` where it is none."""
    try:
        return table_from(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as problem:
        raise OptionError(f"Environment variable {COST_ENV} is '{path}', but holds no cost table: {problem}.") from None


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
