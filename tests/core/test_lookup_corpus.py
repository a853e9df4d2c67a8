"""The shared corpus: its matches against a search over all documents, and every line that is refused."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_trunc.core.lookup.candidates import Candidate, Source
from sglang_trunc.core.lookup.corpus import ACCEPTED, Corpus, CorpusError
from tests.core.lookup_reference import corpus_candidates

TOKENS = st.integers(0, 2)
DOCUMENTS = st.lists(st.lists(TOKENS, max_size=25), max_size=5)


@pytest.fixture
def written(tmp_path):
    def write(*lines: str | bytes):
        path = tmp_path / "corpus.jsonl"
        path.write_bytes(b"\n".join(line.encode() if isinstance(line, str) else line for line in lines) + b"\n")
        return path

    return write


@given(DOCUMENTS, st.lists(TOKENS, max_size=12), st.integers(1, 6), st.integers(1, 6))
@settings(max_examples=300, deadline=None)
def test_a_corpus_finds_what_a_search_over_all_documents_finds(documents, context, left, right):
    asked = (min(left, right), max(left, right), 4, 3)
    corpus = Corpus(documents, max_match=6)
    assert len(corpus) == sum(map(len, documents))
    size = corpus.nbytes
    for _ in range(2):
        assert corpus.candidates(context, *asked) == corpus_candidates(documents, context, *asked)
    assert corpus.nbytes == size


def test_neither_match_nor_continuation_crosses_documents():
    corpus = Corpus([[1, 2], [3, 4]])
    assert corpus.candidates([1, 2], 1, 2, 4, 4) == []
    assert corpus.candidates([2, 3], 1, 2, 4, 4) == [Candidate((4,), 1, Source.CORPUS)]


def test_later_documents_come_first_and_the_longer_of_two_that_start_alike_is_kept():
    corpus = Corpus([[1, 5, 6, 7], [1, 8, 8], [1, 5]])
    found = corpus.candidates([1], 1, 1, 3, 4)
    assert [candidate.tokens for candidate in found] == [(5, 6, 7), (8, 8)]


def test_a_corpus_in_a_context_of_another_vocabulary():
    assert Corpus([[1, 2, 3]]).candidates([2**31 - 1], 1, 1, 1, 1) == []
    with pytest.raises(ValueError, match="a token must be"):
        Corpus([[1, 2, 3]]).candidates([-1], 1, 1, 1, 1)
    with pytest.raises(ValueError, match="max_match 7"):
        Corpus([[1, 2, 3]], max_match=6).candidates([1], 1, 7, 1, 1)


def test_load_tokens_and_text(written):
    path = written('{"tokens": [1, 2, 3]}', "", '{"text": "ab\u00e9"}')
    corpus = Corpus.load(path, encode=lambda text: [ord(letter) for letter in text])
    assert (corpus.documents, len(corpus)) == (2, 6)
    assert corpus.candidates([1, 2], 1, 9, 4, 1) == [Candidate((3,), 2, Source.CORPUS)]
    assert corpus.candidates([97], 1, 9, 4, 1) == [Candidate((98, 233), 1, Source.CORPUS)]
    assert Corpus.load(str(path), encode=lambda text: tuple(range(len(text)))).documents == 2


REFUSED = {
    '{"tokens": [1, 2]': "not JSON in UTF-8",
    b'{"text": "\xff"}': "not JSON in UTF-8",
    "[1, 2]": "not an object with the one key tokens or text",
    "{}": "not an object with the one key",
    '{"tokens": [1], "text": "a"}': "not an object with the one key",
    '{"token": [1]}': "not an object with the one key",
    '{"tokens": "1 2"}': "tokens is not a list",
    '{"tokens": null}': "tokens is not a list",
    '{"tokens": [1, -2]}': "-2 is not a token id from 0 to 2147483647",
    '{"tokens": [2147483648]}': "2147483648 is not a token id",
    '{"tokens": [true]}': "True is not a token id",
    '{"tokens": [1.0]}': "1.0 is not a token id",
    '{"text": 5}': "text is not a string",
    '{"text": "a"}': "text, but no tokenizer was given",
}


@pytest.mark.parametrize("line", REFUSED)
def test_a_refused_line_is_named_with_what_is_accepted(written, line):
    path = written('{"tokens": [1, 2]}', "", line)
    with pytest.raises(CorpusError) as refused:
        Corpus.load(path)
    said = str(refused.value)
    assert said.startswith(f"{path}, line 3: ")
    assert REFUSED[line] in said
    assert said.endswith(ACCEPTED)


def test_what_a_tokenizer_returns_is_checked_too(written):
    with pytest.raises(CorpusError, match="line 1: None is not a token id"):
        Corpus.load(written('{"text": "a"}'), encode=lambda text: [None])


@pytest.mark.parametrize("lines", [[], ["", "  "]])
def test_a_file_without_documents_is_refused(written, lines):
    path = written(*lines)
    with pytest.raises(CorpusError, match=re.escape(f"{path} has no documents; {ACCEPTED}")):
        Corpus.load(path)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(CorpusError, match="nothing.jsonl cannot be read: No such file or directory"):
        Corpus.load(tmp_path / "nothing.jsonl")


def test_accepted_forms_are_those_of_the_message(written):
    for form in re.findall(r"\{.*?\}", ACCEPTED):
        line = form.replace("token ids", "1, 2")
        assert json.loads(line)
        assert Corpus.load(written(line), encode=lambda text: [1]).documents == 1
