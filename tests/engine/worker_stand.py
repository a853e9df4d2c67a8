"""``PipelineWorker`` without a model or a scheduler: batches as far as it looks at them, readouts by a formula."""

from __future__ import annotations

import types
from collections.abc import Sequence

import torch

from sglang_trunc.core.counters import PipelineCounters
from sglang_trunc.core.lane_tree import Lane
from sglang_trunc.core.options import DualOptions
from sglang_trunc.core.pipeline import Pipeline
from sglang_trunc.engine.lookahead import RequestLookups
from sglang_trunc.engine.outputs import Outputs
from sglang_trunc.engine.pipeline_worker import PipelineWorker
from sglang_trunc.engine.slots import tokens_per_round
from sglang_trunc.engine.state import TruncState
from sglang_trunc.engine.tree_lanes import TreeLanes
from tests.engine.sampling_stand import request, sampling_info

PROMPT = 10  # tokens
ROWS, CONTEXT = 6, 64  # of the slot table
VOCABULARY, FULL_DEPTH = 50, 4
BRANCHES = range(900, 912)
OPTIONS = DualOptions(d1=1, d2=2, max_width=12, min_survival=0.0)


def truth(row: int, position: int) -> int:
    """Token of a request at a position; never 0, which fills the strided layout."""
    return 1 + (7 * row + 5 * position) % (VOCABULARY - 1)


class ScriptedLanes(TreeLanes):
    """Lanes without a model: full depth says ``truth``, drafts say it in the rows that are ``right``."""

    def __init__(self, right: set[int]):
        table = torch.arange(ROWS * CONTEXT, dtype=torch.int32).view(ROWS, CONTEXT) + 100
        pool = types.SimpleNamespace(branch_slots=BRANCHES, page_size=1)
        super().__init__(types.SimpleNamespace(req_to_token=table, pool=pool))
        self.right = right
        self.ran: list[Lane] = []

    def start(self, lanes: Sequence[Lane]) -> None:
        pass

    def advance(self, lanes: Sequence[Lane], ticks: int) -> None:
        self.ran += lanes

    def readout(self, lanes: Sequence[Lane]) -> torch.Tensor:
        logits = torch.zeros(len(lanes), VOCABULARY)
        for row, lane in zip(logits, lanes, strict=True):
            wrong = lane.depth < FULL_DEPTH and lane.request_row not in self.right
            row[truth(lane.request_row, lane.position + 1) - (1 + lane.depth if wrong else 0)] = 9.0
        return logits


def scripted_worker() -> PipelineWorker:
    """A worker without a model. Drafts are right in rows 1 and 2, wrong elsewhere."""
    bare = PipelineWorker.__new__(PipelineWorker)
    bare.options = OPTIONS
    bare.stopwatch = None
    bare.outputs = Outputs()
    bare.lookups = RequestLookups(min_match=3, max_match=16)
    bare.stride = tokens_per_round(OPTIONS, FULL_DEPTH)
    bare.model = types.SimpleNamespace(
        config=types.SimpleNamespace(vocab_size=VOCABULARY), shape=types.SimpleNamespace(recurrences=FULL_DEPTH)
    )
    bare.counters = PipelineCounters(recurrences=FULL_DEPTH)
    bare.lanes = ScriptedLanes(right={1, 2})
    bare.pipeline = Pipeline(bare._schedule(), BRANCHES, OPTIONS.max_width, bare.counters)
    return bare


class Client:
    """A request as the scheduler has it. ``length``: committed; the newest ``token`` is at that position."""

    def __init__(self, row: int, most: int = 40, reserve: int = 12):
        self.row = row
        self.length = PROMPT
        self.token = truth(row, PROMPT)
        self.reserve = reserve
        self.req = request(f"request {row}", [3] * PROMPT, most)

    @property
    def last(self) -> int:
        return PROMPT + self.req.sampling_params.max_new_tokens - 1


def batch(*clients: Client, logprobs: bool = False) -> types.SimpleNamespace:
    for client in clients:
        kv = client.req.kv
        kv.kv_allocated_len = max(kv.kv_allocated_len, min(client.length + client.reserve, client.last + 1))
    lengths = torch.tensor([client.length for client in clients])
    return types.SimpleNamespace(
        reqs=[client.req for client in clients],
        seq_lens=lengths,
        req_pool_indices=torch.tensor([client.row for client in clients]),
        spec_info=TruncState(torch.tensor([client.token for client in clients]), lengths),
        return_logprob=logprobs,
        return_hidden_states=False,
        sampling_info=sampling_info([client.req for client in clients], VOCABULARY),
    )


def decode(worker: PipelineWorker, *clients: Client, logprobs: bool = False):
    """One round; every client gets its tokens, which must be the right ones."""
    published = []
    result = worker._decode(batch(*clients, logprobs=logprobs), published.append)
    strided = result.next_token_ids.view(len(clients), worker.stride).tolist()
    state = result.next_draft_input
    assert result.speculative_num_draft_tokens == worker.stride
    for index, (client, count) in enumerate(zip(clients, result.accept_lens.tolist(), strict=True)):
        tokens, padding = strided[index][:count], strided[index][count:]
        assert not any(padding)
        if client.length < client.last:
            assert tokens == [truth(client.row, client.length + 1 + i) for i in range(count)]
        client.length += count
        client.token = tokens[-1]
        assert (state.new_seq_lens[index], state.bonus_tokens[index]) == (client.length, client.token)
    assert [lengths.tolist() for lengths in published] == [[client.length for client in clients]]
    return result
