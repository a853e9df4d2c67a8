"""Where an answer ends: stops, caps and limits inside runs of accepted tokens.

TRUNC's drafts are made at full depth, so every run is a whole block and most stops fall inside one; the pipeline's
runs are short, and its lanes are past a stop before it is known. The truth is the oracle's continuation, cut where
plain decoding would end.
"""

from __future__ import annotations

import re
from functools import partial
from itertools import pairwise

import pytest
import torch

from sglang_trunc.reference.tokenizer import STOP_IDS
from sglang_trunc.serving.client import RequestRefused
from tests.server.oracle import prompt_of
from tests.server.setups import BOTH_RUNS, LONG_RUNS, PROMPT, WHOLE
from tests.server.side_by_side import side_by_side

pytestmark = [BOTH_RUNS, pytest.mark.usefixtures("company")]
BLOCK, CONTEXT = LONG_RUNS.schedule.block_size, LONG_RUNS.context


@pytest.fixture(scope="module")
def readable(whole, decode) -> list[str]:
    """The text of each token of ``whole``; "" where it is not plain ASCII."""
    texts = [decode([token]) for token in whole]
    return [text if text.isascii() and text.isprintable() else "" for text in texts]


# --- stop tokens ---


def test_stop_token_anywhere_in_a_run(client, whole, decode):
    for position in range(2 * BLOCK + 2):
        stop = whole[position]
        end = whole.index(stop)
        answer = client.generate(PROMPT, max_new_tokens=WHOLE, stop_token_ids=[stop], sampling={"ignore_eos": False})
        if any(token in STOP_IDS for token in whole[:end]):
            pytest.fail("the prompt of this test must not run into an end token; choose another seed")
        assert answer.output_ids == whole[: end + 1], f"stop at {position}"
        assert answer.finish_reason == {"type": "stop", "matched": stop}
        assert answer.text == decode(whole[:end])
        assert answer.completion_tokens == end + 1


def test_first_of_several_stop_tokens(client, whole):
    late, early = whole[13], whole[10]
    end = min(whole.index(late), whole.index(early))
    answer = client.generate(PROMPT, max_new_tokens=WHOLE, stop_token_ids=[late, early])
    assert answer.output_ids == whole[: end + 1]


def test_cap_before_the_stop_wins_and_the_stop_as_last_allowed_token_too(client, whole):
    position = next(p for p in range(9, 16) if whole.index(whole[p]) == p)
    stop = whole[position]
    for allowed in (position - 1, position, position + 1, position + 2):
        answer = client.generate(PROMPT, max_new_tokens=allowed, stop_token_ids=[stop])
        assert answer.output_ids == whole[: min(allowed, position + 1)]
        assert answer.finish_reason["type"] == ("stop" if allowed > position else "length")


# --- end-of-text of the model itself ---


def test_end_tokens_wherever_they_come(client, oracle):
    """Short prompts until the model ends some answers by itself: first, inside a run, or not at all."""
    allowed = 24
    prompts = [prompt_of(3, seed=seed) for seed in range(100)]
    answers = client.generate_many(prompts, 8, max_new_tokens=allowed)
    ends = {}
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = answer.output_ids
        assert oracle.mismatch(prompt, ids) is None
        stops = [place for place, token in enumerate(ids) if token in STOP_IDS]
        if stops:
            assert stops == [len(ids) - 1]
            assert answer.finish_reason == {"type": "stop", "matched": ids[-1]}
            ends.setdefault(len(ids) - 1, (prompt, ids))
        else:
            assert len(ids) == allowed
            assert answer.finish_reason == {"type": "length", "length": allowed}
    inside = [place for place in ends if place % BLOCK]  # the prefill's token is 0, runs end at the block's multiples
    assert len(inside) >= 3, f"only {sorted(ends)}: more prompts are needed"
    for place in inside[:3]:
        prompt, ids = ends[place]
        last = client.generate(prompt, max_new_tokens=place + 1)
        assert (last.output_ids, last.finish_reason["type"]) == (ids, "stop")
        beyond = client.generate(prompt, max_new_tokens=place + 9, ignore_eos=True)
        assert beyond.output_ids[: place + 1] == ids
        assert len(beyond.output_ids) == place + 9
        assert beyond.finish_reason["type"] == "length"


def test_end_token_as_first_token(client, oracle, oracle_of):
    prompt = _prompt_that_ends_at_once(oracle)
    answer = client.generate(prompt, max_new_tokens=30)
    assert len(answer.output_ids) == 1
    assert answer.output_ids[0] in STOP_IDS
    assert answer.text == ""
    assert answer.finish_reason["type"] == "stop"


def _prompt_that_ends_at_once(oracle) -> list[int]:
    """A prefix of some random text after which the model's choice is an end token."""
    for seed in range(50):
        text = prompt_of(200, seed=100 + seed)
        with torch.inference_mode():
            choices = oracle.model(torch.tensor(text)).argmax(-1).tolist()
        for place, choice in enumerate(choices):
            if choice in STOP_IDS:
                return text[: place + 1]
    pytest.fail("no random text makes this model end at once")


# --- stop strings ---


def plain_end(whole: list[int], decode, *stops: str) -> tuple[list[int], str, str]:
    """What plain decoding returns: it looks at the text after every token, and cuts it before the stop."""
    for count in range(1, len(whole) + 1):
        text = decode(whole[:count])
        for stop in stops:
            if stop in text:
                return whole[:count], text[: text.index(stop)], stop
    raise AssertionError("none of the stops occurs")


