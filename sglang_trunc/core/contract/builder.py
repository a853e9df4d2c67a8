"""Where candidate trees come from: the most probable tokens of a draft depth, level by level.

Siblings are ordered by probability, the lowest id first on ties, and distinct. What a tree looks like may depend on
draft rows and on past rounds, never on the target's rows of this round or on a coin: then every shape is lossless.

* ``build``: one row of logits a level, whatever the parent. A fixture, no model behaves so.
* ``build_from_model``: fixed widths, one query for every actual parent prefix.
* ``build_adaptive``: the width below each parent from the normalised entropy of its row (``AdaptiveTreePolicy``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_trunc.core.contract.readout import Context, Readout
from sglang_trunc.core.contract.rows import Rows
from sglang_trunc.core.contract.tree import ROOT, CandidateTree


@dataclass(frozen=True)
class AdaptiveTreePolicy:
    """How wide and how deep. Immutable: the depth of the next round is a return value, its caller keeps it."""

    min_width: int = 1  # children of a parent whose row is certain
    max_width: int = 4  # children of a parent whose row is uniform
    min_depth: int = 1
    start_depth: int = 3
    max_depth: int = 8
    grow_at: float = 0.75  # accepted / proposed at or above it: one level more
    shrink_at: float = 0.35  # below it: one level less
    max_nodes: int = 64  # a wide tree grows exponentially

    def __post_init__(self) -> None:
        if not 1 <= self.min_width <= self.max_width:
            raise ValueError(f"widths need 1 <= min_width <= max_width, got {self.min_width}, {self.max_width}")
        if not 1 <= self.min_depth <= self.start_depth <= self.max_depth:
            raise ValueError(
                "depths need 1 <= min_depth <= start_depth <= max_depth, "
                f"got {self.min_depth}, {self.start_depth}, {self.max_depth}"
            )
        if not 0 <= self.shrink_at <= self.grow_at <= 1:
            raise ValueError(f"rates need 0 <= shrink_at <= grow_at <= 1, got {self.shrink_at}, {self.grow_at}")
        if self.max_nodes < 1:
            raise ValueError(f"max_nodes = {self.max_nodes}, a tree has at least one node")

    def width(self, row: Tensor) -> int:
        """Children below a parent with this checked draft row, float64 [vocabulary]; at most the vocabulary."""
        wide = self.min_width + math.floor(normalised_entropy(row) * (self.max_width - self.min_width) + 0.5)
        return min(wide, len(row))

    def next_depth(self, depth: int, proposed: int, accepted: int) -> int:
        """Levels to propose next, after a round at ``depth`` that proposed a tree of ``proposed`` levels and accepted a
        path of ``accepted`` candidates."""
        if not 0 <= accepted <= proposed or not proposed:
            raise ValueError(f"a round accepts 0 to all of at least 1 proposed level, got {accepted} of {proposed}")
        rate = accepted / proposed
        step = 1 if rate >= self.grow_at else -1 if rate < self.shrink_at else 0
        return min(max(depth + step, self.min_depth), self.max_depth)


def normalised_entropy(row: Tensor) -> float:
    """Shannon entropy of a checked row over the logarithm of its size: 0 for a certain row, 1 for a uniform one."""
    if len(row) == 1:
        return 0.0
    return min(float(torch.special.entr(row).sum()) / math.log(len(row)), 1.0)


def build(depth_logits: Rows, widths: Sequence[int]) -> CandidateTree:
    """Fixture tree: ``widths[l]`` children below every node of level l, the top of ``depth_logits[l]``.

    ``depth_logits``: floating [levels, vocabulary]. ``ValueError``: unequal counts or vocabularies, logits that are not
    finite, a width outside 1 to the vocabulary.
    """
    if len(depth_logits) != len(widths):
        raise ValueError(f"depth_logits: expected {len(widths)} rows, one for each width, got {len(depth_logits)}")
    sizes = sorted({len(row) for row in depth_logits})
    if len(sizes) > 1:
        raise ValueError(f"depth_logits: rows must have equal vocabularies, got sizes {sizes}")
    for level, row in enumerate(depth_logits):
        if not row.isfinite().all():
            raise ValueError(f"depth_logits[{level}] has a logit that is not finite")

    def children(level: int, parents: list[Context]) -> list[list[int]]:
        return [_top(depth_logits[level], _checked_width(widths[level], depth_logits[level]))] * len(parents)

    return _grow((), len(widths), None, children)


def build_from_model(draft: Readout, prompt: Context, widths: Sequence[int]) -> CandidateTree:
    """Tree of ``len(widths)`` levels: ``widths[l]`` children below every node of level l, the top of the draft's row
    after that node's own prefix. One query a parent, one call a level; leaves are not queried.

    ``ValueError``: a width outside 1 to the vocabulary; rows as in :class:`Readout`.
    """

    def children(level: int, parents: list[Context]) -> list[list[int]]:
        return [_top(row, _checked_width(widths[level], row)) for row in draft.rows(parents)]

    return _grow(tuple(prompt), len(widths), None, children)


def build_adaptive(draft: Readout, prompt: Context, policy: AdaptiveTreePolicy, depth: int) -> CandidateTree:
    """Tree of at most ``depth`` levels and ``policy.max_nodes`` nodes, each parent's width by its row's entropy.

    ``depth``: at least 1, and no more than the tokens still wanted. Queries as in :func:`build_from_model`.
    """
    if depth < 1:
        raise ValueError(f"depth = {depth}, a tree has at least one level")

    def children(level: int, parents: list[Context]) -> list[list[int]]:
        return [_top(row, policy.width(row)) for row in draft.rows(parents)]

    return _grow(tuple(prompt), depth, policy.max_nodes, children)


def _grow(
    prompt: Context, depth: int, max_nodes: int | None, children: Callable[[int, list[Context]], list[list[int]]]
) -> CandidateTree:
    """Breadth first, parents before children. ``children``: level and parent contexts to ordered tokens of each."""
    tokens: list[int] = []
    parents: list[int] = []
    level_nodes: list[tuple[int, Context]] = [(ROOT, prompt)]
    for level in range(depth):
        room = None if max_nodes is None else max_nodes - len(tokens)
        level_nodes = level_nodes[:room]  # each has a child at least, the others could have none
        if not level_nodes:
            break
        found = children(level, [context for _, context in level_nodes])
        born = [
            (node, context, token) for (node, context), below in zip(level_nodes, found, strict=True) for token in below
        ][:room]
        level_nodes = [(len(tokens) + at, (*context, token)) for at, (_, context, token) in enumerate(born)]
        tokens += [token for _, _, token in born]
        parents += [node for node, _, _ in born]
    return CandidateTree(tokens, parents)


def _checked_width(width: int, row: Tensor) -> int:
    if not 1 <= width <= len(row):
        raise ValueError(f"width {width} is outside 1 to {len(row)}, the vocabulary")
    return width


def _top(row: Tensor, width: int) -> list[int]:
    """The ``width`` largest entries' ids, largest first, lowest id first on ties (``topk`` promises no order there)."""
    order: list[int] = torch.sort(row, descending=True, stable=True).indices[:width].tolist()
    return order
