"""The worker of LOOPSPEC_SINGLE and LOOPSPEC_DUAL: lanes that outlive its calls.

A decode round is one ``pipeline_round``: R/d1 cycles. Between rounds the lanes stay in
``core.pipeline``, keyed by request id. A request's lanes are used again only if they fit what SGLang says of it
(row of the slot table, committed length, newest token, slot); they go when the request leaves its row
(``departures``: finish, abort, retraction), when it is not in a round's batch, when it is prefilled (again), and
when the pool is flushed. A request without lanes starts cold, so nothing depends on them but speed.

Branch slots are the worker's own from the start (``LoopedKVPool.branch_slots``). With page size 1 a branch that wins
keeps its slot and the worker gets the one that was reserved there, so the number of slots on either side never
changes; larger pages cannot be broken up, and there the winner's K/V are copied.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from torch import Tensor

from sglang_trunc.core.counters import PipelineCounters
from sglang_trunc.core.pipeline import Pipeline, Schedule
from sglang_trunc.core.pipeline_round import PipelineRun, choose, pipeline_round
from sglang_trunc.core.traced_pipeline import TracedPipeline
from sglang_trunc.engine import departures, slots
from sglang_trunc.engine.kv_pool import LoopedKVPool
from sglang_trunc.engine.lane_attention import LaneAttention
from sglang_trunc.engine.options import trace_file
from sglang_trunc.engine.rows import RowRunner
from sglang_trunc.engine.tree_lanes import TreeLanes
from sglang_trunc.engine.warm_start import PrefillRiders
from sglang_trunc.engine.worker import LoopedWorker


class PipelineWorker(LoopedWorker):
    """``--speculative-algorithm loopspec_single`` and ``loopspec_dual``."""

    lanes: TreeLanes
    pipeline: Pipeline

    def __init__(self, server_args, gpu_id: int, nccl_port: int, target_worker):
        super().__init__(server_args, gpu_id, nccl_port, target_worker)
        self.counters: PipelineCounters = PipelineCounters(recurrences=self.model.shape.recurrences)

    def _build(self, pool: LoopedKVPool, req_to_token_pool, attention: LaneAttention) -> RowRunner:
        schedule = self._schedule()
        capacity = schedule.max_width + self.model_runner.max_running_requests
        tails = schedule.cycles if pool.branches else 0
        runner = self._runner(pool, req_to_token_pool, attention, capacity=capacity, tail_width=tails)
        self.lanes = TreeLanes(runner)
        self.pipeline = self._make_pipeline(schedule, pool, capacity)
        departures.announce(req_to_token_pool, self.pipeline.leave)
        return runner

    def _make_pipeline(self, schedule: Schedule, pool: LoopedKVPool, capacity: int) -> Pipeline:
        """Traced where a trace was asked for."""
        arguments = (schedule, pool.branch_slots, capacity, self.counters, pool.page_size == 1)
        path = trace_file(self.options.algorithm)
        if path is None:
            return Pipeline(*arguments)
        about = {
            "model": Path(self.model_runner.model_config.model_path).name,
            "schedule": self.options.algorithm,
            "options": dataclasses.asdict(self.options),
        }
        return TracedPipeline(*arguments, path, about, lambda lanes: choose(self.lanes.peek(lanes)))

    def _schedule(self) -> Schedule:
        options = self.options
        return Schedule(
            self.model.shape.recurrences,
            options.d1,
            getattr(options, "d2", None),
            options.max_width,
            options.min_survival,
        )

    def clear_cache_pool(self) -> None:
        """SGLang has emptied its pools; every slot is where it was at the start."""
        self.pipeline.reset(self.lanes.runner.pool.branch_slots)

    def _prefill(self, batch, on_publish) -> GenerationBatchResult:
        """SGLang's prefill, with the lanes of the first tokens running along (``warm_start``)."""
        for req in batch.reqs:
            self.pipeline.leave(req.rid)
        watched = self._watch(batch)
        if not watched:
            return super()._prefill(batch, on_publish)
        batch.spec_info = PrefillRiders(self.lanes, self.pipeline, watched)
        result = super()._prefill(batch, on_publish)
        for req, token in zip(batch.reqs, result.next_token_ids.tolist(), strict=True):
            if req.rid in watched:
                self.pipeline.answer(req.rid, token)
        return result

    def _watch(self, batch) -> dict[str, int]:
        """Requests whose prompts end in this batch and that want more than one token -> row of their last one."""
        watched = {}
        ends = itertools.accumulate(batch.extend_lens)
        lengths, rows = batch.seq_lens.tolist(), batch.req_pool_indices.tolist()
        for req, length, row, end in zip(batch.reqs, lengths, rows, ends, strict=True):
            last = slots.last_position(req)
            if length == len(req.origin_input_ids) + len(req.output_ids) and last > length:
                token = (req.output_ids or req.origin_input_ids)[-1]
                slot = int(self.lanes.runner.req_to_token[row, length - 1])
                self.pipeline.watch(req.rid, row, length - 1, token, slot, last)
                watched[req.rid] = end - 1
        return watched

    def _decode(self, batch, on_publish) -> GenerationBatchResult:
        running = self._admit(batch)
        runs = pipeline_round(self.lanes, self.pipeline, running, batch.return_logprob) if running else {}
        ended = batch.spec_info.bonus_tokens.tolist()
        ordered = [runs.get(req.rid) or PipelineRun([token]) for req, token in zip(batch.reqs, ended, strict=True)]
        device = batch.seq_lens.device
        lengths = torch.tensor([len(run.tokens) for run in ordered], device=device)
        padded = [run.tokens + [0] * (self.stride - len(run.tokens)) for run in ordered]
        tokens = torch.tensor(padded, device=device)
        logits = self._strided_logits(ordered) if batch.return_logprob else None
        return self._result(batch, on_publish, tokens, lengths, logits)

    def _admit(self, batch) -> list[str]:
        """Give every request of the batch its tree; returns those that want tokens.

        A request that has all its tokens is seen once more under overlap scheduling. It is not run: SGLang discards
        what it gets for it.
        """
        lengths, rows = batch.seq_lens.tolist(), batch.req_pool_indices.tolist()
        tokens = batch.spec_info.bonus_tokens.tolist()
        self.pipeline.keep({req.rid for req in batch.reqs})
        running, moves = [], []
        reserved = self._reserved(batch, lengths)
        for req, length, row, token, own in zip(batch.reqs, lengths, rows, tokens, reserved, strict=True):
            last = slots.last_position(req)
            if length >= last:
                self.pipeline.leave(req.rid)
                continue
            # A token past the last slot has no lane to go on with; such a request starts cold in the next round.
            move = self.pipeline.admit(req.rid, row, length, token, own, min(last, length + len(own)))
            if move is not None:
                moves.append(move)
            running.append(req.rid)
        if moves:
            self.lanes.move(moves)
        return running

    def _reserved(self, batch, lengths: list[int]) -> list[list[int]]:
        """Slots from each request's first uncommitted position to the end of what SGLang reserved."""
        counts = [req.kv.kv_allocated_len - length for req, length in zip(batch.reqs, lengths, strict=True)]
        table = self.lanes.runner.req_to_token
        columns = batch.seq_lens.to(torch.int64).unsqueeze(1) + torch.arange(max(counts), device=table.device)
        found = table[batch.req_pool_indices.to(torch.int64).unsqueeze(1), columns.clamp(max=table.shape[1] - 1)]
        return [own[:count] for own, count in zip(found.tolist(), counts, strict=True)]

    def _strided_logits(self, runs: list[PipelineRun]) -> Tensor:
        """Row ``b * stride + j``: the full-depth distribution that emitted token j of request b."""
        device = self.lanes.runner.req_to_token.device
        logits = torch.zeros(len(runs) * self.stride, self.model.config.vocab_size, device=device)
        for index, run in enumerate(runs):
            for number, row in enumerate(run.logits):
                logits[index * self.stride + number] = row
        return logits
