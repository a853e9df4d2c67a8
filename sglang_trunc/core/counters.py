"""What the engine did, in numbers that obey identities.

One ``Counters`` a worker; schedules report to it, ``/server_info`` and the command line read it. "Run" is
what one round commits for one request: accepted drafts plus the bonus token, SGLang's ``accept_len``.

Identities (tests): ``tokens == accepted + runs``; ``accepted <= drafted``;
``sum(accepted_by_position) == accepted``; ``rows >= ticks``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass
class Counters:
    """Totals since the server started."""

    rounds: int = 0  # worker calls that decoded
    runs: int = 0  # (round, request) pairs
    ticks: int = 0  # calls of the core, each one step of all its rows
    rows: int = 0  # rows over all ticks
    readouts: Counter[int] = field(default_factory=Counter)  # depth -> rows read out
    widths: Counter[int] = field(default_factory=Counter)  # rows -> ticks of that width
    drafted: int = 0
    accepted: int = 0
    drafted_by_position: Counter[int] = field(default_factory=Counter)  # 1-based position in the chain
    accepted_by_position: Counter[int] = field(default_factory=Counter)

    @property
    def tokens(self) -> int:
        """Committed tokens, bonus tokens included; tokens past a stop are counted as well."""
        return self.accepted + self.runs

    def count_ticks(self, ticks: int, rows: int) -> None:
        self.ticks += ticks
        self.rows += ticks * rows
        self.widths[rows] += ticks

    def count_readout(self, depth: int, rows: int) -> None:
        self.readouts[depth] += rows

    def count_round(self, drafted: Tensor, accepted: Tensor) -> None:
        """``drafted``, ``accepted``: drafts per request, int64 [bs]."""
        self.rounds += 1
        self.runs += len(drafted)
        for made, kept in zip(drafted.tolist(), accepted.tolist(), strict=True):
            self.drafted += made
            self.accepted += kept
            self.drafted_by_position.update(range(1, made + 1))
            self.accepted_by_position.update(range(1, kept + 1))

    def report(self) -> dict[str, Any]:
        """JSON-ready totals, with the derived ratios users ask for."""
        return {
            "rounds": self.rounds,
            "runs": self.runs,
            "tokens": self.tokens,
            "ticks": self.ticks,
            "rows": self.rows,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "readouts_by_depth": _as_json(self.readouts),
            "ticks_by_width": _as_json(self.widths),
            "drafted_by_position": _as_json(self.drafted_by_position),
            "accepted_by_position": _as_json(self.accepted_by_position),
            "accept_length": self.tokens / self.runs if self.runs else None,
            "accept_rate": self.accepted / self.drafted if self.drafted else None,
        }


def _as_json(counts: Counter[int]) -> dict[str, int]:
    return {str(key): counts[key] for key in sorted(counts)}
