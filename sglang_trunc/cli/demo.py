"""``sglang-trunc demo``: the same prompts through a plain and a speculative server, side by side.

Uses a small trained model that ships with the package, so that it runs anywhere, and stock SGLang for both
servers. Prints the texts, the speed (prefill left out, see ``serving.timing``), the accept length, the
ticks of the looped core that a token waits for, and whether the tokens are equal.

Each server answers the prompts three times and its fastest pass counts, since other work on the machine
only ever slows a pass. The demo model is so small that SGLang's own work per step weighs as much as the model:
ratios that mean something come from ``bench/compare.py``.

Exit code 0: equal tokens; 1: not; 2: a server did not start.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from sglang_trunc.cli import facts, prompts
from sglang_trunc.cli.launch import started
from sglang_trunc.cli.prompts import Prompt
from sglang_trunc.core.ties import first_difference
from sglang_trunc.serving import counters, timing
from sglang_trunc.serving.client import Client, Completion, RequestRefused
from sglang_trunc.serving.server import Server, ServerError

CANNOT_RUN = 2
PROMPTS = 4
PASSES = 3
SHOWN_LINES = 14


@dataclass(frozen=True)
class DemoOptions:
    model: str = "ouro"  # a bundled model's name, or a path
    algorithm: str = "trunc"
    concurrency: int = 1
    max_new_tokens: int = 96
    server_args: tuple[str, ...] = ()


@dataclass(frozen=True)
class Run:
    """What one server answered."""

    name: str
    completions: list[Completion]  # of the first pass
    tokens_per_second: float  # decoding, of the fastest pass
    accept_length: float | None  # None: a plain server
    ticks_per_token: float | None
    options: dict[str, Any]


def run(options: DemoOptions, console: Console) -> int:
    try:
        model = str(facts.bundled_model(options.model)) if options.model in facts.BUNDLED else options.model
        given = _one_of_each_kind(prompts.bundled())
        plain = serve(model, None, given, options, console)
        fast = serve(model, options.algorithm, given, options, console)
    except (ServerError, RequestRefused, OSError, ValueError) as problem:
        console.print(f"demo could not run: {problem}", style="red", markup=False)
        return CANNOT_RUN
    print_texts(console, given, plain, fast)
    console.print(comparison(plain, fast))
    if os.getloadavg()[0] > 2 * len(os.sched_getaffinity(0)):
        console.print("The machine is busy with other work: the speeds are not to be trusted.", style="yellow")
    unequal = [index for index in range(len(given)) if _difference(plain, fast, index) is not None]
    if unequal:
        console.print(
            f"The tokens differ for {len(unequal)} of {len(given)} prompts; "
            f"`sglang-trunc verify --model-path {model}` says whether at near ties only.",
            style="bold red",
        )
    else:
        console.print("The tokens are equal.", style="bold green")
    return 1 if unequal else 0


def serve(model: str, algorithm: str | None, given: Sequence[Prompt], options: DemoOptions, console: Console) -> Run:
    """All prompts through one server, ``PASSES`` times with an empty prefix cache."""
    flags = ["--speculative-algorithm", algorithm] if algorithm else []
    name = algorithm or "plain"
    server = Server(model, [*flags, *options.server_args], name=name)
    with started(server, console), server.client() as client:
        before = server.internal_state()
        passes = []
        with console.status(f"{name}: {len(given)} prompts, {PASSES} passes"):
            for _ in range(PASSES):
                client.flush_cache()
                passes.append(_one_pass(client, given, options))
        return _run(name, passes, before, server.internal_state())


def _one_pass(client: Client, given: Sequence[Prompt], options: DemoOptions) -> list[list[Completion]]:
    """Waves of ``concurrency`` prompts sent together."""
    texts = [prompt.text for prompt in given]
    together = options.concurrency
    waves = [texts[start : start + together] for start in range(0, len(texts), together)]
    tokens = options.max_new_tokens
    return [client.generate_many(wave, together, max_new_tokens=tokens, ignore_eos=True, stream=True) for wave in waves]


def _speed(waves: Sequence[Sequence[Completion]]) -> float:
    windows = [timing.decode_window(wave) for wave in waves]
    return sum(tokens for tokens, _ in windows) / sum(seconds for _, seconds in windows)


def _run(
    name: str, passes: Sequence[Sequence[Sequence[Completion]]], before: dict[str, Any], after: dict[str, Any]
) -> Run:
    answers = [answer for wave in passes[0] for answer in wave]
    speed = max(_speed(waves) for waves in passes)
    counted = counters.counted_since(before, after)
    if not counted:
        return Run(name, answers, speed, None, None, {})
    ticks = counters.ticks_per_token(counters.totals(counted))
    length = counters.total(answers).accept_length
    return Run(name, answers, speed, length, ticks, counters.engine_options(after))


def _one_of_each_kind(given: Sequence[Prompt]) -> list[Prompt]:
    return list({prompt.kind: prompt for prompt in reversed(given)}.values())[::-1][:PROMPTS]


def _difference(plain: Run, fast: Run, index: int) -> int | None:
    return first_difference(plain.completions[index].output_ids, fast.completions[index].output_ids)


def print_texts(console: Console, given: Sequence[Prompt], plain: Run, fast: Run) -> None:
    for index, prompt in enumerate(given):
        body = Text(prompt.text, style="dim")
        body.append(_shown(fast.completions[index].text), style="default")
        position = _difference(plain, fast, index)
        note = "same tokens" if position is None else f"differs from plain at token {position}"
        console.print(Panel(body, title=prompt.kind, subtitle=note))


def _shown(text: str) -> str:
    lines = text.splitlines()
    return text if len(lines) <= SHOWN_LINES else "\n".join([*lines[:SHOWN_LINES], "..."])


def comparison(plain: Run, fast: Run) -> Table:
    table = Table(title="Plain and speculative decoding")
    for column in ("", "tokens/s", "ratio", "accept length", "ticks per token"):
        table.add_column(column, justify="right" if column else "left")
    recurrences = fast.options.get("recurrences")
    for one in (plain, fast):
        ratio = one.tokens_per_second / plain.tokens_per_second
        accepted = "1.00" if one.accept_length is None else f"{one.accept_length:.2f}"
        # Plain decoding passes every recurrence for each token.
        ticks = recurrences if one.accept_length is None else one.ticks_per_token
        waits = "-" if ticks is None else f"{ticks:.2f}"
        table.add_row(one.name, f"{one.tokens_per_second:.1f}", f"{ratio:.2f}", accepted, waits)
    if fast.options:
        table.caption = ", ".join(f"{key} {value}" for key, value in fast.options.items())
    return table
