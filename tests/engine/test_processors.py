"""Custom logit processors in a readout: what they are given, and whom their errors end."""

from __future__ import annotations

from array import array
from http import HTTPStatus
from typing import Any

import pytest
import torch

from sglang_trunc.engine.outputs import Outputs
from sglang_trunc.engine.transforms import RequestView, Transforms, abort_for_processor, run_processor
from tests.engine.sampling_stand import Mirror, Picky, request, sampling_info, stock_logits, with_output

pytestmark = pytest.mark.usefixtures("sglang_context")
PROMPT, VOCABULARY = [3, 5, 9], 21


def random_logits(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 5


def picky(rid: str, add: Any, kind: type = Picky) -> Any:
    return request(rid, PROMPT, processor=kind, custom_params={"add": add, "boost": 1.0})


def test_a_processor_that_fails_ends_its_own_request_alone():
    """Those that share its code, those with another processor and those without go on as if nothing had happened."""
    reqs = [picky("good", 0.5), picky("bad", None), picky("another", 0.0, Mirror), request("plain", PROMPT)]
    logits = random_logits(6, 3)
    requests, paths = [1, 0, 2, 1, 3, 0], [[], [2], [4, 4], [6], [], []]
    expected = logits.clone()
    for row in (1, 2, 5):
        emitted = with_output(reqs[requests[row]], paths[row])
        expected[row] = stock_logits(emitted, logits[row])
    outputs = Outputs()
    for req in reqs:
        outputs.begin(req)
    transforms = Transforms(reqs, sampling_info(reqs, VOCABULARY), [outputs.of(req.rid) for req in reqs])
    transforms.apply(logits, requests, paths)
    assert torch.equal(logits, expected)
    assert [req.to_finish is None for req in reqs] == [True, False, True, True]
    reason = reqs[1].to_finish
    assert reason.status_code == HTTPStatus.BAD_REQUEST
    assert reason.message.startswith("custom_logit_processor failed with ")
    assert "TypeError" in reason.message or "RuntimeError" in reason.message


@pytest.mark.parametrize("answer", [torch.zeros(1, VOCABULARY), torch.zeros(2, 3), None, 7])
def test_an_answer_of_another_kind_is_a_failure(answer):
    logits = random_logits(2, 0)
    before = logits.clone()
    problems = run_processor(lambda logits, params: answer, logits, [0, 1], [4, 4], [{}, {}])
    assert problems.keys() == {4}
    assert torch.equal(logits, before)


def test_a_processor_gets_a_call_for_all_its_rows():
    calls = []

    def processor(logits, params):
        calls.append((logits[:, 0].tolist(), params))
        return logits + 1

    logits = torch.arange(5.0).unsqueeze(1).repeat(1, 3)
    assert run_processor(processor, logits, [3, 1], [0, 0], ["a", "b"]) == {}
    assert calls == [([3.0, 1.0], ["a", "b"])]
    assert logits[:, 0].tolist() == [0.0, 2.0, 2.0, 4.0, 4.0]
    assert run_processor(processor, logits, [], [], []) == {}
    assert len(calls) == 1


def test_a_request_that_is_ending_keeps_its_reason():
    ending, over, running = (picky(rid, 1.0) for rid in ("ending", "over", "running"))
    ending.to_finish = "the client has gone"
    over.finished = lambda: True
    abort_for_processor([ending, over, running], dict.fromkeys((0, 1), ValueError("no")))
    assert (ending.to_finish, over.to_finish, running.to_finish) == ("the client has gone", None, None)


def test_parameters_without_the_request_are_handed_over_as_they_are():
    req = picky("r", 0.25)
    req.sampling_params.custom_params = params = {"add": 0.25}
    seen = []
    info = sampling_info([req], VOCABULARY)
    (entry,) = info.custom_logit_processor.values()
    entry.processor = lambda logits, params: seen.extend(params) or logits
    Transforms([req], info, [None]).apply(random_logits(1, 0), [0], [[1]])
    assert seen == [params]
    assert seen[0] is params


def test_a_view_of_a_request_shows_the_path_and_everything_else():
    req = picky("r", 1.0)
    req.output_ids, req.more = array("q", [4]), "own"
    view = RequestView(req, [4, 6])
    assert view.output_ids == array("q", [4, 6])
    assert array("q", req.origin_input_ids) + view.output_ids == array("q", [*PROMPT, 4, 6])
    assert (view.rid, view.more, view.origin_input_ids) == ("r", "own", PROMPT)
    assert RequestView(request("r", PROMPT), (1, 2)).output_ids == [1, 2]
    assert req.output_ids == array("q", [4])


def test_what_was_emitted_under_overlap_is_the_records():
    """``Req.output_ids`` is a round behind; a processor sees the record, then the path."""
    req = picky("r", 0.0, Mirror)
    outputs = Outputs()
    outputs.begin(req)
    outputs.extend(req.rid, [6, 6])
    seen = []
    info = sampling_info([req], VOCABULARY)
    (entry,) = info.custom_logit_processor.values()
    entry.processor = lambda logits, params: seen.append(params[0]["__req__"].output_ids) or logits
    Transforms([req], info, [outputs.of(req.rid)]).apply(random_logits(1, 0), [0], [[1]])
    assert seen == [[6, 6, 1]]
