"""Served speed against what time(width) and an arm's own counters predict, at concurrency 1.

    python bench/predict.py bench/out/compare.json --model-path M --context 200 --threads 1
    python bench/predict.py bench/out/compare.json --cost info.json --plot predicted.png

Takes ticks and readouts by width from a file or from a server that it starts (``cost_table``), then sums up what every
arm of a comparison did: its histogram of widths, its readouts, and per token what it committed. What is missing to
the prediction is everything but the model: the scheduler, HTTP, acceptance and bookkeeping, of which
``--round-overhead-ms`` may stand for a part. Acceptance is taken from the run itself, so this says nothing about draft
quality; ``bench/simulate.py`` predicts that as well.

Counters know how many rows were read out, not in how many calls. One request has one readout a cycle in a pipeline
(a few have none, which is a little too much), and in TRUNC one a draft and one a round.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import cost_table
import plot
import typer
from cost_table import CostTable
from plot import Point
from rich.console import Console
from rich.table import Table


def calls(counted: Mapping[str, Any], options: Mapping[str, Any]) -> dict[float, float]:
    """Readouts of one request's arm: rows -> calls."""
    rows = sum(counted["readouts_by_depth"].values())
    if "block_size" not in options:
        cycles = counted["ticks"] / options["d1"]
        return {rows / cycles: cycles}
    verified = counted["drafted"] + counted["runs"]
    found: Counter[float] = Counter({1: rows - verified})
    found[verified / counted["rounds"]] += counted["rounds"]
    return dict(found)


def seconds_per_token(
    cost: CostTable, recurrences: int, options: Mapping[str, Any], counted: Mapping[str, Any], overhead: float
) -> float:
    """``counted``: the engine's counters; empty for a plain server, which has one round a token."""
    if not counted:
        return cost.seconds({1: recurrences}, {1: 1}) + overhead
    widths = {int(width): ticks for width, ticks in counted["ticks_by_width"].items() if ticks}
    total = cost.seconds(widths, calls(counted, options)) + overhead * counted["rounds"]
    return total / counted["tokens"]


def added(counted: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counters of several rounds together."""
    total: dict[str, Any] = {}
    for one in counted:
        for name, value in one.items():
            before = total.get(name)
            total[name] = added([before or {}, value]) if isinstance(value, Mapping) else (before or 0) + value
    return total


def predicted_rows(
    compared: Mapping[str, Any], cost: CostTable, recurrences: int, overhead: float = 0.0
) -> Iterator[dict[str, Any]]:
    """One row per arm and prompt length at concurrency 1."""
    for line in compared["summary"]:
        if line["cell"]["concurrency"] != 1:
            continue
        mine = [m for m in compared["measurements"] if (m["arm"], m["cell"]) == (line["arm"], line["cell"])]
        counted = added([m["counters"] for m in mine])
        options = compared["arms"][line["arm"]]["options"]
        yield {
            "arm": line["arm"],
            "prompt_len": line["cell"]["prompt_len"],
            "accept_length": line["accept_length"] or 1.0,
            "predicted_ms": 1e3 * seconds_per_token(cost, recurrences, options, counted, overhead),
            "served_ms": 1e3 / line["decode_tps"],
        }


def main(
    comparison: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="JSON of bench/compare.py.")],
    server_args: Annotated[list[str] | None, typer.Argument(help="After --: for the server.")] = None,
    model_path: Annotated[str | None, typer.Option(help="The checkpoint that was compared.")] = None,
    cost: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="JSON with a cost table.")] = None,
    context: Annotated[int, typer.Option(min=1, help="Context at which ticks are timed.")] = 200,
    threads: Annotated[int, typer.Option(min=1)] = 1,
    round_overhead_ms: Annotated[float, typer.Option(min=0, help="Of a round beside the model.")] = 0.0,
    plot_to: Annotated[Path | None, typer.Option("--plot", help="Picture of predicted and served.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write cost table and rows here as JSON.")] = None,
) -> None:
    """Predicted against served milliseconds per token."""
    console = Console()
    compared = json.loads(comparison.read_text(encoding="utf-8"))
    try:
        recurrences = recurrences_of(compared)
        if plot_to is not None:
            plot.needed()
        table = cost_table.from_file_or_server(cost, model_path, context, threads, server_args or [])
        if table is None:
            raise ValueError("either --cost or --model-path is needed")
    except ValueError as problem:
        raise typer.BadParameter(str(problem)) from problem
    rows = list(predicted_rows(compared, table, recurrences, round_overhead_ms / 1e3))
    shown = Table("arm", "prompt", "accept length", "predicted ms", "served ms", "predicted / served")
    for row in rows:
        shown.add_row(
            row["arm"],
            str(row["prompt_len"]),
            f"{row['accept_length']:.2f}",
            f"{row['predicted_ms']:.2f}",
            f"{row['served_ms']:.2f}",
            f"{row['predicted_ms'] / row['served_ms']:.2f}",
        )
    console.print(shown)
    if plot_to is not None:
        plot.scatter(
            [
                Point(row["arm"], row["prompt_len"], 1, 1e3 / row["predicted_ms"], 1e3 / row["served_ms"])
                for row in rows
            ],
            plot_to,
        )
    if out is not None:
        out.write_text(json.dumps({"cost": table._asdict(), "rows": rows}, indent=1) + "\n", encoding="utf-8")


def recurrences_of(compared: Mapping[str, Any]) -> int:
    """R, which every speculative arm names."""
    if "measurements" not in compared:
        raise ValueError("the comparison's measurements, with the engine's counters, were left out of this file")
    named = {facts["options"]["recurrences"] for facts in compared["arms"].values() if facts["options"]}
    if len(named) != 1:
        raise ValueError(f"the comparison needs speculative arms of one R, it has {sorted(named)}")
    return int(named.pop())


if __name__ == "__main__":
    typer.run(main)
