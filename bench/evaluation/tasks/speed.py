"""Chat, code edit, copy and long context: what speculation meets besides benchmarks; from ``bench/prompts``.

``copy`` and ``edit`` repeat most of their prompt, which drafts well; ``chat`` does not. ``long`` is text of this
machine's Python or ``prose.txt`` with one planted fact and a question for it (``prompt_text`` names the files).
Scores are plain: the expected text must come first in the answer. Chat has none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import prompt_text

from evaluation.tasks import sources
from evaluation.tasks.problem import Grade, Message, Problem, Style, Task, unique
from evaluation.tasks.thoughts import after_thoughts

PROMPTS = Path(__file__).parent.parent.parent / "prompts"
NAMES = ("chat", "edit", "copy", "long")
TOKENS = {"chat": 256, "edit": 384, "copy": 256, "long": 64}
THINKING_TOKENS = 2048
TURNS = ("\n\nRequest:", "<|im_end|>")  # where a base model goes on with a request of its own
COPY = "Repeat the following text exactly, without anything before or after it."


def task(name: str, data: str | None = None, style: Style = Style.BASE) -> Task:
    """``data``: another file of the same form."""
    path = Path(data) if data else PROMPTS / f"{name}.jsonl"
    rows = sources.from_file(path)
    thinking = style is Style.THINKING
    return Task(
        name,
        style,
        str(rows),
        unique([problem(name, row, style) for row in rows.rows]),
        THINKING_TOKENS if thinking else TOKENS[name],
        lambda problem, text: grade(name, problem, text, thinking),
        TURNS if style is Style.BASE else (),
    )


def problem(name: str, row: dict[str, Any], style: Style) -> Problem:
    request, expected = {"chat": _chat, "edit": _edit, "copy": _copy, "long": _long}[name](row)
    reference = {"expected": expected}
    if style is Style.BASE:
        return Problem(row["id"], f"Request: {request}\n\nAnswer:\n", (), reference)
    return Problem(row["id"], None, (Message("user", request),), reference)


def _chat(row: dict[str, Any]) -> tuple[str, str | None]:
    return row["instruction"], None


def _edit(row: dict[str, Any]) -> tuple[str, str | None]:
    return f"{row['instruction']}\n\n```python\n{row['input']}```", row["expected"]


def _copy(row: dict[str, Any]) -> tuple[str, str | None]:
    return f"{COPY}\n\n```\n{row['input']}```", row["input"]


def _long(row: dict[str, Any]) -> tuple[str, str | None]:
    text = "".join(prompt_text.corpus(row["text"]).texts.values())[: row["characters"]]
    # At a line's end, so that neither text nor fact is torn.
    place = text.rfind("\n", 0, int(len(text) * row["at"])) + 1
    return f"{text[:place]}{row['fact']}{text[place:]}\n\n{row['question']}", row["expected"]


def grade(name: str, problem: Problem, text: str, thinking: bool) -> Grade:
    expected = problem.reference["expected"]
    if expected is None:
        return Grade(None, None, "chat has no score")
    said = after_thoughts(text, thinking)
    if said is None:
        return Grade(0.0, None, "the model did not finish thinking")
    answer = said.strip() if name == "long" else unfenced(said)
    right = expected in answer if name == "long" else answer.startswith(expected.strip())
    return Grade(float(right), answer[:200], "right" if right else "another text")


def unfenced(text: str) -> str:
    """Without the fence that a model puts around code."""
    lines = text.strip().split("\n")
    return "\n".join(lines[1:] if lines[0].startswith("```") else lines).strip()
