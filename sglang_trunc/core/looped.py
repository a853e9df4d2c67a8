"""The protocol between a schedule and whatever runs the looped model.

A schedule (``trunc``) decides which nodes exist and how deep they go; a ``LaneEngine`` runs them. Nodes are
addressed by (request, offset): ``request`` indexes the batch, ``offset`` counts from the request's first
uncommitted position, so offset 0 is the bonus token of the round before. The engine keeps each node's state
between calls; a node advanced to step s continues from there, nothing is computed twice.

The same schedule runs over the SGLang engine (``engine.lanes``), over the plain-torch reference model in the
tests, and over a recorded trace in a simulation.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class Nodes(NamedTuple):
    """Addresses of ``n`` nodes, ordered by request, then offset (parents before children)."""

    request: Tensor  # int64 [n]
    offset: Tensor  # int64 [n]

    def __len__(self) -> int:
        return self.request.shape[0]


class LaneEngine(Protocol):
    """Runs nodes through the depths. Steps are 0-based; depth = number of executed steps."""

    recurrences: int

    def start(self, nodes: Nodes, token_ids: Tensor) -> None:
        """Embedding and prelude of new nodes. ``token_ids`` int64 [n]."""

    def advance(self, nodes: Nodes, first_step: int, last_step: int) -> None:
        """Run steps ``[first_step, last_step)`` on nodes that have just finished step ``first_step - 1``."""

    def readout(self, nodes: Nodes) -> Tensor:
        """Logits at the nodes' present depth: float32 [n, vocabulary]."""
