"""``sglang-trunc doctor``: is this installation able to serve, and what would run?

Prints the versions found beside the ones needed, the SGLang names this package relies on (``seams``), the
device and platform, whether the plugin is installed into SGLang, and with ``--model-path`` the resolved
options of that model for every algorithm, with the source of each.

Exit code 1 when something is broken; each broken row says what and how to repair it. Every check is a
``Row`` and none may raise: a broken installation is what this command is for.
"""

from __future__ import annotations

import importlib.metadata
import logging
import platform as host
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from rich.console import Console
from rich.table import Table

VERSIONS = ("sglang", "torch", "transformers", "triton", "numba", "sglang-trunc")
PLUGIN_GROUPS = ("sglang.srt.plugins", "sglang.srt.platforms")


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    part: str
    ok: bool
    found: str
    remedy: str = ""


def run(model_path: str | None, console: Console, all_seams: bool = False) -> int:
    with console.status("loading sglang"), quiet():
        rows = [row for name, check in checks(model_path) for row in guarded(name, check)]
    console.print(table(rows, all_seams))
    broken = [row for row in rows if not row.ok]
    for row in broken:
        sentence = f"{row.part}: {row.found}. {row.remedy}".strip()
        console.print(sentence, style="red", markup=False, soft_wrap=True)
    if not broken:
        console.print("Everything holds.", style="green")
    return 1 if broken else 0


@contextmanager
def quiet() -> Iterator[None]:
    """SGLang warns about absent accelerators while it is imported, and logs what the rows say."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


Check = Callable[[], Iterable[Row]]


def checks(model_path: str | None) -> list[tuple[str, Check]]:
    found: list[tuple[str, Check]] = [
        ("versions", versions),
        ("entry points", entry_points),
        ("seams", seams),
        ("device", device),
        ("algorithm", algorithm),
    ]
    return [*found, ("model", partial(model, model_path))] if model_path else found


def guarded(name: str, check: Check) -> Iterator[Row]:
    """The rows of a check; a check that raises becomes a broken row with its message."""
    try:
        yield from check()
    except Exception as problem:
        yield Row(name, False, f"{type(problem).__name__}: {problem}")


def versions() -> Iterator[Row]:
    from sglang_trunc.seams import REMEDY, SGLANG_VERSION

    python = sys.version_info >= (3, 11)
    yield Row("python", python, host.python_version(), "Python 3.11 or later is needed.")
    for name in VERSIONS:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            # Triton has no wheel for some machines and is needed on accelerators only.
            yield Row(name, name == "triton", "not installed", f"pip install {name}")
            continue
        right = name != "sglang" or version == SGLANG_VERSION
        yield Row(name, right, version, REMEDY)


def entry_points() -> Iterator[Row]:
    """SGLang finds the plugin through these."""
    for group in PLUGIN_GROUPS:
        names = {entry.name for entry in importlib.metadata.entry_points(group=group)}
        here = "sglang_trunc" in names
        yield Row(f"entry point {group}", here, "found" if here else "missing", "pip install -e . (or the wheel)")


def seams() -> Iterator[Row]:
    from sglang_trunc import seams as table_of_seams

    for seam in table_of_seams.check_all():
        yield Row(f"seam {seam.path}", seam.ok, seam.problem or "holds", seam.remedy)


def device() -> Iterator[Row]:
    import torch
    from sglang.srt.platforms import current_platform

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    yield Row("device", True, "none (CPU)" if accelerator is None else str(accelerator))
    kind = type(current_platform)
    yield Row("platform", True, f"{kind.__module__}.{kind.__name__}")


def algorithm() -> Iterator[Row]:
    """Whether loading SGLang's plugins registers the algorithms, as a server would."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.speculative import spec_registry

    from sglang_trunc.engine.names import ALGORITHMS

    load_plugins()
    remedy = "The broken rows above say why; `python -m sglang.launch_server` logs the same reason."
    for name in ALGORITHMS:
        spec = spec_registry.get_spec(name)
        # A plugin that failed registers a stub of SGLang's own class (see plugin.py).
        works = spec is not None and type(spec).__module__.startswith("sglang_trunc.")
        yield Row(f"--speculative-algorithm {name.lower()}", works, "registered" if works else "not available", remedy)


def model(model_path: str) -> Iterator[Row]:
    """What would run for this checkpoint."""
    from sglang.srt.utils.hf_transformers_utils import get_config

    from sglang_trunc.models import configs

    configs.register()
    config = get_config(model_path, trust_remote_code=False)
    if getattr(config, "loop_shape", None) is None:
        yield Row(
            "model",
            False,
            f"{model_path} is {type(config).__name__}, not a looped model",
            "OuroForCausalLM and RavenForCausalLM can be served with --speculative-algorithm trunc.",
        )
        return
    yield Row("model", True, f"{config.architectures[0]}, {config.recurrences} recurrences")
    yield from options(config)


def options(config) -> Iterator[Row]:
    """What each algorithm would run with.

    One that cannot be launched is no fault as long as another can: the model may be too shallow for it, or a variable
    be meant for the other.
    """
    from sglang_trunc.core.options import OPTIONS, OptionError
    from sglang_trunc.engine.options import resolve

    rows: list[Row] = []
    refused: dict[str, str] = {}
    for name in OPTIONS:
        try:
            resolved = resolve(config, name)
        except OptionError as problem:
            refused[name] = str(problem).removesuffix(".")
            continue
        for option, source in resolved.sources.items():
            rows.append(Row(f"option {name} {option}", True, f"{getattr(resolved.options, option)} ({source})"))
    yield from rows
    for name, sentence in refused.items():
        yield Row(f"options of {name}", bool(rows), f"refused: {sentence}")


def table(rows: Iterable[Row], all_seams: bool) -> Table:
    """Seams that hold are one line unless asked for."""
    out = Table(title="sglang-trunc doctor")
    for column in ("", "part", "found"):
        out.add_column(column, overflow="fold")
    rows = list(rows)
    holding = sum(row.ok for row in rows if row.part.startswith("seam "))
    summed = False
    for row in rows:
        if row.part.startswith("seam ") and row.ok and not all_seams:
            if not summed:
                out.add_row("ok", "seams", f"{holding} hold", style="green")
            summed = True
            continue
        out.add_row("ok" if row.ok else "BROKEN", row.part, row.found, style=None if row.ok else "red")
    return out
