"""The command line that ``gsm8k.py``, ``humaneval.py`` and ``python bench/evaluation`` share.

    python bench/evaluation run --model-path M --task gsm8k --task humaneval --limit 5 --allow-code-execution
    python bench/evaluation run ... --peer vllm=http://127.0.0.1:8000 --arm ngram --arm deep:d1=2 -- --page-size 16
    python bench/evaluation report OUT         the report again, from what is stored
    python bench/evaluation depth OUT --model-path M
    python bench/evaluation lm-eval --url http://127.0.0.1:30000 --model-path M

Interrupt it at any point and give the same command again: what is answered is not asked again. A higher ``--limit``,
more arms or more concurrencies go on from there.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from evaluation import finishing, lm_eval_task, report, sandbox, settings, store
from evaluation.figures import collect
from evaluation.runner import Plan, Runner
from evaluation.tasks import catalogue
from evaluation.tasks.problem import Style, Task

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
LINES = "answers.jsonl"

console = Console()
ModelPath = Annotated[str | None, typer.Option(help="Checkpoint folder or Hub name.")]
Styles = Annotated[Style, typer.Option(help="base: plain text; chat, thinking: the chat template.")]
Data = Annotated[list[str] | None, typer.Option(help="[TASK=]FILE, [TASK=]package or [TASK=]hub.")]
ShotsOption = Annotated[str | None, typer.Option(help="GSM8K: own, lm-eval, or a file of JSON lines.")]


def run(
    context: typer.Context,
    server_args: Annotated[list[str] | None, typer.Argument(help="After --: for every server.")] = None,
    model_path: ModelPath = None,
    task: Annotated[list[str] | None, typer.Option(help=f"Any of {', '.join(catalogue.NAMES)}.")] = None,
    style: Styles = Style.BASE,
    sampling: Annotated[str, typer.Option(help="greedy, sampled (temperature 1, top-p 0.7), or both.")] = "greedy",
    concurrency: Annotated[str, typer.Option(help="Requests at a time.")] = "1",
    limit: Annotated[int | None, typer.Option(min=1, help="Problems of each task.")] = None,
    arm: Annotated[list[str] | None, typer.Option(help="NAME:key=value,... (bench/arms.py), or ngram.")] = None,
    peer: Annotated[list[str] | None, typer.Option(help="NAME=URL or NAME=openai:URL of a running server.")] = None,
    only_peers: Annotated[bool, typer.Option("--only-peers", help="The first peer is the reference.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Parts in which the contestants alternate.")] = 2,
    keep_alive: Annotated[bool, typer.Option("--keep-alive", help="All servers at once, one awake.")] = False,
    data: Data = None,
    shots: ShotsOption = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Of a server; default: its own.")] = None,
    allow_code_execution: Annotated[bool, typer.Option(sandbox.FLAG, help="Run what models write.")] = False,
    retry_refused: Annotated[bool, typer.Option("--retry-refused", help="Ask again what was refused.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of the answers and the report.")] = Path("bench/out/evaluation"),
) -> None:
    """Ask, grade, compare, report."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        tasks = load_tasks(task or context.obj or [], style, data or [], shots)
        if any(one.runs_code for one in tasks):
            sandbox.refused_without(allow_code_execution)
        plan = Plan(
            model_path,
            contestants(arm or [], peer or [], only_peers),
            tasks,
            [settings.SAMPLINGS[name] for name in named(sampling)],
            numbers(concurrency),
            limit,
            rounds,
            keep_alive,
            tuple(server_args or ()),
            dict.fromkeys(THREAD_VARIABLES, str(threads)) if threads else {},
            retry_refused,
        )
    except (LookupError, ValueError, PermissionError) as problem:
        raise typer.BadParameter(str(problem)) from problem
    for one in tasks:
        console.print(f"{one.name}: {one.source} {one.facts or ''}", highlight=False)
    if not evaluate(plan, out):
        raise typer.Exit(1)


def evaluate(plan: Plan, out: Path) -> bool:
    """False where a contestant failed, or a difference is no near tie."""
    try:
        with store.Store(out / LINES) as lines:
            bench = Runner(plan, lines, console)
            bench.measure()
            finishing.grade(bench)
            finishing.judge(bench)
    except store.StoreError as problem:
        raise typer.BadParameter(str(problem)) from problem
    written = report.write(store.read(out / LINES), out)
    found = collect(store.read(out / LINES))
    faults = sum(one.compared.faults for one in found if one.compared)
    console.print(f"written: {written}", highlight=False)
    if faults:
        console.print(f"{faults} differences from plain are no near ties; see the report", style="red")
    return not faults and not set(bench.failed) - {settings.NGRAM}


