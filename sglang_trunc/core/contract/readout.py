"""The looped model as the contract sees it: contexts in, next-token distributions of a depth out.

Providers must be pure functions of (context, depth): the same row whenever it is asked, whatever was asked before or
beside it. Nothing here can prove that; a stateful provider is reset by its owner. What can be checked is: rows come
back one for each context, in the order of the contexts, and are distributions (``rows.as_rows``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from sglang_trunc.core.contract.rows import as_rows

Context = tuple[int, ...]  # token ids from the prompt's first on


class ScoredContext(NamedTuple):
    """A row and the context that it follows; the context lets the order be checked."""

    context: Context
    row: Tensor  # floating [vocabulary]: distribution of the token after ``context``


class LoopedModel(Protocol):
    """Next-token distributions at any depth. Depth counts executed recurrences, from 1 to ``recurrences``."""

    recurrences: int

    def next_rows(self, contexts: Sequence[Context], depth: int) -> Sequence[ScoredContext]:
        """One row for each context, in their order, after ``depth`` recurrences."""


class QueryCounts(NamedTuple):
    """What was really asked; a snapshot."""

    queries: int = 0  # contexts
    calls: int = 0  # callbacks, one or more contexts each


class Readout:
    """One depth of a model. Checks what comes back and counts what was asked."""

    def __init__(self, model: LoopedModel, depth: int):
        if not 1 <= depth <= model.recurrences:
            raise ValueError(f"depth = {depth} is outside 1 to {model.recurrences}, the model's recurrences")
        self.model = model
        self.depth = depth
        self._counts = QueryCounts()

    @property
    def counts(self) -> QueryCounts:
        return self._counts

    def rows(self, contexts: Sequence[Context]) -> Tensor:
        """Rows of all contexts in one callback: float64 [len(contexts), vocabulary].

        ``ValueError`` where rows are missing, left over, out of order, or no distributions. No contexts, no callback.
        """
        if not contexts:
            return as_rows([], "model rows")
        asked = [tuple(context) for context in contexts]
        self._counts = QueryCounts(self._counts.queries + len(asked), self._counts.calls + 1)
        scored = self.model.next_rows(tuple(asked), self.depth)
        if len(scored) != len(asked):
            raise ValueError(f"the model returned {len(scored)} rows for {len(asked)} contexts")
        for at, (expected, found) in enumerate(zip(asked, scored, strict=True)):
            if tuple(found.context) != expected:
                raise ValueError(
                    f"the model returned row {at} for context {tuple(found.context)}, expected {expected}: "
                    "rows stay in context order"
                )
        return as_rows([found.row for found in scored], "model rows")

    def row(self, context: Context) -> Tensor:
        """The row of one context in one callback: float64 [vocabulary]."""
        return self.rows([context])[0]
