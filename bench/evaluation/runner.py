"""Asks what has not been asked yet, contestant by contestant, and writes each answer down as it comes.

The problems of a task are cut into rounds. In a round every contestant answers the same part, in an order that rotates,
so that a machine's drift falls on all of them. By default one server runs at a time, started anew in each round;
with ``keep_alive`` all are loaded once and alternate cell by cell. A contestant with nothing left to do is not started.

A problem that a server refuses (too long, an option it does not know) is written down as refused. A server that does
not start or breaks off is written down as failed; the others go on, and the next start tries it again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import provenance
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from evaluation import target as targets
from evaluation.settings import Contestant, Run, Sampling
from evaluation.store import Store
from evaluation.target import Target
from evaluation.tasks.problem import Problem, Task
from sglang_trunc.serving import counters
from sglang_trunc.serving.client import RequestRefused
from sglang_trunc.serving.server import ServerError

OVERLOADED = (408, 429)  # says nothing about the question


@dataclass(frozen=True)
class Plan:
    model_path: str | None
    contestants: list[Contestant]
    tasks: list[Task]
    samplings: list[Sampling]
    levels: list[int]  # concurrency
    limit: int | None = None
    rounds: int = 1
    keep_alive: bool = False
    server_args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    retry_refused: bool = False

    def runs(self, contestant: Contestant) -> list[Run]:
        model = self.model_path or contestant.url or ""
        return [
            Run(model, contestant, task, sampling, level, self.server_args)
            for task in self.tasks
            for sampling in self.samplings
            for level in self.levels
        ]

    @property
    def all_runs(self) -> list[Run]:
        return [run for contestant in self.contestants for run in self.runs(contestant)]

    def part(self, run: Run, number: int) -> list[Problem]:
        """The problems of a round: every ``rounds``-th, so that parts are alike and a longer run keeps them."""
        return run.task.limited(self.limit)[number :: self.rounds]

    def order(self, number: int) -> list[Contestant]:
        start = number % len(self.contestants)
        return [*self.contestants[start:], *self.contestants[:start]]


@dataclass
class Runner:
    plan: Plan
    store: Store
    console: Console
    failed: dict[str, str] = field(default_factory=dict)  # contestant -> why
    _announced: set[str] = field(default_factory=set)

    @property
    def env(self) -> dict[str, str]:
        """Of the servers."""
        return {**self.plan.env, **targets.environment(self.store.path)}

    def measure(self) -> None:
        if left := targets.end_leftovers(self.store.path):
            self.console.print(f"ended {left} processes of servers that an earlier run left", highlight=False)
        with progress_bars(self.console) as bars:
            self._bars, self._ids = bars, {}
            for run in self.plan.all_runs:
                wanted = run.task.limited(self.plan.limit)
                done = len(wanted) - len(self.waiting(run, wanted))
                self._ids[run.key] = bars.add_task(run.title, total=len(wanted), completed=done)
            self._kept_alive() if self.plan.keep_alive else self._one_at_a_time()

    def waiting(self, run: Run, problems: Sequence[Problem]) -> list[Problem]:
        """Those without a line."""
        done = self.store.problems("answer", run.key)
        if not self.plan.retry_refused:
            done |= self.store.problems("refused", run.key)
        return [problem for problem in problems if problem.id not in done]

    def work(self, contestant: Contestant, number: int) -> list[tuple[Run, list[Problem]]]:
        """What is left of a round; nothing for a contestant that failed."""
        if contestant.name in self.failed:
            return []
        parts = [(run, self.waiting(run, self.plan.part(run, number))) for run in self.plan.runs(contestant)]
        return [(run, problems) for run, problems in parts if problems]

    def _one_at_a_time(self) -> None:
        for number in range(self.plan.rounds):
            for contestant in self.plan.order(number):
                work = self.work(contestant, number)
                if not work:
                    continue
                with self.failing(contestant), self.start(contestant) as target:
                    for run, problems in work:
                        self.one_part(target, run, problems)

    def _kept_alive(self) -> None:
        with contextlib.ExitStack() as stack:
            loaded: dict[str, Target] = {}
            for contestant in self.plan.contestants:
                if any(self.work(contestant, number) for number in range(self.plan.rounds)):
                    with self.failing(contestant):
                        loaded[contestant.name] = target = stack.enter_context(self.start(contestant))
                        if target.server is not None:
                            target.server.pause()
            for number in range(self.plan.rounds):
                for cell in range(len(self.plan.runs(self.plan.contestants[0]))):
                    for contestant in self.plan.order(number):
                        self._cell(loaded.get(contestant.name), contestant, number, cell)

    def _cell(self, target: Target | None, contestant: Contestant, number: int, cell: int) -> None:
        run = self.plan.runs(contestant)[cell]
        problems = self.waiting(run, self.plan.part(run, number))
        if target is not None and problems and contestant.name not in self.failed:
            with self.failing(contestant), target.awake():
                self.one_part(target, run, problems)

    def start(self, contestant: Contestant) -> contextlib.AbstractContextManager[Target]:
        self.console.print(f"starting {contestant.name}", highlight=False)
        return targets.started(contestant, self.plan.model_path, self.plan.server_args, self.env)

    @contextlib.contextmanager
    def failing(self, contestant: Contestant) -> Iterator[None]:
        """A server's failure ends its contestant, not the bench."""
        try:
            yield
        except (ServerError, targets.httpx.TransportError) as problem:
            reason = str(problem) or type(problem).__name__
            self.failed[contestant.name] = reason
            self.store.append("failed", contestant=contestant.name, reason=reason)
            self.console.print(f"{contestant.name} failed: {reason}", style="red", highlight=False, markup=False)

    def one_part(self, target: Target, run: Run, problems: Sequence[Problem]) -> None:
        """Answers of one cell; the engine's counters are of exactly these."""
        self.announce(run, target)
        target.warm_up(problems[0], run.task, run.sampling)
        before = target.state()
        answered = self.ask_all(target, run, problems)
        after = target.state()
        counted = counters.counted_since(before, after) if after else {}
        if counted and answered:
            self.store.append("counters", run=run.key, answers=answered, counters=counted)

    def ask_all(self, target: Target, run: Run, problems: Sequence[Problem]) -> int:
        """Number of answers. An interruption lets the requests in flight end and keeps their answers."""
        pool = ThreadPoolExecutor(max_workers=run.concurrency)
        try:
            return sum(pool.map(lambda problem: self.ask(target, run, problem), problems))
        finally:
            pool.shutdown(cancel_futures=True)

    def ask(self, target: Target, run: Run, problem: Problem) -> bool:
        names: dict[str, Any] = {"run": run.key, "problem": problem.id}
        try:
            answer = target.ask(problem, run.task, run.sampling)
        except RequestRefused as refusal:
            if not 400 <= refusal.status < 500 or refusal.status in OVERLOADED:
                raise ServerError(f"{run.contestant.name} could not answer: {refusal}") from refusal
            self.store.append("refused", **names, reason=refusal.message)
            return False
        else:
            self.store.append("answer", **names, **answer._asdict())
            return True
        finally:
            self._bars.advance(self._ids[run.key])

    def announce(self, run: Run, target: Target) -> None:
        """A run's settings, once a start of the bench."""
        if run.key in self._announced:
            return
        self._announced.add(run.key)
        self.store.append(
            "run",
            run=run.key,
            settings=run.settings,
            source=run.task.source,
            task_facts=run.task.facts,
            server=target.facts(),
            provenance=provenance.collect(env=self.plan.env),
        )

    _bars: Progress = field(init=False, repr=False)
    _ids: dict[str, TaskID] = field(init=False, repr=False)


def progress_bars(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)
