"""TRUNC's worker: a decode round is one ``trunc_round`` over the chains of all requests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from torch import Tensor

from sglang_trunc.core.counters import Counters
from sglang_trunc.core.trunc import Run, trunc_round
from sglang_trunc.engine import reporting, slots
from sglang_trunc.engine.choosing import ChainChooser
from sglang_trunc.engine.kv_pool import LoopedKVPool
from sglang_trunc.engine.lane_attention import LaneAttention
from sglang_trunc.engine.lanes import SGLangLanes
from sglang_trunc.engine.rows import RowRunner
from sglang_trunc.engine.worker import LoopedWorker


class TruncWorker(LoopedWorker):
    """``--speculative-algorithm trunc``."""

    lanes: SGLangLanes

    def __init__(self, server_args, gpu_id: int, nccl_port: int, target_worker):
        super().__init__(server_args, gpu_id, nccl_port, target_worker)
        self.counters: Counters = Counters()

    def _build(self, pool: LoopedKVPool, req_to_token_pool, attention: LaneAttention) -> RowRunner:
        block = self.options.block_size
        capacity = block * self.model_runner.max_running_requests
        self.lanes = SGLangLanes(self._runner(pool, req_to_token_pool, attention, capacity=capacity), block)
        return self.lanes.runner

    def _decode(self, batch, on_publish) -> GenerationBatchResult:
        roots = batch.spec_info.bonus_tokens.to(torch.int64)
        self.lanes.begin(batch.req_pool_indices, batch.seq_lens)
        chooser = ChainChooser(self._batch_chooser(batch), self.options, self.lanes.runner.spare)
        budgets = self._budgets(batch)
        lookups = self._looked_up(batch, budgets) if self.options.lookup else ()
        run = trunc_round(self.lanes, roots, budgets, self.options, self.counters, chooser, lookups)
        reporting.note_chains(batch, run, lookups, self.options.d1, self.lanes.recurrences, self.counters)
        logits = self._strided_rows(run, run.logits, len(roots)) if batch.return_logprob else None
        hidden = None
        if batch.return_hidden_states:
            hidden = self._strided_rows(run, self.lanes.hidden(run.kept), len(roots))
        return self._result(batch, on_publish, run.tokens, run.lengths, logits, hidden)

    def _looked_up(self, batch, budgets: list[int]) -> list[Sequence[int]]:
        """What may follow each request's newest token."""
        found: list[Sequence[int]] = []
        for req, length, budget in zip(batch.reqs, batch.seq_lens.tolist(), budgets, strict=True):
            self._know_text(req, length + 1 - len(req.origin_input_ids))
            candidates = self.lookups.candidates(req.rid, (), min(self.options.lookup, budget - 1), 1)
            found.append(candidates[0].tokens if candidates else ())
        return found

    def _remember(self, batch, tokens: Tensor, lengths: Tensor) -> None:
        super()._remember(batch, tokens, lengths)
        for req, run, length in zip(batch.reqs, tokens.tolist(), lengths.tolist(), strict=True):
            for token in run[:length] if self.options.lookup else ():
                self.lookups.commit(req.rid, token)

    def _budgets(self, batch) -> list[int]:
        """Nodes each request may use: never more than the tokens still wanted or the slots reserved.

        Counted from the committed lengths: ``output_ids`` lags one round under overlap scheduling. A request that has
        ended is seen once more there, and gets the one node that a round cannot do without.
        """
        budgets = []
        for req, length in zip(batch.reqs, batch.seq_lens.tolist(), strict=True):
            wanted = slots.last_position(req) - length
            reserved = req.kv.kv_allocated_len - length
            budgets.append(max(1, min(self.options.block_size, wanted, reserved)))
        return budgets

    def _strided_rows(self, run: Run, rows: Tensor, batch_size: int) -> Tensor:
        """Row ``b * stride + j``: the row of the kept node that emitted token j of request b."""
        strided = rows.new_zeros(batch_size * self.stride, rows.shape[1])
        strided[run.kept.request * self.stride + run.kept.offset] = rows
        return strided
