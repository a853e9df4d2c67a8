"""The index of one request's text: prompt and committed output, extended as tokens are committed.

``engine.lookahead`` keeps one for every request; schedules ask it for candidates. There is no way back:
where tokens are taken back or replaced, the owner builds another index.

Memory is bounded by generations. From half of ``max_tokens`` on, a second tree is fed with the same tokens; when the
first holds ``max_tokens``, it is dropped and the second takes its place. So at least the newest ``max_tokens // 2``
tokens can be found, and fewer than ``max_tokens``. A long text pays twice for a token and never waits for a rebuild.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from functools import partial

from sglang_trunc.core.lookup.candidates import Candidate, Source, check_query, read_distinct
from sglang_trunc.core.lookup.context_tree import ContextTree

MAX_MATCH = 32
MAX_TOKENS = 1 << 18


class LookupIndex:
    """N-grams of a growing text.

    ``max_match``: the longest match that can be asked for, 1 to 255. ``max_tokens``, 2 or more: tokens that are held
    before the oldest are dropped. ``ValueError`` for others.
    """

    def __init__(self, max_match: int = MAX_MATCH, max_tokens: int = MAX_TOKENS):
        if max_tokens < 2:
            raise ValueError(f"max_tokens must be at least 2, got {max_tokens}")
        self.max_match = max_match
        self.max_tokens = max_tokens
        self._length = 0
        self._tree = ContextTree(max_match)
        self._next: ContextTree | None = None

    @classmethod
    def build(cls, tokens: Iterable[int], max_match: int = MAX_MATCH, max_tokens: int = MAX_TOKENS) -> LookupIndex:
        """The index of a whole text; the same as that of a text which grew token by token."""
        index = cls(max_match, max_tokens)
        index.extend(tokens)
        return index

    def __len__(self) -> int:
        """Tokens of the text, those included that are too old to be found."""
        return self._length

    @property
    def held(self) -> int:
        """Tokens that can be found: the newest ones of the text."""
        return len(self._tree.text) - self.max_match

    @property
    def nbytes(self) -> int:
        """Bytes of both generations."""
        return sum(tree.nbytes for tree in (self._tree, self._next) if tree is not None)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens. ``ValueError`` for one that is not from 0 to 2**31 - 1; those before it are in."""
        for token in tokens:
            self._tree.add(token)
            if self._next is not None:
                self._next.add(token)
                if self.held == self.max_tokens:
                    self._tree, self._next = self._next, None
            self._length += 1
            if self._next is None and self.held >= self.max_tokens // 2:
                self._next = ContextTree(self.max_match)

    def tail(self, count: int) -> array[int]:
        """The last ``count`` tokens that are held, oldest first, or all where there are fewer: int32."""
        held = min(count, self.held)
        return self._tree.text[len(self._tree.text) - held :]

    def candidates(
        self, min_match: int, max_match: int, length: int, count: int, behind: Sequence[int] = ()
    ) -> list[Candidate]:
        """Continuations after earlier occurrences of the text's last tokens, and of ``behind``: tokens that would
        follow the text, drafted ones, and are not in it.

        A match has ``min_match`` to ``max_match`` tokens and ends before the text does; the two may overlap. Longest
        match first, then the newest first, no two with equal tokens, at most ``count``; the search ends where
        ``PATIENCE`` occurrences in a row brought nothing new. Each has ``length`` tokens: one that reaches the text's
        end goes on from its own start, since the text then repeats itself (as copies do in LZ77). ``ValueError``:
        numbers out of range.
        """
        check_query(min_match, max_match, self.max_match, length, count)
        tree = self._tree
        if not self.held:
            return []
        end = len(tree.text)
        steps = tree.steps_after([*self.tail(max_match), *behind]) if behind else tree.steps(end)
        # With tokens behind it, the text's own end may match, but nothing follows it that could be read.
        occurrences = (found for found in tree.occurrences(steps, min_match, max_match) if found[0] < end)
        return read_distinct(occurrences, partial(_continuation, tree.text, length), Source.OWN, count)


def _continuation(text: array[int], length: int, position: int) -> tuple[int, ...]:
    tokens = tuple(text[position : position + length])
    missing = length - len(tokens)
    return tokens if missing <= 0 else (tokens * (missing // len(tokens) + 2))[:length]
