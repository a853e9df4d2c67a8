"""Tokens looked up in the request's own text: the oracle's tokens, whatever was found, alone and in company."""

from __future__ import annotations

import pytest

from tests.server.oracle import prompt_of
from tests.server.setups import LoopSpec, Setup, Trunc

LOOK_UP = {"SGLANG_TRUNC_LOOKUP": "6", "SGLANG_TRUNC_LOOKUP_MIN_MATCH": "1"}
ROWS = (
    Setup("ouro", Trunc(2, 9), environment=LOOK_UP, flags=("--enable-return-hidden-states",)),
    Setup("ouro", LoopSpec(1, 2, 32, 0.0), environment=LOOK_UP, flags=("--enable-return-hidden-states",)),
    Setup("huginn", LoopSpec(1, None, 32, 0.0), page=16, chunk=16, environment=LOOK_UP),
)
pytestmark = pytest.mark.parametrize("served", ROWS, ids=lambda row: row.name, indirect=True)
# With a minimum match of one token almost every position finds something, mostly wrong.
PROMPTS = [
    prompt_of(9, seed=60) * 7,
    [100] * 24,
    prompt_of(40, seed=61),
    prompt_of(30, seed=62) + prompt_of(20, seed=62),
]


@pytest.mark.parametrize("concurrency", [1, 3, 8])
def test_tokens_are_the_oracles(server, client, oracle, concurrency):
    prompts = PROMPTS * (1 if concurrency < 8 else 2)
    answers = client.generate_many(prompts, concurrency, max_new_tokens=60, ignore_eos=True)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert oracle.mismatch(prompt, answer.output_ids) is None
    counted = server.internal_state()["sglang_trunc"]["counters"]
    assert counted["screened_out"] > 0
    assert counted.get("looked_up") or counted["drafted_by_depth"]["-1"]


def test_a_stop_token_inside_a_chain_ends_the_answer(client, oracle):
    whole = client.generate(PROMPTS[0], max_new_tokens=40, ignore_eos=True).output_ids
    for place in (3, 11, 12, 20):
        answer = client.generate(PROMPTS[0], max_new_tokens=40, stop_token_ids=[whole[place]])
        assert answer.output_ids == whole[: whole.index(whole[place]) + 1]


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.8, "sampling_seed": 3}, {"frequency_penalty": 0.5}], ids=["seeded", "penalised"]
)
def test_options_are_kept(client, sampling):
    """The same alone and in company, that is with other chains and widths."""
    options = {"max_new_tokens": 40, "ignore_eos": True, "sampling": sampling}
    alone = [client.generate(prompt, **options).output_ids for prompt in PROMPTS]
    assert [answer.output_ids for answer in client.generate_many(PROMPTS, 4, **options)] == alone


def test_text_of_a_retraction_or_an_abort_is_not_missed(server, client, oracle):
    """A request that hangs up in the middle leaves no text behind for the next one of its id."""
    body = {
        "input_ids": PROMPTS[0],
        "rid": "same",
        "sampling_params": {"max_new_tokens": 200, "ignore_eos": True, "temperature": 0},
    }
    stream = client.stream(body)
    next(stream)
    stream.close()
    answer = client.generate(PROMPTS[2], max_new_tokens=30, ignore_eos=True, extra={"rid": "same again"})
    assert oracle.mismatch(PROMPTS[2], answer.output_ids) is None
