"""What is refused: HTTP 400, the option's name in the sentence, and no trace in other requests.

Everything else is exact (``test_request_options``, ``test_sampling``). For processors that a client broke, see
``test_broken_processors``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import httpx
import pytest

from sglang_trunc.serving.client import RequestRefused
from sglang_trunc.serving.processors import ThinkingBudget, serialized
from tests.server.oracle import prompt_of
from tests.server.setups import BOTH_RUNS
from tests.server.side_by_side import side_by_side

pytestmark = BOTH_RUNS
PROMPT = prompt_of(6, seed=80)


def refused(client, sampling: dict | None = None, extra: dict | None = None) -> str:
    with pytest.raises(RequestRefused) as caught:
        client.generate(PROMPT, max_new_tokens=8, sampling=sampling, extra=extra)
    assert caught.value.status == 400
    return caught.value.message


def post(server, path: str, body: dict) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=300, trust_env=False)


# --- what no schedule can do, or this server was not started for ---

UNSUPPORTED = {
    "input_embeds": [[0.0] * 256] * 4,
    "lora_path": "adapter",
    "return_sampling_mask": True,
    "return_hidden_states": True,
    "custom_logit_processor": serialized(ThinkingBudget),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_request_option_is_refused_by_name(server, name):
    body = {"sampling_params": {"temperature": 0, "max_new_tokens": 8}, name: UNSUPPORTED[name]}
    if name != "input_embeds":
        body["input_ids"] = PROMPT
    answer = post(server, "/generate", body)
    assert answer.status_code == 400
    assert name.removesuffix("_path") in answer.text.lower().replace("-", "_").replace(" ", "_")


# --- values that mean nothing ---

INVALID: tuple[tuple[dict[str, Any], str], ...] = (
    ({"temperature": -1.0}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"temperature": 1.0, "top_k": 0}, "top_k"),
    ({"temperature": 1.0, "top_k": -2}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"frequency_penalty": 2.5}, "frequency_penalty"),
    ({"presence_penalty": -2.5}, "presence_penalty"),
    ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"min_new_tokens": 9}, "min_new_tokens"),  # of 8 at most
    ({"logit_bias": {"512": 1.0}}, "logit_bias"),  # beyond the vocabulary
    ({"temperature": 1.0, "sampling_seed": 2**63}, "sampling_seed"),
    ({"temperature": 1.0, "sampling_seed": 0.5}, "expected i64"),  # SGLang's reader of JSON, which knows no names
    ({"regex": "("}, "regex"),
    ({"json_schema": '{"type": 7}'}, "json"),
    ({"ebnf": "root ::="}, "ebnf"),
    ({"regex": "a", "ebnf": 'root ::= "a"'}, "Only one of json_schema, regex, ebnf"),
)


@pytest.mark.parametrize(("sampling", "named"), INVALID, ids=[f"{given}" for given, _ in INVALID])
def test_invalid_value_is_refused_by_name(client, sampling, named):
    assert named in refused(client, sampling=sampling)


def test_refused_requests_leave_others_alone(client, oracle):
    prompts = [prompt_of(7, seed=seed) for seed in (81, 82)]
    good = [partial(client.generate, prompt, max_new_tokens=120, ignore_eos=True) for prompt in prompts]

    def bad() -> None:
        for sampling, _ in INVALID:
            refused(client, sampling=sampling)
        refused(client, extra={"return_sampling_mask": True})

    *answers, _ = side_by_side([*good, bad])
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.output_ids) == 120
        assert oracle.mismatch(prompt, answer.output_ids) is None


# --- what is not refused ---


def test_openai_requests_without_a_temperature_are_drawn(server):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 16, "ignore_eos": True}
    texts = []
    for seed in (None, None, 5, 5):
        answer = post(server, "/v1/chat/completions", body if seed is None else {**body, "seed": seed})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 16
        texts.append(answer.json()["choices"][0]["message"]["content"])
    assert texts[2] == texts[3]
    assert len(set(texts)) == 3


def test_options_at_their_neutral_values_change_nothing(client, oracle):
    neutral = {
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "logit_bias": {},
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
    }
    prompt = prompt_of(6, seed=83)
    answer = client.generate(prompt, max_new_tokens=12, ignore_eos=True, sampling=neutral)
    assert oracle.mismatch(prompt, answer.output_ids) is None


def test_top_k_1_is_greedy(client, oracle):
    """temperature 0 and top_k 1 are the same request to SGLang."""
    prompt = prompt_of(6, seed=84)
    answer = client.generate(prompt, max_new_tokens=12, ignore_eos=True, temperature=0.8, sampling={"top_k": 1})
    assert oracle.mismatch(prompt, answer.output_ids) is None
    assert "sampling_seed" not in answer.meta_info
