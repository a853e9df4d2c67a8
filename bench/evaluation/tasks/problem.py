"""The nouns that tasks share. A task is data, a prompt for each style, and a grader that is a pure function of text.

Graders that run programs say so (``runs_code``), so that a run can be refused before anything was generated.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple


class Style(Enum):
    """How a problem is put to a model."""

    BASE = "base"  # plain text to continue; no chat template (Ouro's base models lose 18 points of GSM8K with one)
    CHAT = "chat"  # one user message
    THINKING = "thinking"  # the same, with the template's thinking switched on


class Message(NamedTuple):
    role: str
    content: str


class Problem(NamedTuple):
    """One question. Exactly one of ``text`` and ``messages`` is given, as the style wants it."""

    id: str
    text: str | None
    messages: tuple[Message, ...]
    reference: dict[str, Any]  # what the grader compares with


class Grade(NamedTuple):
    """``score`` in [0, 1]; None where a task has no right answer (chat)."""

    score: float | None
    extracted: str | None
    reason: str
    also: Mapping[str, float] = MappingProxyType({})  # further scores by name, such as another library's rule


@dataclass(frozen=True)
class Task:
    name: str
    style: Style
    source: str  # where the rows come from, with their number
    problems: list[Problem]
    max_new_tokens: int
    grade: Callable[[Problem, str], Grade]
    stop: tuple[str, ...] = ()
    runs_code: bool = False
    facts: dict[str, Any] = field(default_factory=dict)  # shots and the like

    @property
    def digest(self) -> str:
        """Of everything that a model is shown, 12 hex digits: runs with another digest are other runs."""
        shown = [[p.id, p.text, p.messages] for p in self.problems]
        return digest([self.max_new_tokens, self.stop, shown])

    def limited(self, limit: int | None) -> list[Problem]:
        return self.problems[:limit]


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def unique(problems: Sequence[Problem]) -> list[Problem]:
    """The store knows problems by id, so two of one id would be taken for one."""
    ids = [problem.id for problem in problems]
    twice = {name for name in ids if ids.count(name) > 1} if len(set(ids)) < len(ids) else set()
    if twice:
        raise ValueError(f"two problems have the id {sorted(twice)[0]!r}")
    return list(problems)
