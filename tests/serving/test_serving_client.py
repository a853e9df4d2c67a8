"""The HTTP client against the fake server: answers, streams, refusals, order under concurrency."""

import pytest
from fake_sglang import FakeSGLang, Model, Settings, log_softmax

from sglang_trunc.serving import probe
from sglang_trunc.serving.client import Client, RequestRefused


@pytest.fixture
def plain():
    with FakeSGLang() as server, Client(server.url) as client:
        yield server, client


@pytest.fixture
def speculative():
    with FakeSGLang(Settings(speculative=True)) as server, Client(server.url) as client:
        yield server, client


def test_stream_and_whole_answer_agree(speculative):
    _, client = speculative
    whole = client.generate([1, 2, 3], max_new_tokens=10)
    streamed = client.generate([1, 2, 3], max_new_tokens=10, stream=True)
    assert (whole.output_ids, whole.text) == (streamed.output_ids, streamed.text)
    assert whole.completion_tokens == 10
    assert not whole.chunks
    # A block of three per event: the events' counts, not their number, are the tokens.
    assert [chunk.tokens for chunk in streamed.chunks] == [1, 4, 7, 10]
    assert streamed.begin <= streamed.chunks[0].at <= streamed.chunks[-1].at <= streamed.end


def test_incremental_streams_are_joined(speculative, monkeypatch):
    _, client = speculative
    expected = client.generate([1, 2], max_new_tokens=8)
    events = list(client.stream({"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 8}}))
    deltas, seen = [], 0
    for event in events:
        deltas.append(event | {"output_ids": event["output_ids"][seen:], "text": event["text"][seen:]})
        seen = len(event["output_ids"])
    monkeypatch.setattr(client, "stream", lambda body: iter(deltas))
    joined = client.generate([1, 2], max_new_tokens=8, stream=True)
    assert (joined.output_ids, joined.text) == (expected.output_ids, expected.text)


def test_request_carries_only_what_was_asked_for(plain):
    server, client = plain
    client.generate("ab", max_new_tokens=2, stop=["x"], sampling={"top_k": 3}, extra={"rid": "r1"})
    assert server.settings.requests[-1] == {
        "text": "ab",
        "rid": "r1",
        "sampling_params": {
            "max_new_tokens": 2,
            "temperature": 0.0,
            "ignore_eos": False,
            "stop": ["x"],
            "top_k": 3,
        },
    }


def test_answers_come_in_the_order_of_the_prompts(plain):
    _, client = plain
    prompts = [[n, n + 1] for n in range(12)]
    many = client.generate_many(prompts, concurrency=5, max_new_tokens=4)
    assert [c.output_ids for c in many] == [client.generate(p, max_new_tokens=4).output_ids for p in prompts]


def test_stop_tokens_and_finish_reason():
    with FakeSGLang(Settings(Model(answer_at=6))) as server, Client(server.url) as client:
        answer = client.generate([1, 2, 3], max_new_tokens=9)
        assert answer.finish_reason == {"type": "stop", "matched": 0}
        assert answer.output_ids.index(0) == 3 == len(answer.output_ids) - 1
        assert client.generate([1, 2, 3], max_new_tokens=9, ignore_eos=True).completion_tokens == 9


def test_top_logprobs_best_first(plain):
    server, client = plain
    answer = client.generate([4], max_new_tokens=3, return_logprob=True, top_logprobs_num=2)
    for position, token in enumerate(answer.output_ids):
        (best, token_id), (second, _) = answer.top_logprobs(position)
        assert token_id == token
        assert best - second == pytest.approx(5.0)


@pytest.mark.parametrize("stream", [False, True])
def test_refusal_carries_the_servers_sentence(speculative, stream):
    server, client = speculative
    server.settings.refused = "frequency_penalty"
    with pytest.raises(RequestRefused, match="frequency_penalty is refused") as refusal:
        client.generate([1], sampling={"frequency_penalty": 0.5}, stream=stream)
    assert refusal.value.status == 400


def test_error_inside_a_stream_is_raised(plain, monkeypatch):
    _, client = plain
    monkeypatch.setattr(
        "fake_sglang.Decode.events", lambda self: iter([{"error": {"message": "pool is full", "code": 503}}])
    )
    with pytest.raises(RequestRefused, match="HTTP 503: pool is full"):
        client.generate([1], stream=True)


def test_flush_failure_is_an_error():
    settings = Settings(fail_flush=True)
    refused = pytest.raises(RequestRefused, match="Flush cache failed")
    with FakeSGLang(settings) as server, Client(server.url) as client, refused:
        client.flush_cache()


def test_missing_counter_is_an_error_and_not_a_zero(plain):
    _, client = plain
    answer = client.generate([1], max_new_tokens=2)
    del answer.meta_info["completion_tokens"]
    with pytest.raises(KeyError):
        _ = answer.completion_tokens


def test_probe_learns_the_size_of_a_logit(plain):
    server, client = plain
    token = client.generate([9, 8], max_new_tokens=1).output_ids[0]
    found = probe.logits(client, [9, 8], [token, token + 1])
    assert found == {token: pytest.approx(20.0), token + 1: pytest.approx(15.0)}
    values = server.settings.model.logits([9, 8])
    assert log_softmax(values)[token] > -0.1  # so the softmax alone could not have told 20 from any size


@pytest.mark.parametrize(("used", "spare"), [((), 0), ((0,), 1), ((0, 1, 3), 2)])
def test_probe_takes_a_token_nobody_uses(used, spare):
    assert probe.spare_token(set(used)) == spare
