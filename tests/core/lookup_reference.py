"""Lookup by looking at every position: quadratic, and without any structure."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_trunc.core.lookup.candidates import PATIENCE, Candidate, Source

Found = tuple[int, int, tuple[int, ...]]  # match, position, continuation


def agreement(left: Sequence[int], right: Sequence[int], limit: int) -> int:
    """Tokens at the ends of both that are equal."""
    count = 0
    while count < min(limit, len(left), len(right)) and left[-1 - count] == right[-1 - count]:
        count += 1
    return count


def own_candidates(text: Sequence[int], low: int, high: int, length: int, count: int) -> list[Candidate]:
    found: list[Found] = []
    for position in range(1, len(text)):
        tokens: list[int] = []
        for at in range(position, position + length):
            # Behind the end, the text goes on with what was just proposed.
            tokens.append(text[at] if at < len(text) else tokens[at - len(text)])
        found.append((agreement(text[:position], text, high), position, tuple(tokens)))
    return _chosen(found, low, count, Source.OWN)


def corpus_candidates(
    documents: Sequence[Sequence[int]], context: Sequence[int], low: int, high: int, length: int, count: int
) -> list[Candidate]:
    found: list[Found] = []
    for document in documents:
        for at in range(1, len(document)):
            place = len(found)
            found.append((agreement(document[:at], context, high), place, tuple(document[at : at + length])))
    return _chosen(found, low, count, Source.CORPUS)


def _chosen(found: list[Found], low: int, count: int, source: Source) -> list[Candidate]:
    chosen: list[Candidate] = []
    idle = 0
    for match, _, tokens in sorted(found, key=lambda one: (-one[0], -one[1])):
        if match < low or len(chosen) == count or idle == PATIENCE:
            break
        starts_alike = [
            place
            for place, better in enumerate(chosen)
            if all(left == right for left, right in zip(better.tokens, tokens, strict=False))
        ]
        if not starts_alike:
            chosen.append(Candidate(tokens, match, source))
        elif len(tokens) > len(chosen[starts_alike[0]].tokens):
            chosen[starts_alike[0]] = Candidate(tokens, chosen[starts_alike[0]].match, source)
        else:
            idle += 1
            continue
        idle = 0
    return chosen