def write_report(out: Annotated[Path, typer.Argument(exists=True, file_okay=False)]) -> None:
    """The report again, from what is stored."""
    console.print(f"written: {report.write(store.read(out / LINES), out)}", highlight=False)


def depth(
    out: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder with greedy answers of plain.")],
    model_path: Annotated[str, typer.Option(help="Checkpoint folder.")],
    task: Annotated[list[str] | None, typer.Option(help="Default: every task that was answered.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Texts of each task.")] = None,
    data: Data = None,
    shots: ShotsOption = None,
) -> None:
    """Agreement and distance by depth over the stored answers, and the best depths."""
    from evaluation import depths_of_store

    lines = store.read(out / LINES)
    names = task or list(dict.fromkeys(line["settings"]["task"] for line in lines if line["kind"] == "run"))
    styles = {Style(line["settings"]["style"]) for line in lines if line["kind"] == "run"}
    try:
        tasks = [one for style in styles for one in load_tasks(names, style, data or [], shots)]
        written = depths_of_store.write(lines, tasks, model_path, limit, out)
    except (LookupError, ValueError) as problem:
        raise typer.BadParameter(str(problem)) from problem
    console.print(written.read_text(encoding="utf-8"), highlight=False, markup=False)
    console.print(f"written: {written}", highlight=False)


def lm_eval(
    url: Annotated[str, typer.Option(help="Of a running server.")],
    model_path: Annotated[str, typer.Option(help="Checkpoint, for its tokenizer.")],
    concurrency: Annotated[int, typer.Option(min=1)] = 1,
    limit: Annotated[int | None, typer.Option(min=1)] = None,
    data: Data = None,
    shots: ShotsOption = None,
    out: Annotated[Path, typer.Option(help="Folder of the task file.")] = Path("bench/out/lm-eval"),
) -> None:
    """Write GSM8K as an lm-eval task with the same prompts, and the command that runs it on the same server."""
    try:
        gsm8k = load_tasks(["gsm8k"], Style.BASE, data or [], shots)[0]
    except (LookupError, ValueError) as problem:
        raise typer.BadParameter(str(problem)) from problem
    lm_eval_task.write(gsm8k, out)
    console.print("# pip install 'lm_eval[api]'; HF_HUB_OFFLINE=1 where there is no network", highlight=False)
    console.print(lm_eval_task.command(url, model_path, out, concurrency, limit), highlight=False, soft_wrap=True)


def load_tasks(names: list[str], style: Style, data: list[str], shots: str | None) -> list[Task]:
    if not names:
        raise ValueError(f"no --task; there are {', '.join(catalogue.NAMES)}")
    choices = {}
    for text in data:
        name, equals, choice = text.partition("=")
        if equals and name in catalogue.NAMES:
            choices[name] = choice
        elif len(names) == 1:
            choices[names[0]] = text
        else:
            raise ValueError(f"with several tasks --data is TASK={text}")
    return [catalogue.task(name, style, choices.get(name), shots) for name in dict.fromkeys(names)]


def contestants(arms: list[str], peers: list[str], only_peers: bool) -> list[settings.Contestant]:
    if not only_peers:
        return settings.contestants(arms, peers)
    if arms or not peers:
        raise ValueError("--only-peers goes with --peer and without --arm")
    return [settings.peer(text) for text in peers]


def named(text: str) -> list[str]:
    names = [one.strip() for one in text.split(",")]
    unknown = [one for one in names if one not in settings.SAMPLINGS]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not one of {', '.join(settings.SAMPLINGS)}")
    return list(dict.fromkeys(names))


def numbers(text: str) -> list[int]:
    if not all(part.isdigit() and int(part) for part in text.split(",")):
        raise ValueError(f"numbers must be 1 or more, got {text!r}")
    return list(dict.fromkeys(int(part) for part in text.split(",")))


def start(task: str, about: str | None) -> None:
    """A command of one task; ``--task`` may still name others."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(help=about)(run)
    app(obj=[task])


def main() -> None:
    app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None)
    app.command("run")(run)
    app.command("report")(write_report)
    app.command("depth")(depth)
    app.command("lm-eval")(lm_eval)
    app()
