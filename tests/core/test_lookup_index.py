"""The index of one text against a quadratic search, on small alphabets and on texts that are hard for such trees."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_trunc.core.lookup.candidates import Candidate, Source
from sglang_trunc.core.lookup.context_tree import LARGEST_TOKEN, MAX_DEPTH
from sglang_trunc.core.lookup.index import LookupIndex
from tests.core.lookup_reference import own_candidates


def fibonacci(length: int) -> list[int]:
    """The Fibonacci word: the fewest different contexts that a text without a period can have."""
    before, word = [1], [0]
    while len(word) < length:
        before, word = word, word + before
    return word[:length]


def de_bruijn(symbols: int, order: int) -> list[int]:
    """Every word of ``order`` symbols once: the most different contexts. By the greedy rule, largest symbol first."""
    text, seen = [0] * order, {(0,) * order}
    while True:
        last = tuple(text[len(text) - order + 1 :])
        fresh = next((token for token in reversed(range(symbols)) if (*last, token) not in seen), None)
        if fresh is None:
            return text
        seen.add((*last, fresh))
        text.append(fresh)


def shuffled(symbols: int, length: int) -> list[int]:
    return random.Random(7).choices(range(symbols), k=length)


HARD = {
    "all equal": [5] * 700,
    "fibonacci": fibonacci(700),
    "de bruijn": de_bruijn(2, 9),
    "wide de bruijn": de_bruijn(8, 3),
    "rising": list(range(350)) * 2,
    "random bits": shuffled(2, 700),
    "random": shuffled(50_000, 700),
    "largest": [LARGEST_TOKEN, 0] * 350,
    # equal up to the token before the depth of the tree, so that every edge is split
    "combs": [token for tail in range(50) for token in [100 + tail, *range(tail % 9), 7, 7]],
}


@st.composite
def queries(draw, deepest=9):
    depth = draw(st.integers(1, deepest))
    high = draw(st.integers(1, depth))
    low = draw(st.integers(1, high))
    return depth, (low, high, draw(st.integers(1, 7)), draw(st.integers(1, 5)))


def texts(size=60):
    return st.integers(1, 4).flatmap(lambda symbols: st.lists(st.integers(0, symbols - 1), max_size=size))


@given(texts(), queries())
@settings(max_examples=300, deadline=None)
def test_every_prefix_finds_what_a_quadratic_search_finds(text, query):
    depth, asked = query
    index = LookupIndex(depth)
    for length, token in enumerate(text, start=1):
        index.extend([token])
        assert index.candidates(*asked) == own_candidates(text[:length], *asked)


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize(("depth", "asked"), [(12, (1, 12, 9, 6)), (5, (3, 4, 3, 2)), (1, (1, 1, 1, 3))])
def test_hard_texts(name, depth, asked):
    text = HARD[name]
    index = LookupIndex(depth)
    for start in range(0, len(text), 53):
        index.extend(text[start : start + 53])
        assert index.candidates(*asked) == own_candidates(text[: start + 53], *asked)


@given(texts(), st.lists(st.integers(0, 60)), st.integers(4, 40))
@settings(deadline=None)
def test_a_grown_index_equals_a_built_one(text, cuts, max_tokens):
    built = LookupIndex.build(text, 6, max_tokens)
    grown = LookupIndex(6, max_tokens)
    for start, end in pairwise([0, *sorted(cuts), len(text)]):
        grown.extend(text[start:end])
    assert len(grown) == len(text)
    assert grown.nbytes == built.nbytes
    assert list(grown.tail(99)) == list(built.tail(99))
    for asked in ((1, 6, 5, 4), (2, 3, 1, 1)):
        assert grown.candidates(*asked) == built.candidates(*asked)


def test_longest_match_first_then_the_newest():
    #       0  1  2  3  4  5  6  7  8  9 10 11 12 13
    text = [1, 2, 3, 9, 2, 3, 8, 7, 2, 3, 5, 1, 2, 3]
    assert LookupIndex.build(text).candidates(1, 32, 2, 9) == [
        Candidate((9, 2), 3, Source.OWN),
        Candidate((5, 1), 2, Source.OWN),
        Candidate((8, 7), 2, Source.OWN),
    ]


def test_a_match_is_not_counted_beyond_what_was_asked_for():
    text = [1, 2, 3, 9, 4, 2, 3, 8, 1, 2, 3]
    found = LookupIndex.build(text).candidates(1, 2, 1, 9)
    assert found == [Candidate((8,), 2, Source.OWN), Candidate((9,), 2, Source.OWN)]


def test_the_end_of_the_text_is_not_its_own_match():
    assert LookupIndex.build([1, 2, 3, 4, 5]).candidates(1, 32, 4, 4) == []
    assert LookupIndex.build([1]).candidates(1, 32, 4, 4) == []
    assert LookupIndex().candidates(1, 32, 4, 4) == []


def test_a_repetition_goes_on_behind_the_end():
    assert LookupIndex.build([4, 4]).candidates(1, 32, 5, 3) == [Candidate((4,) * 5, 1, Source.OWN)]
    found = LookupIndex.build([9, 1, 2, 3, 1, 2]).candidates(2, 32, 7, 1)
    assert found == [Candidate((3, 1, 2, 3, 1, 2, 3), 2, Source.OWN)]


def test_a_text_that_repeats_one_thing_is_not_searched_to_its_start():
    """Nine occurrences with one continuation hide an older one with another: the price of a bounded search."""
    text = [1, 2, 8] + [1, 2, 9] * 8 + [1, 2]
    assert [found.tokens[0] for found in LookupIndex.build(text).candidates(2, 2, 3, 2)] == [9, 8]
    text = [1, 2, 8] + [1, 2, 9] * 9 + [1, 2]
    assert [found.tokens[0] for found in LookupIndex.build(text).candidates(2, 2, 3, 2)] == [9]


@given(texts(120), st.integers(2, 25))
@settings(deadline=None)
def test_generations_hold_between_half_and_all_of_the_limit(text, max_tokens):
    index = LookupIndex(5, max_tokens)
    for length, token in enumerate(text, start=1):
        index.extend([token])
        assert len(index) == length
        assert min(length, max_tokens // 2) <= index.held <= min(length, max_tokens - 1)
        held = text[length - index.held : length]
        assert list(index.tail(max_tokens)) == held
        assert index.candidates(1, 5, 4, 3) == own_candidates(held, 1, 5, 4, 3)


def test_memory_of_a_long_text_is_bounded_by_generations():
    index = LookupIndex(8, max_tokens=200)
    sizes = []
    for token in shuffled(50, 3000):
        index.extend([token])
        sizes.append(index.nbytes)
    assert max(sizes[1000:]) <= max(sizes[:1000]) * 1.1


@pytest.mark.parametrize("name", HARD)
def test_memory_of_a_token_is_bounded(name):
    """Text and steps' ends 8 bytes, two nodes of 13 and three slots each, a step of 5 for every match length; and a
    sixteenth, which arrays have to spare."""
    depth, text = 6, HARD[name]
    fixed = 2 * LookupIndex(depth).nbytes
    assert LookupIndex.build(text, depth).nbytes <= fixed + len(text) * (8 + 2 * (13 + 3 * 4) + 5 * depth) * 17 / 16


def test_a_repetition_costs_text_and_one_step_a_token():
    short, long = (LookupIndex.build([1, 2, 3] * (length // 3), 16).nbytes for length in (300, 3000))
    assert long - short <= 2700 * 14


@pytest.mark.parametrize("token", [-1, LARGEST_TOKEN + 1])
def test_a_token_out_of_range_is_refused_and_those_before_it_are_in(token):
    index = LookupIndex()
    with pytest.raises(ValueError, match="a token must be from 0 to 2147483647, got"):
        index.extend([1, 2, 1, token])
    assert (len(index), list(index.tail(9))) == (3, [1, 2, 1])
    assert index.candidates(1, 1, 1, 1) == [Candidate((2,), 1, Source.OWN)]


@pytest.mark.parametrize("asked", [(0, 4, 1, 1), (3, 2, 1, 1), (1, 9, 1, 1), (1, 4, 0, 1), (1, 4, 1, 0)])
def test_queries_out_of_range_are_refused(asked):
    with pytest.raises(ValueError, match="must"):
        LookupIndex.build([1, 1], 8).candidates(*asked)


@pytest.mark.parametrize("settings", [{"max_match": 0}, {"max_match": MAX_DEPTH + 1}, {"max_tokens": 1}])
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(ValueError, match="must be"):
        LookupIndex(**settings)


def test_the_longest_possible_match():
    index = LookupIndex.build([*range(300), *range(260)], MAX_DEPTH)
    assert index.candidates(MAX_DEPTH, MAX_DEPTH, 3, 2) == [Candidate((260, 261, 262), MAX_DEPTH, Source.OWN)]
