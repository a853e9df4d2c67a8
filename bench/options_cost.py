"""What request options cost: the time of a decode round that is not the model's, with an option and without.

    python bench/options_cost.py --model-path /tmp/wide_ouro --algorithm loopspec_dual --threads 1

Options change the text, and with it how much is accepted, so tokens/s with and without one cannot be compared. A
round's work beside the model can: penalties, masks, noise, bookkeeping. The server counts both
(``SGLANG_TRUNC_MEASURE``); each option is measured between two passes without any, and its surplus is given in percent
of their round.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import httpx
import prompt_text
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from sglang_trunc.serving.request_options import SERVER_FLAGS, Case, body, cases
from sglang_trunc.serving.server import Server


class Cost(NamedTuple):
    """One option at one concurrency; seconds a round."""

    option: str
    concurrency: int
    rounds: int
    round: float
    beside_model: float
    base_round: float  # mean of the passes without options before and after
    base_beside_model: float

    @property
    def surplus(self) -> float:
        """Share of a round without the option."""
        return (self.beside_model - self.base_beside_model) / self.base_round


class Spent(NamedTuple):
    rounds: int
    seconds: float
    model: float

    def since(self, before: Spent) -> Spent:
        return Spent(self.rounds - before.rounds, self.seconds - before.seconds, self.model - before.model)

    @property
    def round(self) -> float:
        return self.seconds / self.rounds

    @property
    def beside_model(self) -> float:
        return (self.seconds - self.model) / self.rounds


def spent(server: Server) -> Spent:
    state = server.internal_state()["sglang_trunc"]
    return Spent(state["counters"]["rounds"], state["seconds"]["rounds"], state["seconds"]["model"])


def run(server: Server, case: Case, prompts: Sequence[Sequence[int]], concurrency: int, tokens: int) -> Spent:
    def send(prompt: Sequence[int]) -> None:
        answer = httpx.post(f"{server.url}/generate", json=body(case, prompt, tokens), timeout=600, trust_env=False)
        answer.raise_for_status()

    before = spent(server)
    with ThreadPoolExecutor(concurrency) as pool:
        list(pool.map(send, prompts))
    return spent(server).since(before)


def measured(
    server: Server, chosen: Sequence[Case], prompts: Sequence[Sequence[int]], concurrency: int, tokens: int
) -> list[Cost]:
    plain = Case("greedy")
    found = []
    base = run(server, plain, prompts, concurrency, tokens)
    for case in track(chosen, description=f"concurrency {concurrency}"):
        own = run(server, case, prompts, concurrency, tokens)
        after = run(server, plain, prompts, concurrency, tokens)
        base_round = (base.round + after.round) / 2
        beside = (base.beside_model + after.beside_model) / 2
        found.append(Cost(case.name, concurrency, own.rounds, own.round, own.beside_model, base_round, beside))
        base = after
    return found


def main(
    model_path: Annotated[str, typer.Option(help="Checkpoint.")],
    algorithm: Annotated[str, typer.Option(help="Value of --speculative-algorithm.")] = "loopspec_dual",
    concurrency: Annotated[str, typer.Option(help="Requests in flight.")] = "1,4",
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of an answer; grammars may end it earlier.")] = 48,
    prompt_len: Annotated[int, typer.Option(min=1, help="Tokens.")] = 200,
    threads: Annotated[int, typer.Option(min=1, help="OMP_NUM_THREADS of the server.")] = 1,
    only: Annotated[str, typer.Option(help="Names of cases, separated by semicolons; all if left out.")] = "",
    out: Annotated[Path | None, typer.Option(help="JSON.")] = None,
) -> None:
    """Time a round beside the model, option by option."""
    env = {"OMP_NUM_THREADS": str(threads), "SGLANG_TRUNC_MEASURE": str(prompt_len)}
    flags = ["--speculative-algorithm", algorithm, *SERVER_FLAGS, "--max-total-tokens", str(40 * (prompt_len + 1))]
    console, results = Console(), []
    with Server(model_path, flags, env, name="options") as server, server.client() as client:
        levels = [int(level) for level in concurrency.split(",")]
        texts = prompt_text.tokenised(prompt_text.corpus("mixed"), client.tokenize)
        prompts = prompt_text.cut(texts, prompt_len, max(levels))
        every = cases(prompts[0], client.generate(prompts[0], max_new_tokens=32, ignore_eos=True))
        wanted = [case for case in every if case.name != "greedy" and (not only or case.name in only.split(";"))]
        for level in levels:
            results += measured(server, wanted, prompts[:level], level, tokens)
    show(console, results)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps([as_json(cost) for cost in results], indent=1) + "\n", encoding="utf-8")


def as_json(cost: Cost) -> Mapping[str, Any]:
    return {**cost._asdict(), "surplus": cost.surplus}


def show(console: Console, results: Sequence[Cost]) -> None:
    table = Table(title="A decode round beside the model")
    for column in ("option", "requests", "rounds", "ms beside the model", "without", "ms a round without", "surplus"):
        table.add_column(column, justify="left" if column == "option" else "right")
    for cost in results:
        times = (cost.beside_model, cost.base_beside_model, cost.base_round)
        cells = [cost.option, str(cost.concurrency), str(cost.rounds), *(f"{1000 * time:.2f}" for time in times)]
        table.add_row(*cells, f"{100 * cost.surplus:+.2f} %")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
