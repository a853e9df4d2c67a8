"""Plain decoding against speculation, arm by arm, in one run.

    python bench/compare.py --model-path M --prompt-lens 7,200,800 --concurrency 1,2,4,8 --threads 1
    python bench/compare.py --model-path M --prompts code,copy --arm deep:d1=2 --arm wide:block_size=8 -- --page-size 16

Every round measures each arm on the same prompts, in an order that rotates from round to round; ratios to
plain are taken within a round (``summary``), speeds as ``measure`` says, arms as ``arms`` says. By default
one server runs at a time and is started anew each round. ``--keep-alive`` starts all of them once and
alternates cell by cell; the servers that are not measured are stopped by signal, because an idle SGLang
scheduler polls and would take a core.

Greedy, a fixed number of tokens, prefix cache empty before each cell. Writes JSON with provenance and the
table as Markdown, with each arm's worst cell behind it; every cell that was measured is in both.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import arms
import measure
import prompt_text
import provenance
import summary
import typer
from arms import Arm
from measure import Cell, Measured
from rich.console import Console

from sglang_trunc.cli.report import write_json
from sglang_trunc.serving import counters
from sglang_trunc.serving.server import Server

WARM_UP_TOKENS = 8
SLACK_TOKENS = 256  # per request: slots reserved for drafts, page rounding
SMALLEST_POOL = 4096


@dataclass(frozen=True)
class Plan:
    model_path: str
    arms: list[Arm]
    cells: list[Cell]
    rounds: int
    requests: int  # per cell, rounded up to whole waves
    tokens: int
    threads: int | None
    server_args: list[str]

    @property
    def env(self) -> dict[str, str]:
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
        return dict.fromkeys(names, str(self.threads)) if self.threads else {}

    @property
    def pool_args(self) -> list[str]:
        """The same pool for every arm, so that servers kept side by side do not size it by what is left."""
        if "--max-total-tokens" in self.server_args:
            return []
        need = max(c.concurrency * (c.prompt_len + self.tokens + SLACK_TOKENS) for c in self.cells)
        return ["--max-total-tokens", str(max(SMALLEST_POOL, 2 * need))]

    def count(self, cell: Cell) -> int:
        """Prompts of a cell: whole waves."""
        return -(-self.requests // cell.concurrency) * cell.concurrency

    def server(self, arm: Arm) -> Server:
        args = [*arm.server_args, *self.pool_args, *self.server_args]
        return Server(self.model_path, args, {**self.env, **arm.env}, name=arm.name)


@dataclass
class Session:
    """What a comparison collects."""

    plan: Plan
    console: Console
    corpora: dict[str, prompt_text.Corpus]
    tokens: dict[str, list[list[int]]] = field(default_factory=dict)  # tokenised corpora
    facts: dict[str, Any] = field(default_factory=dict)  # per arm
    results: list[Measured] = field(default_factory=list)

    def ready(self, arm: Arm, server: Server) -> None:
        """Notes what a server just started says about itself."""
        with server.client() as client:
            for name, corpus in self.corpora.items() if not self.tokens else ():
                self.tokens[name] = prompt_text.tokenised(corpus, client.tokenize)
        state = server.internal_state()
        memory = state["memory_usage"]
        self.facts[arm.name] = {
            "server_args": arm.server_args,
            "env": arm.env,
            "options": counters.engine_options(state),
            "start_seconds": round(server.start_seconds or 0.0, 1),
            "memory_usage": memory,
            "kv_bytes_per_token": round(memory["kvcache"] * 1024**3 / memory["token_capacity"]),
        }

    def one(self, arm: Arm, server: Server, number: int, cell: Cell) -> None:
        """Warm-up and measurement of a cell."""
        plan = self.plan
        count = plan.count(cell)
        # Prompts change from round to round, and are the same for all arms of a round.
        tokens = self.tokens[cell.prompts]
        prompts = prompt_text.cut(tokens, cell.prompt_len, count, skip=(number + 1) * count)
        spare = prompt_text.cut(tokens, cell.prompt_len, cell.concurrency)
        with self.console.status(f"round {number + 1}: {arm.name}, {cell.name}"):
            measure.warm_up(server, cell, spare, WARM_UP_TOKENS)
            found = measure.measure(server, arm.name, number, cell, prompts, plan.tokens)
        self.results.append(found)
        self.console.print(
            f"round {number + 1}  {arm.name:10} {cell.name}  "
            f"{found.decode_tps:8.2f} tok/s decoding, {found.total_tps:8.2f} in all",
            highlight=False,
        )


def rotated(items: Sequence[Arm], number: int) -> list[Arm]:
    start = number % len(items)
    return [*items[start:], *items[:start]]


def one_at_a_time(session: Session) -> None:
    for number in range(session.plan.rounds):
        for arm in rotated(session.plan.arms, number):
            with starting(session, arm) as server:
                session.ready(arm, server)
                for cell in session.plan.cells:
                    session.one(arm, server, number, cell)


def kept_alive(session: Session) -> None:
    plan = session.plan
    with contextlib.ExitStack() as stack:
        servers = {}
        for arm in plan.arms:
            servers[arm.name] = stack.enter_context(starting(session, arm))
            session.ready(arm, servers[arm.name])
            servers[arm.name].pause()
        for number in range(plan.rounds):
            for cell in plan.cells:
                for arm in rotated(plan.arms, number):
                    with servers[arm.name].running() as server:
                        session.one(arm, server, number, cell)


@contextlib.contextmanager
def starting(session: Session, arm: Arm) -> Iterator[Server]:
    server = session.plan.server(arm)
    with session.console.status(f"starting {arm.name}"):
        server.start()
    with server:
        yield server


def numbers(text: str) -> list[int]:
    values = [int(part) for part in text.split(",")]
    if any(value < 1 for value in values):
        raise typer.BadParameter(f"numbers must be 1 or more, got {text!r}")
    return values


def report(session: Session, out: Path) -> None:
    plan = session.plan
    lines = summary.summarise(session.results)
    title = f"{Path(plan.model_path).name}: {plan.tokens} new tokens, {plan.rounds} rounds"
    session.console.print(summary.rich_table(lines, title))
    unequal = [line for line in lines if line.equal < line.texts]
    if unequal:
        names = ", ".join(sorted({line.arm for line in unequal}))
        session.console.print(f"texts that differ from plain: {names}; see `sglang-trunc verify`", style="red")
    settings = {
        "model": Path(plan.model_path).name,
        "cells": [cell._asdict() for cell in plan.cells],
        "rounds": plan.rounds,
        "requests": plan.requests,
        "max_new_tokens": plan.tokens,
        "threads": plan.threads,
        "prompts": {name: corpus.digest for name, corpus in session.corpora.items()},
        "server_args": [*plan.pool_args, *plan.server_args],
    }
    head = {"provenance": provenance.collect(env=plan.env), "settings": settings, "arms": session.facts}
    write_json(out, {**head, **summary.as_json(session.results, lines)})
    text = summary.markdown(lines) + "\n" + summary.worst_cells(lines)
    out.with_suffix(".md").write_text(text, encoding="utf-8")
    session.console.print(f"written: {out} and {out.with_suffix('.md').name}")


def main(
    model_path: Annotated[str, typer.Option(help="Checkpoint folder or Hub name.")],
    server_args: Annotated[list[str] | None, typer.Argument(help="After --: for every server.")] = None,
    arm: Annotated[list[str] | None, typer.Option(help="NAME:key=value,... (see bench/arms.py).")] = None,
    prompt_lens: Annotated[str, typer.Option(help="Prompt lengths in tokens.")] = "7,200,800",
    concurrency: Annotated[str, typer.Option(help="Requests sent together.")] = "1,4",
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    requests: Annotated[int, typer.Option(min=1, help="Requests per cell and round.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 64,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of a server; default: its own.")] = None,
    prompts: Annotated[str, typer.Option(help="Any of mixed, code, prose, copy, random, text files.")] = "mixed",
    keep_alive: Annotated[bool, typer.Option("--keep-alive", help="All servers at once, one awake.")] = False,
    out: Annotated[Path, typer.Option(help="JSON file; the table goes beside it.")] = Path("bench/out/compare.json"),
) -> None:
    """Plain decoding against speculation."""
    # Longest prompts first would hide a warm-up effect in the shortest ones: keep the order given.
    sources = prompts.split(",")
    cells = [
        Cell(length, level, source)
        for source in sources
        for length in numbers(prompt_lens)
        for level in numbers(concurrency)
    ]
    try:
        chosen = arms.chosen(arm or [])
    except ValueError as problem:
        raise typer.BadParameter(str(problem)) from problem
    plan = Plan(model_path, chosen, cells, rounds, requests, max_new_tokens, threads, list(server_args or []))
    session = Session(plan, Console(), {source: prompt_text.corpus(source) for source in sources})
    kept_alive(session) if keep_alive else one_at_a_time(session)
    report(session, out)


if __name__ == "__main__":
    # So that servers are stopped when this process is told to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    typer.run(main)
