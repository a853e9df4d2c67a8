"""The program in an answer: a continuation of the prompt, or a fenced block.

Base models continue the prompt's function. The text is cut at the task's stop strings here as well, so that a server
that does not know them is scored alike; nothing but whole stop strings is cut. A tail that does not parse (prose
without a fence, a statement cut off by the token limit) is left out line by line, as sanitizers of other harnesses do.

Chat models write fenced blocks: the last one that defines the function counts. What the prompt defines before
the function (imports, helpers) is put in front of it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

FENCE = re.compile(r"^[ \t]*```[^\n]*\n(?P<body>.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
LONGEST_TAIL = 400  # lines


def continued(prompt: str, completion: str, stop: Sequence[str]) -> str:
    """Prompt and completion as a program that parses, as far as leaving lines out can make it."""
    ends = [completion.find(one) for one in stop if one in completion]
    lines = completion[: min(ends)].split("\n") if ends else completion.split("\n")
    whole = prompt + "\n".join(lines)
    for left_out in range(min(len(lines), LONGEST_TAIL)):
        program = prompt + "\n".join(lines[: len(lines) - left_out])
        if parses(program):
            return program
    return whole


def fenced(prompt: str, answer: str, entry_point: str) -> str | None:
    """The answer's program behind the prompt's preamble; None where no block or text defines the function."""
    blocks = [found["body"] for found in FENCE.finditer(answer)] or [answer]
    defining = [block for block in blocks if defines(block, entry_point)]
    return preamble(prompt, entry_point) + defining[-1] if defining else None


def defines(code: str, name: str) -> bool:
    return re.search(rf"^(?:async\s+)?def\s+{re.escape(name)}\b|^{re.escape(name)}\s*=", code, re.MULTILINE) is not None


def preamble(prompt: str, entry_point: str) -> str:
    """What stands before the function."""
    found = re.search(rf"^def\s+{re.escape(entry_point)}\b", prompt, re.MULTILINE)
    return prompt[: found.start()] if found else ""


def parses(program: str) -> bool:
    try:
        ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
