"""What a server says about speculation: per request in ``meta_info``, in total in ``/server_info``.

SGLang reports rounds per request (``spec_verify_ct``), for speculative servers only. Keys are read strictly,
so that a key renamed by a later SGLang is an error here and not an accept rate of 0. With a block size of
1 nothing is proposed and SGLang leaves ``spec_verify_ct`` out; the histogram still counts the rounds.

``accept_length`` is tokens per round with the bonus token counted, from the tokens the client really
got: (completion tokens - 1) / rounds, the first token being the prefill's. SGLang's own
``spec_accept_length`` divides all completion tokens.

The engine's own counters are totals since the server started, so a measurement takes them before and after.
A *tick* is one batched call of the looped core; plain decoding takes R of them for a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from sglang_trunc.serving.client import Completion

STATE_KEY = "sglang_trunc"  # in internal_states[0]; written by engine/reporting.py


class Speculation(NamedTuple):
    """Totals over one or several completions."""

    tokens: int  # emitted by rounds: the prefill's token of each completion is left out
    rounds: int

    @property
    def accept_length(self) -> float:
        return self.tokens / self.rounds if self.rounds else float("nan")


def speculation(meta_info: Mapping[str, Any]) -> Speculation:
    """Counters of one completion of a speculative server."""
    tokens = int(meta_info["completion_tokens"]) - 1
    if not tokens:
        return Speculation(0, 0)  # the prefill's token was the only one: no round ran
    rounds = meta_info.get("spec_verify_ct")
    return Speculation(tokens, int(sum(meta_info["spec_correct_drafts_histogram"]) if rounds is None else rounds))


def sum_up(counts: Sequence[Speculation]) -> Speculation:
    return Speculation(sum(c.tokens for c in counts), sum(c.rounds for c in counts))


def total(completions: Sequence[Completion]) -> Speculation:
    return sum_up([speculation(completion.meta_info) for completion in completions])


@dataclass(frozen=True)
class EngineCounters:
    """The numbers of the engine's report that ratios are made of."""

    rounds: int  # worker calls that decoded
    runs: int  # (round, request) pairs
    tokens: int  # committed, those past a stop included
    ticks: int
    rows: int  # rows over all ticks
    request_ticks: int  # ticks, once for every request that waited for them
    drafted: int
    accepted: int

    def __sub__(self, other: EngineCounters) -> EngineCounters:
        spent = {f.name: getattr(self, f.name) - getattr(other, f.name) for f in fields(self)}
        return EngineCounters(**spent)

    @property
    def accept_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else float("nan")


def engine_counters(internal_state: Mapping[str, Any]) -> EngineCounters | None:
    """Totals since the server started; None for a server that runs without our algorithm."""
    report = internal_state.get(STATE_KEY)
    return None if report is None else totals(report["counters"])


def totals(report: Mapping[str, Any]) -> EngineCounters:
    """``report``: the engine's ``counters``, or a difference of two (:func:`counted_since`)."""
    return EngineCounters(**{f.name: int(report[f.name]) for f in fields(EngineCounters)})


def counted_since(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's whole report between two internal states; empty for a plain server.

    Ratios are left out: a difference of ratios is not a ratio.
    """
    if STATE_KEY not in after:
        return {}
    return _minus(after[STATE_KEY]["counters"], before[STATE_KEY]["counters"])


def _minus(after: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    spent: dict[str, Any] = {}
    for name, value in after.items():
        if isinstance(value, Mapping):
            spent[name] = _minus(value, before.get(name, {}))
        elif isinstance(value, int):
            spent[name] = value - before.get(name, 0)
    return spent


def engine_options(internal_state: Mapping[str, Any]) -> dict[str, Any]:
    """Resolved options and ``recurrences``; empty for a plain server."""
    report = internal_state.get(STATE_KEY)
    return {} if report is None else {**report["options"], "recurrences": report["recurrences"]}


def ticks_per_token(count: EngineCounters | None) -> float | None:
    """Ticks one request waits for one token: plain decoding has R at any batch size."""
    if count is None or not count.tokens:
        return None
    return count.request_ticks / count.tokens
