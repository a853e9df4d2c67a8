"""Lanes that outlive a round, of a real served model over a small pool: requests come, go and return.

``TreeStand`` does by hand what the scheduler and ``PipelineWorker`` do between them. NaN stands in every slot that
nobody may read: before every tick it goes to all slots but those of committed text and of running lanes.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sglang_trunc.core.counters import PipelineCounters
from sglang_trunc.core.lane_tree import Lane, Move
from sglang_trunc.core.options import DualOptions, SingleOptions
from sglang_trunc.core.pipeline import Choice, Pipeline, Schedule
from sglang_trunc.core.pipeline_round import pipeline_round
from sglang_trunc.engine.choosing import BatchChooser, LaneChooser
from sglang_trunc.engine.lanes import SGLangLanes
from sglang_trunc.engine.outputs import Outputs
from sglang_trunc.engine.rows import RowRunner
from sglang_trunc.engine.slots import tokens_per_round
from sglang_trunc.engine.tree_lanes import TreeLanes
from tests.core.pipeline_stand import contents
from tests.engine import sampling_stand
from tests.engine.sampling_stand import emit, sampling_info, stock_choice
from tests.engine.stand import lane_attention, prefill, small_pool

BUCKETS = (4, 8, 16, 32)


Says = Callable[[int, Lane], int]
"""(request, lane) -> the token that the lane's early readout is made to choose."""


@dataclass
class Request:
    tokens: list[int]  # prompt and answer; the newest one has no K/V
    prompt: int
    wanted: int  # tokens of the answer
    row: int = 0  # of the slot table; 0: none
    allocated: int = 0  # positions that have a slot
    known: int = 0  # length that the scheduler knows of under overlap: that of a round ago
    req: Any = None  # the same as ``sampling_stand`` makes it

    @property
    def length(self) -> int:
        return len(self.tokens) - 1

    @property
    def last(self) -> int:
        return self.prompt + self.wanted - 1

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.prompt :]

    @property
    def running(self) -> bool:
        return self.row > 0 and len(self.answer) < self.wanted


class WatchedLanes(TreeLanes):
    """Notes what is run; ``hide(slots)`` and ``hide_dead(lanes)`` put NaN where nothing may be read."""

    def __init__(self, runner: RowRunner, hide: Callable, hide_dead: Callable):
        super().__init__(runner)
        self.hide, self.hide_dead = hide, hide_dead
        self.moves: list[Move] = []
        self.widths: list[int] = []
        self.tails = 0  # rows that had one

    def start(self, lanes: Sequence[Lane]) -> None:
        self.hide([lane.slot for lane in lanes])
        super().start(lanes)

    def advance(self, lanes: Sequence[Lane], ticks: int) -> None:
        self.hide_dead(lanes)
        self.widths.append(len(lanes))
        self.tails += sum(bool(lane.tail) for lane in lanes)
        super().advance(lanes, ticks)

    def readout(self, lanes: Sequence[Lane]) -> Tensor:
        logits = super().readout(lanes)
        assert not logits.isnan().any(), "a lane read what was not there"
        return logits

    def move(self, moves: Sequence[Move]) -> None:
        self.moves += moves
        super().move(moves)


