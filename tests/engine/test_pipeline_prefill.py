"""A pipeline's prefill: whose options the lanes of the first tokens follow, before any round has begun."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sglang_trunc.core.lane_tree import Lane
from sglang_trunc.engine.pipeline_worker import PipelineWorker
from tests.engine.sampling_stand import request, sampling_info, stock_choice, with_output
from tests.engine.worker_stand import VOCABULARY, scripted_worker

pytestmark = pytest.mark.usefixtures("sglang_context")
PROMPT = [3] * 6
PENALTIES = {"frequency_penalty": 2.0, "repetition_penalty": 1.5, "min_new_tokens": 9, "stop_token_ids": [0, 1, 2]}


@pytest.fixture
def worker() -> PipelineWorker:
    return scripted_worker()


def prefill(worker: PipelineWorker, lengths: dict[int, tuple[Any, int]], during: Callable[[Any], None]) -> None:
    """One batch of requests by row, up to these lengths; ``during`` is called in place of the target's pass."""

    def forward(batch):
        during(batch)
        return types.SimpleNamespace(next_token_ids=torch.full((len(lengths),), 5))

    worker._target_worker = types.SimpleNamespace(forward_batch_generation=forward)
    reqs = [req for req, _ in lengths.values()]
    batch = types.SimpleNamespace(
        reqs=reqs,
        seq_lens=torch.tensor([length for _, length in lengths.values()]),
        req_pool_indices=torch.tensor(list(lengths)),
        extend_lens=[1] * len(reqs),
        spec_info=None,
        return_hidden_states=False,
        sampling_info=sampling_info(reqs, VOCABULARY),
        forward_mode=types.SimpleNamespace(is_extend=lambda: True),
    )
    worker._prefill(batch, None)


@pytest.mark.parametrize("emitted", [[], [4, 4, 7]])
def test_lanes_beside_a_prefill_choose_as_plain_decoding_would(worker, emitted):
    """Also behind a retraction, where SGLang's penalizers know nothing of what was emitted."""
    req = request("r", PROMPT, **PENALTIES)
    req.output_ids = list(emitted)
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(len(emitted))) + 3
    logits[:, 0] += 3  # forbidden for a while
    found: list[int] = []

    def during(batch):
        root = worker.pipeline.trees["r"].root
        child = Lane(8, root.position + 1, 900, 0, 1, root, 1)
        grandchild = Lane(8, root.position + 2, 901, 1, 1, child, 1)
        found.extend(choice.token for choice in worker._chooser([root, child, grandchild], logits.clone()))

    prefill(worker, {1: (req, len(PROMPT) + len(emitted))}, during)
    paths = [[], [8], [8, 8]]
    expected = [stock_choice(with_output(req, [*emitted, *path]), row) for path, row in zip(paths, logits, strict=True)]
    assert found == expected
    assert worker.outputs.of("r").tokens == [*emitted, 5]


def test_a_chunk_inside_a_prompt_needs_nothing_of_the_choosers(worker, caplog):
    """A long prompt goes on beside one that ends; its record is not in question."""
    long = request("long", [3] * 40, **PENALTIES)
    for length in (10, 20, 30):
        ending = request(f"ending {length}", PROMPT, **PENALTIES)
        prefill(worker, {1: (long, length), 2: (ending, len(PROMPT))}, lambda batch: None)
        assert worker.outputs.of("long").tokens == []
        assert worker.outputs.of(ending.rid).tokens == [5]
    assert not caplog.records
