"""``sampling_policy`` residual: which rows of a readout draw, draw again or settle (``core.residual`` has the rule).

For lanes, whose proposals outlive a round, the memory is the worker's; for chains it lasts one round. Requests at
temperature 0 take part with laws of one token, which settle on that token whatever was proposed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from sglang_trunc.core.residual import NONE, Drafts, ResidualMemory, draw_first, draw_second, settle


class Cascade:
    """The residual policy over whatever identifies a row from readout to readout."""

    def __init__(self, memory: ResidualMemory):
        self.memory = memory

    def choose(
        self, keys: Sequence[Hashable], final: Sequence[bool], laws: Tensor, seeds: Tensor, positions: Tensor
    ) -> Tensor:
        """The token of each row: int64 ``[n]``.

        ``laws`` float64 ``[n, vocabulary]`` of the rows' readouts; ``final``: which of them are at full depth.
        ``seeds``, ``positions`` int64 ``[n]``.
        """
        known = [self.memory.get(key).t1 != NONE for key in keys]
        tokens = torch.zeros_like(seeds)
        for draw, rows in (
            (self._first, [i for i in range(len(keys)) if not final[i] and not known[i]]),
            (self._second, [i for i in range(len(keys)) if not final[i] and known[i]]),
            (self._settle, [i for i in range(len(keys)) if final[i]]),
        ):
            if rows:
                at = torch.tensor(rows, device=laws.device)
                tokens[at] = draw([keys[row] for row in rows], laws[at], seeds[at], positions[at])
        return tokens

    def _first(self, keys: Sequence[Hashable], laws: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        tokens = draw_first(laws, seeds, positions)
        for key, law, token in zip(keys, laws, tokens.tolist(), strict=True):
            self.memory.first(key, law, token)
        return tokens

    def _second(self, keys: Sequence[Hashable], laws: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        before = Drafts.stack([self.memory.get(key) for key in keys], laws)
        second = draw_second(before.q1, before.t1, laws, seeds, positions)
        for key, law, token, is_open in zip(keys, laws, second.tokens.tolist(), second.open.tolist(), strict=True):
            if is_open:
                self.memory.second(key, law, token)
        return second.tokens

    def _settle(self, keys: Sequence[Hashable], laws: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        proposed = [self.memory.take(key) for key in keys]
        drafts = Drafts.stack(proposed, laws) if any(row.t1 != NONE for row in proposed) else None
        return settle(laws, seeds, positions, drafts)
