"""What a simulation tries, and what it says of each: schedules with their options, rows of the result.

A case is a schedule with every option set. ``Figures`` are its counts by token, and its speed where a cost table is
known; without one a tick counts as one unit whatever its width and readouts are free, so that the ratio to plain
is what a machine with room to spare would give.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import depths
from cost_table import UNIT, CostTable
from rich import box
from rich.table import Table
from sim_paths import Text
from sim_rounds import Outcome, run_pipeline, run_trunc

from sglang_trunc.core.options import TruncOptions
from sglang_trunc.core.pipeline import Schedule

PLAIN, TRUNC, SINGLE, DUAL = "plain", "TRUNC", "LOOPSPEC_SINGLE", "LOOPSPEC_DUAL"
SCHEDULES = (TRUNC, SINGLE, DUAL)


class Case(NamedTuple):
    """Options that a schedule does not have are None."""

    schedule: str
    d1: int | None = None
    d2: int | None = None
    block_size: int | None = None
    max_width: int | None = None
    min_survival: float | None = None
    draft_threshold: float | None = None

    @property
    def name(self) -> str:
        """Short enough for a table."""
        depths = "/".join(str(depth) for depth in (self.d1, self.d2) if depth is not None)
        rows = f"block {self.block_size}" if self.block_size else f"width {self.max_width}"
        return self.schedule if self.d1 is None else f"{self.schedule.removeprefix('LOOPSPEC_')} {depths} {rows}"

    @property
    def depths(self) -> set[int]:
        """At which it reads out early."""
        return {depth for depth in (self.d1, self.d2) if depth is not None}

    def run(self, recurrences: int, texts: Sequence[Text], concurrency: int) -> Outcome:
        if self.schedule in (PLAIN, TRUNC):
            block = TruncOptions(self.d1 or recurrences, self.block_size or 1, self.draft_threshold or 0.0)
            return run_trunc(block, recurrences, texts, concurrency)
        assert self.d1 is not None
        assert self.max_width is not None
        assert self.min_survival is not None
        plan = Schedule(recurrences, self.d1, self.d2, self.max_width, self.min_survival)
        return run_pipeline(plan, texts, concurrency)


@dataclass(frozen=True)
class Grid:
    """Every combination of what is listed; None: all depths that the schedule accepts."""

    schedules: Sequence[str]
    widths: Sequence[int]
    blocks: Sequence[int]
    min_survival: float
    first: Sequence[int] | None = None  # d1
    second: Sequence[int] | None = None  # d2

    def cases(self, recurrences: int, read: Sequence[int]) -> list[Case]:
        """Those whose depths were read out, plain decoding before them."""
        found = [Case(PLAIN)]
        if TRUNC in self.schedules:
            found += [
                Case(TRUNC, d1, block_size=b) for d1 in range(1, recurrences // 2 + 1) for b in self.blocks if b > 1
            ]
        pipelines: list[tuple[str, int, int | None]] = []
        if SINGLE in self.schedules:
            pipelines += [(SINGLE, d1, None) for d1 in depths.single_depths(recurrences)]
        if DUAL in self.schedules:
            pipelines += [(DUAL, *pair) for pair in depths.dual_depths(recurrences)]
        found += [
            Case(schedule, d1, d2, max_width=width, min_survival=self.min_survival)
            for schedule, d1, d2 in pipelines
            for width in self.widths
        ]
        return [case for case in found if case.depths <= set(read) and self._wanted(case)]

    def _wanted(self, case: Case) -> bool:
        return (case.d1 is None or self.first is None or case.d1 in self.first) and (
            case.d2 is None or self.second is None or case.d2 in self.second
        )


class Figures(NamedTuple):
    """One case at one concurrency."""

    case: Case
    concurrency: int
    ticks: float  # that a request waits for a token
    rows: float  # per token
    wasted: float  # rows per token that led to none
    width: float  # mean rows of a tick
    width_p99: int
    readouts: float  # rows read out per token
    accept_length: float  # tokens per R ticks of a request, measured
    modelled: float | None  # by LoopSpec's cost model
    seconds: float  # of everything; ticks where no cost table is known
    speed: float  # tokens per second, or per tick
    ratio: float  # to plain decoding at the same concurrency


def figures(
    case: Case, outcome: Outcome, concurrency: int, cost: CostTable | None, overhead: float, plain: float | None
) -> Figures:
    """``overhead``: seconds of a round beside the model. ``plain``: its speed, None for plain itself."""
    counters, tokens, full = outcome.counters, outcome.tokens, outcome.recurrences
    seconds = outcome.seconds(cost or UNIT, overhead)
    speed = outcome.delivered / seconds
    return Figures(
        case,
        concurrency,
        counters.request_ticks / tokens,
        counters.rows / tokens,
        outcome.wasted / tokens,
        counters.rows / counters.ticks,
        percentile(counters.widths, 0.99),
        counters.readouts.total() / tokens,
        tokens * full / counters.request_ticks,
        getattr(counters, "modelled_accept_length", None),
        seconds,
        speed,
        speed / (plain or speed),
    )


def percentile(counts: Mapping[int, int], share: float) -> int:
    """The smallest value that at least this share of the counts does not exceed."""
    need, seen = math.ceil(share * sum(counts.values()) - 1e-9), 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= need:
            return value
    raise ValueError("nothing was counted")


def best(found: Sequence[Figures]) -> Figures:
    return max(found, key=lambda one: one.speed)


HEADERS = ("schedule", "ticks", "rows", "wasted", "mean", "p99", "read", "per R", "model", "tok/s", "x plain")
LEGEND = (
    "by token: ticks that a request waits for it, rows, rows that led to none, rows read out; mean, p99: rows of "
    "a tick; per R: tokens per R ticks of a request, measured; model: by LoopSpec's cost model; *: the fastest"
)


def rich_table(found: Sequence[Figures], title: str, priced: bool) -> Table:
    """``priced``: a cost table is known."""
    table = Table(title=title, caption=LEGEND, box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for header in HEADERS:
        table.add_column(header, justify="left" if header == "schedule" else "right", no_wrap=True)
    first = best(found)
    for one in found:
        table.add_row(
            f"{'*' if one is first else ' '}{one.case.name}",
            f"{one.ticks:.2f}",
            f"{one.rows:.2f}",
            f"{one.wasted:.2f}",
            f"{one.width:.2f}",
            str(one.width_p99),
            f"{one.readouts:.2f}",
            f"{one.accept_length:.2f}",
            "-" if one.modelled is None else f"{one.modelled:.2f}",
            f"{one.speed:.2f}" if priced else "-",
            f"{one.ratio:.2f}",
            style="bold" if one is first else None,
        )
    return table


def as_json(one: Figures) -> dict[str, Any]:
    return {**one._asdict(), "case": one.case._asdict()}
