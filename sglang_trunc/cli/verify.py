"""``sglang-trunc verify``: does speculation change a model's greedy text?

Starts the speculative server, collects its texts, stops it, starts the plain server of the same model
and compares (see ``agreement``). The speculative server comes first because the plain one must be up when
a difference is looked into. One server at a time, so that the gate needs no more memory than serving.

Exit code 0: equal under the back end's promise; 1: it is not; 2: the check could not be made (a server
did not start, a prompt file is unreadable).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from sglang_trunc.cli import agreement, facts, prompts, report
from sglang_trunc.cli.agreement import Agreement
from sglang_trunc.cli.launch import started
from sglang_trunc.core.ties import Promise
from sglang_trunc.serving import probe
from sglang_trunc.serving.client import RequestRefused
from sglang_trunc.serving.server import Server, ServerError

CANNOT_CHECK = 2


@dataclass(frozen=True)
class VerifyOptions:
    model_path: str
    algorithm: str = "trunc"
    prompts: Path | None = None
    max_new_tokens: int = 64
    concurrency: tuple[int, ...] = (1, 4)
    promise: Promise | None = None  # None: what the back end gives
    json: Path | None = None
    server_args: tuple[str, ...] = ()


def run(options: VerifyOptions, console: Console) -> int:
    """The exit code; everything worth saying is printed."""
    try:
        result = verify(options, console)
    except (ServerError, RequestRefused, OSError, ValueError) as problem:
        console.print(f"verify could not run: {problem}", style="red", markup=False)
        return CANNOT_CHECK
    report.print_agreement(console, result)
    if options.json:
        report.write_json(options.json, report.as_json(result, options.model_path, options.algorithm))
    return 0 if result.passes else 1


def verify(options: VerifyOptions, console: Console) -> Agreement:
    given = prompts.load(options.prompts) if options.prompts else prompts.bundled()
    stop_ids = facts.stop_token_ids(options.model_path)
    tokens = options.max_new_tokens
    args = list(options.server_args)

    speculative = Server(
        options.model_path, ["--speculative-algorithm", options.algorithm, *args], name=options.algorithm
    )
    with started(speculative, console), speculative.client() as client:
        info = client.server_info()
        ids = [client.tokenize(prompt.text, add_special_tokens=True) for prompt in given]
        count = len(given) * len(options.concurrency)
        with console.status(f"{options.algorithm}: {count} texts of {tokens} tokens"):
            texts = list(agreement.speculative_texts(client, given, ids, options.concurrency, tokens))
        problems = agreement.relaxed_acceptance(info) + _pool_problems(speculative)
    promise = options.promise or agreement.promise_of(info)

    plain = Server(options.model_path, [probe.SERVER_FLAG, *args], name="plain")
    spinner = console.status(f"plain: {len(given)} texts of {tokens} tokens, then every difference")
    with started(plain, console), plain.client() as client, spinner:
        checked = agreement.check(client, ids, texts, stop_ids, promise, tokens)
    return Agreement(promise, tokens, checked, problems)


def _pool_problems(server: Server) -> list[str]:
    problem = server.pool_problem()
    return [f"the KV pool is out of balance: {problem}"] if problem else []


def parse_levels(text: str) -> tuple[int, ...]:
    """``1,4`` as numbers."""
    levels = tuple(int(part) for part in text.split(","))
    if any(level < 1 for level in levels):
        raise ValueError(f"concurrency must be 1 or more, got {text!r}")
    return levels


def parse_promise(text: str) -> Promise | None:
    return None if text == "auto" else Promise(text)
