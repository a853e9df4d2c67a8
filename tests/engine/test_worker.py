"""The worker's arithmetic: budgets, and the strided layout in which SGLang reads runs."""

from __future__ import annotations

import types

import pytest
import torch

from sglang_trunc.core.looped import Nodes
from sglang_trunc.core.options import TruncOptions
from sglang_trunc.core.trunc import Run
from sglang_trunc.engine.trunc_worker import TruncWorker

pytestmark = pytest.mark.usefixtures("sglang_context")


@pytest.fixture
def worker() -> TruncWorker:
    bare = TruncWorker.__new__(TruncWorker)
    bare.options = TruncOptions(d1=1, block_size=4, draft_threshold=0.0)
    bare.stride = 4
    return bare


PROMPT = 10  # tokens


def batch(*requests: tuple[int, int, int]) -> types.SimpleNamespace:
    """(max_new_tokens, tokens emitted so far, slots allocated) per request; host state lags by a whole round."""
    reqs = [
        types.SimpleNamespace(
            origin_input_ids=[0] * PROMPT,
            sampling_params=types.SimpleNamespace(max_new_tokens=most),
            output_ids=[0] * max(0, have - 4),
            kv=types.SimpleNamespace(kv_allocated_len=allocated),
        )
        for most, have, allocated in requests
    ]
    # The newest token has no KV yet.
    return types.SimpleNamespace(reqs=reqs, seq_lens=torch.tensor([PROMPT + have - 1 for _, have, _ in requests]))


@pytest.mark.parametrize(
    ("request_", "budget"),
    [
        ((100, 1, 50), 4),  # the block
        ((10, 8, 50), 2),  # tokens still wanted
        ((10, 9, 50), 1),
        ((100, 1, 13), 3),  # slots reserved
        ((10, 10, 50), 1),  # ended already, seen once more under overlap: still one node
        ((10, 10, 20), 1),
    ],
)
def test_budget(worker, request_, budget):
    assert worker._budgets(batch(request_)) == [budget]


def test_budgets_are_each_requests_own(worker):
    assert worker._budgets(batch((100, 1, 50), (3, 1, 50), (100, 41, 51))) == [4, 2, 1]


def test_tokens_are_strided_by_the_block_even_when_no_chain_is_that_long(worker):
    tokens = torch.tensor([[1, 2], [3, 4], [5, 6]])
    assert worker._strided(tokens).tolist() == [1, 2, 0, 0, 3, 4, 0, 0, 5, 6, 0, 0]


def test_logits_row_j_is_what_emitted_token_j(worker):
    kept = Nodes(torch.tensor([0, 0, 1, 2, 2, 2]), torch.tensor([0, 1, 0, 0, 1, 2]))
    logits = torch.arange(6.0).view(6, 1).expand(6, 3)
    run = Run(torch.zeros(3, 3, dtype=torch.int64), torch.tensor([2, 1, 3]), logits, kept)
    rows = worker._strided_rows(run, logits, batch_size=3)
    assert rows.shape == (12, 3)
    assert rows[:, 0].tolist() == [0, 1, 0, 0, 2, 0, 0, 0, 3, 4, 5, 0]


def test_a_model_without_a_loop_is_refused():
    runner = types.SimpleNamespace(model=torch.nn.Linear(1, 1))
    args = types.SimpleNamespace(speculative_algorithm="TRUNC")
    with pytest.raises(TypeError, match=r"needs a looped model \(Ouro, Raven\); Linear is not one"):
        TruncWorker(args, 0, 0, types.SimpleNamespace(model_runner=runner))


def test_a_pool_that_was_not_hooked_in_is_refused(worker):
    runner = types.SimpleNamespace(token_to_kv_pool=object())
    worker.model_runner = runner
    worker._target_worker = types.SimpleNamespace(model_runner=runner, get_memory_pool=lambda: (None, None))
    with pytest.raises(RuntimeError, match="KV pool is object, not LoopedKVPool.*sglang-trunc doctor"):
        worker.alloc_memory_pool()
