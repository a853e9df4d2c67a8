"""What requests' own texts, and a corpus, say of their future: ``core.lookup`` for the requests of a worker.

The text of a request is its prompt and what it has emitted; it is indexed when its lanes start and extended with every
commit, so it may be ahead of what the scheduler has seen. A text that does not fit is indexed anew, and nothing but
speed depends on it. The corpus is read once, when the worker starts; texts in it are tokenised as the server does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sglang_trunc.core.lookup.candidates import Candidate, preferred
from sglang_trunc.core.lookup.corpus import Corpus
from sglang_trunc.core.lookup.index import LookupIndex
from sglang_trunc.core.options import Options

MAX_MATCH = 16

logger = logging.getLogger(__name__)


def lookups_for(options: Options, tokenizer: Any) -> RequestLookups:
    """``tokenizer``: the server's, None where it has none. ``CorpusError``: a corpus that cannot be read."""
    longest = max(MAX_MATCH, options.lookup_min_match)
    corpus = None
    if options.lookup and options.lookup_corpus:
        begin = time.perf_counter()
        encode = None if tokenizer is None else partial(tokenizer.encode, add_special_tokens=False)
        corpus = Corpus.load(Path(options.lookup_corpus), encode, longest)
        seconds = time.perf_counter() - begin
        logger.info("corpus: %d documents, %d tokens, read in %.1f s", corpus.documents, len(corpus), seconds)
    return RequestLookups(options.lookup_min_match, longest, corpus)


class RequestLookups:
    """``core.pipeline.LookupSource`` over one index a request; also TRUNC's."""

    def __init__(self, min_match: int, max_match: int, corpus: Corpus | None = None):
        """Tokens of a match: fewer than ``min_match`` are not taken for one, more than ``max_match`` are not sought.

        ``corpus``: documents that all requests look up in, beside their own texts."""
        self._min_match = min_match
        self._max_match = max_match
        self._corpus = corpus
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

    def candidates(self, key: Hashable, path: Sequence[int], most: int, count: int) -> list[Candidate]:
        """See ``LookupSource``; longest match first, at equal ones the request's own text before the corpus."""
        index = self._indexes.get(key)
        if index is None or most < 1:
            return []
        query = (self._min_match, self._max_match, most, count)
        own = index.candidates(*query, path)
        if self._corpus is None:
            return own
        context = [*index.tail(self._max_match), *path]
        return preferred(own, self._corpus.candidates(context, *query), count)
