"""Tokens per second from streamed completions.

Two figures, both from token counts and the arrival times of streamed events:

* decode tokens/s of one request = (completion tokens - tokens in its first event) / (end - time of the
  first event). The first event carries the one token of the prefill, so this is
  (completion_tokens - 1) / (end - first token time), and it leaves the prefill out.
* total tokens/s = all completion tokens / (last end - first send), prefill included.

For several requests at once the decode window opens when the *last* of them has its first token (until
then the server is still prefilling) and closes with the last end; tokens that arrive inside the window
count. For one request that is the first formula.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_trunc.serving.client import Completion


def ttft(completion: Completion) -> float:
    """Seconds to the first token."""
    return _first(completion) - completion.begin


def decode_tokens_per_second(batch: Sequence[Completion]) -> float:
    """Decode speed of requests sent together, prefill left out. NaN when nothing was decoded."""
    tokens, seconds = decode_window(batch)
    return tokens / seconds if tokens and seconds > 0 else float("nan")


def decode_window(batch: Sequence[Completion]) -> tuple[int, float]:
    """(tokens, seconds) of the decode window, so that several batches can be added up."""
    opens = max(_first(completion) for completion in batch)
    closes = max(completion.end for completion in batch)
    tokens = sum(c.completion_tokens - _tokens_by(c, opens) for c in batch)
    return tokens, closes - opens


def total_window(batch: Sequence[Completion]) -> tuple[int, float]:
    """(tokens, seconds) from the first send to the last end, prefill included."""
    tokens = sum(completion.completion_tokens for completion in batch)
    return tokens, max(c.end for c in batch) - min(c.begin for c in batch)


def total_tokens_per_second(batch: Sequence[Completion]) -> float:
    tokens, seconds = total_window(batch)
    return tokens / seconds


def inter_token_seconds(completion: Completion) -> list[float]:
    """One value per token after the first event: an event's wait shared by the tokens it brings."""
    waits: list[float] = []
    for before, after in zip(completion.chunks, completion.chunks[1:], strict=False):
        count = after.tokens - before.tokens
        waits += [(after.at - before.at) / count] * count if count else []
    return waits


def _first(completion: Completion) -> float:
    if not completion.chunks:
        raise ValueError("speed needs a streamed completion")
    return completion.chunks[0].at


def _tokens_by(completion: Completion, at: float) -> int:
    return max((chunk.tokens for chunk in completion.chunks if chunk.at <= at), default=0)
