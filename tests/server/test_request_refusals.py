"""Options that cannot be served: HTTP 400, the option's name in the sentence, and no trace in other requests."""

from __future__ import annotations

from functools import partial

import httpx
import pytest

from sglang_trunc.serving.client import RequestRefused
from tests.server.oracle import prompt_of
from tests.server.setups import BOTH_RUNS
from tests.server.side_by_side import side_by_side

pytestmark = BOTH_RUNS

INVALID = {
    "temperature": -1,
    "top_p": 0,
    "min_p": 2,
    "frequency_penalty": 3,
    "repetition_penalty": 0,
    "logit_bias": {"100000": 1.0},
}
EXTRA = {
    "return_hidden_states": True,  # without the server's flag
    "custom_logit_processor": '{"callable": "00"}',
    "input_embeds": [[0.0] * 256] * 4,
    "lora_path": "adapter",
}


def refused(client, sampling: dict | None = None, extra: dict | None = None) -> str:
    with pytest.raises(RequestRefused) as caught:
        client.generate(prompt_of(6, seed=80), max_new_tokens=8, sampling=sampling, extra=extra)
    assert caught.value.status == 400
    return caught.value.message


@pytest.mark.parametrize("name", INVALID)
def test_invalid_value_is_refused_by_name(client, name):
    assert name in refused(client, sampling={name: INVALID[name]})


def test_sampling_mask_is_refused_by_name(client):
    assert "sampling_mask" in refused(client, extra={"return_sampling_mask": True})


@pytest.mark.parametrize("name", EXTRA)
def test_request_option_is_refused_by_name(server, name):
    body = {"sampling_params": {"temperature": 0, "max_new_tokens": 8}, name: EXTRA[name]}
    if name != "input_embeds":
        body["input_ids"] = prompt_of(6, seed=80)
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=300, trust_env=False)
    assert answer.status_code == 400
    assert name.split("_")[0] in answer.text.lower()


def test_openai_default_temperature_is_served(server):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=300, trust_env=False)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] <= 4


def test_refused_requests_leave_others_alone(client, oracle):
    prompts = [prompt_of(7, seed=seed) for seed in (81, 82)]
    good = [partial(client.generate, prompt, max_new_tokens=120, ignore_eos=True) for prompt in prompts]

    def bad() -> None:
        for name, value in INVALID.items():
            refused(client, sampling={name: value})
        refused(client, extra={"return_sampling_mask": True})

    *answers, _ = side_by_side([*good, bad])
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.output_ids) == 120
        assert oracle.mismatch(prompt, answer.output_ids) is None


def test_options_at_their_neutral_values_are_accepted(client, oracle):
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


def test_greedy_by_top_k_is_accepted(client, oracle):
    """temperature 0 and top_k 1 are the same request to SGLang."""
    prompt = prompt_of(6, seed=84)
    answer = client.generate(prompt, max_new_tokens=12, ignore_eos=True, temperature=0.8, sampling={"top_k": 1})
    assert oracle.mismatch(prompt, answer.output_ids) is None
