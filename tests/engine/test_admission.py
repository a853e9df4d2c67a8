"""Which requests are refused, in which words, and what happens to them in SGLang's queue."""

from __future__ import annotations

import types

import pytest

from sglang_trunc.engine.admission import check_before_queue, refusal

pytestmark = pytest.mark.usefixtures("sglang_context")


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        ({"temperature": 0.7}, "temperature 0.7"),
        ({"temperature": 1.0, "top_k": 5}, "temperature 1"),
        ({"frequency_penalty": 0.5}, "frequency_penalty 0.5"),
        ({"presence_penalty": -0.5}, "presence_penalty -0.5"),
        ({"repetition_penalty": 1.2}, "repetition_penalty 1.2"),
        ({"min_new_tokens": 3}, "min_new_tokens 3"),
        ({"logit_bias": {"3": 1.0}}, "logit_bias"),
        ({"json_schema": "{}"}, "json_schema"),
        ({"regex": "a+"}, "regex"),
        ({"ebnf": "root ::= 'a'"}, "ebnf"),
        ({"structural_tag": "{}"}, "structural_tag"),
    ],
)
def test_sampling_option_is_named(request_stub, sampling, named):
    sentence = refusal(request_stub(**sampling))
    assert sentence.startswith(named)
    assert "not supported with this speculative algorithm" in sentence


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("custom_logit_processor", "{}"),
        ("return_hidden_states", True),
        ("return_sampling_mask", True),
        ("lora_id", "adapter"),
        ("input_embeds", [[0.0]]),
    ],
)
def test_request_option_is_named(request_stub, field, value):
    request = request_stub()
    setattr(request, field, value)
    assert refusal(request).startswith(f"{field}: not supported")


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.9, "top_k": 1},
        {"stop_token_ids": [3], "ignore_eos": True, "max_new_tokens": 1, "skip_special_tokens": False},
        {"logit_bias": {}, "frequency_penalty": 0.0, "top_p": 0.3, "min_p": 0.5},
    ],
)
def test_greedy_request_is_accepted(request_stub, sampling):
    assert refusal(request_stub(**sampling)) is None


def test_all_reasons_are_in_one_sentence(request_stub):
    sentence = refusal(request_stub(temperature=0.5, presence_penalty=0.5, regex="a"))
    assert sentence.startswith("temperature 0.5; presence_penalty 0.5; regex: not supported")


class Queue:
    """``Scheduler`` as far as the hook sees it."""

    def __init__(self, algorithm: str):
        self.spec_algorithm = types.SimpleNamespace(name=algorithm)
        self.queued = []

    def add(self, _self, request, is_retracted):
        self.queued.append((request, is_retracted))


@pytest.mark.parametrize(
    ("algorithm", "retracted", "refused"), [("TRUNC", False, 1), ("TRUNC", True, 0), ("NONE", False, 0)]
)
def test_refused_request_is_queued_as_aborted(request_stub, algorithm, retracted, refused):
    """Queued, since SGLang answers the client from there; a request of another algorithm is not looked at."""
    queue = Queue(algorithm)
    request = request_stub(temperature=0.5)
    aborts = []
    request.set_finish_with_abort = aborts.append
    check_before_queue(queue.add, queue, request, retracted)
    assert queue.queued == [(request, retracted)]
    assert len(aborts) == refused
