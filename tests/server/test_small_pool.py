"""A pool of about one and a half requests: retraction, and then everything at once, in a fixed random order."""

from __future__ import annotations

import pytest

from sglang_trunc.serving.counters import counted_since
from tests.server.events import KINDS, Events
from tests.server.idle import idle_problem
from tests.server.oracle import prompt_of
from tests.server.setups import LoopSpec, Setup, Trunc, slow

POOL = 320
SMALL = {
    "context": 512,
    "pool": POOL,
    "environment": {
        # Admit requests as if each wanted 16 tokens, so that the pool runs full while they decode.
        "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "16",
        "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",  # no page owned twice, none owned and free
    },
}
ROWS = (
    Setup("ouro", Trunc(2, 4), page=1, **SMALL),
    slow(Setup("ouro-gqa", Trunc(1, 5), page=16, **SMALL)),
    slow(Setup("ouro-gqa", LoopSpec(2, None, 12), page=16, **SMALL)),
    Setup("ouro", LoopSpec(1, 2, 16, 0.0), page=1, checkpoint={"dial": 0.05}, **SMALL),
)
pytestmark = pytest.mark.parametrize("served", ROWS, ids=lambda row: row.name, indirect=True)


def test_retracted_requests_end_with_the_oracles_tokens(client, server, served, oracle):
    prompts = [prompt_of(40, seed=seed) for seed in range(6)]
    before = server.internal_state()
    answers = client.generate_many(prompts, 6, max_new_tokens=170, ignore_eos=True)
    retractions = sum(answer.meta_info["num_retractions"] for answer in answers)
    assert retractions > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.output_ids) == 170
        assert oracle.mismatch(prompt, answer.output_ids) is None, answer.meta_info["num_retractions"]
    if isinstance(served.schedule, LoopSpec):
        spent = counted_since(before, server.internal_state())
        assert spent["cold_starts"] + spent["warm_starts"] == len(prompts) + retractions


def test_retracted_requests_keep_their_logprobs(client, oracle):
    prompts = [prompt_of(50, seed=seed) for seed in range(10, 14)]
    answers = client.generate_many(prompts, 4, max_new_tokens=160, ignore_eos=True, return_logprob=True)
    assert sum(answer.meta_info["num_retractions"] for answer in answers) > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        truth = oracle.logprobs(prompt, answer.output_ids)
        given = answer.meta_info["output_token_logprobs"]
        assert [token for _, token, *_ in given] == answer.output_ids
        assert [value for value, *_ in given] == pytest.approx(
            [float(truth[i, token]) for i, token in enumerate(answer.output_ids)], abs=1e-4
        )


@pytest.mark.parametrize("length", [1, 100, 250])
def test_a_request_that_fills_the_pool_alone(client, served, oracle, length):
    """Its last rounds find no room for a whole reserve: it must end by its length, as in plain decoding."""
    prompt = prompt_of(length, seed=20)
    most = POOL - -(-length // served.page) * served.page - served.page - 1  # what SGLang lets a request have
    answer = client.generate(prompt, max_new_tokens=served.context - length, ignore_eos=True)
    assert answer.finish_reason == {"type": "length", "length": most}
    assert oracle.mismatch(prompt, answer.output_ids) is None


# TRUNC's worker keeps nothing between its rounds; what a pipeline keeps can go wrong in many orders.
EVENTS = {Trunc: 60, LoopSpec: 500}
STAGE = 100  # events between two idle moments


def test_random_events(client, server, served, oracle):
    events = Events(client, oracle, seed=11)
    plan = events.plan(EVENTS[type(served.schedule)])
    for first in range(0, len(plan), STAGE):
        events.run(plan[first : first + STAGE])
        assert (problem := idle_problem(server)) is None, problem
    assert set(events.seen) == set(KINDS)
    assert events.seen.total() == len(plan)
    assert events.retractions > 0
    client.flush_cache()
    assert (problem := idle_problem(server)) is None, problem
    prompt = prompt_of(30, seed=99)
    assert oracle.mismatch(prompt, client.generate(prompt, max_new_tokens=40, ignore_eos=True).output_ids) is None
