"""Where a greedy text parts from plain's: is it a near tie? The rule is ``core.ties``'.

Asked of a plain server with the same weights: after the common prefix, how far below its best token is the one that was
taken? Only the first difference of a text is judged: after it both texts answer to their own prefixes, and
``sglang-trunc verify`` is the place for more. Texts of other engines are not judged, since their arithmetic is theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sglang_trunc.core import ties
from sglang_trunc.core.ties import Difference, Promise, TopLogits
from sglang_trunc.serving import probe
from sglang_trunc.serving.client import Client, RequestRefused

TOP_LOGPROBS = 5


class Pair(NamedTuple):
    """Two texts of one prompt."""

    run: str  # of the other text
    problem: str
    prompt: str | list[int]
    plain: list[int]
    other: list[int]


def judge(client: Client, pair: Pair, promise: Promise) -> Difference:
    """``client``: a plain server started with ``probe.SERVER_FLAG``."""
    position = ties.first_difference(pair.plain, pair.other)
    if position is None:
        raise ValueError("the two texts are equal")
    logits = None
    if position < min(len(pair.plain), len(pair.other)):
        ids = client.tokenize(pair.prompt, add_special_tokens=True) if isinstance(pair.prompt, str) else pair.prompt
        prefix = [*ids, *pair.plain[:position]]
        logits = _logits(client, prefix, pair.plain[position], pair.other[position])
    return ties.classify(pair.plain, pair.other, position, logits, promise=promise)


def _logits(client: Client, prefix: Sequence[int], expected: int, taken: int) -> TopLogits | None:
    """Plain's logits after the prefix. Its best token there is what it took, or a near tie by itself: a prefill may
    round otherwise than the decoding did, so gaps are absolute."""
    try:
        answer = client.generate(
            prefix, max_new_tokens=1, ignore_eos=True, return_logprob=True, top_logprobs_num=TOP_LOGPROBS
        )
        ranked = answer.top_logprobs(0)
        best, second = ranked[0], ranked[1]
        found = probe.logits(client, prefix, {best[1], expected, taken})
    except RequestRefused:
        return None
    return TopLogits(found[best[1]], best[0] - second[0], abs(found[expected] - found[taken]))


def as_fields(difference: Difference) -> dict[str, Any]:
    return {**difference._asdict(), "verdict": difference.verdict.value, "passes": difference.passes}
