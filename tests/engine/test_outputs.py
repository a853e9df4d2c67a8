"""Records of what requests have emitted: from prefill to departure, and what prefills of resumed requests need."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from sglang_trunc.core.penalties import PenaltyRule
from sglang_trunc.engine.outputs import Outputs, penalty_rule
from sglang_trunc.engine.trunc_worker import TruncWorker
from tests.engine.sampling_stand import Mirror, Picky, emit, request, sampling_info, stock_logits

pytestmark = pytest.mark.usefixtures("sglang_context")
VOCABULARY = 20
PROMPT = [1, 2, 3, 4, 5, 6]
PENALTIES = {"frequency_penalty": 0.5, "repetition_penalty": 1.25, "min_new_tokens": 6, "stop_token_ids": [7]}


# What a request asks for.


def test_the_rule_is_the_requests():
    req = request("r", PROMPT, frequency_penalty=0.5, presence_penalty=-1.0, repetition_penalty=0.5)
    assert penalty_rule(req) == PenaltyRule(0.5, -1.0, 0.5, 0, ())
    assert not penalty_rule(request("r", PROMPT)).active


@pytest.mark.parametrize("tokenizer", [True, False])
@pytest.mark.parametrize("own", [{9, 4}, None])
def test_stop_ids_that_are_held_back_are_sglangs(tokenizer, own):
    """Of the request, of the model's config and of the tokenizer, as its penalizer collects them."""
    req = request("r", PROMPT, min_new_tokens=2, stop_token_ids=own)
    req.eos_token_ids = {11, 4}
    if tokenizer:
        req.tokenizer = types.SimpleNamespace(eos_token_id=0, additional_stop_token_ids={15})
    penalised = stock_logits(req, torch.zeros(VOCABULARY))
    found = penalty_rule(req).stop_ids
    assert list(found) == penalised.isinf().nonzero().flatten().tolist()
    assert found == tuple(sorted({*(own or ()), 11, 4, *({0, 15} if tokenizer else ())}))
    req.sampling_params.min_new_tokens = 0
    assert penalty_rule(req).stop_ids == ()


def test_a_server_without_tokenizer_holds_back_the_requests_own_stop_ids():
    req = request("r", PROMPT, min_new_tokens=2, stop_token_ids=[3])
    req.tokenizer = None
    assert penalty_rule(req).stop_ids == (3,)


# The records by hand.


def test_only_requests_that_need_one_have_a_record():
    outputs, everything = Outputs(), Outputs(all_of_them=True)
    reqs = [
        request("plain", PROMPT, temperature=0.8),
        request("penalised", PROMPT, presence_penalty=0.1),
        request("processed", PROMPT, processor=Picky, custom_params={"add": 0.0}),
        request("biased", PROMPT, logit_bias={"3": 1.0}),
    ]
    for req in reqs:
        outputs.begin(req)
        everything.begin(req)
    assert [outputs.of(req.rid) is not None for req in reqs] == [False, True, True, False]
    assert (len(outputs), len(everything)) == (2, 4)
    assert outputs.of("processed").penalties is None
    assert everything.of("plain").penalties is None
    outputs.extend("plain", [1])  # as every run is reported
    outputs.forget("plain")
    outputs.forget("penalised")
    assert outputs.of("penalised") is None


def test_a_record_grows_with_its_runs():
    outputs, req = Outputs(), request("r", PROMPT, **PENALTIES)
    outputs.begin(req)
    for run in ([4], [5, 5, 4], [9]):
        outputs.extend("r", run)
    record = outputs.of("r")
    assert record.tokens == [4, 5, 5, 4, 9]
    emit(req, record.tokens)
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(0))
    expected = stock_logits(req, logits[0])
    record.penalties.apply(logits, [0], [[]])
    assert torch.equal(logits[0], expected)


def test_a_record_that_does_not_fit_is_made_anew(caplog):
    outputs, req = Outputs(), request("r", PROMPT, **PENALTIES)
    outputs.begin(req)
    outputs.extend("r", [4, 5])
    assert outputs.ready(req, 2).tokens == [4, 5]
    assert not caplog.records
    emit(req, [8, 8, 8])
    assert outputs.ready(req, 3).tokens == [8, 8, 8]
    assert [record.getMessage() for record in caplog.records] == ["r has a record of 2 tokens, but emitted 3"]


def test_a_record_that_is_missing_is_made(caplog):
    outputs, req, plain = Outputs(), request("r", PROMPT, **PENALTIES), request("plain", PROMPT)
    emit(req, [8])
    assert outputs.ready(req, 1).tokens == [8]
    assert outputs.ready(plain, 3) is None
    assert not caplog.records


# What resumed requests need in a prefill.


