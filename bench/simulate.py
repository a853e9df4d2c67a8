"""Schedules without a model: which depths, widths and blocks would have been fastest on recorded or made-up text.

    SGLANG_TRUNC_TRACE=run.jsonl SGLANG_TRUNC_D1=1 python -m sglang.launch_server ... \
        --speculative-algorithm loopspec_dual                        # serve, send prompts: the trace grows
    python bench/simulate.py replay run.jsonl --served info.json     # exit code 1 where the server's counters differ
    python bench/simulate.py sweep run.jsonl --cost info.json --concurrency 1,4
    python bench/simulate.py iid --recurrences 32 --d1 2 --a1 0.7 --d2 8 --a2 0.9

``sweep`` runs every schedule and depth pair over the trace's texts, through the same code as the server; what it has to
guess is in ``sim_paths``. A trace serves for multiples of the d1 with which it was taken, so take it with d1 = 1.
``--cost`` is a file with the ``/server_info`` of a server started with ``SGLANG_TRUNC_MEASURE``; ``--measure``
starts one. Without either a tick counts as one unit at any width. ``--measured`` compares with a result of
``bench/compare.py``.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import cost_table
import depths
import plot
import provenance
import sim_cases
import sim_measured
import typer
from cost_table import CostTable
from rich.console import Console
from sim_cases import Case, Figures, Grid
from sim_paths import ChanceText, RecordedText, Text
from sim_replay import Replay, ReplayError, differences

from sglang_trunc.cli.report import write_json
from sglang_trunc.core.trace import read_traces

app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None)
console = Console()

TraceFile = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Written under SGLANG_TRUNC_TRACE.")]
CostFile = Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="JSON with a cost table.")]
Overhead = Annotated[float, typer.Option(min=0, help="Milliseconds of a round beside the model, as you measured.")]
Out = Annotated[Path | None, typer.Option(help="Write everything here as JSON.")]
Numbers = Annotated[str | None, typer.Option(help="Comma-separated; default: all that the schedules accept.")]


@app.command()
def replay(
    trace: TraceFile,
    served: Annotated[Path | None, typer.Option(help="/server_info of that server, idle, as JSON.")] = None,
) -> None:
    """Replay a trace exactly; exit code 1 where anything differs."""
    with one_sentence():
        traces = read_traces(trace)
    for number, one in enumerate(traces, start=1):
        run = Replay(one)
        try:
            totals = run.run()
            # A server's totals are of its own life: the newest part of the file.
            if served is not None and one is traces[-1]:
                found = differences(totals, served_counters(served))
                if found:
                    raise ReplayError(f"totals differ from {served.name}: {'; '.join(found)}")
        except ReplayError as problem:
            console.print(f"part {number}: {problem}", style="red", highlight=False)
            raise typer.Exit(1) from problem
        left = "; the last round is not complete and was left out" if run.cut else ""
        console.print(
            f"part {number}: {one.schedule} {run.rounds} rounds, {totals['tokens']} tokens, {totals['ticks']} ticks, "
            f"{totals['rows']} rows: all counters equal after every round{left}",
            highlight=False,
        )


def served_counters(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8"))
    if "internal_states" in found:
        found = found["internal_states"][0]
    found = found.get("sglang_trunc", found)
    return dict(found.get("counters", found))


@app.command()
def sweep(
    trace: TraceFile,
    server_args: Annotated[list[str] | None, typer.Argument(help="After --: for the server of --measure.")] = None,
    schedules: Annotated[str, typer.Option(help="Of trunc, single, dual.")] = "trunc,single,dual",
    d1: Numbers = None,
    d2: Numbers = None,
    max_width: Annotated[str | None, typer.Option(help="Rows of a tick; default: the trace's.")] = None,
    min_survival: Annotated[float | None, typer.Option(min=0, max=1, help="Default: the trace's.")] = None,
    block_size: Annotated[str, typer.Option(help="Of TRUNC.")] = "2,3,4,6",
    concurrency: Annotated[str, typer.Option(help="Requests at a time.")] = "1",
    tokens: Annotated[int | None, typer.Option(min=1, help="At most so many of each text.")] = None,
    cost: CostFile = None,
    measure: Annotated[str | None, typer.Option(help="Checkpoint: start a server to measure the costs.")] = None,
    context: Annotated[int, typer.Option(min=1, help="Context length of --measure.")] = 200,
    threads: Annotated[int, typer.Option(min=1, help="Of --measure.")] = 1,
    round_overhead_ms: Overhead = 0.0,
    measured: Annotated[Path | None, typer.Option(help="JSON of bench/compare.py.")] = None,
    plot_to: Annotated[Path | None, typer.Option("--plot", help="Picture of predicted and measured.")] = None,
    out: Out = None,
) -> None:
    """Every schedule and depth over a trace's texts."""
    with one_sentence():
        if plot_to is not None:
            plot.needed()
        if plot_to is not None and measured is None:
            raise ValueError("--plot draws what --measured compares")
        if measured is not None and not (cost or measure):
            raise ValueError("--measured needs --cost or --measure")
        traces = sim_measured.traces_alike(read_traces(trace))
        table = cost_table.from_file_or_server(cost, measure, context, threads, server_args or [])
    plan = traces[0].plan
    grid = Grid(
        schedules_named(schedules),
        numbers(max_width) or [plan.max_width],
        numbers(block_size) or [],
        plan.min_survival if min_survival is None else min_survival,
        numbers(d1),
        numbers(d2),
    )
    texts: list[Text] = [RecordedText(one, text, tokens) for one in traces for text in one.texts]
    cases = grid.cases(plan.recurrences, traces[0].depths)
    console.print(f"{len(texts)} texts, R = {plan.recurrences}, read at {list(traces[0].depths)}", highlight=False)
    disagreement = depths.wrong_shares(traces)
    closed = in_closed_form(disagreement, plan.recurrences)
    found = run_all(cases, texts, plan.recurrences, numbers(concurrency) or [1], table, round_overhead_ms / 1e3)
    written = {"provenance": provenance.collect(), "disagreement": disagreement, "closed_form": closed}
    written["rows"] = [sim_cases.as_json(one) for one in found]
    if table is not None:
        written["cost"] = table._asdict()
    if measured is not None and table is not None:
        points = sim_measured.points(measured, texts, plan.recurrences, table, round_overhead_ms / 1e3)
        console.print(sim_measured.rich_table(points))
        written["measured"] = [point._asdict() for point in points]
        if plot_to is not None:
            plot.scatter(points, plot_to)
    if out is not None:
        write_json(out, written)


