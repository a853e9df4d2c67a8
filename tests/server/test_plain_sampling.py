"""Plain decoding without an accelerator, by SGLang's own sampler: what requests ask for is what they get.

One server in deterministic mode. Its answers are judged by the reference model and, written out once more here in numpy
and Python, SGLang's rules: seeded noise, filters, penalties, biases, grammars, processors. The server has no compiler:
what SGLang compiles on a first call would fail.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoTokenizer

from sglang_trunc.reference.decode import output_logits
from sglang_trunc.reference.tokenizer import STOP_IDS
from tests.server.oracle import VOCABULARY, Oracle, prompt_of
from tests.server.setups import PROMPT, Setup
from tests.server.side_by_side import side_by_side

FLAGS = ("--enable-deterministic-inference", "--enable-custom-logit-processor", "--enable-return-hidden-states")
SETUP = Setup("ouro", None, flags=FLAGS, environment={"CXX": "/dev/null/c++"})
LENGTH = 30
DEFAULT_SEED = 42  # SGLang's, for requests that bring none

Row = NDArray[np.float64]  # one row of logits, or noise, by token id
Transform = Callable[[Row, Sequence[int]], Row]  # (logits, tokens emitted before)


# --- the rules, once more ---


def _rotated(words: NDArray[np.uint32], bits: int) -> NDArray[np.uint32]:
    return words << np.uint32(bits) | words >> np.uint32(32 - bits)


def murmur3(words: Sequence[NDArray[np.uint32]]) -> NDArray[np.uint32]:
    """MurmurHash3 x86_32, seed 0, of keys given word by word; arrays of one shape."""
    state = np.zeros_like(words[0])
    for word in words:
        state ^= _rotated(word * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
        state = _rotated(state, 13) * np.uint32(5) + np.uint32(0xE6546B64)
    state ^= np.uint32(4 * len(words))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ state >> np.uint32(shift)) * np.uint32(factor)
    return state ^ state >> np.uint32(16)


def noise(seed: int, position: int) -> Row:
    """Gumbel noise of every column."""
    columns = np.arange(VOCABULARY, dtype=np.uint32)
    key = (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, position)
    hashes = murmur3([*(np.full_like(columns, word) for word in key), columns])
    with np.errstate(divide="ignore"):
        surprise = -np.log(hashes / 0xFFFFFFFF)
    return -np.log(np.clip(surprise, 2.0**-32, np.finfo(np.float64).max))


def draw(logits: Row, position: int, seed: int, temperature: float, top_k: int, top_p: float) -> int:
    """The seeded draw; noise belongs to ranks as soon as anything is filtered."""
    shares = np.exp((logits - logits.max()) / temperature)
    shares /= shares.sum()
    order = np.arange(VOCABULARY)
    if top_k < VOCABULARY or top_p < 1:
        order = np.argsort(-shares, kind="stable")
        shares = shares[order]
        shares[top_k:] = 0
        shares[shares.cumsum() - shares > top_p] = 0
    with np.errstate(divide="ignore"):
        return int(order[np.argmax(np.log(shares) + noise(seed, position))])


def penalised(logits: Row, emitted: Sequence[int], frequency=0.0, presence=0.0, repetition=1.0) -> Row:
    """Under overlap scheduling SGLang counts what it knows a step earlier: for the newest token, the one before it.

    Before there is one, that is the prompt's last token. True of a request without company only.
    """
    counted = [PROMPT[-1], *emitted[:-1]] if emitted else []
    logits = logits.copy()
    for token in set(counted):
        logits[token] -= frequency * counted.count(token) + presence
        logits[token] *= repetition if logits[token] < 0 else 1 / repetition
    return logits


def without(logits: Row, emitted: Sequence[int], tokens: Sequence[int], until: int = LENGTH) -> Row:
    """No such token among the first ``until``."""
    logits = logits.copy()
    logits[list(tokens) if len(emitted) < until else []] = -np.inf
    return logits


def biased(logits: Row, emitted: Sequence[int], bias: dict[int, float]) -> Row:
    logits = logits.copy()
    for token, value in bias.items():
        logits[token] += value
    return logits


def departure(
    oracle: Oracle, output: Sequence[int], sampling: dict, transforms: Sequence[Transform] = (), prompt=PROMPT
) -> tuple[int, int, int] | None:
    """(index, expected, got) of the first token that is not what the rules give; None if there is none."""
    rows = output_logits(oracle.model, prompt, output, oracle.depth).double().numpy()
    for index, (row, token) in enumerate(zip(rows, output, strict=True)):
        for transform in transforms:
            row = transform(row, output[:index])
        expected = int(row.argmax())
        if temperature := sampling.get("temperature", 0):
            expected = draw(
                row,
                len(prompt) - 1 + index,
                sampling.get("sampling_seed", DEFAULT_SEED),
                temperature,
                sampling.get("top_k", VOCABULARY),
                sampling.get("top_p", 1.0),
            )
        if expected != token:
            return index, expected, token
    return None


def ask(client, sampling: dict, prompt: Sequence[int] = PROMPT, **options):
    given = {"max_new_tokens": LENGTH, "ignore_eos": True, **options}
    rest = {key: value for key, value in sampling.items() if key != "temperature"}
    return client.generate(prompt, temperature=sampling.get("temperature", 0), sampling=rest, **given)


# --- draws ---

OPEN = (
    {"temperature": 1.0, "sampling_seed": 0},
    {"temperature": 0.7, "sampling_seed": 2**53 + 1},
    {"temperature": 1.3, "sampling_seed": -5},
    {"temperature": 0.7},
)
FILTERED = (
    {"temperature": 1.0, "sampling_seed": 3, "top_k": 9},
    {"temperature": 0.7, "sampling_seed": 2**40, "top_p": 0.6},
    {"temperature": 1.0, "sampling_seed": 8, "top_k": 20, "top_p": 0.8},
    {"temperature": 1.0, "sampling_seed": 8, "top_k": 1},
)


def named(sampling: dict) -> str:
    return "-".join(f"{key}{value}" for key, value in sampling.items())


@pytest.mark.parametrize("sampling", OPEN + FILTERED, ids=named)
def test_seeded_text_is_the_oracles(client, oracle, sampling):
    output = ask(client, sampling).output_ids
    assert len(output) == LENGTH
    assert departure(oracle, output, sampling) is None


@pytest.mark.parametrize("kind", [OPEN, FILTERED], ids=["open", "filtered"])
def test_seeded_text_is_the_same_in_company(client, oracle, kind):
    """Company of the same kind: one filtered request makes SGLang filter its whole batch, and noise goes by rank."""
    asked = [(sampling, prompt_of(5 + i, seed=9)) for i, sampling in enumerate(kind * 2)]
    answers = side_by_side([partial(ask, client, sampling, prompt) for sampling, prompt in asked])
    for (sampling, prompt), answer in zip(asked, answers, strict=True):
        assert departure(oracle, answer.output_ids, sampling, prompt=prompt) is None


def test_logprobs_are_those_at_the_temperature(client, oracle):
    sampling = {"temperature": 0.7, "sampling_seed": 11}
    answer = ask(client, sampling, return_logprob=True, top_logprobs_num=3)
    assert departure(oracle, answer.output_ids, sampling) is None
    truth = (output_logits(oracle.model, PROMPT, answer.output_ids, oracle.depth) / 0.7).log_softmax(-1)
    values = [value for value, *_ in answer.meta_info["output_token_logprobs"]]
    assert values == pytest.approx(truth.gather(1, torch.tensor([answer.output_ids]).T)[:, 0].tolist(), abs=1e-4)
    for index, best in enumerate(truth.topk(3).values.tolist()):
        assert [value for value, _ in answer.top_logprobs(index)] == pytest.approx(best, abs=1e-4)


# --- what changes logits ---

PENALTIES = (
    {"repetition_penalty": 1.4},
    {"frequency_penalty": 0.8},
    {"presence_penalty": 1.1},
    {"frequency_penalty": -0.4, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    {"repetition_penalty": 0.6, "temperature": 0.8, "sampling_seed": 21},
)


@pytest.mark.parametrize("sampling", PENALTIES, ids=named)
def test_penalties(client, oracle, sampling):
    output = ask(client, sampling).output_ids
    factors = {key.removesuffix("_penalty"): value for key, value in sampling.items() if key.endswith("_penalty")}
    assert departure(oracle, output, sampling, [partial(penalised, **factors)]) is None
    assert departure(oracle, output, sampling) is not None  # the penalty did something


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "sampling_seed": 4}], ids=["greedy", "seeded"])
def test_min_new_tokens(client, oracle, sampling):
    stop = ask(client, sampling).output_ids[4]
    answer = ask(client, {**sampling, "min_new_tokens": 9}, stop_token_ids=[stop])
    held_back = partial(without, tokens=[*STOP_IDS, stop], until=9)
    assert len(answer.output_ids) >= 9
    assert stop not in answer.output_ids[:-1]
    assert departure(oracle, answer.output_ids, sampling, [held_back]) is None


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "sampling_seed": 4}], ids=["greedy", "seeded"])
def test_logit_bias(client, oracle, sampling):
    bias = {300: 3.5, 41: 3.0, ask(client, sampling).output_ids[0]: -100.0}
    output = ask(client, {**sampling, "logit_bias": {str(token): value for token, value in bias.items()}}).output_ids
    assert departure(oracle, output, sampling, [partial(biased, bias=bias)]) is None
    assert departure(oracle, output, sampling) is not None


def test_custom_logit_processor(client, oracle):
    from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

    unwanted = sorted(set(ask(client, {}).output_ids[::2]))
    processor = {"custom_logit_processor": DisallowedTokensLogitsProcessor().to_str()}
    sampling = {"temperature": 0.9, "sampling_seed": 6}
    for choice in ({}, sampling):
        output = ask(client, {**choice, "custom_params": {"token_ids": unwanted}}, extra=processor).output_ids
        assert departure(oracle, output, choice, [partial(without, tokens=unwanted)]) is None


# --- grammars: finite languages, in which no sentence begins another ---

GRAMMARS = (
    ({"regex": "(ab|cd|ef){3}x"}, {"".join(parts) + "x" for parts in itertools.product(("ab", "cd", "ef"), repeat=3)}),
    ({"ebnf": 'root ::= "yes " [a-c] | "no" [0-9]'}, {*(f"yes {c}" for c in "abc"), *(f"no{c}" for c in "0123456789")}),
    ({"json_schema": json.dumps({"enum": ["red", "green", "blue"]})}, {'"red"', '"green"', '"blue"'}),
)


def constrained(logits: Row, emitted: Sequence[int], language: set[str], texts: Sequence[str]) -> Row:
    """Only tokens after which the text begins a sentence; only stop tokens after a whole one."""
    text = "".join(texts[token] for token in emitted)
    if text in language:
        allowed = list(STOP_IDS)
    else:
        starts = {sentence[:end] for sentence in language for end in range(len(sentence) + 1)}
        allowed = [token for token, more in enumerate(texts) if more and text + more in starts]
    return without(logits, emitted, sorted(set(range(VOCABULARY)) - set(allowed)))


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "sampling_seed": 5}], ids=["greedy", "seeded"])
@pytest.mark.parametrize(("grammar", "language"), GRAMMARS, ids=[next(iter(grammar)) for grammar, _ in GRAMMARS])
def test_grammar(client, oracle, served, model_of, grammar, language, sampling):
    tokenizer = AutoTokenizer.from_pretrained(model_of(served))
    texts = [tokenizer.decode([token], skip_special_tokens=True) for token in range(VOCABULARY)]
    answer = ask(client, {**sampling, **grammar}, ignore_eos=False)
    assert answer.text in language
    assert answer.finish_reason["type"] == "stop"
    rule = partial(constrained, language=language, texts=texts)
    assert departure(oracle, answer.output_ids, sampling, [rule]) is None


# --- what comes along ---


def test_hidden_states_are_those_behind_the_tokens(client, oracle):
    prompt = prompt_of(7, seed=31)
    answer = ask(client, {}, prompt, max_new_tokens=5, extra={"return_hidden_states": True})
    first, *later = answer.meta_info["hidden_states"]
    states = torch.tensor([*first, *later])
    assert states.shape == (len(prompt) + 4, oracle.model.width)
    chosen = oracle.model.lm_head(states).argmax(-1)[len(prompt) - 1 :]
    assert chosen.tolist() == answer.output_ids
