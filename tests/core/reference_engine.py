"""A ``LaneEngine`` without a cache over the reference model: every readout recomputes whole prefixes.

Tracks how far each node has been advanced, so that a schedule which reads a node at the wrong depth, or advances it
from a step it is not at, fails here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_trunc.core.looped import Nodes
from sglang_trunc.reference.looped import LoopedReference


class ReferenceLanes:
    """Requests are lists of committed tokens; nodes sit behind them."""

    def __init__(self, model: LoopedReference, committed: list[list[int]]):
        self.model = model
        self.committed = committed
        self.recurrences = model.full_depth
        self.tokens: dict[tuple[int, int], int] = {}
        self.depth: dict[tuple[int, int], int] = {}

    def start(self, nodes: Nodes, token_ids: Tensor) -> None:
        for node, token in zip(_keys(nodes), token_ids.tolist(), strict=True):
            request, offset = node
            assert offset == 0 or (request, offset - 1) in self.depth, "a node was started before its parent"
            self.tokens[node] = token
            self.depth[node] = 0

    def advance(self, nodes: Nodes, first_step: int, last_step: int) -> None:
        for node in _keys(nodes):
            assert self.depth[node] == first_step, f"node {node} is at {self.depth[node]}, not {first_step}"
            self.depth[node] = last_step

    def readout(self, nodes: Nodes) -> Tensor:
        keys = _keys(nodes)
        deepest = dict(keys)  # nodes are ordered, so the last one wins
        logits = {request: self.path_logits(request, offset) for request, offset in deepest.items()}
        return torch.stack([logits[request][len(self.committed[request]) + offset] for request, offset in keys])

    def path_logits(self, request: int, offset: int) -> Tensor:
        """Logits [positions, vocabulary] of the path to a node, at the node's depth."""
        depth = self.depth[request, offset]
        ancestors = [self.depth[request, i] for i in range(offset)]
        assert all(ancestor >= depth for ancestor in ancestors), "an ancestor is behind its child"
        path = self.committed[request] + [self.tokens[request, i] for i in range(offset + 1)]
        return self.model(torch.tensor(path), depth=depth).float()


def _keys(nodes: Nodes) -> list[tuple[int, int]]:
    return list(zip(nodes.request.tolist(), nodes.offset.tolist(), strict=True))