def test_a_resumed_requests_penalties_are_put_in_place():
    """SGLang's penalizers of a new batch have counted nothing; other rows stay theirs."""
    outputs = Outputs()
    reqs = [request("new", PROMPT, **PENALTIES), request("resumed", PROMPT, **PENALTIES), request("plain", PROMPT)]
    emit(reqs[1], [4, 4, 9])
    for req in reqs:
        outputs.begin(req)
    info = sampling_info(reqs, VOCABULARY)
    outputs.correct_penalties(reqs, info)
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([stock_logits(req, row) for req, row in zip(reqs, logits, strict=True)])
    info.apply_logits_bias(logits)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("sampling", [{"presence_penalty": 1.0}, {"repetition_penalty": 2.0}])
def test_a_batch_that_needs_one_kind_of_penalty_alone(sampling):
    outputs, req = Outputs(), request("r", PROMPT, **sampling)
    emit(req, [4, 9])
    outputs.begin(req)
    info = sampling_info([req], VOCABULARY)
    outputs.correct_penalties([req], info)
    logits = torch.ones(1, VOCABULARY)
    info.apply_logits_bias(logits)
    assert torch.equal(logits[0], stock_logits(req, torch.ones(VOCABULARY)))


# A worker's calls, from a request's first chunk to its departure.


@pytest.fixture
def worker() -> TruncWorker:
    bare = TruncWorker.__new__(TruncWorker)
    bare.outputs = Outputs()
    bare.lookups = types.SimpleNamespace(forget=lambda rid: None)
    bare.options = types.SimpleNamespace(lookup=0)
    return bare


def prefill(worker: TruncWorker, ends: dict[Any, int], tokens: list[int], during=lambda batch: None):
    """One prefill batch of requests up to these lengths; what its sampler chose."""

    def forward(batch):
        during(batch)
        return types.SimpleNamespace(next_token_ids=torch.tensor(tokens))

    worker._target_worker = types.SimpleNamespace(forward_batch_generation=forward)
    reqs = [req for req, _ in ends.values()]
    batch = types.SimpleNamespace(
        reqs=reqs,
        seq_lens=torch.tensor([end for _, end in ends.values()]),
        sampling_info=sampling_info(reqs, VOCABULARY),
        forward_mode=types.SimpleNamespace(is_extend=lambda: True),
    )
    return worker._prefill(batch, None)


def test_from_the_first_chunk_to_the_departure(worker):
    """Chunks, prefill, runs, a retraction with what was emitted until then, and the end."""
    req, other = request("r", PROMPT, **PENALTIES), request("other", PROMPT, processor=Mirror, custom_params={})
    prefill(worker, {0: (req, 4)}, [9])  # of the chunk's last token: nobody's
    assert worker.outputs.of("r").tokens == []
    prefill(worker, {0: (req, 6), 1: (other, 3)}, [4, 9])
    assert (worker.outputs.of("r").tokens, worker.outputs.of("other").tokens) == ([4], [])
    batch = types.SimpleNamespace(reqs=[req])
    worker._remember(batch, torch.tensor([[5, 6, 0, 0]]), torch.tensor([2]))
    assert worker.outputs.of("r").tokens == [4, 5, 6]
    worker._leave("r")
    assert worker.outputs.of("r") is None
    emit(req, [4, 5])  # the last run's end came too late
    seen = []
    prefill(worker, {0: (req, 7)}, [9], lambda batch: seen.append(batch.sampling_info.acc_additive_penalties))
    assert worker.outputs.of("r").tokens == [4, 5]
    assert seen[0][0, [4, 5, 6, 7]].tolist() == [-0.5, -0.5, 0.0, -torch.inf]
    prefill(worker, {0: (req, 8)}, [6])
    assert worker.outputs.of("r").tokens == [4, 5, 6]
    for rid in ("r", "other"):
        worker._leave(rid)
    assert len(worker.outputs) == 0


def test_a_prefill_gives_its_sampler_the_seeds(worker):
    reqs = [request("a", PROMPT, temperature=1.0, sampling_seed=-3), request("b", PROMPT), request("c", PROMPT)]
    seen = []
    ends = {number: (req, 6) for number, req in enumerate(reqs)}
    prefill(worker, ends, [1, 2, 3], lambda batch: seen.append(batch.sampling_info.sampling_seed.tolist()))
    assert seen == [[-3, 0, 0]]


def test_a_processor_that_fails_in_a_prefill_ends_its_own_request(worker):
    """The sampler has said which row it was."""
    reqs = [request(rid, PROMPT, processor=Picky, custom_params={"add": 1.0}) for rid in ("good", "bad", "fine")]

    def fail(batch):
        batch.sampling_info.failed_processor = {1: ValueError("no such token")}

    prefill(worker, {number: (req, 6) for number, req in enumerate(reqs)}, [1, 2, 3], fail)
    assert [req.to_finish is None for req in reqs] == [True, False, True]
    assert reqs[1].to_finish.message == "custom_logit_processor failed with ValueError: no such token"
