"""Where an answer ends: stops, caps and limits inside runs of accepted tokens, and what the client is told then.

Drafts are made at full depth, so every run is a whole block of 8 and most stops fall inside one. The truth is the
oracle's continuation, cut where plain decoding would end.
"""

from __future__ import annotations

import json
import threading
from itertools import pairwise

import httpx
import pytest
from transformers import AutoTokenizer

from sglang_trunc.reference.tokenizer import STOP_IDS
from sglang_trunc.serving.client import RequestRefused
from tests.server.oracle import prompt_of
from tests.server.setups import Setup, Trunc

BLOCK = 8
CONTEXT = 256
SETUP = Setup("ouro", Trunc(4, BLOCK), context=CONTEXT)
PROMPT = prompt_of(12, seed=5)
LENGTH = 64


@pytest.fixture(scope="module")
def whole(client, oracle) -> list[int]:
    """64 tokens after PROMPT, known to be right."""
    output = client.generate(PROMPT, max_new_tokens=LENGTH, ignore_eos=True).output_ids
    assert oracle.mismatch(PROMPT, output) is None
    return output


@pytest.fixture(scope="module")
def decode(model_of):
    tokenizer = AutoTokenizer.from_pretrained(model_of(SETUP))
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


@pytest.fixture(scope="module")
def readable(whole, decode) -> list[str]:
    """The text of each token of ``whole``; "" where it is not plain ASCII."""
    texts = [decode([token]) for token in whole]
    return [text if text.isascii() and text.isprintable() else "" for text in texts]


def post(server, path: str, body: dict) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=300, trust_env=False)


# --- stop tokens ---


def test_stop_token_anywhere_in_a_run(client, whole, decode):
    for position in range(2 * BLOCK + 2):
        stop = whole[position]
        end = whole.index(stop)
        answer = client.generate(PROMPT, max_new_tokens=LENGTH, stop_token_ids=[stop], sampling={"ignore_eos": False})
        if any(token in STOP_IDS for token in whole[:end]):
            pytest.fail("the prompt of this test must not run into an end token; choose another seed")
        assert answer.output_ids == whole[: end + 1], f"stop at {position}"
        assert answer.finish_reason == {"type": "stop", "matched": stop}
        assert answer.text == decode(whole[:end])
        assert answer.completion_tokens == end + 1


def test_first_of_several_stop_tokens(client, whole):
    late, early = whole[13], whole[10]
    end = min(whole.index(late), whole.index(early))
    answer = client.generate(PROMPT, max_new_tokens=LENGTH, stop_token_ids=[late, early])
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
    inside = [place for place in ends if place % BLOCK]  # the prefill's token is 0, a run ends at 8, 16, ...
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
    import torch

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
    return [(place, (first + second)[1:]) for place, (first, second) in pairs if first and second and len(first + second) > 2]


def test_stop_string_anywhere_in_a_run(client, whole, readable, decode):
    fragments = _fragments(readable)
    assert len({place % BLOCK for place, _ in fragments}) >= 4
    for place, stop in fragments[:12]:
        ids, text, _ = plain_end(whole, decode, stop)
        answer = client.generate(PROMPT, max_new_tokens=LENGTH, ignore_eos=True, stop=stop)
        assert answer.finish_reason == {"type": "stop", "matched": stop}, f"{stop!r} at {place}"
        assert answer.output_ids == ids
        assert answer.text == text


