"""What the engine did, in numbers that obey identities.

One object a worker; schedules report to it, ``/server_info`` and the command line read it. "Run" is what one
round commits for one request, SGLang's ``accept_len``: for TRUNC accepted drafts plus the bonus token, for the
pipelines one token for every lane that reached full depth.

Identities (tests), TRUNC: ``tokens == accepted + runs``; ``accepted <= drafted``;
``sum(accepted_by_position) == accepted``; ``looked_up_accepted <= accepted``; ``rows >= ticks``. Pipelines:
``tokens == accepted(d1) + accepted(d2) + restarts + ended``; ``rows + warm_rows == R * tokens + rows_wasted + rows in
flight``; ``missed <= restarts``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass
class TickCounters:
    """What every schedule counts; totals since the server started."""

    rounds: int = 0  # worker calls that decoded
    runs: int = 0  # (round, request) pairs
    ticks: int = 0  # calls of the core, each one step of all its rows
    rows: int = 0  # rows over all ticks
    request_ticks: int = 0  # ticks, counted once for every request that waited for them
    readouts: Counter[int] = field(default_factory=Counter)  # depth -> rows read out
    widths: Counter[int] = field(default_factory=Counter)  # rows -> ticks of that width

    def count_ticks(self, ticks: int, rows: int, requests: int) -> None:
        """``rows`` lanes of ``requests`` requests advanced by ``ticks`` steps."""
        self.ticks += ticks
        self.rows += ticks * rows
        self.request_ticks += ticks * requests
        self.widths[rows] += ticks

    def count_readout(self, depth: int, rows: int) -> None:
        self.readouts[depth] += rows

    def report(self) -> dict[str, Any]:
        """JSON-ready totals."""
        return {
            "rounds": self.rounds,
            "runs": self.runs,
            "ticks": self.ticks,
            "rows": self.rows,
            "request_ticks": self.request_ticks,
            "readouts_by_depth": _as_json(self.readouts),
            "ticks_by_width": _as_json(self.widths),
        }


@dataclass
class Counters(TickCounters):
    """TRUNC's totals."""

    drafted: int = 0
    accepted: int = 0
    looked_up: int = 0  # tokens that entered beside their roots; ``drafted`` counts those that d1 let pass
    looked_up_accepted: int = 0  # of ``accepted``; the worker's, which knows what was looked up
    screened_out: int = 0  # looked-up tokens that d1 did not let pass
    round_ticks: int = 0  # of the last round
    drafted_by_position: Counter[int] = field(default_factory=Counter)  # 1-based position in the chain
    accepted_by_position: Counter[int] = field(default_factory=Counter)
    _ticks_of_rounds: int = field(default=0, init=False, repr=False)  # ``ticks`` at the end of the last round

    @property
    def tokens(self) -> int:
        """Committed tokens, bonus tokens included; tokens past a stop are counted as well."""
        return self.accepted + self.runs

    def count_lookups(self, tokens: Tensor) -> None:
        """``tokens``: looked-up tokens per request, int64 [bs]."""
        self.looked_up += int(tokens.sum())

    def count_round(self, drafted: Tensor, accepted: Tensor) -> None:
        """``drafted``, ``accepted``: drafts per request, int64 [bs]."""
        self.rounds += 1
        self.runs += len(drafted)
        self.round_ticks, self._ticks_of_rounds = self.ticks - self._ticks_of_rounds, self.ticks
        for made, kept in zip(drafted.tolist(), accepted.tolist(), strict=True):
            self.drafted += made
            self.accepted += kept
            self.drafted_by_position.update(range(1, made + 1))
            self.accepted_by_position.update(range(1, kept + 1))

    def report(self) -> dict[str, Any]:
        """JSON-ready totals, with the derived ratios users ask for."""
        return {
            **super().report(),
            "tokens": self.tokens,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "looked_up": self.looked_up,
            "looked_up_accepted": self.looked_up_accepted,
            "screened_out": self.screened_out,
            "drafted_by_position": _as_json(self.drafted_by_position),
            "accepted_by_position": _as_json(self.accepted_by_position),
            "accept_length": self.tokens / self.runs if self.runs else None,
            "accept_rate": self.accepted / self.drafted if self.drafted else None,
        }


@dataclass
class PipelineCounters(TickCounters):
    """Totals of LOOPSPEC_SINGLE and LOOPSPEC_DUAL."""

    recurrences: int = 0
    proposed: Counter[int] = field(default_factory=Counter)  # depth -> proposals read
    drafted: Counter[int] = field(default_factory=Counter)  # depth -> lanes started on a proposal
    accepted: Counter[int] = field(default_factory=Counter)  # depth -> such lanes that became the root
    restarts: int = 0  # tokens after which a fresh lane started
    screened_out: int = 0  # looked-up lanes that went because d1 chose another token
    missed: int = 0  # restarts on a token that had been proposed: its lane was cut, or found no row
    ended: int = 0  # tokens after which nothing was wanted
    cold_starts: int = 0  # requests that came into a round without lanes
    warm_starts: int = 0  # requests whose lanes started during their prefill
    warm_rows: int = 0  # rows that ran along with a prefill, beside ``rows``
    lanes_dropped: int = 0
    rows_wasted: int = 0  # rows of dropped lanes

    @property
    def tokens(self) -> int:
        """Committed tokens; tokens past a stop are counted as well."""
        return self.accepted.total() + self.restarts + self.ended

    def count_commit(self, source: int, proposed: bool) -> None:
        """One token whose successor goes on. ``source``: depth that proposed the successor's lane, 0 for a fresh one.
        ``proposed``: whether any depth had proposed it."""
        if source:
            self.accepted[source] += 1
        else:
            self.restarts += 1
            self.missed += proposed

    @property
    def modelled_accept_length(self) -> float | None:
        """Tokens per full depth by LoopSpec's cost model, ``N*R / (sum_d A_d*d + (N - sum_d A_d)*R)``.

        It charges a kept token the depth that proposed it and any other R. Not a measurement: cut and late lanes,
        other requests' cycles and pipeline starts are not in it.
        """
        # A looked-up token is charged d1, at which it is screened.
        first = min((depth for depth in self.proposed if depth > 0), default=0)
        kept = sum(count * (depth if depth > 0 else first) for depth, count in self.accepted.items())
        cost = kept + (self.tokens - self.accepted.total()) * self.recurrences
        return self.tokens * self.recurrences / cost if cost else None

    def report(self) -> dict[str, Any]:
        """JSON-ready totals. ``accept_length``: tokens per R ticks of a request, measured."""
        passes = self.request_ticks / self.recurrences if self.recurrences else 0
        return {
            **super().report(),
            "tokens": self.tokens,
            "proposed_by_depth": _as_json(self.proposed),
            "drafted_by_depth": _as_json(self.drafted),
            "accepted_by_depth": _as_json(self.accepted),
            "drafted": self.drafted.total(),
            "accepted": self.accepted.total(),
            "screened_out": self.screened_out,
            "restarts": self.restarts,
            "missed": self.missed,
            "ended": self.ended,
            "cold_starts": self.cold_starts,
            "warm_starts": self.warm_starts,
            "warm_rows": self.warm_rows,
            "lanes_dropped": self.lanes_dropped,
            "rows_wasted": self.rows_wasted,
            "accept_length": self.tokens / passes if passes else None,
            "modelled_accept_length": self.modelled_accept_length,
        }


def _as_json(counts: Counter[int]) -> dict[str, int]:
    return {str(key): counts[key] for key in sorted(counts)}
