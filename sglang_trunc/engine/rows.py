"""Rows of the served model: static buffers, and the model's own functions over them.

A row is one lane in one call. Its hidden state lives in a bank; a call gathers the rows it advances, runs the
model and scatters them back, so widths may change from call to call. What a call reads is written into static
buffers first; padding rows point at the bank's spare row and at slot 0, SGLang's padding sink, with length 1. So a
body depends on its bucket's width alone, as a captured graph must.

Contract with the pool (``kv_pool``): slot t at step s is row ``s*N + t`` of a core layer; outside the core it
is row t. K/V of all rows of a call are written before any row attends, so a chain may be advanced in one
call, and rows may stand at different steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sglang_trunc.engine.kv_pool import LoopedKVPool
from sglang_trunc.engine.lane_attention import LaneAttention
from sglang_trunc.models.looped import Attend, AttentionSite, LoopedCausalLM, LoopState


class RowBuffers:
    """Static inputs of one body, int64 ``[capacity]`` each but the tails; views of the first rows are handed out."""

    def __init__(self, capacity: int, tail_width: int, device: torch.device):
        def zeros() -> Tensor:
            return torch.zeros(capacity, dtype=torch.int64, device=device)

        self.bank = zeros()  # row of the state bank
        self.positions = zeros()
        self.slots = zeros()
        self.kv_start = zeros()  # offset of the lane's request in the flat req_to_token table
        self.kv_len = zeros()
        self.kv_shared = zeros()  # tokens that are in that table; the others' slots are in the tail
        self.kv_offset = zeros()  # step * N
        self.write_locs = zeros()  # slot + step * N
        self.no_offset = zeros()  # stays zero: rows outside the core
        self.kv_tails = torch.zeros(capacity, tail_width, dtype=torch.int32, device=device)


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
    kv_shared: Tensor
    kv_offset: Tensor
    write_locs: Tensor
    no_offset: Tensor
    kv_tails: Tensor


class RowRunner:
    """Runs rows of one model over its pool."""

    def __init__(
        self,
        model: LoopedCausalLM,
        pool: LoopedKVPool,
        req_to_token: Tensor,
        attention: LaneAttention,
        capacity: int,
        buckets: Sequence[int] = (),
        tail_width: int = 0,
    ):
        """``capacity``: lanes alive at once. ``buckets``: row counts of the bodies; a call that fits none runs
        unpadded. ``tail_width``: most slots of a branch path, 0 where no row has a tail."""
        self.model = model
        self.pool = pool
        self.attention = attention
        self.recurrences = model.shape.recurrences
        self.req_to_token = req_to_token
        self.kv_indices = req_to_token.view(-1)
        self.buckets = sorted(buckets)
        capacity = max(capacity, *self.buckets, 1)
        self.spare = capacity
        device = req_to_token.device
        dtype = model.lm_head.weight.dtype
        self.hidden = torch.zeros(capacity + 1, model.config.hidden_size, dtype=dtype, device=device)
        self.injected = torch.zeros_like(self.hidden) if model.injects else None
        self.tail_width = tail_width
        self.buffers = RowBuffers(capacity, tail_width, device)

    def take(self, real: int) -> Rows:
        """Row buffers for ``real`` lanes, with padding rows filled in; the caller fills the others."""
        rows = Rows(self.buffers, real, next((bucket for bucket in self.buckets if bucket >= real), real))
        if rows.real < rows.bucket:
            rows.bank[real:] = self.spare
            rows.kv_len[real:] = 1
            rows.kv_shared[real:] = 1
            for buffer in (rows.positions, rows.slots, rows.kv_start, rows.kv_offset):
                buffer[real:] = 0
        return rows

    def embed(self, rows: Rows, token_ids: Tensor) -> None:
        """Embedding and prelude: the state before step 0. ``token_ids`` int64 ``[real]``."""
        ids = torch.zeros(rows.bucket, dtype=torch.int64, device=token_ids.device)
        ids[: rows.real] = token_ids
        self.scatter(rows, self.model.embed(ids, rows.positions, self.attend(rows)))

    def advance(self, rows: Rows, ticks: int) -> None:
        """``ticks`` steps of every row, from the step its ``kv_offset`` stands for."""
        state = self.gather(rows)
        attend = self.attend(rows)
        for _ in range(ticks):
            self.begin_step(rows)
            state = self.model.recur(state, rows.positions, attend)
            self.end_step(rows)
        self.scatter(rows, state)

    def begin_step(self, rows: Rows) -> None:
        """Name the places that the coming recurrence writes."""
        torch.add(rows.slots, rows.kv_offset, out=rows.write_locs)

    def end_step(self, rows: Rows) -> None:
        """Go on to the next step. Padding rows stay at step 0's padding page."""
        rows.kv_offset[: rows.real] += self.pool.rows_per_step

    def readout(self, rows: Rows) -> Tensor:
        """Logits of the rows as they stand: float32 ``[real, vocabulary]``."""
        return self.model.logits(self._read(rows))[: rows.real]

    def read_hidden(self, rows: Rows) -> Tensor:
        """What the head reads in ``readout``: ``[real, d]``."""
        return self._read(rows)[: rows.real]

    def _read(self, rows: Rows) -> Tensor:
        return self.model.readout(self.gather(rows), rows.positions, self.attend(rows))

    def peek(self, rows: Rows) -> Tensor:
        """``readout`` after which the coda's K/V of these rows are as they were."""
        coda = range(self.model.shape.coda)
        buffers = [buffer for index in coda for buffer in self.pool.flat_rows("coda", index)]
        before = [buffer[rows.slots] for buffer in buffers]
        logits = self.readout(rows)
        for buffer, values in zip(buffers, before, strict=True):
            buffer[rows.slots] = values
        return logits

    def gather(self, rows: Rows) -> LoopState:
        """The rows' states, out of the bank."""
        injected = None if self.injected is None else self.injected[rows.bank]
        return LoopState(self.hidden[rows.bank], injected)

    def scatter(self, rows: Rows, state: LoopState) -> None:
        """The rows' states, back into the bank."""
        self.hidden[rows.bank] = state.hidden
        if self.injected is not None:
            assert state.injected is not None
            self.injected[rows.bank] = state.injected

    def attend(self, rows: Rows) -> Attend:
        """Stores K/V of the rows, then attends, each row at its own step."""
        tails = (rows.kv_tails, rows.kv_shared) if self.tail_width else ()

        def attend(site: AttentionSite, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            in_core = site.part == "core"
            layer = site.radix[0]
            k_rows, v_rows = self.pool.flat_rows(site.part, site.index)
            self.attention.store_rows(k, v, k_rows, v_rows, rows.write_locs if in_core else rows.slots)
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
                *tails,
            )
            return out

        return attend