def test_earliest_of_two_stop_strings_in_one_run(client, whole, readable, decode):
    pairs = [
        (early, late)
        for (at, early), (then, late) in pairwise(_fragments(readable))
        if 0 < then - at and (at // BLOCK) == (then + 1) // BLOCK
    ]
    assert pairs
    for early, late in pairs[:4]:
        ids, text, matched = plain_end(whole, decode, late, early)
        answer = client.generate(PROMPT, max_new_tokens=LENGTH, ignore_eos=True, stop=[late, early])
        assert answer.output_ids == ids
        assert answer.finish_reason["matched"] == matched
        assert answer.text == text


def test_stop_token_before_a_stop_string_in_one_run(client, whole, readable, decode):
    """Plain decoding never sees the string: it ends at the token."""
    checked = 0
    for place, string in _fragments(readable):
        ids, _, _ = plain_end(whole, decode, string)
        for back in range(2, 6):
            position = len(ids) - 1 - back
            if position < 1 or (position - 1) // BLOCK != (len(ids) - 2) // BLOCK:
                continue
            stop = whole[position]
            if whole.index(stop) != position:
                continue
            answer = client.generate(PROMPT, max_new_tokens=LENGTH, stop=string, stop_token_ids=[stop])
            assert answer.output_ids == whole[: position + 1], f"{string!r} ends at {len(ids) - 1}"
            assert answer.finish_reason["matched"] == stop
            checked += 1
            break
    assert checked


def test_stop_regex_in_a_run(client, whole, readable, decode):
    _, stop = _fragments(readable)[1]
    pattern = stop[0] + "." + stop[2:] if stop[0].isalnum() and stop[2:].isalnum() else "[a-z]{3}"
    ids, text, _ = _regex_end(whole, decode, pattern)
    answer = client.generate(PROMPT, max_new_tokens=LENGTH, ignore_eos=True, sampling={"stop_regex": [pattern]})
    assert answer.output_ids == ids
    assert answer.finish_reason["type"] == "stop"


def _regex_end(whole, decode, pattern):
    import re

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
    answers = []

    def one(place: int) -> None:
        answers.append((place, client.generate(prompts[place], max_new_tokens=1 + 3 * place, ignore_eos=True)))

    threads = [threading.Thread(target=one, args=(place,)) for place in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 8
    for place, answer in answers:
        assert len(answer.output_ids) == 1 + 3 * place
        assert oracle.mismatch(prompts[place], answer.output_ids) is None


def test_requests_at_the_context_limit_side_by_side(client, oracle):
    """The reserve of a round reaches past a request's last position; it must not reach the next request's row."""
    longest = CONTEXT - 6  # SGLang's own limit on inputs
    lengths = [longest, longest, longest - 3, longest - 10, 100, 5, longest, 40]
    prompts = [prompt_of(length, seed=40 + i) for i, length in enumerate(lengths)]
    with_room = [
        (prompt, {"max_new_tokens": CONTEXT - len(prompt), "ignore_eos": True, "temperature": 0}) for prompt in prompts
    ]
    answers: dict[int, list[int]] = {}

    def one(place: int) -> None:
        prompt, sampling = with_room[place]
        answers[place] = client.generate(prompt, max_new_tokens=sampling["max_new_tokens"], ignore_eos=True).output_ids

    threads = [threading.Thread(target=one, args=(place,)) for place in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for place, prompt in enumerate(prompts):
        assert oracle.mismatch(prompt, answers[place]) is None, f"prompt of {len(prompt)}"
        assert len(answers[place]) == CONTEXT - 2 - len(prompt)  # what SGLang allows a plain request too


def test_prompt_beyond_the_context_is_refused(client):
    with pytest.raises(RequestRefused, match="context length|longer than") as caught:
        client.generate(prompt_of(CONTEXT + 1), max_new_tokens=1)
    assert caught.value.status == 400


def test_one_token_prompts_side_by_side(client, oracle):
    prompts = [[token] for token in range(100, 108)]
    for prompt, answer in zip(prompts, client.generate_many(prompts, 8, max_new_tokens=30, ignore_eos=True), strict=True):
        assert oracle.mismatch(prompt, answer.output_ids) is None


# --- streams and aborts ---


@pytest.mark.parametrize("options", [{}, {"stop": 20}, {"allowed": 11}], ids=["whole", "stop-token", "cap"])
def test_stream_gives_what_the_answer_gives(client, whole, options):
    given = {"max_new_tokens": options.get("allowed", LENGTH), "ignore_eos": "stop" not in options}
    if "stop" in options:
        given["stop_token_ids"] = [whole[options["stop"]]]
    answer = client.generate(PROMPT, **given)
    stream = client.generate(PROMPT, stream=True, **given)
    assert stream.output_ids == answer.output_ids
    assert stream.text == answer.text
    assert stream.finish_reason == answer.finish_reason
    counts = [chunk.tokens for chunk in stream.chunks]
    assert counts == sorted(set(counts))
    assert counts[-1] == len(answer.output_ids) == answer.completion_tokens
    assert len(counts) < len(answer.output_ids)  # several tokens an event: it did speculate


def test_streamed_events_are_growing_prefixes(client, whole):
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 30, "ignore_eos": True, "temperature": 0}}
    for event in client.stream(body):
        seen = event["output_ids"]
        assert seen == whole[: len(seen)]


def test_client_hangs_up_while_streaming(client, whole):
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 200, "ignore_eos": True, "temperature": 0}}
    for events in (1, 2, 5):
        stream = client.stream(body)
        for _ in range(events):
            next(stream)
        stream.close()
        assert client.generate(PROMPT, max_new_tokens=10, ignore_eos=True).output_ids == whole[:10]


