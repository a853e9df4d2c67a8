"""The workers' decode rounds over a model that is a table: logits depend on the depth and the newest token alone.

So laws of whole texts are known, and thousands of requests fit into a round. The lanes know their paths from what they
were started on, and check every readout's paths and positions against what the chooser makes of them.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sglang_trunc.core.counters import Counters, PipelineCounters
from sglang_trunc.core.lane_tree import Lane
from sglang_trunc.core.looped import Nodes
from sglang_trunc.core.options import RESIDUAL, Options, TruncOptions
from sglang_trunc.core.pipeline import Pipeline
from sglang_trunc.core.residual import ResidualMemory
from sglang_trunc.engine.cascades import Cascade
from sglang_trunc.engine.choosing import BatchChooser
from sglang_trunc.engine.lookahead import RequestLookups, lookups_for
from sglang_trunc.engine.outputs import Outputs
from sglang_trunc.engine.pipeline_worker import PipelineWorker
from sglang_trunc.engine.slots import last_position, tokens_per_round
from sglang_trunc.engine.state import TruncState
from sglang_trunc.engine.tree_lanes import TreeLanes
from sglang_trunc.engine.trunc_worker import TruncWorker
from sglang_trunc.engine.worker import LoopedWorker
from tests.engine.sampling_stand import sampling_info

FULL_DEPTH = 4
CONTEXT = 64
FIRST_BRANCH = 1 << 40


class Tables:
    """Logits float32 ``[V, V]`` of each depth, by newest token. ``spread``: how far early depths are off."""

    def __init__(self, vocabulary: int, seed: int = 0, spread: float = 1.0, forbidden: float = 0.0):
        """``forbidden``: share of tokens that have probability 0, at every depth others."""
        generator = torch.Generator().manual_seed(seed)
        shape = (vocabulary, vocabulary)
        truth = torch.randn(shape, generator=generator)
        self.vocabulary = vocabulary
        self.at = {}
        for depth in range(1, FULL_DEPTH + 1):
            wrong = spread * (1 - depth / FULL_DEPTH)
            logits = truth + wrong * torch.randn(shape, generator=generator)
            logits[torch.rand(shape, generator=generator) < forbidden] = -torch.inf
            logits[:, 1] = logits[:, 1].nan_to_num(neginf=0.0)
            self.at[depth] = logits

    def __call__(self, depths: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """One row a pair: ``[n, V]``."""
        stacked = torch.stack([self.at[depth] for depth in sorted(self.at)])
        return stacked[torch.tensor(depths) - 1, torch.tensor(tokens)]


class TableChains:
    """TRUNC's lanes."""

    recurrences = FULL_DEPTH

    def __init__(self, tables: Tables, most: int, block: int):
        self.tables = tables
        self.runner = types.SimpleNamespace(spare=most * block)
        self.tokens = torch.zeros(most, block, dtype=torch.int64)
        self.depths = torch.zeros(most, block, dtype=torch.int64)
        self.read: list[list[int]] = []  # paths behind the base of the last readout's rows

    def begin(self, request_rows: Tensor, lengths: Tensor) -> None:
        pass

    def start(self, nodes: Nodes, token_ids: Tensor) -> None:
        self.tokens[nodes.request, nodes.offset] = token_ids
        self.depths[nodes.request, nodes.offset] = 0

    def advance(self, nodes: Nodes, first_step: int, last_step: int) -> None:
        assert (self.depths[nodes.request, nodes.offset] == first_step).all()
        self.depths[nodes.request, nodes.offset] = last_step

    def readout(self, nodes: Nodes) -> Tensor:
        at = (nodes.request, nodes.offset)
        pairs = zip(nodes.request.tolist(), nodes.offset.tolist(), strict=True)
        self.read = [self.tokens[request, 1 : offset + 1].tolist() for request, offset in pairs]
        return self.tables(self.depths[at].tolist(), self.tokens[at].tolist())


class TableLanes(TreeLanes):
    """The pipelines' lanes."""

    def __init__(self, tables: Tables, table: Tensor, branches: int):
        pool = types.SimpleNamespace(branch_slots=range(FIRST_BRANCH, FIRST_BRANCH + branches), page_size=1)
        super().__init__(types.SimpleNamespace(req_to_token=table, pool=pool))
        self.tables = tables
        self.texts: dict[int, dict[int, list[int]]] = {}  # request row -> length -> what a root may stand behind
        self.paths: dict[Lane, list[int]] = {}  # all tokens up to a lane's own
        self.read: list[list[int]] = []

    def start(self, lanes: Sequence[Lane]) -> None:
        for lane in lanes:
            parent, texts = lane.parent, self.texts[lane.request_row]
            before = texts[lane.position] if parent is None else self.paths[parent]
            assert len(before) == lane.position
            self.paths[lane] = [*before, lane.token]

    def advance(self, lanes: Sequence[Lane], ticks: int) -> None:
        self.paths = {lane: self.paths[lane] for lane in lanes}

    def readout(self, lanes: Sequence[Lane]) -> Tensor:
        self.read = [self.paths[lane] for lane in lanes]
        for lane in lanes:
            if lane.depth == FULL_DEPTH:
                self.texts[lane.request_row][len(self.paths[lane])] = self.paths[lane]
        return self.tables([lane.depth for lane in lanes], [lane.token for lane in lanes])


