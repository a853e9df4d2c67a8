"""What follows the answers: grades, and a verdict on every difference from plain. Resumable as the answers are.

After the servers have stopped, since a program under test takes the processor that a server is timed on.
"""

from __future__ import annotations

from evaluation import judging, runner
from evaluation import target as targets
from evaluation.judging import Pair
from evaluation.runner import Runner
from evaluation.settings import Contestant, Run
from evaluation.store import Line
from evaluation.tasks.problem import Problem
from sglang_trunc.cli import agreement
from sglang_trunc.core import ties
from sglang_trunc.serving import probe


def grade(bench: Runner) -> None:
    """Every answer without a grade."""
    waiting = [(run, line) for run in bench.plan.all_runs for line in _ungraded(bench, run)]
    with runner.progress_bars(bench.console) as bars:
        bar = bars.add_task("grading", total=len(waiting))
        for run, line in waiting:
            problem = _by_id(run)[line["problem"]]
            found = run.task.grade(problem, line["text"])
            fields = {**found._asdict(), "also": dict(found.also)}
            bench.store.append("grade", run=run.key, problem=problem.id, **fields)
            bars.advance(bar)


def _ungraded(bench: Runner, run: Run) -> list[Line]:
    done = bench.store.problems("grade", run.key)
    known = _by_id(run)
    lines = bench.store.lines("answer", run.key)
    return [line for line in lines if line["problem"] in known and line["problem"] not in done]


def _by_id(run: Run) -> dict[str, Problem]:
    return {problem.id: problem for problem in run.task.problems}


def judge(bench: Runner) -> None:
    """Every difference of a greedy text without a verdict. Starts the plain server once, and only if there is one."""
    plain = bench.plan.contestants[0]
    pairs = [pair for run in bench.plan.all_runs for pair in _pairs(bench, plain, run)]
    if not pairs:
        return
    bench.console.print(f"{len(pairs)} texts differ from {plain.name}'s: asking it about each", highlight=False)
    plan = bench.plan
    extra = () if plain.arm is None else (probe.SERVER_FLAG,)
    with bench.failing(plain), targets.started(plain, plan.model_path, plan.server_args, bench.env, extra) as target:
        if target.sglang is None:
            return
        promise = agreement.promise_of(target.info)
        for run in plan.all_runs:
            for pair in _pairs(bench, plain, run, target):
                found = judging.judge(target.sglang.client, pair, promise)
                bench.store.append("difference", run=run.key, problem=pair.problem, **judging.as_fields(found))


def _pairs(bench: Runner, plain: Contestant, run: Run, target: targets.Target | None = None) -> list[Pair]:
    """Unjudged texts of a run that differ from plain's; with ``target`` their prompts are rendered."""
    if run.contestant == plain or run.contestant.arm is None or run.sampling.temperature > 0:
        return []
    reference = run._replace(contestant=plain)
    texts = {line["problem"]: line["output_ids"] for line in bench.store.lines("answer", reference.key)}
    done = bench.store.problems("difference", run.key)
    known = _by_id(run)
    found = []
    for line in bench.store.lines("answer", run.key):
        name, ids = line["problem"], line["output_ids"]
        if name in done or name not in known or texts.get(name) is None or ids is None:
            continue
        if ties.first_difference(texts[name], ids) is not None:
            prompt = target.prompt(known[name], run.task.style) if target else None
            found.append(Pair(run.key, name, prompt or "", texts[name], ids))
    return found
