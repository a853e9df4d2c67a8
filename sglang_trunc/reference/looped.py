"""What both families have in common: depth is an argument, never a property of the weights.

    context, state = model.begin(ids)        embedding and prelude; the state that enters the loop
    state = model.advance(context, state)    one recurrence (one core step over all positions)
    logits = model.readout(context, state)   coda, norm and head at whatever depth the state has reached

ids are int64 [S] or [B, S]; states are [..., S, width]; logits are [..., S, V] in the model's dtype. Depth
counts executed recurrences, 1-based. `state` arguments replace the state that enters the first recurrence
(Ouro: the embedding, Raven: the initial state). Nothing here keeps a cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from sglang_trunc.reference.blocks import RotaryTables
from sglang_trunc.reference.configs import OuroReferenceConfig, RavenReferenceConfig


class Context(NamedTuple):
    """What stays the same in every recurrence of one forward pass."""

    rotary: RotaryTables
    injected: torch.Tensor | None  # [B, S, width]: Raven's prelude output; None for Ouro


class LoopedReference(nn.Module):
    config: OuroReferenceConfig | RavenReferenceConfig
    full_depth: int  # R
    vocab_size: int
    width: int

    def begin(self, ids: torch.Tensor, state: torch.Tensor | None = None) -> tuple[Context, torch.Tensor]:
        """Context and entering state, both with a batch dimension: [S] ids count as a batch of one."""
        raise NotImplementedError

    def advance(self, context: Context, state: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def readout(self, context: Context, state: torch.Tensor, last_only: bool = False) -> torch.Tensor:
        raise NotImplementedError

    def forward(
        self,
        ids: torch.Tensor,
        depth: int | None = None,
        state: torch.Tensor | None = None,
        last_only: bool = False,
    ) -> torch.Tensor:
        """Logits [..., S, V] (or [..., 1, V]) at `depth`, by default the full one."""
        depth = self.full_depth if depth is None else depth
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        context, state = self.begin(ids, state)
        for _ in range(depth):
            state = self.advance(context, state)
        logits = self.readout(context, state, last_only)
        return logits if ids.dim() == 2 else logits[0]

    def all_depths(
        self, ids: torch.Tensor, depth: int | None = None, state: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits of depths 1..depth, [R, ..., S, V]: entry d - 1 equals forward(ids, depth=d)."""
        context, state = self.begin(ids, state)
        per_depth = []
        for _ in range(self.full_depth if depth is None else depth):
            state = self.advance(context, state)
            per_depth.append(self.readout(context, state))
        logits = torch.stack(per_depth)
        return logits if ids.dim() == 2 else logits[:, 0]


def batched(ids: torch.Tensor, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Adds the batch dimension that [S] ids (and their [S, width] state) lack."""
    if ids.dim() == 2:
        return ids, state
    if ids.dim() != 1:
        raise ValueError(f"ids must be [S] or [B, S], got shape {tuple(ids.shape)}")
    return ids[None], None if state is None else state[None]
