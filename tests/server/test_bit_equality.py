"""bf16 on the GPU-less platform: plain decoding and speculation give the same bits, no near tie excepted.

The servers of a group also differ in page size and in how prompts are cut into prefill chunks, which must not show
either: a row's bits depend neither on its neighbours nor on whether it was prefilled, decoded or verified.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from sglang_trunc.serving.server import Server
from tests.server.idle import idle_problem
from tests.server.oracle import prompt_of
from tests.server.setups import LoopSpec, Setup, Trunc

pytestmark = pytest.mark.skipif(
    torch.accelerator.current_accelerator(check_available=True) is not None,
    reason="accelerators promise equality up to near ties",
)
BF16 = {"dtype": "bfloat16"}
DEEP = {**BF16, "checkpoint": {"full_depth": 16}}
TOKENS = 80
PROMPTS = [prompt_of(length, seed=90) for length in (1, 2, 5, 16, 33, 64, 130, 250)]

# Plain decoding first.
GROUPS: list[Any] = [
    (
        Setup("huginn", None, chunk=7, **DEEP),
        Setup("huginn", Trunc(3, 5), page=16, **DEEP),
        Setup("huginn", LoopSpec(4, 8, 32, 0.0), radix=False, **DEEP),
    ),
    pytest.param(
        (
            Setup("ouro-gqa", None, page=16, radix=False, **BF16),
            Setup("ouro-gqa", Trunc(2, 4), chunk=7, overlap=False, **BF16),
            Setup("ouro-gqa", LoopSpec(1, None, 32, 0.0), page=16, chunk=16, **BF16),
        ),
        marks=pytest.mark.slow,
    ),
]
DEMO = Path(str(resources.files("sglang_trunc"))) / "demos" / "ouro"
if DEMO.is_dir():
    GROUPS.append(
        (
            Setup("demo-ouro", None, directory=DEMO, chunk=64, **BF16),
            Setup("demo-ouro", Trunc(2, 6), directory=DEMO, **BF16),
            Setup("demo-ouro", LoopSpec(1, 2, 16), directory=DEMO, overlap=False, **BF16),
        )
    )


class Said(NamedTuple):
    """One answer to the last bit."""

    ids: list[int]
    top: list[list[tuple[float, int]]]  # (logprob, token) of the five best, per position


def answers(server: Server, concurrency: int) -> list[Said]:
    with server.client() as client:
        client.flush_cache()
        given = client.generate_many(
            PROMPTS, concurrency, max_new_tokens=TOKENS, ignore_eos=True, return_logprob=True, top_logprobs_num=5
        )
    return [
        Said(answer.output_ids, [answer.top_logprobs(i) for i in range(len(answer.output_ids))]) for answer in given
    ]


@pytest.mark.parametrize("setups", GROUPS, ids=lambda group: group[0].family)
def test_plain_and_speculative_servers_agree_to_the_bit(servers, setups):
    plain, *speculative = setups
    server = servers.get(plain)
    want = answers(server, concurrency=8)
    assert answers(server, concurrency=1) == want
    assert server.pool_balanced()
    for setup in speculative:
        server = servers.get(setup)
        for concurrency in (1, 8):
            for prompt, said, wanted in zip(PROMPTS, answers(server, concurrency), want, strict=True):
                told = f"{setup.name}: prompt of {len(prompt)} tokens, concurrency {concurrency}"
                assert said.ids == wanted.ids, told
                assert said.top == wanted.top, told
        assert (problem := idle_problem(server)) is None, problem
