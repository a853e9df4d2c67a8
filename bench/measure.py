"""One cell of a comparison: an arm, a prompt length, a concurrency.

A cell is measured in *waves*: ``concurrency`` different prompts sent together, as many waves as the number
of requests needs. The prefix cache is empty before each cell and no prompt appears twice, so that prefill is
paid every time. A cell's speed is the sum of its waves' tokens over the sum of their windows
(``serving.timing``): decode speed leaves the prefill out, total speed does not.

Nothing here compares arms; ``summary`` does.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from sglang_trunc.serving import counters, timing
from sglang_trunc.serving.client import Client, Completion
from sglang_trunc.serving.server import Server


class Cell(NamedTuple):
    prompt_len: int
    concurrency: int
    prompts: str = "mixed"  # what they are cut from (``prompt_text``)

    @property
    def name(self) -> str:
        return f"{self.prompts} {self.prompt_len} x {self.concurrency}"


class Measured(NamedTuple):
    """One arm's cell in one round."""

    arm: str
    round: int
    cell: Cell
    decode_tps: float  # tokens/s of all requests together, prefill left out
    total_tps: float  # prefill included
    ttft: float  # median seconds to the first token
    accept_length: float | None  # None: a plain server
    ticks_per_token: float | None
    accept_rate: float | None
    output_ids: list[list[int]]
    counters: dict[str, Any]  # the engine's own, this cell's share; empty for a plain server

    @property
    def rows_per_token(self) -> float | None:
        """Rows of the core spent on a committed token; None for a plain server, which spends R."""
        spent = counters.totals(self.counters) if self.counters else None
        return spent.rows / spent.tokens if spent and spent.tokens else None


def measure(
    server: Server, arm: str, number: int, cell: Cell, prompts: Sequence[Sequence[int]], tokens: int
) -> Measured:
    with server.client() as client:
        client.flush_cache()
        before = server.internal_state()
        waves = [send(client, wave, tokens) for wave in in_waves(prompts, cell.concurrency)]
        counted = counters.counted_since(before, server.internal_state())
    answers = [answer for wave in waves for answer in wave]
    check_counts(answers, cell, tokens)
    spent = counters.totals(counted) if counted else None
    return Measured(
        arm,
        number,
        cell,
        speed([timing.decode_window(wave) for wave in waves]),
        speed([timing.total_window(wave) for wave in waves]),
        statistics.median(timing.ttft(answer) for answer in answers),
        counters.total(answers).accept_length if spent else None,
        counters.ticks_per_token(spent),
        spent.accept_rate if spent and spent.drafted else None,
        [answer.output_ids for answer in answers],
        counted,
    )


def warm_up(server: Server, cell: Cell, prompts: Sequence[Sequence[int]], tokens: int) -> None:
    """One unmeasured wave of a cell's own shape: compiled kernels, allocator, page cache."""
    with server.client() as client:
        send(client, prompts[: cell.concurrency], tokens)


def send(client: Client, wave: Sequence[Sequence[int]], tokens: int) -> list[Completion]:
    return client.generate_many(wave, len(wave), max_new_tokens=tokens, ignore_eos=True, stream=True)


def in_waves(prompts: Sequence[Sequence[int]], concurrency: int) -> list[Sequence[Sequence[int]]]:
    """Full waves only: a last wave with fewer requests would be another cell."""
    return [prompts[i : i + concurrency] for i in range(0, len(prompts) - concurrency + 1, concurrency)]


def speed(windows: Sequence[tuple[int, float]]) -> float:
    return sum(tokens for tokens, _ in windows) / sum(seconds for _, seconds in windows)


def check_counts(answers: Sequence[Completion], cell: Cell, tokens: int) -> None:
    """A cell is only what it says if every prompt was prefilled whole and every answer is full."""
    for answer in answers:
        if answer.completion_tokens != tokens or len(answer.output_ids) != tokens:
            raise RuntimeError(f"asked for {tokens} tokens, got {answer.completion_tokens}: {answer.finish_reason}")
        if answer.prompt_tokens != cell.prompt_len:
            raise RuntimeError(f"sent {cell.prompt_len} prompt tokens, the server counted {answer.prompt_tokens}")
