"""Several candidates as one small tree of drafts.

A node's ``reach`` estimates that the text will pass through it. After n tokens that agreed in a row, the next agrees
with probability (n + 1) / (n + 2): Laplace's rule of succession. A candidate's match counts, and the drafts before the
node: so the j-th draft after a match of m is reached with (m + 1) / (m + 1 + j). Where candidates part, they share
what is left, better candidates first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sglang_trunc.core.lookup.candidates import Candidate

ROOT = -1  # the parent of first tokens: the end of the text


@dataclass(frozen=True)
class DraftTree:
    """Parents before children; of two nodes the earlier one is at least as likely to be reached."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]  # ROOT, or a smaller node id
    origins: tuple[int, ...]  # which of the merged candidates proposed the node, the best one where several did

    def __len__(self) -> int:
        return len(self.tokens)


class _Node(NamedTuple):
    token: int
    parent: int
    origin: int
    reach: float


def merge(candidates: Sequence[Candidate], budget: int) -> DraftTree:
    """The ``budget`` most promising nodes of all candidates, best candidate first in ``candidates``.

    One candidate gives a chain. Siblings have different tokens. ``ValueError``: a negative budget.
    """
    if budget < 0:
        raise ValueError(f"budget must not be negative, got {budget}")
    nodes = _trie(candidates)
    # A child's reach is below its parent's, so a cut by reach keeps whole paths; ties keep the candidates' order.
    chosen = sorted(range(len(nodes)), key=lambda node: -nodes[node].reach)[:budget]
    place = {node: at for at, node in enumerate(chosen)} | {ROOT: ROOT}
    return DraftTree(
        tuple(nodes[node].token for node in chosen),
        tuple(place[nodes[node].parent] for node in chosen),
        tuple(nodes[node].origin for node in chosen),
    )


def _trie(candidates: Sequence[Candidate]) -> list[_Node]:
    nodes: list[_Node] = []
    children: dict[tuple[int, int], int] = {}
    left = {ROOT: 1.0}  # by node: its reach without that of its children so far
    for origin, candidate in enumerate(candidates):
        node = ROOT
        for agreed, token in enumerate(candidate.tokens, start=candidate.match):
            child = children.setdefault((node, token), len(nodes))
            if child == len(nodes):
                reach = left[node] * (agreed + 1) / (agreed + 2)
                left[node] -= reach
                left[child] = reach
                nodes.append(_Node(token, node, origin, reach))
            node = child
    return nodes
