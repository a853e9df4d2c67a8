"""Random lanes over a pool in which every slot that no lane may read holds NaN."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

STEPS = 3
POISON_SLOT = 0  # in the spare entries of tails; no lane owns it, so it holds NaN at every step


class Scene(NamedTuple):
    """Arguments of lane attention, but ``out`` and ``scale``."""

    q: Tensor
    k_rows: Tensor
    v_rows: Tensor
    table: Tensor  # int32, flat: one row a request
    start: Tensor
    length: Tensor
    offset: Tensor
    kv_heads: int
    tails: Tensor
    shared: Tensor

    def rows(self, chosen: list[int]) -> Scene:
        """The same pool with these lanes alone, in this order."""
        index = torch.tensor(chosen, dtype=torch.int64, device=self.q.device)
        names = ("q", "start", "length", "offset", "tails", "shared")
        return self._replace(**{name: getattr(self, name)[index] for name in names})

    def run(self, attend, with_tails: bool = True, **options) -> Tensor:
        """What ``attend`` writes: float32 [rows, Hq*D]."""
        out = torch.full_like(self.q, float("nan"))
        tails = (self.tails, self.shared) if with_tails else ()
        pool = (self.k_rows, self.v_rows, self.table, self.start, self.length, self.offset)
        attend(self.q, *pool, out, self.kv_heads**-0.5 / 8, self.kv_heads, *tails, **options)
        return out


def lanes(seed: int, lengths: list[int], tail_lengths: list[int], kv_heads: int, group: int, dim: int) -> Scene:
    """Lane r has ``lengths[r]`` tokens, the last ``tail_lengths[r]`` of them in its tail; two lanes share a request."""
    gen = torch.Generator().manual_seed(seed)
    rows, width = len(lengths), max(lengths) + 3
    requests = rows // 2 + 1
    tail_width = max(tail_lengths) + 1
    slots = 1 + requests * width + rows * tail_width
    order = 1 + torch.randperm(slots - 1, generator=gen)
    table = order[: requests * width].view(requests, width)
    tails = order[requests * width :].view(rows, tail_width).int()
    length, own = torch.tensor(lengths), torch.tensor(tail_lengths)
    start = torch.arange(rows) // 2 * width
    offset = torch.randint(STEPS, (rows,), generator=gen) * slots
    shape = (STEPS * slots, kv_heads * dim)
    k_rows, v_rows = torch.full((2, *shape), float("nan"))
    for row in range(rows):
        stretch = table.view(-1)[start[row] : start[row] + length[row] - own[row]]
        read = torch.cat((stretch, tails[row, : own[row]])) + offset[row]
        k_rows[read] = torch.randn(len(read), shape[1], generator=gen)
        v_rows[read] = torch.randn(len(read), shape[1], generator=gen)
        tails[row, own[row] :] = POISON_SLOT
    q = torch.randn(rows, kv_heads * group * dim, generator=gen)
    return Scene(q, k_rows, v_rows, table.flatten().int(), start, length, offset, kv_heads, tails, length - own)


def on(scene: Scene, device: str) -> Scene:
    """The scene on a device."""
    return Scene(*(part.to(device) if isinstance(part, Tensor) else part for part in scene))
