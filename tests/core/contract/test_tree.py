"""Residual verification of fixed candidates: exact counts, the law, order, absent trees, and everything refused."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from sglang_trunc.core.contract.tree import ROOT, CandidateTree, TreeRun, evaluate_tree
from tests.core.contract.toy import LAST_UNIFORM, assert_law, grid, law_of, random_rows, row, step

# Two levels of a binary vocabulary: P(first) = (1/4, 3/4), P(second | 0) = (4/5, 1/5), P(second | 1) = (2/5, 3/5).
FIRST, AFTER_0, AFTER_1 = row(0.25, 0.75), row(0.8, 0.2), row(0.4, 0.6)


def test_two_level_tree_counts_2000_500_3000_4500_of_10000():
    tree = CandidateTree([1, 0, 1, 0, 0, 1], [ROOT, ROOT, 0, 0, 1, 1])
    rows = [FIRST, FIRST, AFTER_1, AFTER_1, AFTER_0, AFTER_0]
    found: Counter[tuple[int, ...]] = Counter()
    for first, second in grid(100, 2):
        run = evaluate_tree(tree, rows, [first, 0.5, second, 0.5, second, 0.5], 0.5)
        assert not run.replaced
        found[run.tokens] += 1
    assert [found[tokens] for tokens in ((0, 0), (0, 1), (1, 0), (1, 1))] == [2000, 500, 3000, 4500]


def test_two_rounds_of_one_candidate_a_level_keep_the_joint_law():
    """A rejected first candidate ends its round; the next round draws the second token."""
    tree = CandidateTree([1, 1], [ROOT, 0])
    found: Counter[tuple[int, ...]] = Counter()
    for first, second in grid(20, 2):
        tokens = evaluate_tree(tree, [FIRST, AFTER_1], [first, second], 0.5).tokens
        if len(tokens) == 1:
            tokens += evaluate_tree(CandidateTree([1], [ROOT]), [AFTER_0], [second], 0.5).tokens
        found[tokens] += 1
    assert [found[tokens] for tokens in ((0, 0), (0, 1), (1, 0), (1, 1))] == [80, 20, 120, 180]


@pytest.mark.parametrize("candidates", [[2], [0, 3], [3, 0], [1, 4, 2], [4, 3, 2, 1, 0]])
@pytest.mark.parametrize("seed", [1, 2])
def test_siblings_in_any_order_keep_the_law(candidates, seed):
    """Acceptance shares and the replacement's law are measured from outside; no sampling error."""
    p = random_rows(seed, 1, 5, zeros=seed)[0]
    tree = CandidateTree(candidates, [ROOT] * len(candidates))
    law = torch.zeros(5, dtype=torch.float64)
    left = 1.0

    def run(coins, fallback=0.5):
        return evaluate_tree(tree, [p] * len(candidates), coins, fallback)

    for at, token in enumerate(candidates):
        before, after = [LAST_UNIFORM] * at, [LAST_UNIFORM] * (len(candidates) - at - 1)

        def taken(u, before=before, after=after):
            return run([*before, u, *after]).path

        share = step(taken, (at,)) if taken(0.0) == (at,) else 0.0
        law[token] += left * share
        left *= 1 - share
        if left < 1e-9:
            break
    else:
        law += left * law_of(lambda u: run([LAST_UNIFORM] * len(candidates), u).tokens[0], 5)
    assert torch.allclose(law, p, atol=1e-9)


def test_sampled_law_and_no_excluded_token():
    p = random_rows(5, 1, 6, zeros=3)[0]
    tree = CandidateTree([0, 3, 5], [ROOT] * 3)
    uniforms = torch.rand(3000, 4, generator=torch.Generator().manual_seed(6), dtype=torch.float64).tolist()
    found = Counter(evaluate_tree(tree, [p] * 3, u[:3], u[3]).tokens[0] for u in uniforms)
    assert_law(found, dict(enumerate(p.tolist())))


def test_siblings_are_tried_in_their_order():
    p = row(0.5, 0.3, 0.2)
    for order in ([0, 1], [1, 0]):
        run = evaluate_tree(CandidateTree(order, [ROOT, ROOT]), [p, p], [0.0, 0.0], 0.5)
        assert run == TreeRun((order[0],), (0,), False)
    # the first rejected: the second is accepted with 0.3 / 0.5, not 0.3
    tree = CandidateTree([0, 1], [ROOT, ROOT])
    assert evaluate_tree(tree, [p, p], [0.5, 0.59], 0.5).path == (1,)
    assert evaluate_tree(tree, [p, p], [0.5, 0.61], 0.0) == TreeRun((2,), (), True)


def test_only_the_accepted_branch_is_followed():
    tree = CandidateTree([0, 1, 2, 2], [ROOT, ROOT, 0, 1])
    after_0, after_1 = row(0, 0, 1), row(1, 0, 0)
    p = row(0.5, 0.5, 0)
    rows = [p, p, after_0, after_1]
    assert evaluate_tree(tree, rows, [0.4, 0, 0.9, 0], 0.5) == TreeRun((0, 2), (0, 2), False)
    assert evaluate_tree(tree, rows, [0.6, 0, 0, 0], 0.5) == TreeRun((1, 0), (1,), True)


def test_a_leaf_ends_the_round_without_another_token():
    assert evaluate_tree(CandidateTree([1], [ROOT]), [row(0, 1)], [LAST_UNIFORM], 0.0) == TreeRun((1,), (0,), False)


@pytest.mark.parametrize("tree", [None, CandidateTree((), ())])
def test_an_absent_tree_draws_one_token_of_the_target(tree):
    found = Counter(evaluate_tree(tree, [], [], u, row(0.25, 0, 0.75)) for (u,) in grid(100, 1))
    assert found == {TreeRun((0,), (), True): 25, TreeRun((2,), (), True): 75}


