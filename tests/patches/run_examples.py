"""Runs every example of the patches, and prints what came out as one line of JSON.

    python -m tests.patches.run_examples '[[["stock", "ours"], null], [["patched"], "folder of a patched sglang"]]'

A *side* is what an example shows: SGLang as it is, SGLang as it is with this package's part in the place of the patch,
or patched SGLang. No plugin is loaded: what this package does, examples call by name. Every job has a process of its
own, forked once all that SGLang imports, but nothing of SGLang, is there: that is three quarters of its import time.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import sys
from types import ModuleType
from typing import Any

SEPARATOR = "EXAMPLES "
Job = tuple[list[str], str | None]  # sides, and the folder whose sglang/ comes first

_SLOW_IMPORTS = ("torch._inductor.compile_fx", "transformers.modeling_utils", "flashinfer", "openai")


@contextlib.contextmanager
def replaced(module: ModuleType, **names: Any):
    """Other values for a module's globals, for the time of an example."""
    absent = object()
    before = {name: getattr(module, name, absent) for name in names}
    for name, value in names.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is absent:
                delattr(module, name)
            else:
                setattr(module, name, value)


def attempt(example, side: str) -> dict[str, Any]:
    """What the example returns, or the error that it ends with."""
    try:
        return {"value": example(side)}
    except Exception as error:  # an error is what some examples show
        return {"error": f"{type(error).__name__}: {error}"}


def run(job: Job) -> dict[str, Any]:
    """Per example, per side: its value or error; and where that SGLang came from."""
    sides, first = job
    if first is not None:
        sys.path.insert(0, first)
    import sglang

    from tests.patches import example_requests, example_sampling, example_slots, example_spec

    modules = (example_spec, example_requests, example_slots, example_sampling)
    examples = {name: example for module in modules for name, example in module.EXAMPLES.items()}
    answers: dict[str, Any] = {
        name: {side: attempt(example, side) for side in sides} for name, example in examples.items()
    }
    return {**answers, "sglang": sglang.__file__}


def main(jobs: list[Job]) -> None:
    for name in _SLOW_IMPORTS:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    assert "sglang" not in sys.modules  # it would be every job's
    with multiprocessing.get_context("fork").Pool(min(2, len(jobs)), maxtasksperchild=1) as pool:
        print(SEPARATOR + json.dumps(pool.map(run, jobs, chunksize=1)))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
