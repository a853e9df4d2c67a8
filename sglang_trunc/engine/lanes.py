"""The ``LaneEngine`` over a served model: lanes of many requests, each at its own step, in static buffers.

A lane's hidden state lives in a bank, addressed by ``request * width + offset``; a call gathers the rows it
advances, runs the model's own functions and scatters them back, so widths may change from call to call. What
a call reads is written into static row buffers first; padding rows point at the bank's spare row and at slot
0, SGLang's padding sink, with length 1. So a body depends on its bucket's width alone, as a captured graph
must.

Contract with the pool (``kv_pool``): slot t at step s is row ``s*N + t`` of a core layer; outside the core it
is row t. K/V of all rows of a call are written before any row attends, so a chain may be advanced in one
call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sglang_trunc.core.looped import Nodes
from sglang_trunc.engine.kv_pool import LoopedKVPool
from sglang_trunc.engine.lane_attention import LaneAttention
from sglang_trunc.models.looped import Attend, AttentionSite, LoopedCausalLM, LoopState


class RowBuffers:
    """Static inputs of one body, int64 ``[capacity]`` each; views of the first ``bucket`` rows are handed out."""

    def __init__(self, capacity: int, device: torch.device):
        def zeros() -> Tensor:
            return torch.zeros(capacity, dtype=torch.int64, device=device)

        self.bank = zeros()  # row of the state bank
        self.positions = zeros()
        self.slots = zeros()
        self.kv_start = zeros()  # offset of the lane's request in the flat req_to_token table
        self.kv_len = zeros()
        self.kv_offset = zeros()  # step * N
        self.write_locs = zeros()  # slot + step * N
        self.no_offset = zeros()  # stays zero: rows outside the core


class Rows:
    """One bucket's views of the row buffers."""

    def __init__(self, buffers: RowBuffers, real: int, bucket: int):
        self.real = real
        self.bucket = bucket
        for name, buffer in vars(buffers).items():
            setattr(self, name, buffer[:bucket])

    bank: Tensor
    positions: Tensor
    slots: Tensor
    kv_start: Tensor
    kv_len: Tensor
    kv_offset: Tensor
    write_locs: Tensor
    no_offset: Tensor


class SGLangLanes:
    """Runs nodes through the served model (``core.looped.LaneEngine``)."""

    def __init__(
        self,
        model: LoopedCausalLM,
        pool: LoopedKVPool,
        req_to_token: Tensor,
        attention: LaneAttention,
        width: int,
        max_requests: int,
        buckets: Sequence[int] = (),
    ):
        """``width``: nodes of a request. ``buckets``: row counts of the bodies; a call that fits none runs unpadded."""
        self.model = model
        self.pool = pool
        self.attention = attention
        self.recurrences = model.shape.recurrences
        self.req_to_token = req_to_token
        self.kv_indices = req_to_token.view(-1)
        self.width = width
        self.buckets = sorted(buckets)
        capacity = max(width * max_requests, *self.buckets, 1)
        self.spare = capacity
        config, device = model.config, req_to_token.device
        dtype = model.lm_head.weight.dtype
        self.hidden = torch.zeros(capacity + 1, config.hidden_size, dtype=dtype, device=device)
        self.injected: Tensor | None = None
        if model.injects:
            self.injected = torch.zeros_like(self.hidden)
        self.buffers = RowBuffers(capacity, device)
        self._loaded: Nodes | None = None
        self._rows: Rows | None = None

    def begin(self, req_pool_indices: Tensor, seq_lens: Tensor) -> None:
        """Name the batch that the nodes of the coming round belong to. Both int64 ``[bs]``."""
        self._request_rows = req_pool_indices.to(torch.int64)
        self._first = seq_lens.to(torch.int64)
        self._loaded = None

    def start(self, nodes: Nodes, token_ids: Tensor) -> None:
        rows = self._load(nodes)
        ids = torch.zeros(rows.bucket, dtype=torch.int64, device=token_ids.device)
        ids[: rows.real] = token_ids
        state = self.model.embed(ids, rows.positions, self._attend(rows))
        self._scatter(rows, state)

    def advance(self, nodes: Nodes, first_step: int, last_step: int) -> None:
        rows = self._load(nodes)
        state = self._gather(rows)
        attend = self._attend(rows)
        stride = self.pool.rows_per_step
        for step in range(first_step, last_step):
            # Padding rows stay at step 0's padding page.
            rows.kv_offset[: rows.real] = step * stride
            torch.add(rows.slots, rows.kv_offset, out=rows.write_locs)
            state = self.model.recur(state, rows.positions, attend)
        self._scatter(rows, state)

    def readout(self, nodes: Nodes) -> Tensor:
        rows = self._load(nodes)
        hidden = self.model.readout(self._gather(rows), rows.positions, self._attend(rows))
        return self.model.logits(hidden)[: rows.real]

    def _load(self, nodes: Nodes) -> Rows:
        """Fill the row buffers for these nodes, unless the last call's nodes are asked for again."""
        if nodes is self._loaded and self._rows is not None:
            return self._rows
        real = len(nodes)
        rows = Rows(self.buffers, real, self._bucket(real))
        request_rows = self._request_rows[nodes.request]
        positions = self._first[nodes.request] + nodes.offset
        rows.bank[:real] = nodes.request * self.width + nodes.offset
        rows.positions[:real] = positions
        rows.slots[:real] = self.req_to_token[request_rows, positions]
        rows.kv_start[:real] = request_rows * self.req_to_token.shape[1]
        rows.kv_len[:real] = positions + 1
        self._pad(rows)
        self._loaded, self._rows = nodes, rows
        return rows

    def _bucket(self, rows: int) -> int:
        """Rows of the body that serves this many lanes."""
        return next((bucket for bucket in self.buckets if bucket >= rows), rows)

    def _pad(self, rows: Rows) -> None:
        if rows.real == rows.bucket:
            return
        rows.bank[rows.real :] = self.spare
        rows.kv_len[rows.real :] = 1
        for buffer in (rows.positions, rows.slots, rows.kv_start, rows.kv_offset):
            buffer[rows.real :] = 0

    def _gather(self, rows: Rows) -> LoopState:
        injected = None if self.injected is None else self.injected[rows.bank]
        return LoopState(self.hidden[rows.bank], injected)

    def _scatter(self, rows: Rows, state: LoopState) -> None:
        self.hidden[rows.bank] = state.hidden
        if self.injected is not None:
            assert state.injected is not None
            self.injected[rows.bank] = state.injected

    def _attend(self, rows: Rows) -> Attend:
        def attend(site: AttentionSite, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            in_core = site.part == "core"
            layer = site.radix[0]
            k_rows, v_rows = self.pool.flat_rows(site.part, site.index)
            locs = rows.write_locs if in_core else rows.slots
            self.attention.store_rows(k, v, k_rows, v_rows, locs)
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            self.attention.attend(
                q,
                k_rows,
                v_rows,
                self.kv_indices,
                rows.kv_start,
                rows.kv_len,
                rows.kv_offset if in_core else rows.no_offset,
                out,
                layer.scaling,
                layer.tp_k_head_num,
            )
            return out

        return attend
