"""Sampled and constrained texts of real models under every schedule: plain decoding's, chosen by SGLang's own code.

Both sides run the same model over the same pool; a plain token's logits have the bits of a lane's. So the texts are
equal to the last token, in float32, whatever was drafted.
"""

from __future__ import annotations

from typing import Any

import pytest

from sglang_trunc.core.options import TruncOptions
from sglang_trunc.core.pipeline import Schedule
from sglang_trunc.reference.tokenizer import TINY_VOCAB
from tests.engine.plain_stand import plain_decoding
from tests.engine.sampling_stand import Mirror, grammar_of, request

pytestmark = pytest.mark.usefixtures("sglang_context")
PROMPTS = [[5, 9, 17, 33, 250, 11, 99], [100], [7, 7, 7, 8, 8, 301, 4, 77, 13, 5, 6, 200, 8, 8]]
WANTED = 12
CHECKPOINT: dict[str, dict[str, Any]] = {"ouro": {}, "huginn": {"full_depth": 4}}

# Each batch mixes kinds; a prompt for each of its requests.
BATCHES: dict[str, list[dict[str, Any]]] = {
    "sampled": [
        {"temperature": 0.9, "sampling_seed": 11},
        {"temperature": 1.1, "top_p": 0.9, "top_k": 40, "sampling_seed": -5},
        {},
    ],
    "penalised": [
        {"frequency_penalty": 0.8, "presence_penalty": 0.3, "repetition_penalty": 1.2},
        {"temperature": 0.8, "sampling_seed": 3, "repetition_penalty": 1.5, "logit_bias": {"9": 4.0, "10": -100.0}},
        {"min_new_tokens": 6, "stop_token_ids": list(range(0, TINY_VOCAB, 2)), "frequency_penalty": -0.5},
    ],
    "constrained": [
        {"temperature": 0.7, "sampling_seed": 1, "processor": Mirror, "custom_params": {"boost": 3.0}},
        {"temperature": 0.8, "sampling_seed": 2, "grammar": True, "presence_penalty": 0.5},
        {"grammar": True, "logit_bias": {"3": 2.0}},
    ],
}


@pytest.fixture(scope="module")
def grammar():
    """Tokens with even ids and with odd ids take turns, and the text may end after an odd one."""
    words = ["<eos>", *(f"{'ab'[token % 2]}{token} " for token in range(1, TINY_VOCAB))]
    return grammar_of(words, "(b[0-9]+ a[0-9]+ )+")


@pytest.fixture(scope="module")
def requests_of(grammar):
    """``requests_of(batch)``: new ones, and what a stand wants to know of them."""

    def make(batch: str) -> list[Any]:
        reqs = []
        for number, (prompt, asked) in enumerate(zip(PROMPTS, BATCHES[batch], strict=True)):
            options = {name: value for name, value in asked.items() if name != "grammar"}
            reqs.append(request(f"request {number}", prompt, WANTED, **options))
            if "grammar" in asked:
                reqs[-1].grammar = grammar()
        return reqs

    return make


@pytest.fixture(scope="module")
def right(served_model, requests_of):
    """``right(family, batch)``: plain decoding's answers, each once."""
    known: dict[tuple[str, str], list[list[int]]] = {}

    def answers(family: str, batch: str) -> list[list[int]]:
        if (family, batch) not in known:
            model = served_model(family, **CHECKPOINT[family])
            pairs = zip(PROMPTS, requests_of(batch), strict=True)
            known[family, batch] = [plain_decoding(model, prompt, WANTED, req)[0] for prompt, req in pairs]
        return known[family, batch]

    return answers


def drafts(how: str, answers: list[list[int]]) -> dict[int, list[int]] | None:
    """What all early readouts are made to say: by request, at every position of its answer and some behind."""
    if how == "own":
        return None
    shift = 0 if how == "right" else 1
    return {key: [(token + shift) % TINY_VOCAB for token in answer] + [1] * 40 for key, answer in enumerate(answers)}


HOW = ("own", "right", "wrong")


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("family", CHECKPOINT)
def test_chains(make_stand, requests_of, right, family, batch, how):
    answers = right(family, batch)
    for options in (TruncOptions(1, 8, 0.0), TruncOptions(2, 3, 0.01)):
        stand = make_stand(family, CHECKPOINT[family], width=options.block_size, requests=3)
        assert stand.answer(requests_of(batch), WANTED, options, drafts(how, answers)) == answers
        counters = stand.counters
        if how == "wrong":
            assert not counters.accepted
        elif how == "right" and not options.draft_threshold:
            assert counters.accepted > counters.drafted / 2


PLANS = [
    (Schedule(4, 1, None, 32, 0.0), 1),
    (Schedule(4, 1, 2, 32, 0.0), 1),
    (Schedule(4, 1, 3, 32, 0.05), 16),
    (Schedule(4, 2, None, 5, 0.0), 16),
]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("family", CHECKPOINT)
def test_lanes(make_tree_stand, requests_of, right, family, batch, how):
    answers = right(family, batch)
    forced = drafts(how, answers)
    for number, (plan, page) in enumerate(PLANS):
        stand = make_tree_stand(family, CHECKPOINT[family], plan, page=page)
        if forced is not None:
            stand.forced = lambda key, lane: forced[key][lane.position + 1 - len(PROMPTS[key])]
        for req in requests_of(batch):
            stand.enter(req)
            if number % 2:  # arrivals beside lanes of others
                stand.round()
        assert stand.run() == answers
        accepted = sum(count for depth, count in stand.counters.accepted.items() if depth)
        if how == "wrong":
            assert not accepted
        elif how == "right" and plan.max_width == 32:
            assert stand.counters.tokens > 1.5 * stand.counters.runs
            assert max(stand.engine.widths) > 6


def test_a_text_goes_on_after_a_retraction(make_tree_stand, requests_of, right):
    """Records and lanes are new; penalties and grammars know what was emitted before."""
    for batch in ("penalised", "constrained"):
        stand = make_tree_stand("ouro", {}, Schedule(4, 1, 2, 32, 0.0))
        for req in requests_of(batch):
            stand.enter(req)
        for key in (0, 1):
            stand.round()
            assert stand.requests[key].running
            known = len(stand.outputs)
            stand.leave(key)
            assert len(stand.outputs) == known - 1
            stand.round()
            stand.resume(key)
        assert stand.run() == right("ouro", batch)
