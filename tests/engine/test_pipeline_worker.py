"""What the pipelines' worker takes from SGLang's batches and gives back: which lanes it keeps, the strided layout."""

from __future__ import annotations

import types

import pytest
import torch

from sglang_trunc.core.lane_tree import LaneTree
from sglang_trunc.core.options import DualOptions, SingleOptions
from sglang_trunc.core.pipeline import Choice, Schedule
from sglang_trunc.engine import departures
from sglang_trunc.engine import worker as worker_module
from sglang_trunc.engine.pipeline_worker import PipelineWorker
from tests.engine.worker_stand import (
    BRANCHES,
    CONTEXT,
    FULL_DEPTH,
    OPTIONS,
    PROMPT,
    VOCABULARY,
    Client,
    batch,
    decode,
    scripted_worker,
)

pytestmark = pytest.mark.usefixtures("sglang_context")


@pytest.fixture
def worker() -> PipelineWorker:
    return scripted_worker()


def tree(worker: PipelineWorker, client: Client) -> LaneTree | None:
    return worker.pipeline.trees.get(client.req.rid)


def assert_empty(worker: PipelineWorker) -> None:
    assert not worker.pipeline.trees
    assert worker.pipeline.slots.free == len(BRANCHES)
    assert worker.pipeline.rows.free == OPTIONS.max_width


# Which lanes are used again.


def test_lanes_that_fit_are_used_again(worker):
    clients = [Client(1), Client(2), Client(3)]
    decode(worker, *clients)
    before = [tree(worker, client) for client in clients]
    lanes = [list(t.lanes) for t in before]
    assert len(lanes[0]) > 1
    assert worker._admit(batch(*clients)) == [client.req.rid for client in clients]
    assert [tree(worker, client) for client in clients] == before
    assert [t.lanes for t in before] == lanes
    assert worker.counters.cold_starts == 3
    while clients[0].length < clients[0].last:
        decode(worker, *clients)
    assert worker.counters.cold_starts == 3


@pytest.mark.parametrize("fact", ["row", "position", "token", "slot"])
def test_lanes_that_do_not_fit_are_dropped(worker, fact):
    client, other = Client(1), Client(2)
    decode(worker, client, other)
    before, others = tree(worker, client), tree(worker, other)
    old, table = list(before.lanes), worker.lanes.runner.req_to_token
    if fact == "row":
        table[5] = table[1]
        client.row = 5
    elif fact == "position":
        client.length += 1
        table[1, client.length] = before.root.slot  # only the position is another
    elif fact == "token":
        client.token = 0
    else:
        table[1, client.length] = 77
    worker._admit(batch(client, other))
    new = tree(worker, client)
    assert new is not before
    assert tree(worker, other) is others
    assert not any(lane.alive for lane in old)
    root = new.root
    assert new.lanes == [root]
    assert (root.request_row, root.position, root.token) == (client.row, client.length, client.token)
    assert (root.slot, root.depth) == (table[client.row, client.length], 0)
    assert worker.counters.cold_starts == 3


def test_lanes_of_a_request_outside_the_batch_are_dropped(worker):
    client, other = Client(1), Client(2)
    decode(worker, client, other)
    decode(worker, other)
    assert tree(worker, client) is None
    decode(worker, client)
    assert worker.counters.cold_starts == 3
    assert tree(worker, other) is None


@pytest.mark.parametrize("wants", [1, 40])
def test_lanes_of_a_request_that_is_prefilled_again_are_dropped(worker, wants):
    client, other = Client(1), Client(2)
    decode(worker, client, other)
    old, others = list(tree(worker, client).lanes), tree(worker, other)
    client.req.sampling_params.max_new_tokens = wants
    worker._target_worker = types.SimpleNamespace(
        forward_batch_generation=lambda batch: types.SimpleNamespace(next_token_ids=torch.tensor([5]))
    )
    again = batch(client)
    again.forward_mode = types.SimpleNamespace(is_extend=lambda: True)
    again.extend_lens = [PROMPT]
    again.seq_lens = torch.tensor([PROMPT])
    result = worker.forward_batch_generation(again)
    assert not any(lane.alive for lane in old)
    assert tree(worker, client) is None
    assert tree(worker, other) is others
    assert result.next_draft_input.bonus_tokens.tolist() == [5]


