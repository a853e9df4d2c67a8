"""Requests that were retracted and resumed say what they say alone, under options that depend on all that was said."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from sglang_trunc.serving.client import Completion
from tests.server.oracle import prompt_of
from tests.server.side_by_side import side_by_side
from tests.server.test_small_pool import ROWS

pytestmark = pytest.mark.parametrize("served", [ROWS[0], ROWS[3]], ids=lambda row: row.name, indirect=True)
TOKENS = 100
# Through noise by position, counts of tokens, or a grammar's state.
OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0, "sampling_seed": 5},
    {"temperature": 0.7, "sampling_seed": 6, "top_p": 0.9},
    {"temperature": 1.0, "sampling_seed": 7, "frequency_penalty": 0.6, "repetition_penalty": 1.2},
    {"temperature": 0.8, "sampling_seed": 8, "regex": "([a-f][0-9]){80}"},
    {"frequency_penalty": 0.5, "presence_penalty": 0.3},
    {"temperature": 1.0, "sampling_seed": 9, "min_p": 0.02, "min_new_tokens": 60},
)


def test_text_and_logprobs_are_those_of_the_request_alone(client):
    def one(number: int) -> Completion:
        sampling = dict(OPTIONS[number])
        return client.generate(
            prompt_of(40, seed=number),
            max_new_tokens=TOKENS,
            ignore_eos=True,
            temperature=sampling.pop("temperature", 0.0),
            sampling=sampling,
            return_logprob=True,
        )

    alone = [one(number) for number in range(len(OPTIONS))]
    assert not any(answer.meta_info["num_retractions"] for answer in alone)
    together = side_by_side([partial(one, number) for number in range(len(OPTIONS))])
    assert sum(answer.meta_info["num_retractions"] for answer in together) > 1
    for want, got in zip(alone, together, strict=True):
        assert got.output_ids == want.output_ids
        assert len(got.output_ids) == TOKENS
        assert got.meta_info["output_token_logprobs"] == want.meta_info["output_token_logprobs"]
