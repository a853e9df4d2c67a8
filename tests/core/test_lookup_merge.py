"""Candidates as a tree: chains, shared starts, the order by reach against exact fractions, the budget."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_trunc.core.contract.tree import CandidateTree
from sglang_trunc.core.lookup.candidates import Candidate, Source, preferred
from sglang_trunc.core.lookup.merge import ROOT, DraftTree, merge

OWN, CORPUS = Source.OWN, Source.CORPUS


def candidate(tokens, match=2, source=OWN):
    return Candidate(tuple(tokens), match, source)


CANDIDATES = st.lists(st.builds(candidate, st.lists(st.integers(0, 2), min_size=1, max_size=5), st.integers(1, 9)))


def exact_reach(candidates) -> dict[tuple[int, ...], Fraction]:
    """Path -> reach, first seen first: a path's share of what its better siblings leave."""
    reach: dict[tuple[int, ...], Fraction] = {}
    for one in candidates:
        for end in range(1, len(one.tokens) + 1):
            path = one.tokens[:end]
            if path in reach:
                continue
            siblings = sum(share for other, share in reach.items() if other[:-1] == path[:-1] and len(other) == end)
            left = (reach[path[:-1]] if end > 1 else 1) - siblings
            reach[path] = left * Fraction(one.match + end, one.match + end + 1)
    return reach


def path_of(tree: DraftTree, node: int) -> tuple[int, ...]:
    return (*(path_of(tree, tree.parents[node]) if tree.parents[node] != ROOT else ()), tree.tokens[node])


def test_one_candidate_gives_a_chain():
    assert merge([candidate([4, 5, 4])], 8) == DraftTree((4, 5, 4), (ROOT, 0, 1), (0, 0, 0))
    assert merge([candidate([4, 5, 4])], 2) == DraftTree((4, 5), (ROOT, 0), (0, 0))


def test_shared_starts_are_one_path():
    tree = merge([candidate([1, 2, 3]), candidate([1, 2, 4]), candidate([1, 2])], 9)
    assert tree == DraftTree((1, 2, 3, 4), (ROOT, 0, 1, 1), (0, 0, 0, 1))
    assert len(tree) == 4


def test_a_second_candidate_comes_before_the_far_end_of_the_first():
    """After a match of 3 the j-th draft is reached with 4 / (4 + j). It leaves 1/5 for another first token, which after
    a match of 2 gets 3/4 of that: less than the 22nd draft's 4/26, more than the 23rd's 4/27."""
    tree = merge([candidate(range(10, 40), match=3), candidate([9], match=2)], 40)
    assert tree.tokens.index(9) == 22


def test_a_long_match_is_trusted_further_than_a_short_one():
    other = candidate([9], match=1)
    assert merge([candidate(range(10, 20), match=30), other], 10).tokens == tuple(range(10, 20))
    assert 9 in merge([candidate(range(10, 20), match=1), other], 10).tokens


def test_nothing_gives_an_empty_tree():
    assert merge([], 5) == DraftTree((), (), ())
    assert len(merge([candidate([1, 2])], 0)) == 0
    with pytest.raises(ValueError, match="budget must not be negative, got -1"):
        merge([candidate([1, 2])], -1)


@given(CANDIDATES, st.integers(0, 30))
@settings(deadline=None)
def test_the_best_nodes_in_order(candidates, budget):
    tree = merge(candidates, budget)
    CandidateTree(tree.tokens, tree.parents)  # parents before children, no siblings with the same token
    reach = exact_reach(candidates)
    paths = [path_of(tree, node) for node in range(len(tree))]
    assert len(tree) == min(budget, len(reach))
    assert len(set(paths)) == len(paths)
    for path, origin in zip(paths, tree.origins, strict=True):
        proposers = [place for place, one in enumerate(candidates) if one.tokens[: len(path)] == path]
        assert origin == proposers[0]
    shares = [float(reach[path]) for path in paths]
    best = sorted(map(float, reach.values()), reverse=True)[:budget]
    assert shares == pytest.approx(best, rel=1e-12)


@given(CANDIDATES, st.integers(0, 30))
@settings(deadline=None)
def test_a_smaller_budget_gives_the_start_of_the_same_tree(candidates, budget):
    small, large = merge(candidates, budget), merge(candidates, budget + 1)
    assert small.tokens == large.tokens[:budget]
    assert small.parents == large.parents[:budget]


def test_own_text_comes_before_the_corpus_at_equal_matches():
    own = [candidate([1], 4), candidate([2], 2)]
    corpus = [candidate([3], 4, CORPUS), candidate([4], 3, CORPUS), candidate([5], 2, CORPUS)]
    assert [one.tokens[0] for one in preferred(own, corpus, 9)] == [1, 3, 4, 2, 5]
    assert preferred(own, corpus, 3) == [own[0], corpus[0], corpus[1]]


def test_the_same_tokens_from_both_are_one_candidate():
    own, corpus = [candidate([1, 2, 3], 2)], [candidate([1, 2], 5, CORPUS), candidate([1, 2, 3], 2, CORPUS)]
    assert preferred(own, corpus, 4) == [candidate([1, 2, 3], 5, CORPUS)]
    assert preferred(own, corpus[1:], 4) == own
