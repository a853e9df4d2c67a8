"""Prompts for ``verify`` and ``demo``: the bundled ones, or a file.

A file is JSON lines with a ``text`` (and optionally a ``kind``), or plain text with one prompt a line.
Blank lines are skipped. The bundled prompts are code, prose, chat and lists, so that both predictable and
surprising continuations are met.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import NamedTuple


class Prompt(NamedTuple):
    kind: str
    text: str


def bundled() -> list[Prompt]:
    """Twelve prompts that ship with the package."""
    text = resources.files(__package__).joinpath("prompts.jsonl").read_text(encoding="utf-8")
    return parse(text, "bundled")


def load(path: Path) -> list[Prompt]:
    prompts = parse(path.read_text(encoding="utf-8"), path.name)
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    return prompts


def parse(text: str, source: str) -> list[Prompt]:
    return [_one(line, f"{source}:{number}") for number, line in enumerate(text.splitlines(), 1) if line.strip()]


def _one(line: str, where: str) -> Prompt:
    if not line.lstrip().startswith("{"):
        return Prompt("text", line)
    try:
        entry = json.loads(line)
        return Prompt(str(entry.get("kind", "text")), str(entry["text"]))
    except (json.JSONDecodeError, KeyError) as problem:
        raise ValueError(f'{where} is not a JSON object with a "text": {problem}') from problem