@app.command()
def iid(
    recurrences: Annotated[int, typer.Option(min=2)],
    d1: Annotated[int, typer.Option(min=1)],
    a1: Annotated[float, typer.Option(min=0, max=1, help="Share of tokens that depth d1 gets right.")],
    d2: Annotated[int | None, typer.Option(min=2)] = None,
    a2: Annotated[float | None, typer.Option(min=0, max=1, help="Share that depth d2 gets right.")] = None,
    max_width: Annotated[str, typer.Option(help="Rows of a tick.")] = "8",
    min_survival: Annotated[float, typer.Option(min=0, max=1)] = 0.05,
    block_size: Annotated[str, typer.Option(help="Of TRUNC.")] = "2,3,4,6",
    concurrency: Annotated[str, typer.Option(help="Requests at a time.")] = "1",
    requests: Annotated[int, typer.Option(min=1)] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Of each request.")] = 256,
    seed: int = 0,
    cost: CostFile = None,
    round_overhead_ms: Overhead = 0.0,
    out: Out = None,
) -> None:
    """Independent acceptance, without a trace."""
    if (d2 is None) != (a2 is None):
        raise typer.BadParameter("d2 and a2 come together")
    agreement = {d1: a1} if d2 is None or a2 is None else {d1: a1, d2: a2}
    first = None if d2 is None else [d2]
    schedules = sim_cases.SCHEDULES if first else sim_cases.SCHEDULES[:2]
    grid = Grid(schedules, numbers(max_width) or [], numbers(block_size) or [], min_survival, [d1], first)
    cases = grid.cases(recurrences, sorted(agreement))
    texts = [ChanceText(recurrences, agreement, tokens, seed + index) for index in range(requests)]
    with one_sentence():
        table = cost_table.loaded(cost) if cost else None
    found = run_all(cases, texts, recurrences, numbers(concurrency) or [1], table, round_overhead_ms / 1e3)
    if out is not None:
        write_json(out, {"provenance": provenance.collect(), "rows": [sim_cases.as_json(one) for one in found]})


def run_all(
    cases: Sequence[Case],
    texts: Sequence[Text],
    recurrences: int,
    levels: Sequence[int],
    cost: CostTable | None,
    overhead: float,
) -> list[Figures]:
    """A table for every concurrency."""
    found: list[Figures] = []
    for level in levels:
        mine: list[Figures] = []
        for number, case in enumerate(cases):
            with console.status(
                f"{level} at a time: {number + 1} of {len(cases)}, {case.schedule} {case.d1} {case.d2}"
            ):
                outcome = case.run(recurrences, texts, level)
            plain = mine[0].speed if mine else None
            mine.append(sim_cases.figures(case, outcome, level, cost, overhead, plain))
        priced = "" if cost else " (a tick counts as one unit, readouts as nothing)"
        console.print(sim_cases.rich_table(mine, f"{level} requests at a time{priced}", cost is not None))
        found += mine
    return found


def in_closed_form(disagreement: Mapping[int, float], recurrences: int) -> dict[str, Any] | None:
    """Prints and returns the fitted envelope with its depths."""
    shares = ", ".join(f"{depth}: {1 - share:.3f}" for depth, share in disagreement.items())
    console.print(f"agreement with full depth by depth: {shares}", highlight=False)
    law = depths.fit(disagreement)
    if law is None:
        console.print("no power law fits, so there are no depths in closed form")
        return None
    wanted = depths.closed_form(law, recurrences)
    pair = depths.nearest(wanted, recurrences)
    console.print(
        f"1 - agreement is about {law.beta:.3f} * depth^-{law.alpha:.2f}; closed form: d1 = {wanted[0]:.2f}, "
        f"d2 = {wanted[1]:.2f}, nearest accepted pair {pair}",
        highlight=False,
    )
    return {**law._asdict(), "depths": wanted, "nearest": pair}


def numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    if not all(part.isdigit() and int(part) for part in text.split(",")):
        raise typer.BadParameter(f"numbers must be 1 or more, got {text!r}")
    return [int(part) for part in text.split(",")]


def schedules_named(text: str) -> list[str]:
    known = {"trunc": sim_cases.TRUNC, "single": sim_cases.SINGLE, "dual": sim_cases.DUAL}
    unknown = [name for name in text.split(",") if name not in known]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is not one of {', '.join(known)}")
    return [known[name] for name in text.split(",")]


@contextlib.contextmanager
def one_sentence() -> Iterator[None]:
    """What was given cannot be used: its sentence, not a traceback."""
    try:
        yield
    except ValueError as problem:
        raise typer.BadParameter(str(problem)) from problem


if __name__ == "__main__":
    app()
