"""Candidate trees: order, ties, widths by entropy, depths by acceptance, and what the draft was asked."""

from __future__ import annotations

import math

import pytest
import torch

from sglang_trunc.core.contract.builder import (
    AdaptiveTreePolicy,
    build,
    build_adaptive,
    build_from_model,
    normalised_entropy,
)
from sglang_trunc.core.contract.readout import Readout, ScoredContext
from sglang_trunc.core.contract.tree import ROOT
from tests.core.contract.toy import ToyModel, random_rows, row

PROMPT = (5,)


class Scripted:
    """A draft whose row depends on the last token alone."""

    recurrences = 2

    def __init__(self, rows):
        self.rows = rows

    def next_rows(self, contexts, depth):
        return [ScoredContext(context, self.rows[context[-1]]) for context in contexts]


CERTAIN, UNIFORM, TILTED = row(1, 0, 0, 0), row(0.25, 0.25, 0.25, 0.25), row(0.5, 0, 0.5, 0)
SCRIPT = Readout(Scripted({5: UNIFORM, 0: CERTAIN, 1: UNIFORM, 2: TILTED, 3: CERTAIN}), 1)


def test_fixture_tree_is_the_same_below_every_parent():
    tree = build([torch.tensor([0.0, 2.0, 1.0]), torch.tensor([5.0, -1.0, 7.0])], [2, 2])
    assert tree.tokens == (1, 2, 2, 0, 2, 0)
    assert tree.parents == (ROOT, ROOT, 0, 0, 1, 1)


def test_ties_go_to_the_lowest_id():
    logits = torch.zeros(2000)
    logits[[1500, 7]] = 1.0
    assert build([logits], [4]).tokens == (7, 1500, 0, 1)


def test_candidates_are_the_most_probable_tokens_after_the_parents_own_prefix():
    model = ToyModel(vocabulary=6)
    tree = build_from_model(Readout(model, 2), PROMPT, [2, 3, 1])
    assert [tree.levels().count(level) for level in (1, 2, 3)] == [2, 6, 6]
    for parent in (ROOT, *(node for node in range(8))):
        expected = model.row(PROMPT + tree.path(parent), 2).argsort(descending=True).tolist()
        found = [tree.tokens[node] for node in tree.children(parent)]
        assert found == expected[: len(found)]
        assert len(found) == (2 if parent == ROOT else 3 if parent < 2 else 1)
    assert len({tree.tokens[at : at + 3] for at in (2, 5)}) == 2  # parents differ, so do their children


def test_every_parent_is_asked_once_and_no_leaf_is():
    model = ToyModel(vocabulary=6)
    draft = Readout(model, 2)
    tree = build_from_model(draft, PROMPT, [2, 3, 1])
    asked = [PROMPT + tree.path(parent) for parent in (ROOT, *range(8))]
    assert [context for _, contexts in model.calls for context in contexts] == asked
    assert draft.counts == (9, 3)


@pytest.mark.parametrize(
    ("row_given", "entropy"), [(CERTAIN, 0), (UNIFORM, 1), (TILTED, 0.5), (row(1), 0), (row(0.5, 0.5), 1)]
)
def test_normalised_entropy(row_given, entropy):
    assert normalised_entropy(row_given) == pytest.approx(entropy)


def test_width_follows_the_parents_entropy():
    policy = AdaptiveTreePolicy(min_width=1, max_width=4)
    assert [policy.width(given) for given in (CERTAIN, TILTED, UNIFORM)] == [1, 3, 4]
    assert AdaptiveTreePolicy(min_width=1, max_width=9).width(UNIFORM) == 4  # no more than the vocabulary
    widths = [policy.width(given) for given in random_rows(0, 200, 8)]
    assert set(widths) <= {1, 2, 3, 4}
    tree = build_adaptive(SCRIPT, PROMPT, policy, 2)
    assert tree.tokens == (0, 1, 2, 3, 0, 0, 1, 2, 3, 0, 2, 1, 0)
    assert tree.parents == (ROOT, ROOT, ROOT, ROOT, 0, 1, 1, 1, 1, 2, 2, 2, 3)