def test_lanes_of_a_request_that_leaves_its_row_are_dropped(worker):
    pool, client, other = types.SimpleNamespace(), Client(1), Client(2)
    departures.announce(pool, worker.pipeline.leave)
    decode(worker, client, other)
    departures.on_free(None, pool, client.req)
    departures.on_free(None, pool, Client(4).req)  # never decoded
    assert tree(worker, client) is None
    assert tree(worker, other) is not None
    departures.on_free(None, pool, other.req)
    assert_empty(worker)


def test_a_flush_forgets_lanes_and_exchanged_slots(worker):
    decode(worker, Client(1), Client(3))
    worker.pipeline.slots.take()
    worker.clear_cache_pool()
    assert_empty(worker)


# The end of a request.


def test_an_ended_request_gets_one_token_and_is_not_run(worker):
    """Seen once more under overlap scheduling."""
    ended, running = Client(1, most=6), Client(2)
    while ended.length < ended.last:
        decode(worker, ended, running)
    worker.lanes.ran.clear()
    token = ended.token
    result = decode(worker, ended, running)
    assert result.accept_lens[0] == 1
    assert ended.token == token
    assert {lane.request_row for lane in worker.lanes.ran} == {2}
    assert tree(worker, ended) is None


def test_a_batch_of_ended_requests_runs_nothing(worker):
    clients = [Client(1, most=1), Client(3, most=1)]
    assert decode(worker, *clients).accept_lens.tolist() == [1, 1]
    assert not worker.lanes.ran
    assert_empty(worker)


@pytest.mark.parametrize("most", range(1, 9))
def test_no_request_gets_more_than_it_wants(worker, most):
    clients = [Client(1, most), Client(3, most + 2)]
    while any(client.length < client.last for client in clients):
        waiting = [client for client in clients if client.length < client.last]
        decode(worker, *waiting)
    assert [client.length for client in clients] == [client.last for client in clients]


@pytest.mark.parametrize("reserved", range(1, 14))
def test_no_lane_is_behind_the_reserved_slots(worker, reserved):
    """SGLang reserves nothing more while a request uses them up; then it goes on."""
    client, other = Client(1, reserve=0), Client(3)
    client.req.kv.kv_allocated_len = end = PROMPT + reserved
    while client.length < end:
        decode(worker, client, other)
        assert max(lane.position for lane in worker.lanes.ran if lane.request_row == 1) < end
    assert client.length == end
    client.reserve = 12
    decode(worker, client, other)
    assert worker.counters.cold_starts == 3


def served_behind(worker: PipelineWorker, reserve: int) -> list[int]:
    """Tokens a round of a request that drafts right beside one that always restarts; SGLang is a round behind."""
    fast, slow = Client(1), Client(3)
    known = {fast: fast.length, slow: slow.length}
    counts = []
    for _ in range(7):
        for client, length in known.items():
            client.reserve = reserve - (client.length - length)
            known[client] = client.length
        counts.append(int(decode(worker, fast, slow).accept_lens[0]))
    return counts


def test_the_reserve_is_just_enough_for_full_speed(worker):
    """See ``slots.tokens_per_round``; the first round is filling the pipeline."""
    assert served_behind(worker, 2 * worker.stride) == [1] + [FULL_DEPTH] * 6
    assert served_behind(scripted_worker(), 2 * worker.stride - 1) != [1] + [FULL_DEPTH] * 6


# What is read from the slot table, and how results are laid out.


def test_reserved_slots_are_those_from_the_newest_token_on(worker):
    one, two = Client(1), Client(3)
    one.length, two.length = 12, CONTEXT - 3
    one.req.kv.kv_allocated_len, two.req.kv.kv_allocated_len = 20, CONTEXT
    table = worker.lanes.runner.req_to_token
    got = worker._reserved(batch(one, two, logprobs=False), [12, CONTEXT - 3])
    assert got == [table[1, 12:24].tolist(), table[3, CONTEXT - 3 :].tolist()]


