"""The sampler of prefills: SGLang's tokens and logprobs to the bit, each row for itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.layers import sampler
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_trunc.engine.choosing import seeds_of
from sglang_trunc.engine.sampler import SeededSampler
from tests.engine.sampling_stand import Mirror, Picky, request, sampling_info, stock_logits, stock_sample

pytestmark = pytest.mark.usefixtures("sglang_context")
VOCABULARY, ROWS = 600, 16
PROMPT = [3, 1, 4]
FIELDS = (
    "next_token_logprobs",
    "next_token_top_logprobs_val",
    "next_token_top_logprobs_idx",
    "next_token_token_ids_logprobs_val",
    "next_token_token_ids_logprobs_idx",
)
BATCHES: dict[str, list[dict[str, Any]]] = {
    "greedy": [{}],
    "open": [{"temperature": 0.7}, {"temperature": 1.4}],
    "top-p": [{"temperature": 0.9, "top_p": 0.7}, {"temperature": 1.2, "top_p": 0.95}],
    "top-k": [{"temperature": 1.0, "top_k": 9}, {"temperature": 1.0, "top_k": 300, "top_p": 0.9}],
}


def requests(kinds: list[dict[str, Any]], rows: int = ROWS) -> list[Any]:
    return [
        request(f"request {row}", [*PROMPT, *range(row)], sampling_seed=row**5 - 9, **kinds[row % len(kinds)])
        for row in range(rows)
    ]


def random_logits(rows: int = ROWS, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def positions_of(reqs: list[Any]) -> torch.Tensor:
    return torch.tensor([len(req.origin_input_ids) - 1 for req in reqs])


def sample(reqs: list[Any], logits: torch.Tensor, **logprobs: Any) -> tuple[torch.Tensor, LogitsProcessorOutput]:
    info, output = sampling_info(reqs, VOCABULARY), LogitsProcessorOutput(next_token_logits=logits.clone())
    info.sampling_seed = seeds_of(reqs, logits.device)
    asked = {"return_logprob": False, "top_logprobs_nums": [], "token_ids_logprobs": [], **logprobs}
    return SeededSampler()(output, info, positions=positions_of(reqs), **asked), output


def logprobs_of(rows: int) -> dict[str, Any]:
    return {
        "return_logprob": True,
        "top_logprobs_nums": [row % 4 for row in range(rows)],
        "token_ids_logprobs": [[row, 7] if row % 3 else None for row in range(rows)],
    }


def listed(values: Any) -> Any:
    """Nested lists, whatever of them were tensors."""
    if isinstance(values, torch.Tensor):
        return values.tolist()
    return [listed(value) for value in values] if isinstance(values, list | tuple) else values


@pytest.mark.parametrize("original", [False, True], ids=["tempered logprobs", "original logprobs"])
@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_of_one_kind_gets_sglangs_tokens_and_logprobs(monkeypatch, kind, original):
    reqs, logits = requests(BATCHES[kind]), random_logits()
    monkeypatch.setattr(sampler, "SGLANG_RETURN_ORIGINAL_LOGPROB", original)
    seeds, positions = seeds_of(reqs, logits.device), positions_of(reqs)
    expected, theirs = stock_sample(logits, sampling_info(reqs, VOCABULARY), seeds, positions, **logprobs_of(ROWS))
    with envs.SGLANG_RETURN_ORIGINAL_LOGPROB.override(original):
        tokens, ours = sample(reqs, logits, **logprobs_of(ROWS))
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == expected.tolist()
    for field in FIELDS:
        assert getattr(theirs, field) is not None
        assert listed(getattr(ours, field)) == listed(getattr(theirs, field)), field


def test_a_rows_token_and_logprobs_do_not_depend_on_its_neighbours():
    """SGLang filters a whole batch as soon as one row asks for it."""
    kinds = [kind for kinds in BATCHES.values() for kind in kinds] + [{"temperature": 0.8, "min_p": 0.05}]
    reqs, logits = requests(kinds, 21), random_logits(21)
    tokens, output = sample(reqs, logits, **logprobs_of(21))
    for row in range(21):
        alone, its_output = sample([reqs[row]], logits[row : row + 1], **logprobs_of(1))
        assert alone.tolist() == tokens[row : row + 1].tolist()
        assert torch.equal(its_output.next_token_logprobs, output.next_token_logprobs[row : row + 1])
    order = list(reversed(range(21)))
    assert sample([reqs[row] for row in order], logits[order])[0].tolist() == tokens[order].tolist()


def test_min_p_keeps_what_it_should():
    reqs = [request(str(seed), PROMPT, temperature=1.0, min_p=0.5, sampling_seed=seed) for seed in range(200)]
    logits = torch.zeros(1, VOCABULARY).expand(200, -1).clone()
    logits[:, 5], logits[:, 7], logits[:, 9] = 9.0, 8.5, 8.2  # shares 1, 0.61, 0.45 of the best
    assert set(sample(reqs, logits)[0].tolist()) == {5, 7}


def test_processors_see_their_own_rows_and_a_failing_one_leaves_them_alone():
    """The worker learns which request it was; all others are served as ever."""
    reqs = [
        request("mirror", PROMPT, processor=Mirror, custom_params={"boost": 30.0}),
        request("bad", PROMPT, processor=Picky, custom_params={"add": None}),
        request("plain", PROMPT),
        request("good", PROMPT, processor=Picky, custom_params={"add": 1.0}),
        request("mirror too", [1], processor=Mirror, custom_params={"boost": 30.0}),
    ]
    logits = random_logits(5)
    info, output = sampling_info(reqs, VOCABULARY), LogitsProcessorOutput(next_token_logits=logits.clone())
    info.sampling_seed = seeds_of(reqs, logits.device)
    tokens = SeededSampler()(output, info, False, [], [], positions_of(reqs))
    best = [int(stock_logits(req, row).argmax()) for req, row in zip(reqs, logits, strict=True) if req.rid != "bad"]
    assert tokens.tolist() == [best[0], int(logits[1].argmax()), *best[1:]]
    assert tokens[3] > VOCABULARY - 9  # whose id has been added
    assert info.failed_processor.keys() == {1}


def test_other_errors_are_not_swallowed():
    reqs = requests([{}], 2)
    with pytest.raises(RuntimeError):
        sample(reqs, random_logits(3), return_logprob=True, top_logprobs_nums=[0], token_ids_logprobs=[None])
