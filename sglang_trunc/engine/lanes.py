"""The ``LaneEngine`` over a served model: chains of nodes behind each request, for block schedules.

A node's state is row ``request * width + offset`` of the state bank, its slot the one that SGLang reserved for
its position. ``rows`` runs them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_trunc.core.looped import Nodes
from sglang_trunc.engine.rows import RowRunner, Rows


class SGLangLanes:
    """Runs nodes through the served model (``core.looped.LaneEngine``)."""

    def __init__(self, runner: RowRunner, width: int):
        """``width``: nodes of a request; the runner's capacity is at least that many for every request."""
        self.runner = runner
        self.recurrences = runner.recurrences
        self.width = width
        self._loaded: Nodes | None = None
        self._rows: Rows | None = None

    def begin(self, req_pool_indices: Tensor, seq_lens: Tensor) -> None:
        """Name the batch that the nodes of the coming round belong to. Both int64 ``[bs]``."""
        self._request_rows = req_pool_indices.to(torch.int64)
        self._first = seq_lens.to(torch.int64)
        self._loaded = None

    def start(self, nodes: Nodes, token_ids: Tensor) -> None:
        self.runner.embed(self._load(nodes), token_ids)

    def advance(self, nodes: Nodes, first_step: int, last_step: int) -> None:
        rows = self._load(nodes)
        rows.kv_offset[: rows.real] = first_step * self.runner.pool.rows_per_step
        self.runner.advance(rows, last_step - first_step)

    def readout(self, nodes: Nodes) -> Tensor:
        return self.runner.readout(self._load(nodes))

    def hidden(self, nodes: Nodes) -> Tensor:
        """What the head reads for these nodes: ``[n, d]``."""
        return self.runner.read_hidden(self._load(nodes))

    def _load(self, nodes: Nodes) -> Rows:
        """Fill the row buffers for these nodes, unless the last call's nodes are asked for again."""
        if nodes is self._loaded and self._rows is not None:
            return self._rows
        real = len(nodes)
        rows = self.runner.take(real)
        table = self.runner.req_to_token
        request_rows = self._request_rows[nodes.request]
        positions = self._first[nodes.request] + nodes.offset
        rows.bank[:real] = nodes.request * self.width + nodes.offset
        rows.positions[:real] = positions
        rows.slots[:real] = table[request_rows, positions]
        rows.kv_start[:real] = request_rows * table.shape[1]
        rows.kv_len[:real] = positions + 1
        self._loaded, self._rows = nodes, rows
        return rows
