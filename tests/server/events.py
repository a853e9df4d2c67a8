"""Clients that do anything at any time, in a random order that a seed fixes before anything runs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import TypeVar

from sglang_trunc.serving.client import Client, RequestRefused
from tests.server.oracle import VOCABULARY, Oracle, prompt_of
from tests.server.side_by_side import side_by_side

T = TypeVar("T")
KINDS = ["whole"] * 4 + ["stopped"] * 2 + ["scored", "streamed", "hung_up", "aborted", "aborted_at_once", "flushed"]
CLIENTS = 8


def refusal_or(call: Callable[[], T], reason: str) -> T | None:
    """What the call returns; None where the server refused it for this reason."""
    try:
        return call()
    except RequestRefused as refused:
        if refused.status in (400, 503) and reason in refused.message.lower():
            return None
        raise


class Events:
    """What happens to one server; each event checks its own outcome, cut short or not, against the oracle."""

    def __init__(self, client: Client, oracle: Oracle, seed: int):
        self.client = client
        self.oracle = oracle
        self.random = random.Random(seed)
        self.bases = [prompt_of(length, seed=seed) for length in (1, 16, 33, 90)]
        self.made = 0
        self.seen: Counter[str] = Counter()
        self.retractions = 0

    def plan(self, count: int) -> list[partial]:
        return [self._event(self.random.choice(KINDS)) for _ in range(count)]

    def run(self, plan: Sequence[partial]) -> None:
        """All events, of 8 clients at the same time."""
        side_by_side([partial(self._run, plan[place::CLIENTS]) for place in range(CLIENTS)])

    def _run(self, events: Sequence[partial]) -> None:
        for event in events:
            event()
            self.seen[event.func.__name__] += 1

    def _event(self, kind: str) -> partial:
        # Shared beginnings, so that requests meet in the prefix cache; now and then the very same prompt.
        prompt = self.random.choice(self.bases) + prompt_of(self.random.choice([0, 3, 20]), seed=self.made % 7)
        options = {
            "prompt": prompt,
            "length": self.random.choice([1, 2, *(self.random.randint(3, 110) for _ in range(10))]),
            "after": self.random.randint(1, 6),
            "stops": [self.random.randrange(5, VOCABULARY) for _ in range(12)],
            "rid": f"event-{self.made}",
        }
        self.made += 1
        return partial(getattr(self, kind), options)

    def _right(self, options: dict, ids: list[int]) -> None:
        assert self.oracle.mismatch(options["prompt"], ids) is None

    def _generate(self, options: dict, **more):
        answer = self.client.generate(
            options["prompt"], max_new_tokens=options["length"], extra={"rid": options["rid"]}, **more
        )
        self._right(options, answer.output_ids)
        self.retractions += answer.meta_info.get("num_retractions", 0)  # not said of one aborted before it ran
        return answer

    # Events.

    def whole(self, options: dict) -> None:
        answer = self._generate(options, ignore_eos=True)
        assert len(answer.output_ids) == answer.completion_tokens == options["length"]

    def stopped(self, options: dict) -> None:
        answer = self._generate(options, stop_token_ids=options["stops"])
        found = [place for place, token in enumerate(answer.output_ids) if token in options["stops"]]
        if found or answer.finish_reason["type"] == "stop":
            assert found in ([], [len(answer.output_ids) - 1])  # [] where an end token of the model came first
        else:
            assert len(answer.output_ids) == options["length"]

    def scored(self, options: dict) -> None:
        answer = self._generate(options, ignore_eos=True, return_logprob=True)
        given = answer.meta_info["output_token_logprobs"]
        assert [token for _, token, *_ in given] == answer.output_ids
        truth = self.oracle.logprobs(options["prompt"], answer.output_ids)
        for place, (value, token, *_) in enumerate(given):
            assert abs(value - float(truth[place, token])) < 1e-4

    def streamed(self, options: dict) -> None:
        answer = self._generate(options, ignore_eos=True, stream=True)
        assert len(answer.output_ids) == options["length"]

    def hung_up(self, options: dict) -> None:
        stream = self.client.stream(self._body(options))
        events = list(islice(stream, options["after"]))
        stream.close()
        self._right(options, events[-1]["output_ids"])

    def aborted(self, options: dict) -> None:
        events = []
        for event in self.client.stream(self._body(options)):
            events.append(event)
            if len(events) == options["after"]:
                self.client.abort(options["rid"])
        assert events[-1]["meta_info"]["finish_reason"]["type"] in ("abort", "length")
        self._right(options, events[-1]["output_ids"])

    def aborted_at_once(self, options: dict) -> None:
        """Refused where it was aborted while it waited."""
        request = partial(self._generate, options, ignore_eos=True)
        side_by_side([partial(refusal_or, request, "abort"), partial(self.client.abort, options["rid"])])

    def flushed(self, options: dict) -> None:
        """Refused while requests run, which is right; nothing may break either way."""
        refusal_or(partial(self.client.flush_cache, wait=0), "")

    @staticmethod
    def _body(options: dict) -> dict:
        sampling = {"max_new_tokens": options["length"], "ignore_eos": True, "temperature": 0}
        return {"input_ids": options["prompt"], "rid": options["rid"], "sampling_params": sampling}
