"""The indexes of all requests: extended while the text grows, built anew where it is another text."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_trunc.core.lookup.candidates import Candidate, Source
from sglang_trunc.core.lookup.corpus import Corpus
from sglang_trunc.core.lookup.index import LookupIndex
from sglang_trunc.core.lookup.registry import LAST, SAMPLES, Fingerprint, Lookups

ASKED = (1, 8, 4, 3)


def text(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(9), k=length)


def same(index: LookupIndex, tokens: list[int]) -> bool:
    built = LookupIndex.build(tokens, index.max_match, index.max_tokens)
    return list(index.tail(10**6)) == list(built.tail(10**6)) and index.candidates(*ASKED) == built.candidates(*ASKED)


def test_a_growing_text_extends_one_index():
    lookups, tokens = Lookups(8), text(900)
    index = lookups.ensure("a", tokens[:100])
    for total in (100, 101, 350, 900):
        assert lookups.ensure("a", tokens, total) is index
        assert len(index) == total
        assert same(index, tokens[:total])


def test_what_lies_behind_the_total_is_not_indexed():
    lookups = Lookups(8)
    first = lookups.ensure("a", [1, 2, 3, 9, 9], 3)
    assert lookups.ensure("a", [1, 2, 3, 4, 5], 4) is first
    assert list(first.tail(9)) == [1, 2, 3, 4]
    for total in (-1, 6):
        with pytest.raises(ValueError, match=f"total must be from 0 to the 5 tokens given, got {total}"):
            lookups.ensure("a", [1, 2, 3, 4, 5], total)


def test_keys_are_apart_and_forgotten_one_by_one():
    lookups = Lookups(8)
    lookups.ensure("a", [1, 2, 1])
    lookups.ensure("b", [1, 3, 1])
    assert (len(lookups), "a" in lookups, "c" in lookups) == (2, True, False)
    assert lookups.nbytes == 2 * LookupIndex.build([1, 2, 1], 8).nbytes
    assert [lookups.candidates(key, 1, 8, 1, 1)[0].tokens for key in "ab"] == [(2,), (3,)]
    lookups.forget("a")
    lookups.forget("a")
    assert (len(lookups), "a" in lookups) == (1, False)
    with pytest.raises(KeyError):
        lookups.candidates("a", *ASKED)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda tokens: tokens[:-1], id="shorter"),
        pytest.param(lambda tokens: [], id="empty"),
        pytest.param(lambda tokens: [*tokens[:-1], 99, 5], id="other last token"),
        pytest.param(lambda tokens: [*tokens[:-LAST], 99, *tokens[1 - LAST :]], id="the oldest of the last tokens"),
        pytest.param(lambda tokens: [99, *tokens[1:], 5], id="other first token"),
        pytest.param(lambda tokens: [99, *tokens], id="shifted"),
        pytest.param(lambda tokens: text(len(tokens), seed=1)[: -2 * LAST] + tokens[-2 * LAST :], id="same end"),
    ],
)
@pytest.mark.parametrize("length", [70, 5000])
def test_another_text_under_the_same_key_is_indexed_anew(change, length):
    lookups, tokens = Lookups(8, max_tokens=4096), text(length)
    index = lookups.ensure("a", tokens)
    other = change(tokens)
    anew = lookups.ensure("a", other)
    assert anew is not index
    assert len(anew) == len(other)
    assert same(anew, other)
    assert lookups.ensure("a", other) is anew


def test_any_change_in_a_text_of_few_samples_is_noticed():
    tokens = text(SAMPLES)
    for place in range(SAMPLES):
        lookups = Lookups(8)
        index = lookups.ensure("a", tokens)
        assert lookups.ensure("a", [*tokens[:place], 99, *tokens[place + 1 :]]) is not index


@given(st.lists(st.integers(1, 400), max_size=12))
@settings(deadline=None)
def test_a_fingerprint_does_not_depend_on_how_the_text_arrived(parts):
    tokens = list(range(sum(parts)))
    grown, at_once = Fingerprint(), Fingerprint()
    start = 0
    for part in parts:
        grown.extend(tokens, start, start + part)
        start += part
        assert grown.fits(tokens, start)
    at_once.extend(tokens, 0, len(tokens))
    assert grown == at_once
    assert len(grown.samples) <= SAMPLES
    assert len(grown.samples) > SAMPLES // 2 or grown.step == 1


def test_a_token_that_is_refused_leaves_no_half_extended_index():
    lookups = Lookups(8)
    lookups.ensure("a", [1, 2])
    with pytest.raises(ValueError, match="got -5"):
        lookups.ensure("a", [1, 2, 3, -5])
    assert "a" not in lookups
    assert list(lookups.ensure("a", [1, 2, 3]).tail(9)) == [1, 2, 3]


def test_arrays_and_tuples_are_texts_too():
    lookups = Lookups(8)
    index = lookups.ensure("a", (1, 2, 1))
    assert lookups.ensure("a", range(1, 3)) is not index
    assert lookups.ensure("b", LookupIndex.build([4, 5, 4]).tail(3)).candidates(1, 1, 1, 1)[0].tokens == (5,)


def test_the_corpus_comes_second_at_equal_matches():
    lookups = Lookups(4, corpus=Corpus([[1, 2, 3], [7, 1, 2, 4], [1, 2, 5]], max_match=4))
    lookups.ensure("a", [1, 2, 6, 1, 2])
    assert lookups.candidates("a", 1, 4, 1, 9) == [
        Candidate((6,), 2, Source.OWN),
        Candidate((5,), 2, Source.CORPUS),
        Candidate((4,), 2, Source.CORPUS),
        Candidate((3,), 2, Source.CORPUS),
    ]
    assert len(lookups.candidates("a", 1, 4, 1, 2)) == 2
    lookups.ensure("b", [7, 1, 2])
    assert lookups.candidates("b", 1, 4, 1, 1) == [Candidate((4,), 3, Source.CORPUS)]


def test_a_corpus_of_shorter_matches_is_refused():
    with pytest.raises(ValueError, match="the corpus knows matches of 4 tokens, the indexes of 8"):
        Lookups(8, corpus=Corpus([], max_match=4))
