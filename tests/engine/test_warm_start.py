"""Lanes that ride along with their prompts' prefill: plain decoding's text and K/V, and a pipeline that is filled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_trunc.core.pipeline import Schedule
from sglang_trunc.engine.rows import RowRunner
from sglang_trunc.engine.warm_start import PrefillRiders
from sglang_trunc.reference.tiny import FAMILIES
from sglang_trunc.reference.tokenizer import TINY_VOCAB
from tests.engine import sampling_stand
from tests.engine.plain_stand import plain_decoding
from tests.engine.sampling_stand import Mirror, stock_choice
from tests.engine.tree_stand import TreeStand

pytestmark = pytest.mark.usefixtures("sglang_context")
PROMPTS = [[5, 9, 17, 33, 250, 11, 99], [100], [7, 7, 7, 8, 8, 301, 4, 77, 13, 5, 6, 200, 8, 8]]
WANTED = 12


def prefill_with_riders(stand: TreeStand, *keys: int, begin: int = 0) -> None:
    """One prefill batch, as ``PipelineWorker`` and ``LoopedCausalLM.forward`` run it between them.

    ``begin``: tokens of every prompt that are in the pool already.
    """
    model, pipeline = stand.runner.model, stand.pipeline
    requests = [stand.requests[key] for key in keys]
    tokens = [token for request in requests for token in request.tokens[begin:]]
    positions = [p for request in requests for p in range(begin, len(request.tokens))]
    owners = torch.tensor([request.row for request in requests for _ in request.tokens[begin:]])
    runner = RowRunner(model, stand.pool, stand.table, stand.runner.attention, len(tokens))
    rows = runner.take(len(tokens))
    rows.positions[:] = torch.tensor(positions)
    rows.slots[:] = stand.table[owners, rows.positions]
    rows.kv_start[:] = owners * stand.table.shape[1]
    rows.kv_len[:] = rows.positions + 1
    last, end = {}, 0
    for key, request in zip(keys, requests, strict=True):
        position = len(request.tokens) - 1
        slot = int(stand.table[request.row, position])
        pipeline.watch(key, request.row, position, request.tokens[-1], slot, request.last)
        end += len(request.tokens) - begin
        last[key] = end - 1
    riders, attend = PrefillRiders(stand.engine, pipeline, last, stand.chooser(keys)), runner.attend(rows)
    state = model.embed(torch.tensor(tokens), rows.positions, attend)
    for step in range(runner.recurrences):
        runner.begin_step(rows)
        state = riders.recur(model, step, state, rows.positions, attend)
        runner.end_step(rows)
    logits = model.logits(model.readout(state, rows.positions, attend))
    for key, row in last.items():
        token = stock_choice(stand.requests[key].req, logits[row])
        pipeline.answer(key, token)
        stand.prefilled(key, token)


def check(stand: TreeStand, plain, family: str, checkpoint: dict) -> None:
    for key, answer in enumerate(stand.run()):
        want, kv = plain(family, checkpoint, PROMPTS[key], WANTED)
        assert answer == want
        stand.check_kv(key, kv)
    counters = stand.counters
    assert counters.warm_starts + counters.cold_starts == len(PROMPTS)
    tokens = len(PROMPTS) * (WANTED - 1)
    assert counters.tokens == tokens
    assert counters.rows + counters.warm_rows == stand.plan.recurrences * tokens + counters.rows_wasted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_text_and_kv_are_plain_decodings_to_the_bit(make_tree_stand, plain, family, dtype):
    checkpoint, warm = {"full_depth": 4, "dtype": dtype}, 0
    for page, depths, width in ((1, (1, 3), 32), (16, (1, 2), 32), (1, (1, 2), 6), (16, (2, None), 32)):
        stand = make_tree_stand(family, checkpoint, Schedule(4, *depths, width, 0.0), page=page)
        keys = [stand.place(prompt, WANTED) for prompt in PROMPTS[:2]]
        prefill_with_riders(stand, *keys)
        stand.check_slots()
        stand.round()
        prefill_with_riders(stand, stand.place(PROMPTS[2], WANTED))  # beside lanes of others
        check(stand, plain, family, checkpoint)
        warm += stand.counters.warm_starts
    assert warm > 3


SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.9, "sampling_seed": 4, "repetition_penalty": 1.6},
    {"min_new_tokens": 8, "stop_token_ids": list(range(0, TINY_VOCAB, 2)), "logit_bias": {"7": 1.0}},
    {"temperature": 0.6, "top_p": 0.9, "processor": Mirror, "custom_params": {"boost": 3.0}},
]


def place(stand: TreeStand, number: int) -> int:
    return stand.place(PROMPTS[number], WANTED, **SAMPLING[number])


@pytest.mark.parametrize("family", ["ouro", "huginn"])
def test_riders_choose_as_their_requests_want(make_tree_stand, served_model, family):
    """Behind a prompt nothing has been emitted yet, and a rider's path begins at the prompt's last token."""
    checkpoint, warm = {"full_depth": 4}, 0
    model = served_model(family, **checkpoint)
    plain = [
        plain_decoding(model, prompt, WANTED, sampling_stand.request("r", prompt, WANTED, **sampling))[0]
        for prompt, sampling in zip(PROMPTS, SAMPLING, strict=True)
    ]
    for d2, page in ((None, 1), (2, 16)):
        stand = make_tree_stand(family, checkpoint, Schedule(4, 1, d2, 32, 0.0), page=page)
        stand.forced = lambda key, lane: plain[key][lane.position + 1 - len(PROMPTS[key])] if lane.token % 3 else 9
        prefill_with_riders(stand, place(stand, 0), place(stand, 1))
        stand.round()
        prefill_with_riders(stand, place(stand, 2))
        assert stand.run() == plain
        warm += stand.counters.warm_starts
    assert warm > 2


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("family", ["ouro", "huginn"])
def test_a_prompts_last_chunk_is_enough(make_tree_stand, plain, family, page):
    """Its other tokens came out of the prefix cache."""
    checkpoint = {"full_depth": 8}
    stand = make_tree_stand(family, checkpoint, Schedule(8, 2, 4, 32, 0.0), page=page)
    for prompt in PROMPTS:
        key = stand.place(prompt, WANTED)
        begin = len(prompt) // 2
        stand.requests[key].tokens = prompt[:begin]
        if begin:
            stand.prefilled(key)
        stand.requests[key].tokens = list(prompt)
        prefill_with_riders(stand, key, begin=begin)
    check(stand, plain, family, checkpoint)


@pytest.mark.parametrize("d1", [1, 2])
def test_a_right_first_draft_saves_all_but_the_prefills_own_depth(make_tree_stand, plain, monkeypatch, d1):
    """With riders the second token is final d1 ticks after the first one."""
    checkpoint = {"full_depth": 4}
    text = PROMPTS[0] + plain("ouro", checkpoint, PROMPTS[0], WANTED)[0]
    stand = make_tree_stand("ouro", checkpoint, Schedule(4, d1, None, 32, 0.0))
    stand.forced = lambda key, lane: text[lane.position + 1]
    key = stand.place(PROMPTS[0], WANTED)
    original = PrefillRiders._choices

    def right(self, model, readers, *rest):
        choices = original(self, model, readers, *rest)
        return [c._replace(token=text[lane.position + 1]) for lane, c in zip(readers, choices, strict=True)]

    monkeypatch.setattr(PrefillRiders, "_choices", right)
    prefill_with_riders(stand, key)
    assert stand.run() == [text[len(PROMPTS[0]) :]]
    assert stand.counters.ticks == (WANTED - 1) * d1
    assert (stand.counters.warm_starts, stand.counters.restarts) == (1, 0)
