"""Which requests are refused, in which words, what the others get, and what becomes of both in SGLang's queue."""

from __future__ import annotations

import json
import types

import pytest
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

from sglang_trunc.core.options import TruncOptions
from sglang_trunc.engine.admission import check_before_queue, refusal
from sglang_trunc.engine.reporting import KEY

pytestmark = pytest.mark.usefixtures("sglang_context")
PROCESSOR = DisallowedTokensLogitsProcessor.to_str()


@pytest.mark.parametrize(
    ("field", "value"),
    [("return_sampling_mask", True), ("lora_id", "adapter"), ("input_embeds", [[0.0]]), ("input_embeds", [])],
)
def test_request_option_is_refused_by_name(request_stub, field, value):
    request = request_stub()
    setattr(request, field, value)
    assert refusal(request) == (
        f"{field}: not supported with this speculative algorithm. "
        "Leave it out, or start the server without --speculative-algorithm."
    )


@pytest.mark.parametrize(
    ("processor", "problem"),
    [
        ("{}", "KeyError: 'callable'"),
        ("not json", "JSONDecodeError"),
        ('{"callable": "00"}', "Error"),
        (json.dumps({"callable": b"cno_such_module\nThing\n.".hex()}), "ModuleNotFoundError"),
        (json.dumps({"callable": b"cbuiltins\nrange\n.".hex()}), "TypeError"),  # cannot be made without arguments
    ],
)
def test_a_processor_that_does_not_load_is_refused(request_stub, processor, problem):
    """SGLang loads it when it makes a batch, and ends there."""
    request = request_stub(temperature=0.7)
    request.custom_logit_processor = processor
    sentence = refusal(request)
    assert sentence.startswith("custom_logit_processor that does not load (")
    assert problem in sentence.split(")")[0]
    assert ": not supported with this speculative algorithm." in sentence


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.9, "top_k": 1},
        {"temperature": 0.7, "top_p": 0.3, "top_k": 5, "min_p": 0.5, "sampling_seed": 3},
        {"stop_token_ids": [3], "ignore_eos": True, "max_new_tokens": 1, "skip_special_tokens": False},
        {"frequency_penalty": 0.5, "presence_penalty": -0.5, "repetition_penalty": 1.2, "min_new_tokens": 3},
        {"logit_bias": {"3": 1.0}},
        {"json_schema": "{}"},
        {"regex": "a+"},
        {"ebnf": "root ::= 'a'"},
        {"structural_tag": "{}"},
    ],
)
def test_what_is_served_exactly_is_accepted(request_stub, sampling):
    assert refusal(request_stub(**sampling)) is None


@pytest.mark.parametrize(("field", "value"), [("return_hidden_states", True), ("custom_logit_processor", PROCESSOR)])
def test_request_option_is_accepted(request_stub, field, value):
    request = request_stub()
    setattr(request, field, value)
    assert refusal(request) is None


def test_all_reasons_are_in_one_sentence(request_stub):
    request = request_stub()
    request.return_sampling_mask, request.lora_id, request.custom_logit_processor = True, "a", "{}"
    sentence = refusal(request)
    assert sentence.startswith("return_sampling_mask; lora_id; custom_logit_processor that does not load (KeyError")


class Queue:
    """``Scheduler`` as far as the hook sees it."""

    def __init__(self, algorithm: str, options: TruncOptions | None = None):
        self.spec_algorithm = types.SimpleNamespace(name=algorithm)
        self.draft_worker = types.SimpleNamespace(options=options or TruncOptions(1, 4, 0.0))
        self.random_seed = 5
        self.queued = []

    def add(self, _self, request, is_retracted):
        self.queued.append((request, is_retracted))


def arrive(queue: Queue, request: types.SimpleNamespace, retracted: bool = False) -> list[str]:
    """What a request is refused with, if it is; it is queued in any case, since SGLang answers from there."""
    aborts: list[str] = []
    request.rid, request.set_finish_with_abort = "r", aborts.append
    check_before_queue(queue.add, queue, request, retracted)
    assert queue.queued[-1] == (request, retracted)
    return aborts


def said(request: types.SimpleNamespace) -> dict:
    """What its answer will say of itself from the start."""
    return request.customized_info[KEY].said


@pytest.mark.parametrize(
    ("algorithm", "retracted", "refused"), [("TRUNC", False, 1), ("TRUNC", True, 0), ("NONE", False, 0)]
)
def test_refused_request_is_queued_as_aborted(request_stub, algorithm, retracted, refused):
    request = request_stub(temperature=0.5)
    request.lora_id = "adapter"
    assert len(arrive(Queue(algorithm), request, retracted)) == refused
    assert request.sampling_params.sampling_seed is None
    assert request.customized_info is None


@pytest.mark.parametrize("algorithm", ["TRUNC", "LOOPSPEC_SINGLE", "LOOPSPEC_DUAL"])
def test_a_sampled_request_gets_a_seed_and_says_so(request_stub, algorithm):
    queue = Queue(algorithm)
    one, other, given, greedy = (
        request_stub(temperature=0.5),
        request_stub(temperature=0.5),
        request_stub(temperature=0.5, sampling_seed=8),
        request_stub(),
    )
    assert [arrive(queue, request) for request in (one, other, given, greedy)] == [[]] * 4
    seeds = [request.sampling_params.sampling_seed for request in (one, other, given, greedy)]
    assert len({*seeds}) == 4
    assert seeds[2:] == [8, None]
    assert [said(request) for request in (one, other, given)] == [{"sampling_seed": seed} for seed in seeds[:3]]
    assert said(greedy) == {}


def test_a_retracted_request_keeps_its_seed_and_what_it_says(request_stub):
    queue, request = Queue("TRUNC"), request_stub(temperature=0.5)
    arrive(queue, request)
    seed, told = request.sampling_params.sampling_seed, request.customized_info
    arrive(queue, request, retracted=True)
    assert request.sampling_params.sampling_seed == seed
    assert request.customized_info is told


def test_a_request_that_has_ended_already_is_left_alone(request_stub):
    request = request_stub(temperature=0.5)
    request.to_finish, request.lora_id = "too long", "adapter"
    assert arrive(Queue("TRUNC"), request) == []
    assert request.sampling_params.sampling_seed is None


def test_relaxed_acceptance_is_said_of_greedy_requests_too(request_stub):
    request = request_stub()
    arrive(Queue("TRUNC", TruncOptions(1, 4, 0.0, relax_top=2, relax_tau=0.5)), request)
    assert said(request) == {"relaxed_acceptance": {"top": 2, "tau": 0.5}}


def test_a_server_of_another_algorithm_assigns_nothing(request_stub):
    request = request_stub(temperature=0.5)
    assert arrive(Queue("NONE"), request) == []
    assert request.sampling_params.sampling_seed is None
    assert request.customized_info is None
