"""A pool of about one and a half requests: retraction, and then everything at once, in a fixed random order."""

from __future__ import annotations

import random
from functools import partial
from itertools import islice

import pytest

from sglang_trunc.serving.client import RequestRefused
from tests.server.oracle import VOCABULARY, prompt_of
from tests.server.setups import Setup, Trunc
from tests.server.side_by_side import side_by_side

POOL = 320
SMALL = {
    "context": 512,
    "pool": POOL,
    "environment": {
        # Admit requests as if each wanted 16 tokens, so that the pool runs full while they decode.
        "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "16",
        "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",  # no page owned twice, none owned and free
    },
}
ROWS = (Setup("ouro", Trunc(2, 4), page=1, **SMALL), Setup("ouro-gqa", Trunc(1, 5), page=16, **SMALL))
pytestmark = pytest.mark.parametrize("served", ROWS, ids=lambda row: row.name, indirect=True)


def test_retracted_requests_end_with_the_oracles_tokens(client, oracle):
    prompts = [prompt_of(40, seed=seed) for seed in range(6)]
    answers = client.generate_many(prompts, 6, max_new_tokens=170, ignore_eos=True)
    assert sum(answer.meta_info["num_retractions"] for answer in answers) > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.output_ids) == 170
        assert oracle.mismatch(prompt, answer.output_ids) is None, answer.meta_info["num_retractions"]


def test_retracted_requests_keep_their_logprobs(client, oracle):
    prompts = [prompt_of(50, seed=seed) for seed in range(10, 14)]
    answers = client.generate_many(prompts, 4, max_new_tokens=160, ignore_eos=True, return_logprob=True)
    assert sum(answer.meta_info["num_retractions"] for answer in answers) > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        truth = oracle.logprobs(prompt, answer.output_ids)
        given = answer.meta_info["output_token_logprobs"]
        assert [token for _, token, *_ in given] == answer.output_ids
        assert [value for value, *_ in given] == pytest.approx(
            [float(truth[i, token]) for i, token in enumerate(answer.output_ids)], abs=1e-4
        )


@pytest.mark.parametrize("length", [1, 100, 250])
def test_a_request_that_fills_the_pool_alone(client, served, oracle, length):
    """Its last rounds find no room for a whole reserve: it must end by its length, as in plain decoding."""
    prompt = prompt_of(length, seed=20)
    most = POOL - -(-length // served.page) * served.page - served.page - 1  # what SGLang lets a request have
    answer = client.generate(prompt, max_new_tokens=served.context - length, ignore_eos=True)
    assert answer.finish_reason == {"type": "length", "length": most}
    assert oracle.mismatch(prompt, answer.output_ids) is None


def refusal_or(call, reason: str):
    """What the call returns; None where the server refused it for this reason."""
    try:
        return call()
    except RequestRefused as refused:
        if refused.status in (400, 503) and reason in refused.message.lower():
            return None
        raise


class Events:
    """What one client does, as a plan made from a seed before anything runs; each method checks its own outcome."""

    def __init__(self, client, oracle, seed: int):
        self.client = client
        self.oracle = oracle
        self.random = random.Random(seed)
        self.bases = [prompt_of(length, seed=seed) for length in (1, 16, 33, 90)]
        self.seen: dict[str, int] = {}

    def plan(self, count: int) -> list:
        kinds = ["whole"] * 4 + ["stopped"] * 2 + ["streamed", "hung_up", "aborted", "aborted_at_once", "flushed"]
        return [self._event(self.random.choice(kinds), number) for number in range(count)]

    def _event(self, kind: str, number: int):
        # Shared beginnings, so that requests meet in the prefix cache; now and then the very same prompt.
        prompt = self.random.choice(self.bases) + prompt_of(self.random.choice([0, 3, 20]), seed=number % 7)
        options = {
            "prompt": prompt,
            "length": self.random.randint(1, 110),
            "after": self.random.randint(1, 6),
            "stops": [self.random.randrange(5, VOCABULARY) for _ in range(12)],
            "rid": f"event-{number}",
        }
        return partial(getattr(self, kind), options)

    def run(self, event) -> None:
        event()
        name = event.func.__name__
        self.seen[name] = self.seen.get(name, 0) + 1

    def right(self, options: dict, ids: list[int]) -> None:
        assert self.oracle.mismatch(options["prompt"], ids) is None

    def whole(self, options: dict) -> None:
        answer = self.client.generate(options["prompt"], max_new_tokens=options["length"], ignore_eos=True)
        assert len(answer.output_ids) == options["length"]
        self.right(options, answer.output_ids)

    def stopped(self, options: dict) -> None:
        answer = self.client.generate(
            options["prompt"], max_new_tokens=options["length"], stop_token_ids=options["stops"]
        )
        self.right(options, answer.output_ids)
        found = [place for place, token in enumerate(answer.output_ids) if token in options["stops"]]
        if found or answer.finish_reason["type"] == "stop":
            assert found in ([], [len(answer.output_ids) - 1])  # [] where an end token of the model came first
        else:
            assert len(answer.output_ids) == options["length"]

    def streamed(self, options: dict) -> None:
        answer = self.client.generate(options["prompt"], max_new_tokens=options["length"], ignore_eos=True, stream=True)
        assert len(answer.output_ids) == options["length"]
        self.right(options, answer.output_ids)

    def hung_up(self, options: dict) -> None:
        stream = self.client.stream(self._body(options))
        events = list(islice(stream, options["after"]))
        stream.close()
        self.right(options, events[-1]["output_ids"])

    def aborted(self, options: dict) -> None:
        events = []
        for event in self.client.stream(self._body(options)):
            events.append(event)
            if len(events) == options["after"]:
                self.client.abort(options["rid"])
        assert events[-1]["meta_info"]["finish_reason"]["type"] in ("abort", "length")
        self.right(options, events[-1]["output_ids"])

    def aborted_at_once(self, options: dict) -> None:
        request = partial(
            self.client.generate,
            options["prompt"],
            max_new_tokens=options["length"],
            ignore_eos=True,
            extra={"rid": options["rid"]},
        )
        answer, _ = side_by_side([partial(refusal_or, request, "abort"), partial(self.client.abort, options["rid"])])
        if answer is not None:  # None: aborted while it waited
            self.right(options, answer.output_ids)

    def flushed(self, options: dict) -> None:
        """Refused while requests run, which is right; nothing may break either way."""
        refusal_or(partial(self.client.flush_cache, wait=0), "")

    @staticmethod
    def _body(options: dict) -> dict:
        sampling = {"max_new_tokens": options["length"], "ignore_eos": True, "temperature": 0}
        return {"input_ids": options["prompt"], "rid": options["rid"], "sampling_params": sampling}


def test_sixty_random_events(client, server, oracle):
    events = Events(client, oracle, seed=11)
    plan = events.plan(60)
    lanes = [plan[place::8] for place in range(8)]  # 8 clients
    side_by_side([partial(lambda lane: [events.run(event) for event in lane], lane) for lane in lanes])
    assert sum(events.seen.values()) == 60
    assert set(events.seen) == {"whole", "stopped", "streamed", "hung_up", "aborted", "aborted_at_once", "flushed"}
    assert server.pool_balanced()
    client.flush_cache()
    assert server.load()["num_used_tokens"] == 0
    prompt = prompt_of(30, seed=99)
    assert oracle.mismatch(prompt, client.generate(prompt, max_new_tokens=40, ignore_eos=True).output_ids) is None
