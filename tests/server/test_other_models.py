"""A model without a loop, served with the plugin installed: as if it were not there."""

from __future__ import annotations

import pytest
import torch

from tests.server.oracle import prompt_of
from tests.server.setups import Setup

SETUP = Setup("llama", None, page=16, chunk=16)


@pytest.fixture(scope="module")
def llama(served, model_of):
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(model_of(served), dtype=torch.float32).eval()


@pytest.mark.parametrize("concurrency", [1, 8])
def test_tokens_are_transformers_own(client, llama, concurrency):
    prompts = [prompt_of(length, seed=concurrency) for length in (1, 2, 17, 60, 100, 5, 6, 7)]
    answers = client.generate_many(prompts, concurrency, max_new_tokens=24, ignore_eos=True)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt + answer.output_ids])
        with torch.inference_mode():
            choices = llama(ids).logits[0, len(prompt) - 1 : -1].argmax(-1)
        assert choices.tolist() == answer.output_ids


def test_options_that_speculation_refuses_work(client):
    answer = client.generate(
        prompt_of(9),
        max_new_tokens=9,
        ignore_eos=True,
        temperature=0.8,
        sampling={"presence_penalty": 0.5, "top_p": 0.9},
    )
    assert len(answer.output_ids) == 9


def test_prefix_is_reused(client):
    prompt = prompt_of(50, seed=7)
    first, again = (client.generate(prompt, max_new_tokens=5, ignore_eos=True) for _ in range(2))
    assert again.output_ids == first.output_ids
    assert again.cached_tokens == 48


def test_nothing_of_ours_is_reported(server):
    assert "sglang_trunc" not in server.internal_state()
