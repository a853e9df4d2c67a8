"""The lookup indexes of all requests that run, by key, and the corpus they share.

The owner calls ``ensure`` with a request's text before it asks for candidates, and ``forget`` when the request leaves
(finished, aborted). A retracted request may stay or be forgotten: when it resumes, its text either extends what is held
or is indexed anew. Nothing but speed depends on what is held.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from sglang_trunc.core.lookup.candidates import Candidate, preferred
from sglang_trunc.core.lookup.corpus import Corpus
from sglang_trunc.core.lookup.index import MAX_MATCH, MAX_TOKENS, LookupIndex

LAST = 32  # tokens at the end of the known text that are compared one by one
SAMPLES = 128  # tokens of a fingerprint at most


@dataclass
class Fingerprint:
    """Every ``step``-th token of a text, from its start on; ``step`` doubles whenever there are over ``SAMPLES``."""

    step: int = 1
    samples: list[int] = field(default_factory=list)

    def extend(self, tokens: Sequence[int], start: int, end: int) -> None:
        """``tokens[start:end]`` are new."""
        first = -(-start // self.step) * self.step
        self.samples += tokens[first : end : self.step]
        while len(self.samples) > SAMPLES:
            del self.samples[1::2]
            self.step *= 2

    def fits(self, tokens: Sequence[int], end: int) -> bool:
        """Whether the first ``end`` tokens, as many as were seen, have this fingerprint."""
        return self.samples == list(tokens[0 : end : self.step])


@dataclass
class _Known:
    index: LookupIndex
    fingerprint: Fingerprint = field(default_factory=Fingerprint)

    def extend(self, tokens: Sequence[int], total: int) -> None:
        start = len(self.index)
        self.index.extend(tokens[start:total])
        self.fingerprint.extend(tokens, start, total)

    def is_start_of(self, tokens: Sequence[int], total: int) -> bool:
        """Whether the text may be an extension of the one that is known."""
        length = len(self.index)
        if length > total:
            return False
        last = list(self.index.tail(LAST))
        return last == list(tokens[length - len(last) : length]) and self.fingerprint.fits(tokens, length)


class Lookups:
    """Indexes by key.

    ``max_match`` and ``max_tokens``: of every index, see ``LookupIndex``. ``corpus``: must know matches as long, else
    ``ValueError``.
    """

    def __init__(self, max_match: int = MAX_MATCH, max_tokens: int = MAX_TOKENS, corpus: Corpus | None = None):
        if corpus is not None and corpus.max_match < max_match:
            raise ValueError(f"the corpus knows matches of {corpus.max_match} tokens, the indexes of {max_match}")
        self._max_match = max_match
        self._max_tokens = max_tokens
        self._corpus = corpus
        self._known: dict[Hashable, _Known] = {}

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._known

    @property
    def nbytes(self) -> int:
        """Bytes of the indexes, without the corpus."""
        return sum(known.index.nbytes for known in self._known.values())

    def ensure(self, key: Hashable, tokens: Sequence[int], total: int | None = None) -> LookupIndex:
        """The index of the first ``total`` of ``tokens`` (all, if None): the known one extended, or a new one.

        ``tokens`` is the request's whole text, prompt first; what lies behind ``total`` is not committed. A new one is
        built where the key is unknown or the text is not an extension of the known one: it is shorter, or differs in
        the last tokens that were known or in the fingerprint. The check costs O(``LAST`` + ``SAMPLES``), whatever the
        length; a text that differs only between the samples passes it, which costs drafts, never tokens.
        ``ValueError``: a ``total`` that ``tokens`` does not have; a token that is not from 0 to 2**31 - 1, after which
        the key is forgotten.
        """
        total = len(tokens) if total is None else total
        if not 0 <= total <= len(tokens):
            raise ValueError(f"total must be from 0 to the {len(tokens)} tokens given, got {total}")
        # Out of the table meanwhile: a token that is refused half-way must not leave half an extension behind.
        known = self._known.pop(key, None)
        if known is None or not known.is_start_of(tokens, total):
            known = _Known(LookupIndex(self._max_match, self._max_tokens))
        known.extend(tokens, total)
        self._known[key] = known
        return known.index

    def candidates(self, key: Hashable, min_match: int, max_match: int, length: int, count: int) -> list[Candidate]:
        """From the request's own text and the corpus, which comes second at equal matches; ``LookupIndex.candidates``.

        ``KeyError``: a key that ``ensure`` has not seen.
        """
        index = self._known[key].index
        own = index.candidates(min_match, max_match, length, count)
        if self._corpus is None:
            return own
        context = index.tail(max_match)
        return preferred(own, self._corpus.candidates(context, min_match, max_match, length, count), count)

    def forget(self, key: Hashable) -> None:
        """Drop a request's index, if there is one."""
        self._known.pop(key, None)