class CheckedChooser(BatchChooser):
    """Compares every readout's paths and positions with what its rows stand behind."""

    def __init__(self, *arguments, texts: list[list[int]], lanes: TableChains | TableLanes):
        super().__init__(*arguments)
        self.texts = texts
        self.lanes = lanes

    def transform(self, logits: Tensor, requests: Tensor, paths) -> None:
        behind = [self.texts[index] for index in requests.tolist()]
        found = [[*text, *path] for text, path in zip(behind, paths(), strict=True)]
        if isinstance(self.lanes, TableLanes):
            assert found == self.lanes.read
        else:
            assert found == [[*text, *path] for text, path in zip(behind, self.lanes.read, strict=True)]
        self.ends = [len(text) - 1 for text in found]
        super().transform(logits, requests, paths)

    def rows(self, requests: Tensor, positions: Tensor):
        assert positions.tolist() == self.ends
        return super().rows(requests, positions)


class TableServer:
    """A worker and its requests, all of them in every round until they have what they want."""

    worker: LoopedWorker

    def __init__(self, tables: Tables, options: Options, reqs: Sequence[Any], check: bool = False):
        """``reqs`` have emitted one token, a root. ``check``: every path and position, which takes time."""
        self.tables = tables
        self.options = options
        self.reqs = list(reqs)
        self.texts = [[*req.origin_input_ids, *req.output_ids] for req in reqs]
        table = torch.arange(1, 1 + len(reqs) * CONTEXT, dtype=torch.int64).view(-1, CONTEXT)
        lookups = lookups_for(options, None)
        self.worker = self._trunc() if isinstance(options, TruncOptions) else self._pipeline(table, lookups)
        self.worker.options = options
        self.worker.outputs = Outputs(all_of_them=options.lookup > 0)
        self.worker.lookups = lookups
        self.worker.stride = tokens_per_round(options, FULL_DEPTH)
        self.lanes = self.worker.lanes
        for req in reqs:
            self.worker.outputs.begin(req)
        if check:
            self.worker._batch_chooser = self._checked_chooser

    def _trunc(self) -> TruncWorker:
        worker = TruncWorker.__new__(TruncWorker)
        worker.counters = Counters()
        worker.lanes = TableChains(self.tables, len(self.reqs), self.options.block_size)
        return worker

    def _pipeline(self, table: Tensor, lookups: RequestLookups) -> PipelineWorker:
        worker, options = PipelineWorker.__new__(PipelineWorker), self.options
        worker.options = options
        worker.model = types.SimpleNamespace(shape=types.SimpleNamespace(recurrences=FULL_DEPTH))
        worker.counters = PipelineCounters(recurrences=FULL_DEPTH)
        worker.lanes = TableLanes(self.tables, table, options.max_width)
        capacity = options.max_width + len(self.reqs)
        schedule = worker._schedule()
        slots = worker.lanes.runner.pool.branch_slots
        worker.pipeline = Pipeline(schedule, slots, capacity, worker.counters, True, lookups)
        if options.sampling_policy == RESIDUAL:
            worker._cascade = Cascade(ResidualMemory(capacity * (schedule.cycles + 1)))
        return worker

    def _checked_chooser(self, batch) -> CheckedChooser:
        texts = [self.texts[index] for index in batch.req_pool_indices.tolist()]
        arguments = (batch, batch.seq_lens, self.worker.outputs)
        return CheckedChooser(*arguments, texts=texts, lanes=self.lanes)

    def round(self, running: Sequence[int]) -> None:
        """One decode round of these requests, by index."""
        reqs = [self.reqs[index] for index in running]
        lengths = [len(self.texts[index]) - 1 for index in running]
        for req, length in zip(reqs, lengths, strict=True):
            reserve = min(length + 2 * self.worker.stride, last_position(req) + 1)
            req.kv.kv_allocated_len = max(req.kv.kv_allocated_len, reserve)
        if isinstance(self.lanes, TableLanes):
            self.lanes.texts = {index: {len(self.texts[index]) - 1: self.texts[index][:-1]} for index in running}
        newest = torch.tensor([self.texts[index][-1] for index in running])
        batch = types.SimpleNamespace(
            reqs=reqs,
            seq_lens=torch.tensor(lengths),
            req_pool_indices=torch.tensor(running),
            spec_info=TruncState(newest, torch.tensor(lengths)),
            return_logprob=False,
            return_hidden_states=False,
            sampling_info=sampling_info(reqs, self.tables.vocabulary),
        )
        result = self.worker._decode(batch, None)
        strided = result.next_token_ids.view(len(running), self.worker.stride).tolist()
        for index, tokens, count in zip(running, strided, result.accept_lens.tolist(), strict=True):
            self.texts[index] += tokens[:count]

    def run(self, wanted: int, waves: int = 1) -> list[list[int]]:
        """The first ``wanted`` tokens behind every root. Requests arrive in ``waves``, one a round."""
        begins = [len(text) for text in self.texts]
        arrived = 0
        while True:
            arrived = min(arrived + 1, waves)
            waiting = [i for i, text in enumerate(self.texts) if len(text) - begins[i] < wanted]
            if not waiting:
                return [text[begin : begin + wanted] for text, begin in zip(self.texts, begins, strict=True)]
            if running := [i for i in waiting if i % waves < arrived]:
                self.round(running)