def test_the_node_budget_cuts_a_tree_and_its_queries():
    model = ToyModel(vocabulary=9, sharpness=0.1)
    draft = Readout(model, 1)
    policy = AdaptiveTreePolicy(min_width=3, max_width=3, max_nodes=5)
    tree = build_adaptive(draft, PROMPT, policy, 4)
    assert tree.parents == (ROOT, ROOT, ROOT, 0, 0)
    assert draft.counts == (3, 2)  # of the three parents only as many as could have a child


def test_depth_grows_and_shrinks_with_acceptance():
    policy = AdaptiveTreePolicy(min_depth=1, start_depth=2, max_depth=3, grow_at=0.75, shrink_at=0.5)
    assert [policy.next_depth(2, 4, accepted) for accepted in range(5)] == [1, 1, 2, 3, 3]
    assert policy.next_depth(3, 3, 3) == 3
    assert policy.next_depth(1, 1, 0) == 1
    assert policy == AdaptiveTreePolicy(min_depth=1, start_depth=2, max_depth=3, grow_at=0.75, shrink_at=0.5)


@pytest.mark.parametrize(("proposed", "accepted"), [(0, 0), (2, 3), (2, -1)])
def test_refused_acceptances(proposed, accepted):
    with pytest.raises(ValueError, match="accepts") as refusal:
        AdaptiveTreePolicy().next_depth(2, proposed, accepted)
    assert str(refusal.value) == (
        f"a round accepts 0 to all of at least 1 proposed level, got {accepted} of {proposed}"
    )


BAD_POLICIES = [
    ({"min_width": 0}, "widths need 1 <= min_width <= max_width, got 0, 4"),
    ({"min_width": 5}, "widths need 1 <= min_width <= max_width, got 5, 4"),
    ({"min_depth": 0}, "depths need 1 <= min_depth <= start_depth <= max_depth, got 0, 3, 8"),
    ({"start_depth": 9}, "depths need 1 <= min_depth <= start_depth <= max_depth, got 1, 9, 8"),
    ({"shrink_at": 0.8}, "rates need 0 <= shrink_at <= grow_at <= 1, got 0.8, 0.75"),
    ({"grow_at": 1.5}, "rates need 0 <= shrink_at <= grow_at <= 1, got 0.35, 1.5"),
    ({"max_nodes": 0}, "max_nodes = 0, a tree has at least one node"),
]


@pytest.mark.parametrize(("change", "sentence"), BAD_POLICIES)
def test_refused_policies(change, sentence):
    with pytest.raises(ValueError, match=r"\w") as refusal:
        AdaptiveTreePolicy(**change)
    assert str(refusal.value) == sentence


ROW = torch.tensor([0.0, 1.0])
BAD_BUILDS = [
    ([ROW], [1, 1], "depth_logits: expected 2 rows, one for each width, got 1"),
    ([ROW, torch.zeros(3)], [1, 1], "depth_logits: rows must have equal vocabularies, got sizes [2, 3]"),
    ([ROW, torch.tensor([math.nan, 0])], [1, 1], "depth_logits[1] has a logit that is not finite"),
    ([ROW], [3], "width 3 is outside 1 to 2, the vocabulary"),
    ([ROW], [0], "width 0 is outside 1 to 2, the vocabulary"),
]


@pytest.mark.parametrize(("logits", "widths", "sentence"), BAD_BUILDS)
def test_refused_fixtures(logits, widths, sentence):
    with pytest.raises(ValueError, match=r"\w") as refusal:
        build(logits, widths)
    assert str(refusal.value) == sentence


def test_refused_model_builds():
    with pytest.raises(ValueError, match="width 4 is outside 1 to 3, the vocabulary"):
        build_from_model(Readout(ToyModel(), 1), PROMPT, [1, 4])
    with pytest.raises(ValueError, match="depth = 0, a tree has at least one level"):
        build_adaptive(Readout(ToyModel(), 1), PROMPT, AdaptiveTreePolicy(), 0)


def test_no_levels_is_an_absent_tree():
    draft = Readout(ToyModel(), 1)
    assert len(build_from_model(draft, PROMPT, [])) == 0
    assert draft.counts == (0, 0)
