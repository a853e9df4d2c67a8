"""What a client is told: streams, aborts, log-probabilities, several answers, the OpenAI routes.

Runs are whole blocks of accepted tokens, or what a pipeline commits in company, so events and rows come in batches.
"""

from __future__ import annotations

import json
from functools import partial

import httpx
import pytest
from transformers import AutoTokenizer

from tests.server.oracle import prompt_of
from tests.server.setups import BOTH_RUNS, PROMPT, WHOLE, Trunc
from tests.server.side_by_side import side_by_side

pytestmark = [BOTH_RUNS, pytest.mark.usefixtures("company")]


def post(server, path: str, body: dict) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=300, trust_env=False)


# --- streams and aborts ---


@pytest.mark.parametrize("options", [{}, {"stop": 20}, {"allowed": 11}], ids=["whole", "stop-token", "cap"])
def test_stream_gives_what_the_answer_gives(client, served, whole, options):
    given = {"max_new_tokens": options.get("allowed", WHOLE), "ignore_eos": "stop" not in options}
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
    if isinstance(served.schedule, Trunc) or len(counts) == WHOLE:  # a pipeline's runs are not that even
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
    aborted = prompt_of(9, seed=52)

    def abort_after_two_events() -> dict:
        body = {"input_ids": aborted, "rid": "to-abort"}
        body["sampling_params"] = {"max_new_tokens": 220, "ignore_eos": True, "temperature": 0}
        events = []
        for event in client.stream(body):
            events.append(event)
            if len(events) == 2:
                client.abort("to-abort")
        return events[-1]

    *answers, last = side_by_side(
        [
            *(partial(client.generate, prompt, max_new_tokens=150, ignore_eos=True) for prompt in kept),
            abort_after_two_events,
        ]
    )
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(last["output_ids"]) < 220
    assert oracle.mismatch(aborted, last["output_ids"]) is None
    for prompt, answer in zip(kept, answers, strict=True):
        assert len(answer.output_ids) == 150
        assert oracle.mismatch(prompt, answer.output_ids) is None


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
    answer = client.generate(
        prompt, max_new_tokens=9, ignore_eos=True, return_logprob=True, extra={"logprob_start_len": 0}
    )
    truth = oracle.logprobs(prompt[:1], prompt[1:])
    given = answer.meta_info["input_token_logprobs"]
    assert [token for _, token, *_ in given] == prompt
    assert [value for value, *_ in given[1:]] == pytest.approx(
        [float(truth[i, token]) for i, token in enumerate(prompt[1:])], abs=1e-4
    )
    assert oracle.mismatch(prompt, answer.output_ids) is None


def test_requests_with_and_without_logprobs_side_by_side(client, oracle):
    prompts = [prompt_of(6, seed=seed) for seed in range(70, 76)]
    answers = side_by_side(
        [
            partial(
                client.generate,
                prompt,
                max_new_tokens=25,
                ignore_eos=True,
                return_logprob=place % 2 == 0,
                top_logprobs_num=place // 2,
            )
            for place, prompt in enumerate(prompts)
        ]
    )
    for place, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert oracle.mismatch(prompt, answer.output_ids) is None
        if place % 2 == 0:
            truth = oracle.logprobs(prompt, answer.output_ids)
            values = [value for value, *_ in answer.meta_info["output_token_logprobs"]]
            assert values == pytest.approx(
                [float(truth[i, token]) for i, token in enumerate(answer.output_ids)], abs=1e-4
            )


# --- counts, several answers, OpenAI routes ---


def test_answer_says_how_many_rounds_it_took(client, whole):
    taken = []
    for _ in range(3):
        answer = client.generate(PROMPT, max_new_tokens=WHOLE, ignore_eos=True)
        rounds, drafts = (answer.meta_info[name] for name in ("spec_verify_ct", "spec_num_correct_drafts"))
        histogram = answer.meta_info["spec_correct_drafts_histogram"]
        assert answer.completion_tokens == WHOLE == 1 + rounds + drafts  # 1: the prefill's
        assert sum(histogram) == rounds
        assert sum(count * times for count, times in enumerate(histogram)) == drafts
        taken.append(rounds)
    assert 0 < min(taken) < WHOLE - 1


def test_two_answers_of_one_prompt_are_the_same(server, whole):
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"n": 2, "temperature": 0, "max_new_tokens": 21, "ignore_eos": True},
    }
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


def test_openai_chat(server, served, client, oracle, model_of, decode):
    messages = [{"role": "user", "content": "What is a loop?"}]
    body = {"model": "m", "messages": messages, "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    answer = post(server, "/v1/chat/completions", body).json()
    tokenizer = AutoTokenizer.from_pretrained(model_of(served))
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    output = client.generate(prompt, max_new_tokens=30, ignore_eos=True).output_ids
    assert oracle.mismatch(prompt, output) is None
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["choices"][0]["message"]["content"] == decode(output)
