"""Logits of rows in a tree of drafted paths: those that SGLang's plain decoding would have behind the same tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar
from torch import Tensor

from sglang_trunc.engine.outputs import Outputs
from sglang_trunc.engine.transforms import Transforms
from tests.engine.sampling_stand import (
    Mirror,
    Picky,
    grammar_of,
    request,
    sampling_info,
    stock_logits,
    with_output,
)

pytestmark = pytest.mark.usefixtures("sglang_context")

# A token a word; the first ends the text.
WORDS = [
    "<eos>",
    "a",
    "b",
    "ab",
    "1",
    "2",
    ",",
    "x",
    '"',
    "[",
    "]",
    "aa",
    "bb",
    "12",
    "3",
    "y",
    "z",
    "4",
    "5",
    "6",
    "7",
]
VOCABULARY = len(WORDS)
REGEX = "(a|b)+(1|2x)?"
PROMPT = [3, 5, 9]


@pytest.fixture(scope="module")
def grammar() -> Callable[..., XGrammarGrammar]:
    """``grammar(tokens)``: SGLang's object, behind these tokens."""
    return grammar_of(WORDS, REGEX)


def random_logits(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 5


def allowed(grammar: XGrammarGrammar) -> list[int]:
    """Tokens that a grammar allows next; none of them once it has ended."""
    if grammar.is_terminated():
        return []
    mask = grammar.allocate_vocab_mask(VOCABULARY, 1, "cpu")
    grammar.fill_vocab_mask(mask, 0)
    return [token for token in range(VOCABULARY) if mask[0, 0].item() >> token & 1]


def random_tokens(rng: random.Random, count: int, at: Callable | None, tokens: list[int] = ()) -> list[int]:
    """``count`` more tokens; as a grammar allows them, any behind its end."""
    tokens = list(tokens)
    for _ in range(count):
        legal = allowed(at(tokens)) if at is not None else []
        tokens.append(rng.choice(legal or range(VOCABULARY)))
    return tokens


SAMPLING: list[dict[str, Any]] = [
    {},
    {"frequency_penalty": 0.7},
    {"presence_penalty": -0.4, "repetition_penalty": 1.3},
    {"min_new_tokens": 6, "stop_token_ids": [2, 11]},
    {"logit_bias": {"3": 2.5, "5": -100.0, "0": float("-inf")}},
    {"frequency_penalty": -0.2, "min_new_tokens": 3, "stop_token_ids": [0], "logit_bias": {"1": 9.0}},
    {"repetition_penalty": 0.6, "processor": Mirror, "custom_params": {"boost": 4.0}},
    {"frequency_penalty": 0.3, "logit_bias": {"8": 1.0}, "processor": Mirror, "custom_params": {"boost": -2.0}},
    {"processor": Picky, "custom_params": {"add": 0.25}},
]


def random_request(rng: random.Random, number: int, grammar: Callable) -> Any:
    """A request in the middle of its answer, grammar included."""
    req = request(f"request {number}", PROMPT[: rng.randrange(1, 4)], **rng.choice(SAMPLING))
    constrained = rng.random() < 0.5
    req.output_ids = random_tokens(rng, rng.randrange(6), grammar if constrained else None)
    if constrained:
        req.grammar = grammar(req.output_ids)
        req.grammar.finished = rng.random() < 0.1
    return req


@pytest.mark.parametrize("seed", range(60))
def test_rows_are_what_plain_decoding_would_make_of_them(grammar, seed):
    """Several requests, each with paths of many lengths, rows in any order; then a second readout of the same round."""
    rng = random.Random(seed)
    reqs = [random_request(rng, number, grammar) for number in range(rng.randrange(1, 6))]
    outputs = Outputs()
    for req in reqs:
        outputs.begin(req)
    info = sampling_info(reqs, VOCABULARY)
    transforms = Transforms(reqs, info, [outputs.of(req.rid) for req in reqs])
    for readout in range(2):
        requests = [rng.randrange(len(reqs)) for _ in range(rng.randrange(1, 14))]
        paths = [
            random_tokens(rng, rng.randrange(5), grammar if reqs[i].grammar else None, reqs[i].output_ids)[
                len(reqs[i].output_ids) :
            ]
            for i in requests
        ]
        logits = random_logits(len(requests), 2 * seed + readout)
        expected = [twin_row(*pair, grammar) for pair in zip(logits, [reqs[i] for i in requests], paths, strict=True)]
        before = logits.clone()
        transforms.apply(logits, requests, paths)
        assert torch.equal(logits, torch.stack(expected))
        assert transforms.active or torch.equal(logits, before)
    for req in reqs:
        assert req.grammar is None or req.grammar.accepted_tokens == grammar(req.output_ids).accepted_tokens
        assert req.to_finish is None


def twin_row(logits: Tensor, req: Any, path: list[int], grammar: Callable) -> Tensor:
    tokens = [*req.output_ids, *path]
    fresh = None
    if req.grammar is not None:
        fresh = grammar(tokens)
        fresh.finished = req.grammar.finished
    return stock_logits(with_output(req, tokens, fresh), logits)


def test_each_step_stands_where_sglang_has_it():
    """Scaled after the additive penalties; a bias and a processor that come later may lift what a mask forbade."""
    req = request(
        "r",
        PROMPT,
        presence_penalty=1.0,
        repetition_penalty=2.0,
        logit_bias={"1": 3.0},
        processor=Picky,
        custom_params={"add": 10.0},
    )
    req.output_ids = [1]
    logits = torch.full((1, VOCABULARY), 4.0)
    apply([req], logits, [0], [[2]])
    expected = torch.full((VOCABULARY,), 4.0)
    expected[1] = (4 - 1) / 2 + 3
    expected[2] = (4 - 1) / 2
    assert torch.equal(logits[0], expected + 10 * torch.arange(VOCABULARY))


def apply(reqs: list, logits: Tensor, requests: list[int], paths: list[list[int]]) -> Transforms:
    outputs = Outputs()
    for req in reqs:
        outputs.begin(req)
    transforms = Transforms(reqs, sampling_info(reqs, VOCABULARY), [outputs.of(req.rid) for req in reqs])
    transforms.apply(logits, requests, paths)
    return transforms


def test_siblings_of_one_request_are_masked_by_their_own_paths(grammar):
    req = request("r", PROMPT)
    req.output_ids, req.grammar = [1], grammar([1])
    logits = torch.zeros(4, VOCABULARY)
    apply([req], logits, [0] * 4, [[5], [], [4], [5, 7]])
    kept = [row.isfinite().nonzero().flatten().tolist() for row in logits]
    assert kept == [allowed(grammar([1, *path])) for path in ([5], [], [4], [5, 7])]
    assert kept[0] == [7]
    assert kept[2] == kept[3] == [0]


@pytest.mark.parametrize("how", ["finished", "terminated"])
def test_a_grammar_that_is_through_constrains_nothing(grammar, how):
    through, other = request("through", PROMPT), request("other", PROMPT)
    through.output_ids = [1] if how == "finished" else [1, 0]
    through.grammar = grammar(through.output_ids)
    through.grammar.finished = how == "finished"
    other.grammar = grammar()
    logits = torch.zeros(2, VOCABULARY)
    apply([through, other], logits, [0, 1], [[], []])
    assert torch.equal(logits[0], torch.zeros(VOCABULARY))
    assert logits[1].isinf().any()
    assert not apply([through], torch.zeros(1, VOCABULARY), [0], [[]]).active


def test_a_path_that_ends_its_grammar_is_free_behind_the_end(grammar):
    req = request("r", PROMPT)
    req.grammar = grammar()
    logits = torch.zeros(3, VOCABULARY)
    apply([req], logits, [0, 0, 0], [[1, 4, 0], [1, 4], [1, 4, 0, 9, 9]])
    assert [int(row.isinf().sum()) for row in logits] == [0, VOCABULARY - 1, 0]


def test_requests_without_options_are_inactive_and_left_alone():
    plain, biased = request("plain", PROMPT), request("biased", PROMPT, logit_bias={"2": 1.0})
    logits = random_logits(2, 0)
    before = logits.clone()
    assert not apply([plain], logits[:0], [], []).active
    assert apply([plain, biased], logits, [0, 1], [[4], [4]]).active
    assert torch.equal(logits[0], before[0])
    assert not torch.equal(logits[1], before[1])


def test_a_readout_without_rows_of_a_demanding_request_needs_nothing_of_it(grammar):
    """A round's later readouts may be other requests' alone."""
    plain, demanding = request("plain", PROMPT), request("demanding", PROMPT, frequency_penalty=1.0)
    demanding.grammar = grammar()
    demanding.processor, demanding.custom_logit_processor = Mirror, "Mirror"
    logits = random_logits(2, 0)
    before = logits.clone()
    apply([demanding, plain], logits, [1, 1], [[4], [5]])
    assert torch.equal(logits, before)
    assert demanding.to_finish is None
