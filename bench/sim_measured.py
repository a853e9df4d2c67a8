"""Simulated beside measured speeds: the arms of a comparison, over a trace's texts.

The comparison's prompts are others than the trace's, so acceptance may differ; ``bench/predict.py`` takes an arm's own
counters instead and leaves only the time of a token open.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sim_cases
from cost_table import CostTable
from plot import Point
from rich import box
from rich.table import Table
from sim_cases import DUAL, PLAIN, SINGLE, TRUNC, Case
from sim_paths import Text

from sglang_trunc.core.trace import Trace


def traces_alike(traces: Sequence[Trace]) -> Sequence[Trace]:
    """Parts of a file whose texts may be put together."""
    kinds = {(one.header["model"], one.plan.recurrences, one.plan.d1) for one in traces}
    if len(kinds) > 1:
        raise ValueError(f"the trace holds servers of different model, R and d1: {sorted(kinds)}")
    if not any(one.texts for one in traces):
        raise ValueError("the trace holds no text")
    return traces


def case_of(options: Mapping[str, Any]) -> Case:
    """From an arm's resolved options; a plain server has none."""
    if not options:
        return Case(PLAIN)
    names = [name for name in Case._fields if name in options]
    kind = TRUNC if "block_size" in options else DUAL if "d2" in options else SINGLE
    return Case(kind, **{name: options[name] for name in names})


def points(comparison: Path, texts: Sequence[Text], recurrences: int, cost: CostTable, overhead: float) -> list[Point]:
    """One an arm and cell."""
    compared = json.loads(comparison.read_text(encoding="utf-8"))
    speeds: dict[tuple[Case, int], float] = {}
    found = []
    for line in compared["summary"]:
        cell = line["cell"]
        key = case_of(compared["arms"][line["arm"]]["options"]), cell["concurrency"]
        if key not in speeds:
            case, level = key
            outcome = case.run(recurrences, texts, level)
            speeds[key] = sim_cases.figures(case, outcome, level, cost, overhead, None).speed
        found.append(Point(line["arm"], cell["prompt_len"], cell["concurrency"], speeds[key], line["decode_tps"]))
    return found


def rich_table(found: Sequence[Point]) -> Table:
    table = Table("arm", "prompt", "requests", "predicted tok/s", "measured", "ratio", box=box.SIMPLE_HEAD)
    for one in found:
        numbers = (one.predicted, one.measured, one.predicted / one.measured)
        table.add_row(one.arm, str(one.prompt_len), str(one.concurrency), *(f"{value:.2f}" for value in numbers))
    return table
