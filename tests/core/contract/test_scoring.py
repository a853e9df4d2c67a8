"""Which contexts are asked, in how many calls and what order, and which node each answer scores."""

from __future__ import annotations

import pytest
import torch

from sglang_trunc.core.contract.readout import QueryCounts, Readout, ScoredContext
from sglang_trunc.core.contract.scoring import (
    score_tree_from_batch_model,
    score_tree_from_model,
    score_tree_layers_from_batch_model,
    tree_queries,
)
from sglang_trunc.core.contract.tree import ROOT, CandidateTree
from tests.core.contract.toy import Spoiled, ToyModel, row

PROMPT = (9, 8)
#        0     1
#      2   3   4
#      5
TREE = CandidateTree([0, 1, 0, 2, 1, 2], [ROOT, ROOT, 0, 0, 1, 2])
DEPTH_FIRST = CandidateTree([0, 1, 2, 1, 0], [ROOT, 0, 1, ROOT, 3])
SCORERS = [score_tree_from_model, score_tree_layers_from_batch_model, score_tree_from_batch_model]
BATCHED = SCORERS[1:]


def test_queries_exclude_the_token_that_they_score():
    queries = tree_queries(TREE, PROMPT)
    assert queries.contexts == ((9, 8), (9, 8, 0), (9, 8, 1), (9, 8, 0, 0))
    assert queries.levels == (1, 2, 2, 3)
    assert queries.of_node == (0, 0, 1, 1, 2, 3)


@pytest.mark.parametrize("score", SCORERS)
@pytest.mark.parametrize("tree", [TREE, DEPTH_FIRST])
def test_every_node_gets_the_row_after_its_ancestors(score, tree):
    model = ToyModel(vocabulary=4)
    scored = score(Readout(model, 4), tree, PROMPT)
    assert scored.tree is tree
    for node in range(len(tree)):
        assert torch.allclose(scored.rows[node], model.row(PROMPT + tree.path(node)[:-1]), atol=1e-15)
    assert torch.equal(scored.prompt_row, scored.rows[0])


@pytest.mark.parametrize("tree", [TREE, DEPTH_FIRST, CandidateTree((), ()), None])
def test_all_adapters_agree_to_the_bit(tree):
    found = [score(Readout(ToyModel(vocabulary=997), 4), tree, PROMPT) for score in SCORERS]
    for scored in found[1:]:
        assert torch.equal(scored.rows, found[0].rows)
        assert torch.equal(scored.prompt_row, found[0].prompt_row)


@pytest.mark.parametrize(("score", "calls"), zip(SCORERS, [4, 3, 1], strict=True))
def test_actual_calls_and_their_order(score, calls):
    model = ToyModel()
    readout = Readout(model, 3)
    score(readout, TREE, PROMPT)
    assert readout.counts == QueryCounts(queries=4, calls=calls)
    assert len(model.calls) == calls
    assert [context for _, asked in model.calls for context in asked] == list(tree_queries(TREE, PROMPT).contexts)
    assert {depth for depth, _ in model.calls} == {3}
    if calls == 3:
        assert [len(asked) for _, asked in model.calls] == [1, 2, 1]


@pytest.mark.parametrize("score", SCORERS)
@pytest.mark.parametrize("tree", [None, CandidateTree((), ())])
def test_an_absent_tree_asks_the_prompt(score, tree):
    model = ToyModel()
    scored = score(Readout(model, 4), tree, PROMPT)
    assert model.calls == [(4, (PROMPT,))]
    assert scored.rows.shape == (0, 3)
    assert torch.allclose(scored.prompt_row, model.row(PROMPT))


def test_rows_of_a_scored_tree_are_its_own():
    model = ToyModel()
    scored = score_tree_from_batch_model(Readout(model, 4), TREE, PROMPT)
    before = scored.rows.clone()
    for given in model._rows.values():
        given.zero_()
    scored.prompt_row.zero_()
    assert torch.equal(scored.rows, before)


@pytest.mark.parametrize("score", BATCHED)
def test_rows_out_of_order_are_refused(score):
    model = Spoiled(lambda scored: scored[::-1])
    with pytest.raises(ValueError, match=r"the model returned row \d for context .* rows stay in context order"):
        score(Readout(model, 4), TREE, PROMPT)


@pytest.mark.parametrize("score", SCORERS)
@pytest.mark.parametrize("change", [-1, 1])
def test_missing_and_extra_rows_are_refused(score, change):
    model = Spoiled(lambda scored: scored[:-1] if change < 0 else [*scored, scored[-1]])
    asked = 4 if score is score_tree_from_batch_model else 1
    with pytest.raises(ValueError, match=f"the model returned {asked + change} rows for {asked} contexts"):
        score(Readout(model, 4), TREE, PROMPT)


def test_the_sentence_for_a_wrong_context():
    model = Spoiled(lambda scored: [ScoredContext((1,), scored[0].row)])
    with pytest.raises(ValueError, match="row") as refusal:
        score_tree_from_model(Readout(model, 4), TREE, PROMPT)
    assert str(refusal.value) == (
        "the model returned row 0 for context (1,), expected (9, 8): rows stay in context order"
    )


@pytest.mark.parametrize("score", SCORERS)
def test_unequal_vocabularies_are_refused(score):
    model = Spoiled(lambda scored: [one if len(one.context) < 4 else one._replace(row=row(0.5, 0.5)) for one in scored])
    with pytest.raises(ValueError, match="rows must have equal vocabularies") as refusal:
        score(Readout(model, 4), TREE, PROMPT)
    assert str(refusal.value) == "model rows: rows must have equal vocabularies, got sizes [2, 3]"


@pytest.mark.parametrize("score", SCORERS)
def test_rows_that_are_no_distributions_are_refused(score):
    model = Spoiled(lambda scored: [one._replace(row=one.row / 2) for one in scored])
    with pytest.raises(ValueError, match=r"model rows\[0\] has mass 0\.5"):
        score(Readout(model, 4), TREE, PROMPT)


@pytest.mark.parametrize("depth", [0, 5])
def test_depths_outside_the_model_are_refused(depth):
    with pytest.raises(ValueError, match=f"depth = {depth} is outside 1 to 4, the model's recurrences"):
        Readout(ToyModel(), depth)


def test_counts_are_snapshots():
    readout = Readout(ToyModel(), 4)
    before = readout.counts
    readout.rows([(1,), (2,)])
    readout.rows([])
    assert before == QueryCounts(0, 0)
    assert readout.counts == QueryCounts(2, 1)
