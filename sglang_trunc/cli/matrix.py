"""``sglang-trunc verify --options matrix``: does speculation change the answer under any request option?

Every case of ``serving.request_options`` goes to a server of each algorithm, at each concurrency: one after the other
at 1, all cases of all prompts mixed and shuffled at higher ones. Then the same requests go, one at a time, to the
reference: a plain server, or TRUNC with a block of one token where stock plain decoding is none. ``matrix_check``
compares. The reference comes last because differences are looked into there; so the cases are made from the first
speculative server's greedy text, which one of them compares, too.

One server at a time. Exit codes as for ``verify``; a refusal (HTTP 400 that names the option) is not a difference.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from sglang_trunc.cli import agreement, matrix_check, prompts, report
from sglang_trunc.cli.launch import started
from sglang_trunc.cli.matrix_check import Answer, Asked, Job, Outcome, Result
from sglang_trunc.cli.prompts import Prompt
from sglang_trunc.core.options import OPTIONS, SEEDED, env_name
from sglang_trunc.core.ties import Promise
from sglang_trunc.serving import request_options
from sglang_trunc.serving.client import RequestRefused
from sglang_trunc.serving.request_options import GREEDY_TOKENS, PLAIN_FLAGS, SERVER_FLAGS, OptionClient
from sglang_trunc.serving.server import Server, ServerError

CANNOT_CHECK = 2
ALGORITHMS = tuple(name.lower() for name in OPTIONS)
LEAST_TOKENS = 24  # fewer would end most answers before their option matters
BUNDLED = ("code", "prose")  # of these kinds the first bundled prompt
SEED = 20261201  # of the order at higher concurrencies


@dataclass(frozen=True)
class MatrixOptions:
    model_path: str
    algorithms: tuple[str, ...] = ALGORITHMS
    prompts: Path | None = None  # None: two bundled ones
    max_new_tokens: int = 64
    concurrency: tuple[int, ...] = (1, 4)
    promise: Promise | None = None  # None: what the back end gives
    json: Path | None = None
    server_args: tuple[str, ...] = ()


@dataclass(frozen=True)
class Matrix:
    """The result."""

    promise: Promise
    max_new_tokens: int
    algorithms: tuple[str, ...]
    prompts: list[Prompt]
    outcomes: list[Outcome]
    problems: list[str] = field(default_factory=list)  # besides differences

    @property
    def failures(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.result is Result.DIFFERS]

    @property
    def passes(self) -> bool:
        return bool(self.outcomes) and not self.failures and not self.problems


def run(options: MatrixOptions, console: Console) -> int:
    """The exit code; everything worth saying is printed."""
    try:
        result = verify(options, console)
    except (ServerError, RequestRefused, OSError, ValueError) as problem:
        console.print(f"verify could not run: {problem}", style="red", markup=False)
        return CANNOT_CHECK
    report.print_matrix(console, result)
    if options.json:
        report.write_json(options.json, report.matrix_json(result, options.model_path))
    return 0 if result.passes else 1


def verify(options: MatrixOptions, console: Console) -> Matrix:
    """Run the servers. Raises ``ServerError`` or ``ValueError`` where the check cannot be made."""
    if options.max_new_tokens < LEAST_TOKENS:
        raise ValueError(f"--options matrix needs --max-new-tokens {LEAST_TOKENS} or more")
    given = prompts.load(options.prompts) if options.prompts else bundled()
    jobs: list[Job] = []
    asked: list[Asked] = []
    problems: list[str] = []
    info: Mapping[str, Any] = {}
    for algorithm in options.algorithms:
        server = Server(
            options.model_path,
            [*SERVER_FLAGS, "--speculative-algorithm", algorithm, *options.server_args],
            name=algorithm,
        )
        with started(server, console), OptionClient(server.url) as client:
            info = client.server_info()
            _refuse_other_draws(info)
            jobs = jobs or make_jobs(client, given, options.max_new_tokens)
            for level in options.concurrency:
                with console.status(f"{algorithm}: {len(jobs)} requests, {level} in flight"):
                    asked += [Asked(algorithm, level, job, answer) for job, answer in ask(client, jobs, level)]
            problems += [f"{algorithm}: {problem}" for problem in _problems(server, info)]
    promise = options.promise or agreement.promise_of(info)
    values = info.get("device") == "cpu"  # elsewhere a row's logprobs depend on the shape of its batch
    outcomes = _check(options, asked, promise, values, console)
    return Matrix(promise, options.max_new_tokens, options.algorithms, given, outcomes, problems)


def bundled() -> list[Prompt]:
    """The first bundled prompt of each kind in ``BUNDLED``."""
    every = prompts.bundled()
    return [next(prompt for prompt in every if prompt.kind == kind) for kind in BUNDLED]


def make_jobs(client: OptionClient, given: Sequence[Prompt], tokens: int) -> list[Job]:
    """All cases of all prompts, from the greedy text of the server behind ``client``."""
    client.flush_cache()
    jobs = []
    for index, prompt in enumerate(given):
        ids = client.tokenize(prompt.text, add_special_tokens=True)
        greedy = client.generate(ids, max_new_tokens=GREEDY_TOKENS, ignore_eos=True)
        jobs += [Job(index, ids, case, tokens) for case in request_options.cases(ids, greedy)]
    return jobs


def ask(client: OptionClient, jobs: Sequence[Job], level: int) -> list[tuple[Job, Answer]]:
    """Send all jobs, ``level`` at a time; above 1 in an order of its own."""
    order = list(jobs)
    if level > 1:
        random.Random(SEED + level).shuffle(order)
    with ThreadPoolExecutor(max_workers=level) as pool:
        return list(zip(order, pool.map(lambda job: matrix_check.answer(client, job.request), order), strict=True))


def _refuse_other_draws(info: Mapping[str, Any]) -> None:
    """ValueError under a policy whose sampled text is not plain seeded decoding's."""
    policy = agreement.engine_options(info).get("sampling_policy", SEEDED)
    if policy != SEEDED:
        raise ValueError(f"sampling_policy {policy} draws another text of the same law, so texts cannot be compared")


def _problems(server: Server, info: Mapping[str, Any]) -> list[str]:
    pool = server.pool_problem()
    return agreement.relaxed_acceptance(info) + ([f"the KV pool is out of balance: {pool}"] if pool else [])


def _check(
    options: MatrixOptions, asked: Sequence[Asked], promise: Promise, values: bool, console: Console
) -> list[Outcome]:
    """Hold all answers to their references, in the order of the answers."""
    one_token = Server(
        options.model_path,
        [*SERVER_FLAGS, "--speculative-algorithm", "trunc", *options.server_args],
        {env_name("block_size"): "1"},
        name="block-of-one",
    )
    plain = Server(options.model_path, [*SERVER_FLAGS, *PLAIN_FLAGS, *options.server_args], name="plain")
    found: dict[int, Outcome] = {}
    for server, stock in ((one_token, False), (plain, True)):
        own = {place: one for place, one in enumerate(asked) if one.job.case.stock is stock}
        if not own:
            continue
        status = console.status(f"{server.name}: the reference of {len(own)} answers, then every difference")
        with started(server, console), OptionClient(server.url) as client, status:
            client.flush_cache()
            checker = matrix_check.Checker(client, promise, values)
            found |= {place: checker.outcome(one) for place, one in own.items()}
    return [found[place] for place in sorted(found)]
