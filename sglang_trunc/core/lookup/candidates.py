"""What a lookup finds: continuations after earlier occurrences of the last tokens.

Between the indexes that find them (``index``, ``corpus``) and ``merge``, which makes one tree of them. The order is:
longest match first; at equal matches the request's own text before the corpus; then the newest occurrence first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import NamedTuple

# Occurrences in a row that may bring nothing new before a query stops: a text that repeats one thing has thousands of
# them, all with the same continuation.
PATIENCE = 8


class Source(Enum):
    OWN = "own"  # the request's prompt and output
    CORPUS = "corpus"


class Candidate(NamedTuple):
    """Tokens that may come next."""

    tokens: tuple[int, ...]  # at least one
    match: int  # tokens before them that agree with the end of the text
    source: Source


def check_query(min_match: int, max_match: int, longest: int, length: int, count: int) -> None:
    """``ValueError`` unless 1 <= min_match <= max_match <= longest, length >= 1 and count >= 1."""
    if not 1 <= min_match <= max_match <= longest:
        raise ValueError(
            f"matches must satisfy 1 <= min_match <= max_match <= {longest}, got min_match {min_match} and "
            f"max_match {max_match}"
        )
    if length < 1 or count < 1:
        raise ValueError(f"length and count must be at least 1, got length {length} and count {count}")


def read_distinct(
    occurrences: Iterable[tuple[int, int]], read: Callable[[int], tuple[int, ...]], source: Source, count: int
) -> list[Candidate]:
    """At most ``count`` candidates from (position, match) in their order; ``read``: the tokens after a position."""
    found: list[Candidate] = []
    idle = 0
    for position, match in occurrences:
        idle = 0 if _put(found, read(position), match, source) else idle + 1
        if len(found) == count or idle == PATIENCE:
            break
    return found


def preferred(own: list[Candidate], corpus: list[Candidate], count: int) -> list[Candidate]:
    """The best ``count`` of two lists that are in order, deduplicated."""
    found: list[Candidate] = []
    for candidate in sorted(own + corpus, key=lambda candidate: -candidate.match):  # stable: own text first
        _put(found, *candidate)
    return found[:count]


def _put(found: list[Candidate], tokens: tuple[int, ...], match: int, source: Source) -> bool:
    """Append a candidate, unless it and a better one start alike; then that one takes the longer of the two texts.
    Returns whether there was anything new."""
    for place, better in enumerate(found):
        shared = min(len(tokens), len(better.tokens))
        if tokens[:shared] == better.tokens[:shared]:
            if len(tokens) == shared:
                return False
            found[place] = better._replace(tokens=tokens)
            return True
    found.append(Candidate(tokens, match, source))
    return True