def _fragments(readable: list[str]) -> list[tuple[int, str]]:
    """(position, text): two neighbouring readable tokens, stop strings that span a token boundary."""
    pairs = enumerate(pairwise(readable))
    return [
        (place, (first + second)[1:])
        for place, (first, second) in pairs
        if first and second and len(first + second) > 2
    ]


def test_stop_string_anywhere_in_a_run(client, whole, readable, decode):
    fragments = _fragments(readable)
    assert len({place % BLOCK for place, _ in fragments}) >= 4
    for place, stop in fragments[:12]:
        ids, text, _ = plain_end(whole, decode, stop)
        answer = client.generate(PROMPT, max_new_tokens=WHOLE, ignore_eos=True, stop=stop)
        assert answer.finish_reason == {"type": "stop", "matched": stop}, f"{stop!r} at {place}"
        assert answer.output_ids == ids
        assert answer.text == text


def test_earliest_of_two_stop_strings_in_one_run(client, whole, readable, decode):
    pairs = [
        (early, late)
        for (at, early), (then, late) in pairwise(_fragments(readable))
        if then > at and (at // BLOCK) == (then + 1) // BLOCK
    ]
    assert pairs
    for early, late in pairs[:4]:
        ids, text, matched = plain_end(whole, decode, late, early)
        answer = client.generate(PROMPT, max_new_tokens=WHOLE, ignore_eos=True, stop=[late, early])
        assert answer.output_ids == ids
        assert answer.finish_reason["matched"] == matched
        assert answer.text == text


def test_stop_token_before_a_stop_string_in_one_run(client, whole, readable, decode):
    """Plain decoding never sees the string: it ends at the token."""
    checked = 0
    for _, string in _fragments(readable):
        ids, _, _ = plain_end(whole, decode, string)
        for back in range(2, 6):
            position = len(ids) - 1 - back
            if position < 1 or (position - 1) // BLOCK != (len(ids) - 2) // BLOCK:
                continue
            stop = whole[position]
            if whole.index(stop) != position:
                continue
            answer = client.generate(PROMPT, max_new_tokens=WHOLE, stop=string, stop_token_ids=[stop])
            assert answer.output_ids == whole[: position + 1], f"{string!r} ends at {len(ids) - 1}"
            assert answer.finish_reason["matched"] == stop
            checked += 1
            break
    assert checked


def test_stop_regex_in_a_run(client, whole, readable, decode):
    _, stop = _fragments(readable)[1]
    pattern = stop[0] + "." + stop[2:] if stop[0].isalnum() and stop[2:].isalnum() else "[a-z]{3}"
    ids, text, _ = _regex_end(whole, decode, pattern)
    answer = client.generate(PROMPT, max_new_tokens=WHOLE, ignore_eos=True, sampling={"stop_regex": [pattern]})
    assert answer.output_ids == ids
    assert answer.finish_reason["type"] == "stop"


def _regex_end(whole, decode, pattern):
    for count in range(1, len(whole) + 1):
        if found := re.search(pattern, decode(whole[:count])):
            return whole[:count], decode(whole[:count])[: found.start()], pattern
    raise AssertionError("the pattern does not occur")


# --- caps ---


@pytest.mark.parametrize("allowed", [1, 2, 3, 5, 7, 8, 9, 10, 17])
def test_max_new_tokens_is_exact(client, whole, decode, allowed):
    answer = client.generate(PROMPT, max_new_tokens=allowed, ignore_eos=True)
    assert answer.output_ids == whole[:allowed]
    assert answer.completion_tokens == allowed
    assert answer.finish_reason == {"type": "length", "length": allowed}
    assert answer.text == decode(whole[:allowed])


def test_unequal_caps_side_by_side(client, oracle):
    prompts = [prompt_of(5, seed=seed) for seed in range(8)]
    caps = [1 + 3 * place for place in range(8)]
    answers = side_by_side(
        [
            partial(client.generate, prompt, max_new_tokens=cap, ignore_eos=True)
            for prompt, cap in zip(prompts, caps, strict=True)
        ]
    )
    for prompt, cap, answer in zip(prompts, caps, answers, strict=True):
        assert len(answer.output_ids) == cap
        assert oracle.mismatch(prompt, answer.output_ids) is None


def test_requests_at_the_context_limit_side_by_side(client, oracle):
    """The reserve of a round reaches past a request's last position; it must not reach the next request's row."""
    longest = CONTEXT - 7  # SGLang's own limit on inputs
    lengths = [longest, longest, longest - 3, longest - 10, 100, 5, longest, 40]
    prompts = [prompt_of(length, seed=40 + i) for i, length in enumerate(lengths)]
    answers = side_by_side(
        [partial(client.generate, prompt, max_new_tokens=CONTEXT - len(prompt), ignore_eos=True) for prompt in prompts]
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        assert oracle.mismatch(prompt, answer.output_ids) is None, f"prompt of {len(prompt)}"
        assert len(answer.output_ids) == CONTEXT - 2 - len(prompt)  # what SGLang allows a plain request too


def test_prompt_beyond_the_context_is_refused(client):
    with pytest.raises(RequestRefused, match="context length|longer than") as caught:
        client.generate(prompt_of(CONTEXT + 1), max_new_tokens=1)
    assert caught.value.status == 400


def test_one_token_prompts_side_by_side(client, oracle):
    prompts = [[token] for token in range(100, 108)]
    for prompt, answer in zip(
        prompts, client.generate_many(prompts, 8, max_new_tokens=30, ignore_eos=True), strict=True
    ):
        assert oracle.mismatch(prompt, answer.output_ids) is None
