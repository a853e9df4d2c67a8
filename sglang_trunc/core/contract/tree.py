"""Trees of deterministic candidates and their residual verification.

A candidate is fixed before the target is asked: a point mass, not a draw from the builder's row. So the rule is not
p / q. Among siblings, in their order, r starts as the target's row p; candidate x is accepted with r(x), else its mass
is removed and r renormalised. If every sibling fails, the replacement is drawn from what is left and the round ends.
On acceptance only that branch is followed; behind an accepted leaf the round ends without another token.

Law: x is emitted with p(x), and every y != x with (1 - p(x)) * p(y) / (1 - p(x)) = p(y); the same again for the next
sibling and at every accepted prefix. Needs independent draws and a target whose rows depend on the context alone.

This is residual sampling of fixed candidates, neither SpecInfer's serving system nor its multi-draft sampling.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_trunc.core.contract.readout import Context
from sglang_trunc.core.contract.rows import (
    Rows,
    Uniforms,
    as_row,
    as_rows,
    as_token,
    as_uniform,
    as_uniforms,
    draw_token,
)

ROOT = -1  # the parent of first-level candidates: the prompt itself


@dataclass(frozen=True, init=False)
class CandidateTree:
    """Candidate ``x`` is ``tokens[x]`` after the path to ``parents[x]``; siblings stand in the order they are tried in.

    ``ValueError``: unequal lengths, a child before its parent, a token twice among siblings, a negative token id.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]  # ROOT, or a smaller node id

    def __init__(self, tokens: Iterable[int], parents: Iterable[int]):
        object.__setattr__(self, "tokens", tuple(tokens))  # copies: later changes of the caller's lists stay outside
        object.__setattr__(self, "parents", tuple(parents))
        if len(self.tokens) != len(self.parents):
            raise ValueError(f"a tree has one parent for each token, got {len(self.parents)} for {len(self.tokens)}")
        seen: dict[tuple[int, int], int] = {}
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if not ROOT <= parent < node:
                raise ValueError(f"node {node} has parent {parent}: parents come before children, {ROOT} is the root")
            if token < 0:
                raise ValueError(f"node {node} has token {token}, a token id is not negative")
            twin = seen.setdefault((parent, token), node)
            if twin != node:
                raise ValueError(f"nodes {twin} and {node} are siblings with the same token {token}")

    def __len__(self) -> int:
        return len(self.tokens)

    def children(self, parent: int) -> list[int]:
        """Node ids below ``parent``, in the order they are tried in."""
        return [node for node in range(len(self)) if self.parents[node] == parent]

    def path(self, node: int) -> Context:
        """Tokens from the first level to ``node``, itself included; of ``ROOT``: none."""
        tokens: list[int] = []
        while node != ROOT:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tuple(reversed(tokens))

    def levels(self) -> list[int]:
        """Level of each node; the first is 1."""
        levels: list[int] = []
        for parent in self.parents:
            levels.append(1 if parent == ROOT else levels[parent] + 1)
        return levels

    @property
    def depth(self) -> int:
        """Levels of the tree; the most tokens that a round can emit."""
        return max(self.levels(), default=0)


class TreeRun(NamedTuple):
    """What a round emits."""

    tokens: tuple[int, ...]  # accepted candidates, then the replacement if one was drawn
    path: tuple[int, ...]  # node ids of the accepted candidates
    replaced: bool  # False: the round ended behind an accepted leaf


def evaluate_tree(
    tree: CandidateTree | None,
    rows: Rows,
    accept_uniforms: Uniforms,
    fallback: float,
    prompt_row: Tensor | None = None,
) -> TreeRun:
    """One round over a tree.

    ``rows``: floating [nodes, vocabulary]; row x is the target's distribution after the prompt and x's ancestors, x
    EXCLUDED, which is the row that scores x; siblings have the same one. ``accept_uniforms``: [nodes], by node id.
    ``fallback``: one uniform, draws the replacement. ``prompt_row``: the row after the prompt. Needed where the tree is
    absent (None or empty): then one token is drawn from it. Else, if given, it must be the first level's row.

    ``ValueError``: counts, unequal vocabularies, rows that are no distributions, uniforms outside [0, 1), a token
    outside the vocabulary, siblings with different rows, an absent tree without ``prompt_row``.
    """
    nodes = 0 if tree is None else len(tree)
    root = None if prompt_row is None else as_row(prompt_row, "prompt row")
    p = as_rows(rows, "target rows", count=nodes, vocabulary=None if root is None else len(root))
    coins = as_uniforms(accept_uniforms, "accept_uniforms", nodes)
    last = as_uniform(fallback, "fallback")
    if tree is None or not nodes:
        if root is None:
            raise ValueError("an absent tree needs prompt_row, the row that its only token is drawn from")
        return TreeRun((draw_token(root, last),), (), True)
    _check_scores(tree, p, root)
    path: list[int] = []
    siblings = tree.children(ROOT)
    while siblings:
        accepted, left = _try_siblings(tree, siblings, p[siblings[0]], coins)
        if accepted is None:
            return TreeRun((*(tree.tokens[node] for node in path), draw_token(left, last)), tuple(path), True)
        path.append(accepted)
        siblings = tree.children(accepted)
    return TreeRun(tuple(tree.tokens[node] for node in path), tuple(path), False)


def _try_siblings(
    tree: CandidateTree, siblings: list[int], row: Tensor, coins: list[float]
) -> tuple[int | None, Tensor]:
    """The accepted node or None, and the weights that are left (r before it is renormalised)."""
    left = row.clone()
    for node in siblings:
        token = tree.tokens[node]
        # A candidate that holds all the mass has share 1 exactly and is accepted, so some is left after a rejection.
        if coins[node] < float(left[token] / left.sum()):
            return node, left
        left[token] = 0
    return None, left


def _check_scores(tree: CandidateTree, p: Tensor, root: Tensor | None) -> None:
    """Token ids inside the vocabulary, one row for all siblings."""
    first: dict[int, int] = {}
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        as_token(token, f"token of node {node}", p.shape[1])
        twin = first.setdefault(parent, node)
        if twin != node and not torch.equal(p[twin], p[node]):
            raise ValueError(f"nodes {twin} and {node} are siblings with different target rows, one query scores both")
    if root is not None and not torch.equal(p[first[ROOT]], root):
        raise ValueError("prompt_row differs from the target row of the first level, one query scores both")
