"""The agreement gate once its servers run: what is sent, compared and judged.

The speculative server decodes every prompt a fixed number of tokens at each concurrency. The first level
meets an empty prefix cache, the later ones a warm one, so that KV written by speculative rounds and shared
through the radix tree is covered too. The plain server then decodes the same prompts one at a time, with
the logprobs of its best tokens; that text is the reference.

Every difference is judged, not only the first: after one, plain decoding continues from the speculative
text's own prefix, so the remaining tokens are held to plain's choices as well. The logit that gives the
size of an ulp is asked from the plain server (``serving.probe``); if it cannot be learned the
difference does not pass.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sglang_trunc.cli.prompts import Prompt
from sglang_trunc.core import ties
from sglang_trunc.core.ties import Difference, Promise, TopLogits
from sglang_trunc.serving import counters, probe
from sglang_trunc.serving.client import Client, Completion, RequestRefused
from sglang_trunc.serving.counters import Speculation

Ids = Sequence[int]

TOP_LOGPROBS = 5
MAX_DIFFERENCES = 16  # per text: each one costs a request, and a broken engine differs everywhere


class Text(NamedTuple):
    """One prompt decoded by the speculative server at one concurrency."""

    prompt: int  # index into the prompts
    kind: str
    concurrency: int
    output_ids: list[int]
    cached_tokens: int
    speculation: Speculation


@dataclass(frozen=True)
class Checked:
    """A text and its differences from plain decoding, in order of position."""

    text: Text
    differences: list[Difference]

    @property
    def identical(self) -> bool:
        return not self.differences


@dataclass(frozen=True)
class Agreement:
    """The gate's result."""

    promise: Promise
    max_new_tokens: int
    checked: list[Checked]
    problems: list[str] = field(default_factory=list)  # besides differences

    @property
    def differences(self) -> list[Difference]:
        return [difference for checked in self.checked for difference in checked.differences]

    @property
    def failures(self) -> list[Difference]:
        return [difference for difference in self.differences if not difference.passes]

    @property
    def passes(self) -> bool:
        return bool(self.checked) and not self.failures and not self.problems


def promise_of(server_info: Mapping[str, Any]) -> Promise:
    """The GPU-less platform gives a row the same bits at every width; float32 has no near ties to excuse."""
    float32 = server_info.get("dtype") in ("float32", "float")
    return Promise.BIT_EQUAL if float32 or server_info.get("device") == "cpu" else Promise.NEAR_TIES


def relaxed_acceptance(server_info: Mapping[str, Any]) -> list[str]:
    """Settings under which a server may keep tokens that plain decoding would not choose: SGLang's, and ours."""
    names = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc", "relax_top", "relax_tau")
    given = {**server_info, **engine_options(server_info)}
    return [f"{name} is {given[name]}: only 1 is lossless" for name in names if given.get(name) not in (None, 1)]


def engine_options(server_info: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the speculative algorithm in ``/server_info``; none for a plain server."""
    states = server_info.get("internal_states") or [{}]
    return dict(states[0].get(counters.STATE_KEY, {}).get("options", {}))


def speculative_texts(
    client: Client,
    prompts: Sequence[Prompt],
    ids: Sequence[Ids],
    levels: Sequence[int],
    tokens: int,
) -> Iterator[Text]:
    """Every prompt at every concurrency, from a speculative server."""
    client.flush_cache()
    for level in levels:
        answers = client.generate_many(ids, level, max_new_tokens=tokens, ignore_eos=True)
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            count = counters.speculation(answer.meta_info)
            yield Text(index, prompt.kind, level, answer.output_ids, answer.cached_tokens, count)


def plain_references(client: Client, ids: Sequence[Ids], tokens: int) -> list[Completion]:
    client.flush_cache()
    return [_plain(client, prompt, tokens) for prompt in ids]


def _plain(client: Client, prompt: Sequence[int], tokens: int) -> Completion:
    return client.generate(
        prompt, max_new_tokens=tokens, ignore_eos=True, return_logprob=True, top_logprobs_num=TOP_LOGPROBS
    )


def differences(
    client: Client,
    prompt: Sequence[int],
    reference: Completion,
    other: Sequence[int],
    stop_ids: Collection[int],
    promise: Promise,
) -> list[Difference]:
    """Every position of ``other`` that plain decoding would have chosen differently."""
    found: list[Difference] = []
    start = 0  # tokens of `other` before the plain completion in hand
    while len(found) < MAX_DIFFERENCES:
        offset = ties.first_difference(reference.output_ids, other[start:])
        if offset is None:
            break
        position = start + offset
        logits = None
        if offset < len(reference.output_ids) and position < len(other):
            prefix = [*prompt, *other[:position]]
            logits = _top_logits(client, prefix, reference, offset, other[position])
        plain = [*other[:start], *reference.output_ids]
        found.append(ties.classify(plain, other, position, logits, stop_ids, promise))
        start = position + 1
        if logits is None or start >= len(other):
            break
        reference = _plain(client, [*prompt, *other[:start]], len(other) - start)
    return found


def _top_logits(
    client: Client, prefix: Sequence[int], reference: Completion, offset: int, taken: int
) -> TopLogits | None:
    best = reference.output_ids[offset]
    try:
        probed = probe.logits(client, prefix, [best, taken])
    except RequestRefused:
        return None
    # The gaps are plain decoding's own, from the run that is the reference; the probe gives the size.
    ranked = {token: value for value, token in reference.top_logprobs(offset)}
    second = max((value for token, value in ranked.items() if token != best), default=float("-inf"))
    taken_gap = ranked[best] - ranked[taken] if taken in ranked else probed[best] - probed[taken]
    return TopLogits(probed[best], ranked[best] - second, taken_gap)


def check(
    client: Client,
    ids: Sequence[Ids],
    texts: Sequence[Text],
    stop_ids: Collection[int],
    promise: Promise,
    tokens: int,
) -> list[Checked]:
    """Hold speculative texts to the plain server behind ``client``."""
    references = plain_references(client, ids, tokens)
    return [
        Checked(text, differences(client, ids[text.prompt], plain, text.output_ids, stop_ids, promise))
        for text in texts
        for plain in [references[text.prompt]]
    ]
