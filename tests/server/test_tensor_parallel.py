"""Plain decoding over two gloo ranks on a CPU: the oracle's tokens."""

from __future__ import annotations

import pytest

from tests.server.oracle import prompt_of
from tests.server.setups import Setup, slow

TWO_RANKS = {"flags": ("--tp-size", "2"), "environment": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}}
ROWS = (slow(Setup("ouro", None, **TWO_RANKS)), Setup("retro-olmo2", None, chunk=7, **TWO_RANKS))


@pytest.mark.parametrize("served", ROWS, ids=lambda row: row.family, indirect=True)
@pytest.mark.parametrize("concurrency", [1, 4])
def test_tokens_are_the_oracles(client, oracle, concurrency):
    prompts = [prompt_of(length, seed=concurrency) for length in (1, 17, 40, 130)]
    answers = client.generate_many(prompts, concurrency, max_new_tokens=60, ignore_eos=True)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert oracle.mismatch(prompt, answer.output_ids) is None