def test_several_tokens_in_one_round_are_strided(worker):
    """A request whose drafts are right goes on while another one restarts."""
    fast, slow = Client(1), Client(3)
    for _ in range(4):
        result = decode(worker, fast, slow)
    assert result.accept_lens.tolist() == [FULL_DEPTH, 1]
    assert worker.stride >= FULL_DEPTH
    assert result.next_token_ids.tolist()[worker.stride] == slow.token


def test_logits_row_j_is_what_emitted_token_j(worker, monkeypatch):
    monkeypatch.setattr(worker_module, "compute_spec_logprobs", lambda *args, **options: None)
    fast, slow, ended = Client(1), Client(3), Client(2, most=1)
    for _ in range(3):
        result = decode(worker, fast, slow, ended, logprobs=True)
    logits = result.logits_output.next_token_logits.view(3, worker.stride, VOCABULARY)
    tokens = result.next_token_ids.view(3, worker.stride)
    counts = result.accept_lens.tolist()
    assert counts == [FULL_DEPTH, 1, 1]
    for index, count in enumerate(counts[:2]):
        assert torch.equal(logits[index, :count].argmax(-1), tokens[index, :count])
        assert not logits[index, count:].any()
    assert not logits[2].any()


# Lanes that started during the prefill.


def test_a_root_in_a_branch_slot_is_settled_on_admission(worker):
    client = Client(1)
    pipeline, table = worker.pipeline, worker.lanes.runner.req_to_token
    slot = int(table[1, PROMPT - 1])
    pipeline.watch(client.req.rid, 1, PROMPT - 1, token=3, slot=slot, end=client.last)
    pipeline.absorb(pipeline.advanced(pipeline.lanes([client.req.rid])), [Choice(client.token, 0.9)])
    pipeline.answer(client.req.rid, client.token)
    branch, reserved = tree(worker, client).root.slot, int(table[1, PROMPT])
    assert branch in BRANCHES
    decode(worker, client)
    assert worker.counters.cold_starts == 0
    assert table[1, PROMPT] == branch
    assert reserved not in table
    pipeline.leave(client.req.rid)
    taken = [pipeline.slots.take() for _ in BRANCHES]
    assert sorted(taken) == sorted({*BRANCHES, reserved} - {branch})


# Construction.


@pytest.mark.parametrize("options", [OPTIONS, SingleOptions(d1=2, max_width=5, min_survival=0.1)])
def test_the_schedule_is_the_options(worker, options):
    worker.options = options
    d2 = 2 if options is OPTIONS else None
    assert worker._schedule() == Schedule(FULL_DEPTH, options.d1, d2, options.max_width, options.min_survival)


@pytest.mark.parametrize(("page", "most", "capacity"), [(1, 4, 24), (16, 33, 53)])
def test_there_is_a_state_row_for_every_lane_and_arrival(worker, make_tree_stand, page, most, capacity):
    stand = make_tree_stand("huginn", {"full_depth": FULL_DEPTH}, Schedule(FULL_DEPTH, 1, 2, 20, 0.0), page=page)
    worker.model, worker.options = stand.runner.model, DualOptions(1, 2, 20, 0.0)
    worker.model_runner = types.SimpleNamespace(max_running_requests=most)
    table_pool = types.SimpleNamespace(req_to_token=stand.table)
    runner = worker._build(stand.pool, table_pool, stand.runner.attention)
    assert worker.lanes.runner is runner
    assert len(runner.hidden) == capacity + 1
    assert worker.pipeline.rows.size == capacity
    assert runner.buffers.kv_tails.shape == (capacity, FULL_DEPTH)
    assert worker.pipeline.exchange == (page == 1)
    taken = [worker.pipeline.slots.take() for _ in range(20)]
    assert sorted(taken) == list(stand.pool.branch_slots)
    client = Client(1)
    worker.pipeline.join(client.req.rid, 1)
    worker._leave(client.req.rid)
    assert not worker.pipeline.trees