def test_abort_request_ends_that_request_only(client, oracle):
    kept = [prompt_of(9, seed=seed) for seed in (50, 51)]
    answers = {}

    def keep(place: int) -> None:
        answers[place] = client.generate(kept[place], max_new_tokens=150, ignore_eos=True)

    threads = [threading.Thread(target=keep, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    body = {"input_ids": prompt_of(9, seed=52), "rid": "to-abort"}
    body["sampling_params"] = {"max_new_tokens": 220, "ignore_eos": True, "temperature": 0}
    seen = []
    for event in client.stream(body):
        seen.append(event)
        if len(seen) == 2:
            client.abort("to-abort")
    for thread in threads:
        thread.join()
    assert seen[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(seen[-1]["output_ids"]) < 220
    assert oracle.mismatch(prompt_of(9, seed=52), seen[-1]["output_ids"]) is None
    for place, prompt in enumerate(kept):
        assert len(answers[place].output_ids) == 150
        assert oracle.mismatch(prompt, answers[place].output_ids) is None


# --- log-probabilities ---


@pytest.mark.parametrize("stop_at", [None, 11])
def test_logprobs_are_the_oracles_and_end_at_the_stop(client, whole, oracle, stop_at):
    stop = {} if stop_at is None else {"stop_token_ids": [whole[stop_at]]}
    wanted = whole[:20] if stop_at is None else whole[: whole.index(whole[stop_at]) + 1]
    chosen = [7, 300]
    answer = client.generate(
        PROMPT,
        max_new_tokens=20,
        ignore_eos=stop_at is None,
        return_logprob=True,
        top_logprobs_num=3,
        token_ids_logprob=chosen,
        **stop,
    )
    assert answer.output_ids == wanted
    truth = oracle.logprobs(PROMPT, wanted)
    meta = answer.meta_info
    given = meta["output_token_logprobs"]
    assert [token for _, token, *_ in given] == wanted
    assert [value for value, *_ in given] == pytest.approx(
        [float(truth[i, token]) for i, token in enumerate(wanted)], abs=1e-4
    )
    assert len(meta["output_top_logprobs"]) == len(meta["output_token_ids_logprobs"]) == len(wanted)
    for i in range(len(wanted)):
        best = truth[i].topk(3)
        top = answer.top_logprobs(i)
        assert [value for value, _ in top] == pytest.approx(best.values.tolist(), abs=1e-4)
        ids = {token: value for value, token, *_ in meta["output_token_ids_logprobs"][i]}
        assert ids == pytest.approx({token: float(truth[i, token]) for token in chosen}, abs=1e-4)


def test_prompt_logprobs(client, oracle):
    prompt = prompt_of(20, seed=60)
    answer = client.generate(prompt, max_new_tokens=9, ignore_eos=True, return_logprob=True, extra={"logprob_start_len": 0})
    truth = oracle.logprobs(prompt[:1], prompt[1:])
    given = answer.meta_info["input_token_logprobs"]
    assert [token for _, token, *_ in given] == prompt
    assert [value for value, *_ in given[1:]] == pytest.approx(
        [float(truth[i, token]) for i, token in enumerate(prompt[1:])], abs=1e-4
    )
    assert oracle.mismatch(prompt, answer.output_ids) is None


def test_requests_with_and_without_logprobs_side_by_side(client, oracle):
    prompts = [prompt_of(6, seed=seed) for seed in range(70, 76)]
    answers = {}

    def one(place: int) -> None:
        answers[place] = client.generate(
            prompts[place], max_new_tokens=25, ignore_eos=True, return_logprob=place % 2 == 0, top_logprobs_num=place // 2
        )

    threads = [threading.Thread(target=one, args=(place,)) for place in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for place, prompt in enumerate(prompts):
        answer = answers[place]
        assert oracle.mismatch(prompt, answer.output_ids) is None
        if place % 2 == 0:
            truth = oracle.logprobs(prompt, answer.output_ids)
            values = [value for value, *_ in answer.meta_info["output_token_logprobs"]]
            assert values == pytest.approx(
                [float(truth[i, token]) for i, token in enumerate(answer.output_ids)], abs=1e-4
            )


# --- several answers, OpenAI routes ---


def test_two_answers_of_one_prompt_are_the_same(server, whole):
    body = {"input_ids": PROMPT, "sampling_params": {"n": 2, "temperature": 0, "max_new_tokens": 21, "ignore_eos": True}}
    answers = post(server, "/generate", body).json()
    assert [answer["output_ids"] for answer in answers] == [whole[:21]] * 2


def test_openai_completions(server, client, decode, whole):
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 19, "temperature": 0, "ignore_eos": True}
    answer = post(server, "/v1/completions", body).json()
    assert answer["choices"][0]["text"] == decode(whole[:19])
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 19
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)
    with httpx.stream(
        "POST",
        f"{server.url}/v1/completions",
        json={**body, "stream": True, "stream_options": {"include_usage": True}},
        timeout=300,
        trust_env=False,
    ) as response:
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]
    events = [json.loads(line) for line in lines]
    assert "".join(choice["text"] for event in events for choice in event["choices"]) == decode(whole[:19])
    assert [event["usage"]["completion_tokens"] for event in events if event.get("usage")][-1] == 19


def test_openai_chat(server, client, oracle, model_of, decode):
    messages = [{"role": "user", "content": "What is a loop?"}]
    body = {"model": "m", "messages": messages, "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    answer = post(server, "/v1/chat/completions", body).json()
    tokenizer = AutoTokenizer.from_pretrained(model_of(SETUP))
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    output = client.generate(prompt, max_new_tokens=30, ignore_eos=True).output_ids
    assert oracle.mismatch(prompt, output) is None
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["choices"][0]["message"]["content"] == decode(output)