def test_candidates_that_hold_all_the_mass_are_accepted_whatever_rounding_says():
    p = row(1 / 3, 1 / 3, 1 / 3)
    for order in ([0, 1, 2], [2, 0, 1]):
        run = evaluate_tree(CandidateTree(order, [ROOT] * 3), [p] * 3, [LAST_UNIFORM] * 3, 0.5)
        assert run.path == (2,)
    thin = row(1 - 2**-53, 2**-53, 0)
    run = evaluate_tree(CandidateTree([0, 1, 2], [ROOT] * 3), [thin] * 3, [LAST_UNIFORM] * 3, 0.5)
    assert run.path == (1,)
    single = row(0, 1, 0)
    assert evaluate_tree(CandidateTree([0, 1], [ROOT] * 2), [single] * 2, [0.0, LAST_UNIFORM], 0.5).path == (1,)


def test_a_depth_first_tree_is_a_tree():
    tree = CandidateTree([0, 1, 1, 0], [ROOT, 0, ROOT, 2])
    assert tree.levels() == [1, 2, 1, 2]
    assert tree.depth == 2
    assert tree.children(ROOT) == [0, 2]
    assert [tree.path(node) for node in (ROOT, 1, 3)] == [(), (0, 1), (1, 0)]
    rows = [FIRST, AFTER_0, FIRST, AFTER_1]
    assert evaluate_tree(tree, rows, [0.9, 0, 0.9, 0.39], 0).tokens == (1, 0)


def test_trees_and_rows_are_snapshots():
    tokens, parents = [0, 1], [ROOT, ROOT]
    tree = CandidateTree(tokens, parents)
    twin = CandidateTree([0, 1], [ROOT, ROOT])
    tokens[1], parents[1] = 0, 5
    assert tree == twin
    assert hash(tree) == hash(twin)
    with pytest.raises(AttributeError):
        tree.tokens = ()
    p = random_rows(7, 1, 4)[0]
    rows = torch.stack([p, p])
    before = rows.clone()
    evaluate_tree(tree, rows, [LAST_UNIFORM, LAST_UNIFORM], 0.5)
    assert torch.equal(rows, before)


BAD_TREES = [
    ([0, 1], [ROOT], "a tree has one parent for each token, got 1 for 2"),
    ([0, 1], [1, ROOT], "node 0 has parent 1: parents come before children, -1 is the root"),
    ([0], [0], "node 0 has parent 0: parents come before children, -1 is the root"),
    ([0], [-2], "node 0 has parent -2: parents come before children, -1 is the root"),
    ([0, 1, 1], [ROOT, 0, 0], "nodes 1 and 2 are siblings with the same token 1"),
    ([4, 5, 4], [ROOT] * 3, "nodes 0 and 2 are siblings with the same token 4"),
    ([-1], [ROOT], "node 0 has token -1, a token id is not negative"),
]


@pytest.mark.parametrize(("tokens", "parents", "sentence"), BAD_TREES)
def test_refused_trees(tokens, parents, sentence):
    with pytest.raises(ValueError, match="node|tree") as refusal:
        CandidateTree(tokens, parents)
    assert str(refusal.value) == sentence


TREE = CandidateTree([0, 1, 0], [ROOT, ROOT, 0])
REFUSALS = [
    ({"rows": [FIRST, FIRST]}, "target rows: expected 3 rows, got 2"),
    ({"rows": [FIRST, FIRST, row(1, 0, 0)]}, "target rows: rows must have equal vocabularies, got sizes [2, 3]"),
    (
        {"rows": [FIRST, AFTER_0, AFTER_0]},
        "nodes 0 and 1 are siblings with different target rows, one query scores both",
    ),
    ({"rows": [FIRST, FIRST, row(0.5, 0.25)]}, "target rows[2] has mass 0.75, a distribution has 1 within 1e-05"),
    ({"rows": [FIRST, FIRST, row(math.inf, 0)]}, "target rows[2][0] = inf is not finite"),
    ({"rows": [FIRST, FIRST, row(1.5, -0.5)]}, "target rows[2][1] = -0.5 is negative"),
    ({"accept_uniforms": [0.5, 0.5]}, "accept_uniforms: expected 3 uniforms, got shape (2,)"),
    ({"accept_uniforms": [0.5, 0.5, 1.0]}, "accept_uniforms[2] = 1.0 is outside [0, 1)"),
    ({"fallback": math.nan}, "fallback = nan is not finite, a uniform lies in [0, 1)"),
    ({"tree": CandidateTree([0, 2, 0], [ROOT, ROOT, 0])}, "token of node 1 = 2 is not a token id of a vocabulary of 2"),
    ({"prompt_row": row(1, 0, 0)}, "target rows: rows must have equal vocabularies, got sizes [2, 3]"),
    ({"prompt_row": AFTER_0}, "prompt_row differs from the target row of the first level, one query scores both"),
    ({"tree": None}, "target rows: expected 0 rows, got 3"),
    (
        {"tree": None, "rows": [], "accept_uniforms": []},
        "an absent tree needs prompt_row, the row that its only token is drawn from",
    ),
]


@pytest.mark.parametrize(("change", "sentence"), REFUSALS)
def test_refusals_although_the_first_level_is_rejected(change, sentence):
    given = {"tree": TREE, "rows": [FIRST, FIRST, AFTER_0], "accept_uniforms": [0.9, 0.5, 0.5], "fallback": 0.5}
    assert 2 not in evaluate_tree(**given).path
    with pytest.raises(ValueError, match=r"\w") as refusal:
        evaluate_tree(**(given | change))
    assert str(refusal.value) == sentence
