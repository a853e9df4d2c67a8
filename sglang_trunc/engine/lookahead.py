"""What requests' own texts say of their future: ``core.lookup`` for the requests that a worker decodes.

The text of a request is its prompt and what it has emitted; it is indexed when its lanes start and extended with every
commit, so it may be ahead of what the scheduler has seen. A text that does not fit is indexed anew, and nothing but
speed depends on it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from sglang_trunc.core.lookup.index import LookupIndex

MAX_MATCH = 16
_MATCHES_TOLD_APART = 16


class RequestLookups:
    """``core.pipeline.LookupSource`` over one index a request; also TRUNC's."""

    def __init__(self, min_match: int, max_match: int):
        """Tokens of a match: fewer than ``min_match`` are not taken for one, more than ``max_match`` are not sought."""
        self._min_match = min_match
        self._max_match = max_match
        self._indexes: dict[Hashable, LookupIndex] = {}

    def __len__(self) -> int:
        return len(self._indexes)

    def length(self, key: Hashable) -> int:
        """Tokens of a request's text as far as it is known; 0 for none."""
        return len(self._indexes[key]) if key in self._indexes else 0

    def begin(self, key: Hashable, text: Sequence[int]) -> None:
        """Index a request's whole text."""
        self._indexes[key] = LookupIndex.build(text, self._max_match)

    def commit(self, key: Hashable, token: int) -> None:
        if key in self._indexes:
            self._indexes[key].extend((token,))

    def forget(self, key: Hashable) -> None:
        self._indexes.pop(key, None)

    def continuation(self, key: Hashable, path: Sequence[int], most: int) -> tuple[Sequence[int], float]:
        """The newest continuation of the longest match, and how long that is, as a number below 1."""
        index = self._indexes.get(key)
        if index is None or most < 1:
            return (), 0.0
        found = index.candidates(self._min_match, self._max_match, most, 1, path)
        if not found:
            return (), 0.0
        best = found[0]
        return best.tokens, min(best.match, _MATCHES_TOLD_APART - 1) / _MATCHES_TOLD_APART
