"""Texts and a corpus as the workers ask for them."""

from __future__ import annotations

import json
import types

import pytest

from sglang_trunc.core.lookup.corpus import CorpusError
from sglang_trunc.core.options import DualOptions
from sglang_trunc.engine.lookahead import RequestLookups, lookups_for


def options(tmp_path, *lines: object, lookup: int = 4) -> DualOptions:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return DualOptions(1, 2, 8, 0.0, lookup=lookup, lookup_min_match=2, lookup_corpus=str(path))


def tokens(lookups: RequestLookups, path=(), most: int = 4, count: int = 2) -> list[tuple[int, ...]]:
    return [found.tokens for found in lookups.candidates("r", path, most, count)]


def test_a_requests_own_text_comes_before_the_corpus_at_equal_matches(tmp_path):
    lookups = lookups_for(options(tmp_path, {"tokens": [7, 8, 30, 31]}), None)
    lookups.begin("r", [7, 8, 20, 21, 7, 8])
    assert tokens(lookups) == [(20, 21, 7, 8), (30, 31)]
    lookups.begin("r", [1, 7, 8])
    assert tokens(lookups) == [(30, 31)]


def test_a_longer_match_in_the_corpus_comes_first(tmp_path):
    lookups = lookups_for(options(tmp_path, {"tokens": [6, 7, 8, 30]}), None)
    lookups.begin("r", [7, 8, 20, 21, 6, 7, 8])
    assert tokens(lookups, most=1) == [(30,), (20,)]


def test_drafted_tokens_count_as_text(tmp_path):
    lookups = lookups_for(options(tmp_path, {"tokens": [8, 9, 40]}), None)
    lookups.begin("r", [1, 2, 8])
    assert tokens(lookups, path=[9]) == [(40,)]


def test_commits_lengthen_a_text_and_leaving_forgets_it(tmp_path):
    lookups = lookups_for(options(tmp_path, {"tokens": [1]}), None)
    lookups.begin("r", [5, 6, 7])
    for token in (5, 6):
        lookups.commit("r", token)
    assert tokens(lookups, count=1) == [(7, 5, 6, 7)]
    lookups.forget("r")
    lookups.commit("r", 9)
    assert (lookups.length("r"), tokens(lookups), len(lookups)) == (0, [], 0)


def test_texts_are_tokenised_without_special_tokens(tmp_path):
    asked = []

    def encode(text: str, add_special_tokens: bool) -> list[int]:
        asked.append((text, add_special_tokens))
        return [ord(letter) for letter in text]

    given = options(tmp_path, {"text": "abc"})
    lookups = lookups_for(given, types.SimpleNamespace(encode=encode))
    lookups.begin("r", [1, ord("a"), ord("b")])
    assert asked == [("abc", False)]
    assert tokens(lookups) == [(ord("c"),)]
    with pytest.raises(CorpusError, match="line 1: text, but no tokenizer was given"):
        lookups_for(given, None)


def test_a_corpus_that_is_not_asked_for_is_not_read(tmp_path):
    lookups_for(options(tmp_path, {"nonsense": 1}, lookup=0), None)
    with pytest.raises(CorpusError, match="line 1: not an object with the one key tokens or text"):
        lookups_for(options(tmp_path, {"nonsense": 1}), None)
