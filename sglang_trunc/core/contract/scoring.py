"""Target rows of a tree: what is asked, in how many calls, and which node each answer scores.

The query of node x is the prompt and x's ancestors, x EXCLUDED; the row that comes back is the distribution of the
token at x's place. Siblings share one query, leaves ask nothing. Three adapters ask the same queries and give the same
rows; they differ in calls alone: one a query, one a level, one in all. ``Readout`` checks that rows come back one for
each context and in order, before any row is given to a node.

No tensor tree-attention mask, kernel or KV is involved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_trunc.core.contract.readout import Context, Readout
from sglang_trunc.core.contract.tree import ROOT, CandidateTree


class TreeQueries(NamedTuple):
    """The unique parent contexts of a tree."""

    contexts: tuple[Context, ...]  # the prompt, then prompt + path of each node with children, by node id
    levels: tuple[int, ...]  # level of the nodes that each query scores; 1 for the prompt
    of_node: tuple[int, ...]  # index of each node's query


class ScoredTree(NamedTuple):
    """A tree and its target rows, ready for ``evaluate_tree``."""

    tree: CandidateTree
    rows: Tensor  # float64 [nodes, vocabulary]: row x scores node x
    prompt_row: Tensor  # float64 [vocabulary]: the first level's row, or the whole answer of an absent tree


Scorer = Callable[[Readout, CandidateTree | None, Context], ScoredTree]


def tree_queries(tree: CandidateTree | None, prompt: Context) -> TreeQueries:
    """What has to be asked. An absent tree (None or empty) asks the prompt alone."""
    tree = CandidateTree((), ()) if tree is None else tree
    asking = [ROOT, *sorted(set(tree.parents) - {ROOT})]
    index = {parent: at for at, parent in enumerate(asking)}
    levels = tree.levels()
    return TreeQueries(
        tuple(tuple(prompt) + tree.path(parent) for parent in asking),
        tuple(1 if parent == ROOT else levels[parent] + 1 for parent in asking),
        tuple(index[parent] for parent in tree.parents),
    )


def score_tree_from_model(target: Readout, tree: CandidateTree | None, prompt: Context) -> ScoredTree:
    """Sequential reference: one call a query."""
    queries = tree_queries(tree, prompt)
    return _align(tree, queries, _stack([target.row(context) for context in queries.contexts]))


def score_tree_layers_from_batch_model(target: Readout, tree: CandidateTree | None, prompt: Context) -> ScoredTree:
    """One call a level, all parents of that level in it."""
    queries = tree_queries(tree, prompt)
    rows: dict[int, Tensor] = {}
    for level in range(1, max(queries.levels) + 1):
        asked = [at for at, found in enumerate(queries.levels) if found == level]
        rows.update(zip(asked, target.rows([queries.contexts[at] for at in asked]), strict=True))
    return _align(tree, queries, _stack([rows[at] for at in range(len(rows))]))


def score_tree_from_batch_model(target: Readout, tree: CandidateTree | None, prompt: Context) -> ScoredTree:
    """One call with all unique parent contexts."""
    queries = tree_queries(tree, prompt)
    return _align(tree, queries, target.rows(queries.contexts))


def _stack(rows: list[Tensor]) -> Tensor:
    """Checked rows of several calls as one: float64 [queries, vocabulary]."""
    sizes = sorted({len(row) for row in rows})
    if len(sizes) > 1:
        raise ValueError(f"model rows: rows must have equal vocabularies, got sizes {sizes}")
    return torch.stack(rows)


def _align(tree: CandidateTree | None, queries: TreeQueries, rows: Tensor) -> ScoredTree:
    """Rows by query, float64 [queries, vocabulary], to rows by node."""
    tree = CandidateTree((), ()) if tree is None else tree
    return ScoredTree(tree, rows[list(queries.of_node)], rows[0].clone())
