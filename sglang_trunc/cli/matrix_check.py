"""One answer of the option matrix against its reference: exact, refused, a near tie, or different.

The reference server runs while answers are checked, and is asked for each request once, alone. Where tokens differ it
is asked again, for the logprobs of both tokens, and ``serving.probe`` for the size of a logit; ``core.ties`` judges.
What is compared are the logits a token was really chosen by: after penalties, masks and biases, and, for a drawn
token, with its noise. Under a filter noise goes by rank; there only two nearly equal logits, whose ranks may have
changed places, count as a tie, and any other difference is one.

Only the first difference of an answer can be judged: what follows depends on it through penalties and grammars.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch

from sglang_trunc.core import noise, ties
from sglang_trunc.core.ties import Difference, Promise, TopLogits
from sglang_trunc.serving import probe, request_options
from sglang_trunc.serving.client import RequestRefused
from sglang_trunc.serving.request_options import Case, OptionClient, Parting

Answer = list[dict[str, Any]] | RequestRefused


class Job(NamedTuple):
    """One case of one prompt."""

    prompt: int  # index into the prompts
    ids: list[int]
    case: Case
    tokens: int  # at most

    @property
    def request(self) -> dict[str, Any]:
        return request_options.body(self.case, self.ids, self.tokens)


class Asked(NamedTuple):
    """What a server of an algorithm said to a job."""

    algorithm: str
    concurrency: int
    job: Job
    answer: Answer


class Result(Enum):
    EXACT = "exact"
    REFUSED = "refused"  # HTTP 400 that names the option
    TIE = "near tie"
    DIFFERS = "DIFFERS"


@dataclass(frozen=True)
class Outcome:
    """One answer, judged."""

    algorithm: str
    concurrency: int
    prompt: int
    case: str
    result: Result
    said: str = ""  # the options refused, or what differs
    place: int | None = None  # of the token that differs
    difference: Difference | None = None


def answer(client: OptionClient, request: Mapping[str, Any]) -> Answer:
    """A refusal is an answer, too."""
    try:
        return client.ask(request)
    except RequestRefused as refused:
        return refused


class Checker:
    """Compares with the reference server behind ``client``."""

    def __init__(self, client: OptionClient, promise: Promise, values: bool):
        """``values``: whether logprobs and hidden states must be equal, too."""
        self._client = client
        self._promise = promise
        self._values = values
        self._references: dict[tuple[int, str], Answer] = {}

    def outcome(self, asked: Asked) -> Outcome:
        result, said, difference = self._judged(asked)
        place = None if difference is None else difference.position
        return Outcome(
            asked.algorithm,
            asked.concurrency,
            asked.job.prompt,
            asked.job.case.name,
            result,
            said,
            place,
            difference,
        )

    def _judged(self, asked: Asked) -> tuple[Result, str, Difference | None]:
        job = asked.job
        if isinstance(asked.answer, RequestRefused):
            return (*_refusal(asked.answer, job.case), None)
        reference = self._reference(job)
        if isinstance(reference, RequestRefused):
            return Result.DIFFERS, f"the reference refuses it: {reference}", None
        expected, got = (request_options.visible(one, self._values) for one in (reference, asked.answer))
        parting = request_options.first_difference(expected, got)
        if parting is None:
            return Result.EXACT, "", None
        if parting.field != "output_ids" or parting.place is None:
            return Result.DIFFERS, str(parting), None
        difference = self._difference(job, parting, expected, got)
        if difference.passes:
            return Result.TIE, str(parting), difference
        return Result.DIFFERS, f"{parting} ({difference.verdict.value})", difference

    def _reference(self, job: Job) -> Answer:
        key = job.prompt, job.case.name
        if key not in self._references:
            self._references[key] = answer(self._client, job.request)
        return self._references[key]

    def _difference(
        self, job: Job, parting: Parting, expected: Sequence[dict[str, Any]], got: Sequence[dict[str, Any]]
    ) -> Difference:
        plain, other = expected[parting.answer]["output_ids"], got[parting.answer]["output_ids"]
        place = parting.place
        assert place is not None
        known = self._promise is Promise.NEAR_TIES and place < min(len(plain), len(other))
        logits = self._logits(job, plain, other[place], place) if known else None
        return ties.classify(plain, other, place, logits, promise=self._promise)

    def _logits(self, job: Job, plain: Sequence[int], taken: int, place: int) -> TopLogits | None:
        """How far the token taken was from winning; None if the reference cannot say."""
        best = plain[place]
        request = job.request
        request["sampling_params"].pop("n", None)
        request |= {"return_logprob": True, "token_ids_logprob": [best, taken]}
        try:
            (again,) = self._client.ask(request)
            probed = probe.logits(self._client, [*job.ids, *plain[:place]], [best, taken])
        except RequestRefused:
            return None
        if again["output_ids"][: place + 1] != list(plain[: place + 1]):
            return None
        logprobs = {token: value for value, token, *_ in again["meta_info"]["output_token_ids_logprobs"][place]}
        gap = choice_gap(job.case, logprobs[best] - logprobs[taken], (best, taken), len(job.ids) - 1 + place)
        return TopLogits(probed[best], gap, gap)


def choice_gap(case: Case, gap: float, tokens: tuple[int, int], position: int) -> float:
    """By how much the first of two tokens won over the second, in logits; under a filter, how far apart they are.

    ``gap``: between their logprobs, which are at the case's temperature where it draws. ``position``: of the token
    they follow, which keys the noise as in ``core.sampling``.
    """
    if not case.draws:
        return max(gap, 0.0)
    temperature = float(case.sampling["temperature"])
    if case.filtered:
        return abs(gap) * temperature
    seeds, positions = (torch.tensor([value]) for value in (case.sampling["sampling_seed"], position))
    first, second = noise.gumbel(noise.murmur32(seeds, positions, torch.tensor(tokens)))[0].tolist()
    return max(gap + first - second, 0.0) * temperature


def _refusal(refused: RequestRefused, case: Case) -> tuple[Result, str]:
    named = [name for name in case.options if name in refused.message]
    if refused.status == 400 and named:
        return Result.REFUSED, ", ".join(named)
    return Result.DIFFERS, f"{refused} (no option is named)"
