"""Documents that every request may look its next tokens up in; read once, never changed.

The file is JSON Lines, UTF-8, one document a line; empty lines are skipped:

    {"tokens": [12, 7, 99]}        token ids
    {"text": "def main():"}        where the caller passes a tokenizer

A document's end ends a continuation, and no match reaches over it. At equal matches later lines come first.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sglang_trunc.core.lookup.candidates import Candidate, Source, check_query, read_distinct
from sglang_trunc.core.lookup.context_tree import LARGEST_TOKEN, SEPARATOR, ContextTree
from sglang_trunc.core.lookup.index import MAX_MATCH

Encode = Callable[[str], Sequence[int]]

ACCEPTED = 'a line is {"tokens": [token ids]}, or {"text": "..."} where a tokenizer is at hand'


class CorpusError(ValueError):
    """A file that is no corpus; the text names file and line, and what is accepted."""


class Corpus:
    """An index of documents, each a sequence of token ids. ``ValueError`` for ids that are not from 0 to 2**31 - 1."""

    def __init__(self, documents: Iterable[Sequence[int]], max_match: int = MAX_MATCH):
        self.max_match = max_match
        self.documents = 0
        self._tree = ContextTree(max_match)
        for document in documents:
            self._add(document)

    @classmethod
    def load(cls, path: Path, encode: Encode | None = None, max_match: int = MAX_MATCH) -> Corpus:
        """Read a file. ``encode``: token ids of a text, without special tokens. ``CorpusError``: a file that cannot be
        read, a line of another form, text without ``encode``, a file without documents."""
        corpus = cls(_documents(Path(path), encode), max_match)
        if not corpus.documents:
            raise CorpusError(f"{path} has no documents; {ACCEPTED}")
        return corpus

    def __len__(self) -> int:
        """Tokens of all documents."""
        return len(self._tree.text) - self.max_match - self.documents

    @property
    def nbytes(self) -> int:
        return self._tree.nbytes

    def candidates(
        self, context: Sequence[int], min_match: int, max_match: int, length: int, count: int
    ) -> list[Candidate]:
        """Continuations after occurrences of the last tokens of ``context``; see ``LookupIndex.candidates``.

        Here each ends where its document ends. Where a candidate starts with all of a better one, it is returned in the
        better one's place. ``ValueError``: numbers out of range, of the query or of the context's tokens.
        """
        check_query(min_match, max_match, self.max_match, length, count)
        steps = self._tree.steps_after(context[-max_match:])
        occurrences = self._tree.occurrences(steps, min_match, max_match)
        return read_distinct(occurrences, partial(_continuation, self._tree.text, length), Source.CORPUS, count)

    def _add(self, document: Sequence[int]) -> None:
        """Behind a document's last token nothing follows: that position is not findable."""
        for token in document[:-1]:
            self._tree.add(token)
        for token in document[-1:]:
            self._tree.push(token)
        self._tree.push(SEPARATOR)
        self.documents += 1


def _continuation(text: array[int], length: int, position: int) -> tuple[int, ...]:
    tokens = tuple(text[position : position + length])
    return tokens[: tokens.index(SEPARATOR)] if SEPARATOR in tokens else tokens


def _documents(path: Path, encode: Encode | None) -> Iterator[list[int]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _document(line, f"{path}, line {number}", encode)
    except OSError as error:
        raise CorpusError(
            f"{path} cannot be read: {error.strerror}; a corpus is a JSON Lines file, {ACCEPTED}"
        ) from error


def _document(line: bytes, where: str, encode: Encode | None) -> list[int]:
    try:
        parsed = json.loads(line.decode("utf-8"))
    except ValueError as error:  # both UTF-8 and JSON
        raise CorpusError(f"{where}: not JSON in UTF-8 ({error}); {ACCEPTED}") from error
    if not isinstance(parsed, dict) or len(parsed) != 1 or not parsed.keys() <= {"tokens", "text"}:
        raise CorpusError(f"{where}: not an object with the one key tokens or text; {ACCEPTED}")
    if "tokens" in parsed:
        return _tokens(parsed["tokens"], where)
    if not isinstance(parsed["text"], str):
        raise CorpusError(f"{where}: text is not a string; {ACCEPTED}")
    if encode is None:
        raise CorpusError(f"{where}: text, but no tokenizer was given; {ACCEPTED}")
    return _tokens(list(encode(parsed["text"])), where)


def _tokens(found: Any, where: str) -> list[int]:
    if not isinstance(found, list):
        raise CorpusError(f"{where}: tokens is not a list; {ACCEPTED}")
    for token in found:
        # bool is an int to Python, 1.0 is equal to 1
        if type(token) is not int or not 0 <= token <= LARGEST_TOKEN:
            raise CorpusError(f"{where}: {token!r} is not a token id from 0 to {LARGEST_TOKEN}; {ACCEPTED}")
    return found
