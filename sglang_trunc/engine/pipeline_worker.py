"""The worker of LOOPSPEC_SINGLE, LOOPSPEC_DUAL and, unless it is asked for blocks, TRUNC: lanes that outlive its calls.

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
from collections.abc import Sequence
from pathlib import Path

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from torch import Tensor

from sglang_trunc.core.control import Control
from sglang_trunc.core.counters import PipelineCounters
from sglang_trunc.core.cycle_cost import CycleCost
from sglang_trunc.core.lane_tree import Lane
from sglang_trunc.core.options import RESIDUAL
from sglang_trunc.core.pipeline import Choice, Pipeline, Schedule
from sglang_trunc.core.pipeline_round import PipelineRun, pipeline_round
from sglang_trunc.core.residual import ResidualMemory
from sglang_trunc.core.traced_pipeline import TracedPipeline
from sglang_trunc.engine import slots
from sglang_trunc.engine.cascades import Cascade
from sglang_trunc.engine.choosing import BatchChooser, LaneChooser
from sglang_trunc.engine.cost_store import table_for
from sglang_trunc.engine.decision_log import DecisionLog
from sglang_trunc.engine.kv_pool import LoopedKVPool
from sglang_trunc.engine.lane_attention import LaneAttention
from sglang_trunc.engine.options import decisions_file, is_controlled, trace_file
from sglang_trunc.engine.reporting import note_runs
from sglang_trunc.engine.rows import RowRunner
from sglang_trunc.engine.tree_lanes import TreeLanes
from sglang_trunc.engine.warm_start import PrefillRiders
from sglang_trunc.engine.worker import LoopedWorker, prompts_end


class PipelineWorker(LoopedWorker):
    """``--speculative-algorithm loopspec_single``, ``loopspec_dual``, and ``trunc`` without a block size."""

    lanes: TreeLanes
    pipeline: Pipeline
    _chooser: LaneChooser  # of the round or prefill at hand
    _cascade: Cascade | None = None  # under the residual policy

    def __init__(self, server_args, gpu_id: int, nccl_port: int, target_worker):
        super().__init__(server_args, gpu_id, nccl_port, target_worker)
        self.counters: PipelineCounters = PipelineCounters(recurrences=self.model.shape.recurrences)

    def _build(self, pool: LoopedKVPool, req_to_token_pool, attention: LaneAttention) -> RowRunner:
        schedule = self._schedule()
        capacity = schedule.max_width + self.model_runner.max_running_requests
        tails = schedule.cycles * (1 + schedule.lookup) if pool.branches else 0
        runner = self._runner(pool, req_to_token_pool, attention, capacity=capacity, tail_width=tails)
        self.lanes = TreeLanes(runner)
        self.pipeline = self._make_pipeline(schedule, pool, capacity, self._control(runner, schedule, capacity))
        # Lanes that were dropped in a round are forgotten before the next one.
        residual = self.options.sampling_policy == RESIDUAL
        self._cascade = Cascade(ResidualMemory(capacity * (schedule.cycles + 1))) if residual else None
        return runner

    def _leave(self, rid: str) -> None:
        super()._leave(rid)
        self.pipeline.leave(rid)

    def _control(self, runner: RowRunner, schedule: Schedule, capacity: int) -> Control:
        """By what rows cost here, where the options say so."""
        if not is_controlled(self.options):
            return Control()
        self.cost = table_for(runner, self.model_runner.model_config, capacity)
        path = decisions_file(self.options)
        explain = None if path is None else DecisionLog(path)
        return Control(CycleCost(self.cost, schedule.recurrences, schedule.d1, schedule.d2), explain)

    def _make_pipeline(self, schedule: Schedule, pool: LoopedKVPool, capacity: int, control: Control) -> Pipeline:
        """Traced where a trace was asked for."""
        arguments = (schedule, pool.branch_slots, capacity, self.counters, pool.page_size == 1)
        path = trace_file(self.options)
        if path is None:
            return Pipeline(*arguments, self.lookups, control)
        about = {
            "model": Path(self.model_runner.model_config.model_path).name,
            "schedule": self.options.algorithm,
            "options": dataclasses.asdict(self.options),
        }
        return TracedPipeline(*arguments, path, about, self._beside, control)

    def _beside(self, lanes: Sequence[Lane]) -> list[Choice]:
        """What lanes would say that are not due, for a trace."""
        return self._chooser.peek(lanes, self.lanes.peek(lanes))

    def _schedule(self) -> Schedule:
        options = self.options
        return Schedule(
            self.model.shape.recurrences,
            options.d1,
            getattr(options, "d2", 0) or None,
            options.max_width,
            options.min_survival,
            options.lookup,
            options.lookup_candidates,
            options.screen_top,
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
        # A prompt's paths begin at its last token, whose lane proposes the first tokens.
        bases = batch.seq_lens.to(torch.int64) - 1
        self._chooser = self._lane_chooser(batch, BatchChooser(batch, bases, self.outputs))
        batch.spec_info = PrefillRiders(self.lanes, self.pipeline, watched, self._chooser)
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
        for req, length, row, end, last_chunk in zip(batch.reqs, lengths, rows, ends, prompts_end(batch), strict=True):
            last = slots.last_position(req)
            if last_chunk and last > length:
                token = (req.output_ids or req.origin_input_ids)[-1]
                slot = int(self.lanes.runner.req_to_token[row, length - 1])
                self._know_text(req, len(req.output_ids))
                self.pipeline.watch(req.rid, row, length - 1, token, slot, last)
                watched[req.rid] = end - 1
        return watched

    def _decode(self, batch, on_publish) -> GenerationBatchResult:
        running = self._admit(batch)
        self._chooser = self._lane_chooser(batch, self._batch_chooser(batch))
        runs = {}
        if running:
            runs = pipeline_round(self.lanes, self.pipeline, running, batch.return_logprob, self._chooser)
        ended = batch.spec_info.bonus_tokens.tolist()
        ordered = [runs.get(req.rid) or PipelineRun([token]) for req, token in zip(batch.reqs, ended, strict=True)]
        note_runs(batch.reqs, ordered, self.model.shape.recurrences)
        device = batch.seq_lens.device
        lengths = torch.tensor([len(run.tokens) for run in ordered], device=device)
        padded = [run.tokens + [0] * (self.stride - len(run.tokens)) for run in ordered]
        tokens = torch.tensor(padded, device=device)
        logits = hidden = None
        if batch.return_logprob:
            logits = self._strided_rows([run.logits for run in ordered], self.model.config.vocab_size, torch.float32)
        if batch.return_hidden_states:
            bank = self.lanes.runner.hidden
            hidden = self._strided_rows(self._chooser.hidden, bank.shape[1], bank.dtype)
        return self._result(batch, on_publish, tokens, lengths, logits, hidden)

    def _lane_chooser(self, batch, chooser: BatchChooser) -> LaneChooser:
        hidden = self.lanes.hidden if batch.return_hidden_states else None
        cascade = self._cascade
        if cascade is not None:
            cascade.memory.keep({lane for tree in self.pipeline.trees.values() for lane in tree.lanes})
        rows = batch.req_pool_indices.tolist()
        return LaneChooser(chooser, rows, self.model.shape.recurrences, self.options, cascade, hidden)

    def _admit(self, batch) -> list[str]:
        """Give every request of the batch its tree; returns those that want tokens.

        A request that has all its tokens is seen once more under overlap scheduling, and so is one whose grammar has
        ended it, with its slots gone. It is not run: SGLang discards what it gets for it.
        """
        lengths, rows = batch.seq_lens.tolist(), batch.req_pool_indices.tolist()
        tokens = batch.spec_info.bonus_tokens.tolist()
        self.pipeline.keep({req.rid for req in batch.reqs})
        running, moves = [], []
        reserved = self._reserved(batch, lengths)
        for req, length, row, token, own in zip(batch.reqs, lengths, rows, tokens, reserved, strict=True):
            last = slots.last_position(req)
            if length >= last or not own:
                self.pipeline.leave(req.rid)
                continue
            # A token past the last slot has no lane to go on with; such a request starts cold in the next round. With
            # looked-up chains, that goes for one more than a round can report, too.
            self._know_text(req, length + 1 - len(req.origin_input_ids))
            most = min(len(own), self.stride) if self.options.lookup else len(own)
            move = self.pipeline.admit(req.rid, row, length, token, own, min(last, length + most))
            if move is not None:
                moves.append(move)
            running.append(req.rid)
        if moves:
            self.lanes.move(moves)
        return running

    def _reserved(self, batch, lengths: list[int]) -> list[list[int]]:
        """Slots from each request's first uncommitted position to the end of what SGLang reserved."""
        allocated = [req.kv.kv_allocated_len for req in batch.reqs]
        counts = [max(0, end - length) for end, length in zip(allocated, lengths, strict=True)]
        table = self.lanes.runner.req_to_token
        columns = batch.seq_lens.to(torch.int64).unsqueeze(1) + torch.arange(max(counts), device=table.device)
        found = table[batch.req_pool_indices.to(torch.int64).unsqueeze(1), columns.clamp(max=table.shape[1] - 1)]
        return [own[:count] for own, count in zip(found.tolist(), counts, strict=True)]

    def _strided_rows(self, runs: list[list[Tensor]], width: int, dtype: torch.dtype) -> Tensor:
        """Row ``b * stride + j``: the row that emitted token j of request b."""
        device = self.lanes.runner.req_to_token.device
        strided = torch.zeros(len(runs) * self.stride, width, dtype=dtype, device=device)
        for index, run in enumerate(runs):
            for number, row in enumerate(run):
                strided[index * self.stride + number] = row
        return strided
