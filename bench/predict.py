"""Served speed against what time(width) and the recorded acceptance predict.

    python bench/predict.py bench/out/compare.json --model-path M --context 200 --threads 1

Starts one server that measures ticks and readouts by width (``SGLANG_TRUNC_MEASURE``, see ``engine.cost``), then,
for every arm of a comparison at concurrency 1, predicts milliseconds per token from the arm's options and its
recorded accept length:

    round = d1 * w * tick(1) + (R - d1) * tick(w) + (w - 1) * readout(1) + readout(w)
    per token = round / accept length; plain = R * tick(1) + readout(1)

and prints the served figure beside it. What is missing to the prediction is everything but the model: the scheduler,
HTTP, acceptance and bookkeeping. Acceptance is taken from the run itself, so this says nothing about draft quality.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from sglang_trunc.serving.server import Server


def interpolated(times: dict[str, float], width: int) -> float:
    """Seconds at a width, linear between measured neighbours."""
    known = sorted((int(rows), seconds) for rows, seconds in times.items())
    for (low, before), (high, after) in zip(known, known[1:], strict=False):
        if low <= width <= high:
            return before + (after - before) * (width - low) / (high - low)
    raise ValueError(f"width {width} is outside the measured {known[0][0]} to {known[-1][0]}")


def round_seconds(cost: dict[str, Any], recurrences: int, d1: int, width: int) -> float:
    """One TRUNC round of one request with a full block."""
    tick, readout = cost["tick"], cost["readout"]
    draft = d1 * width * interpolated(tick, 1) + (width - 1) * interpolated(readout, 1)
    verify = (recurrences - d1) * interpolated(tick, width) + interpolated(readout, width)
    return draft + verify


def measured_cost(model_path: str, context: int, threads: int, server_args: list[str]) -> dict[str, Any]:
    env = {"OMP_NUM_THREADS": str(threads), "SGLANG_TRUNC_MEASURE": str(context)}
    args = ["--speculative-algorithm", "trunc", "--max-total-tokens", str(40 * (context + 1)), *server_args]
    with Server(model_path, args, env, name="measure") as server:
        return dict(server.internal_state()["sglang_trunc"])


def main(
    comparison: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="JSON of bench/compare.py.")],
    model_path: Annotated[str, typer.Option(help="The checkpoint that was compared.")],
    context: Annotated[int, typer.Option(min=1, help="Context at which ticks are timed.")] = 200,
    threads: Annotated[int, typer.Option(min=1)] = 1,
    server_args: Annotated[list[str] | None, typer.Argument(help="After --: for the server.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write cost table and rows here as JSON.")] = None,
) -> None:
    """Predicted against served milliseconds per token."""
    console = Console()
    compared = json.loads(comparison.read_text(encoding="utf-8"))
    state = measured_cost(model_path, context, threads, list(server_args or []))
    cost, recurrences = state["cost"], state["recurrences"]
    console.print_json(json.dumps(cost))
    rows = list(predicted_rows(compared, cost, recurrences))
    table = Table("arm", "prompt", "accept length", "predicted ms", "served ms", "predicted / served")
    for row in rows:
        table.add_row(
            row["arm"],
            str(row["prompt_len"]),
            f"{row['accept_length']:.2f}",
            f"{row['predicted_ms']:.1f}",
            f"{row['served_ms']:.1f}",
            f"{row['predicted_ms'] / row['served_ms']:.2f}",
        )
    console.print(table)
    if out is not None:
        out.write_text(json.dumps({"cost": cost, "rows": rows}, indent=1) + "\n", encoding="utf-8")


def predicted_rows(compared: dict[str, Any], cost: dict[str, Any], recurrences: int) -> Iterator[dict[str, Any]]:
    """One row per arm and prompt length at concurrency 1."""
    for line in compared["summary"]:
        if line["cell"]["concurrency"] != 1:
            continue
        options = compared["arms"][line["arm"]]["options"]
        d1, width = (options["d1"], options["block_size"]) if options else (recurrences, 1)
        accept = line["accept_length"] or 1.0
        yield {
            "arm": line["arm"],
            "prompt_len": line["cell"]["prompt_len"],
            "accept_length": accept,
            "predicted_ms": 1e3 * round_seconds(cost, recurrences, min(d1, recurrences), width) / accept,
            "served_ms": 1e3 / line["decode_tps"],
        }


if __name__ == "__main__":
    typer.run(main)