class TreeStand:
    """At most ``requests`` at a time; slots are handed out in an order of no meaning, and the last freed one first."""

    def __init__(
        self,
        model,
        plan: Schedule,
        requests: int = 3,
        attention: str = "cpu",
        page: int = 1,
        context: int = 64,
        buckets: Sequence[int] = BUCKETS,
        forced: Says | None = None,
    ):
        depths = (plan.d1,) if plan.d2 is None else (plan.d1, plan.d2)
        options = (DualOptions if plan.d2 else SingleOptions)(*depths, plan.max_width, plan.min_survival)
        options.check(plan.recurrences)
        self.reserve = 2 * tokens_per_round(options, plan.recurrences)  # positions behind the length SGLang knows
        self.plan = plan
        self.options = options
        self.forced = forced
        self.outputs = Outputs()
        self.requests: list[Request] = []
        size = -(-(requests * context + 1) // page) * page
        self.pool = small_pool(model, size, page, branches=plan.max_width)
        order = torch.randperm(size, generator=torch.Generator().manual_seed(0)) + page
        self.trap, *self.handed_out = order.tolist()  # what the table names where nothing is reserved
        # Row 0 is SGLang's padding row; slots of page 0 are its padding sink.
        self.table = torch.zeros(requests + 1, context, dtype=torch.int32)
        kernel, capacity = lane_attention(attention), plan.max_width + requests
        self.prefiller = SGLangLanes(RowRunner(model, self.pool, self.table, kernel, capacity=8), width=8)
        self.runner = RowRunner(model, self.pool, self.table, kernel, capacity, buckets, tail_width=plan.cycles)
        self.engine = WatchedLanes(self.runner, self._hide, self._hide_dead)
        self.counters = PipelineCounters(recurrences=plan.recurrences)
        self.pipeline = Pipeline(plan, self.pool.branch_slots, capacity, self.counters, exchange=page == 1)
        self.flush()

    def flush(self) -> None:
        """Empty the pool: every request loses its K/V, every slot is back where it was at the start."""
        for request in self.requests:
            request.row = request.allocated = 0
        self.table[1:] = self.trap
        self.free = list(self.handed_out)
        self.free_rows = list(range(1, len(self.table)))
        self._hide(range(self.pool.page_size, self.pool.rows_per_step))
        self.pipeline.reset(self.pool.branch_slots)

    # Requests.

    def place(self, prompt: Sequence[int], wanted: int, **sampling: Any) -> int:
        """A new request, not prefilled yet; its key."""
        return self._place(sampling_stand.request(f"request {len(self.requests)}", prompt, wanted, **sampling))

    def enter(self, req: Any) -> None:
        """A new request that ``sampling_stand`` has made, prefilled."""
        self.prefilled(self._place(req))

    def _place(self, req: Any) -> int:
        prompt = list(req.origin_input_ids)
        self.requests.append(Request(prompt, len(prompt), req.sampling_params.max_new_tokens, req=req))
        self._seat(self.requests[-1])
        return len(self.requests) - 1

    def submit(self, prompt: Sequence[int], wanted: int, **sampling: Any) -> None:
        """A new request, prefilled."""
        self.prefilled(self.place(prompt, wanted, **sampling))

    def resume(self, key: int) -> None:
        """Prefill a request's text, its answer so far included."""
        self._seat(self.requests[key])
        self.prefilled(key)

    def prefilled(self, key: int, token: int | None = None) -> None:
        """A prefill gives its request's next token; without one it is done here."""
        request = self.requests[key]
        self.outputs.begin(request.req)
        if token is None:
            token = stock_choice(request.req, prefill(self.prefiller, request.row, request.tokens))
        self._emit(request, [token])
        request.known = request.length

    def leave(self, key: int) -> None:
        """Finish, abort or retract a request."""
        request = self.requests[key]
        self.pipeline.leave(key)
        self.outputs.forget(request.req.rid)
        slots = self.table[request.row, : request.allocated].tolist()
        self._hide(slots)
        self.free += slots
        self.table[request.row] = self.trap
        self.free_rows.append(request.row)
        request.row = request.allocated = 0
        self.check_slots()

    def round(self) -> None:
        running = [key for key, request in enumerate(self.requests) if request.running]
        self.pipeline.keep(running)
        moves = []
        for key in running:
            request = self.requests[key]
            self._reserve(request, min(request.known + self.reserve, request.last + 1))
            request.known = request.length
            own = self.table[request.row, request.length : request.allocated].tolist()
            end = min(request.last, request.length + len(own))
            moves.append(self.pipeline.admit(key, request.row, request.length, request.tokens[-1], own, end))
        if any(moves):
            self.engine.move([move for move in moves if move is not None])
        runs = pipeline_round(self.engine, self.pipeline, running, choose=self.chooser(running))
        for key, run in runs.items():
            assert 1 <= len(run.tokens) <= self.plan.cycles
            self._emit(self.requests[key], run.tokens)
        self.check_slots()

    def run(self) -> list[list[int]]:
        """Rounds until no request wants more; all answers."""
        while any(request.running for request in self.requests):
            self.round()
        return [request.answer for request in self.requests]

    def check_kv(self, key: int, want: Sequence[Tensor]) -> None:
        """K and V of a request's committed positions, in every KV layer, to the bit."""
        request = self.requests[key]
        slots = self.table[request.row, : request.length].long()
        for number, (buffer, right) in enumerate(zip((*self.pool.k_buffer, *self.pool.v_buffer), want, strict=True)):
            assert torch.equal(buffer[slots], right[: request.length]), f"request {key}, buffer {number}"

    def check_slots(self) -> None:
        """Every slot is in one place: free, in a table, in the worker's bank, or a running lane's branch."""
        tables = [slot for r in self.requests if r.row for slot in self.table[r.row, : r.allocated].tolist()]
        branches = {lane.slot for lane in self.pipeline.lanes()} - set(tables)
        everywhere = [self.trap, *self.free, *tables, *contents(self.pipeline.slots), *branches]
        assert sorted(everywhere) == sorted([self.trap, *self.handed_out, *self.pool.branch_slots])
        assert len(contents(self.pipeline.slots)) + len(branches) == len(self.pool.branch_slots)
        for buffer in self.pool.k_buffer:
            assert buffer[self.trap].isnan().all(), "a slot was written that nobody had reserved"

    def chooser(self, keys: Sequence[int]) -> Callable[[Sequence[Lane], Tensor], list[Choice]]:
        """For the readouts of these requests, whose paths begin at their newest committed tokens."""
        requests = [self.requests[key] for key in keys]
        reqs = [request.req for request in requests]
        batch = types.SimpleNamespace(reqs=reqs, sampling_info=sampling_info(reqs, self.runner.model.config.vocab_size))
        bases = torch.tensor([request.length for request in requests])
        rows = [request.row for request in requests]
        own = LaneChooser(BatchChooser(batch, bases, self.outputs), rows, self.plan.recurrences, self.options)
        key_of = dict(zip(rows, keys, strict=True))

        def choose(lanes: Sequence[Lane], logits: Tensor) -> list[Choice]:
            choices = own(lanes, logits)
            if self.forced is None:
                return choices
            return [
                choice
                if lane.depth == self.plan.recurrences
                else choice._replace(token=self.forced(key_of[lane.request_row], lane))
                for lane, choice in zip(lanes, choices, strict=True)
            ]

        return choose

    def _emit(self, request: Request, tokens: Sequence[int]) -> None:
        request.tokens += tokens
        emit(request.req, tokens)
        self.outputs.extend(request.req.rid, tokens)

    def _seat(self, request: Request) -> None:
        request.row = self.free_rows.pop()
        self._reserve(request, len(request.tokens))

    def _reserve(self, request: Request, positions: int) -> None:
        page = self.pool.page_size
        for position in range(request.allocated, -(-positions // page) * page):
            self.table[request.row, position] = self.free.pop()
            request.allocated += 1

    def _hide(self, slots: Iterable[int]) -> None:
        index = torch.tensor(list(slots), dtype=torch.int64)
        for part in ("prelude", "core", "coda"):
            for layer in range(getattr(self.pool.shape, part)):
                for rows in self.pool.flat_rows(part, layer):
                    rows.view(-1, self.pool.rows_per_step, rows.shape[1])[:, index] = float("nan")

    def _hide_dead(self, lanes: Sequence[Lane]) -> None:
        dead = set(range(self.pool.page_size, self.pool.rows_per_step)) - {lane.slot for lane in lanes}
        for key, request in enumerate(self.requests):
            tree = self.pipeline.trees.get(key)
            committed = tree.root.position if tree is not None and tree.root is not None else request.allocated
            if request.row:
                dead -= set(self.table[request.row, :committed].tolist())
        self._hide(dead)
