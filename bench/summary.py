"""From cells to a table: medians over rounds, ratios to plain of the same round, equality with plain.

A ratio is taken within a round, since a machine's speed drifts between rounds; the table shows the median
of those ratios with the smallest and largest, never the best one alone. Equality counts whole texts and
stands beside every speed: a fast arm with other tokens is not faster.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from arms import PLAIN
from measure import Cell, Measured
from rich import box
from rich.table import Table

from sglang_trunc.core.ties import first_difference


class Line(NamedTuple):
    """One arm's cell over all rounds."""

    cell: Cell
    arm: str
    decode_tps: float
    total_tps: float
    ttft: float
    ratio: float  # to plain, decode speed
    ratio_min: float
    ratio_max: float
    total_ratio: float
    accept_length: float | None
    ticks_per_token: float | None
    rows_per_token: float | None
    equal: int  # texts equal to plain's of the same round
    texts: int
    first_differences: list[int]  # token positions, over all rounds


def summarise(results: Sequence[Measured]) -> list[Line]:
    plain = {(r.round, r.cell): r for r in results if r.arm == PLAIN}
    keys = list(dict.fromkeys((r.cell, r.arm) for r in results))
    lines = []
    for cell, arm in sorted(keys, key=lambda key: key[0]):
        mine = [r for r in results if (r.cell, r.arm) == (cell, arm)]
        lines.append(line(mine, [plain[r.round, r.cell] for r in mine]))
    return lines


def line(mine: Sequence[Measured], plain: Sequence[Measured]) -> Line:
    ratios = [m.decode_tps / p.decode_tps for m, p in zip(mine, plain, strict=True)]
    pairs = [
        first_difference(expected, taken)
        for m, p in zip(mine, plain, strict=True)
        for expected, taken in zip(p.output_ids, m.output_ids, strict=True)
    ]
    return Line(
        mine[0].cell,
        mine[0].arm,
        statistics.median(m.decode_tps for m in mine),
        statistics.median(m.total_tps for m in mine),
        statistics.median(m.ttft for m in mine),
        statistics.median(ratios),
        min(ratios),
        max(ratios),
        statistics.median(m.total_tps / p.total_tps for m, p in zip(mine, plain, strict=True)),
        median_or_none([m.accept_length for m in mine]),
        median_or_none([m.ticks_per_token for m in mine]),
        median_or_none([m.rows_per_token for m in mine]),
        sum(position is None for position in pairs),
        len(pairs),
        [position for position in pairs if position is not None],
    )


def median_or_none(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and not math.isnan(value)]
    return statistics.median(known) if known else None


HEADERS = ("cell", "arm", "tok/s", "ratio", "min-max", "in all", "ratio", "TTFT", "accept", "ticks", "rows", "equal")
LEGEND = (
    "cell: prompts, their tokens x requests; tok/s: decoding, all requests together; ratio: to plain of the same "
    "round, median, with min-max; in all: with prefill; TTFT: ms to the first token; "
    "accept: tokens a round; ticks: passes of the core a token waits for; rows: of the core, spent on a token; "
    "equal: texts equal to plain's"
)


def cells_of(one: Line) -> list[str]:
    return [
        one.cell.name,
        one.arm,
        f"{one.decode_tps:.2f}",
        f"{one.ratio:.2f}",
        f"{one.ratio_min:.2f}-{one.ratio_max:.2f}",
        f"{one.total_tps:.2f}",
        f"{one.total_ratio:.2f}",
        f"{one.ttft * 1000:.0f}",
        "-" if one.accept_length is None else f"{one.accept_length:.2f}",
        "-" if one.ticks_per_token is None else f"{one.ticks_per_token:.2f}",
        "-" if one.rows_per_token is None else f"{one.rows_per_token:.2f}",
        f"{one.equal}/{one.texts}",
    ]


def rich_table(lines: Sequence[Line], title: str) -> Table:
    table = Table(title=title, caption=LEGEND, box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for header in HEADERS:
        table.add_column(header, justify="left" if header == "arm" else "right", no_wrap=True)
    before = None
    for one in lines:
        if before not in (None, one.cell):
            table.add_row()
        before = one.cell
        table.add_row(*cells_of(one))
    return table


def markdown(lines: Sequence[Line]) -> str:
    rows = [HEADERS, ["---"] * len(HEADERS), *map(cells_of, lines)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + f"\n\n{LEGEND}\n"


def worst_cells(lines: Sequence[Line]) -> str:
    """Markdown: of each arm the cell in which it does worst against plain."""
    worst = {one.arm: one for one in sorted(lines, key=lambda one: -one.ratio) if one.arm != PLAIN}
    rows = [f"| {arm} | {one.ratio:.2f} | {one.cell.name} |" for arm, one in sorted(worst.items())]
    return "\n".join(["| arm | least ratio to plain | cell |", "|---|---|---|", *rows]) + "\n"


def as_json(results: Sequence[Measured], lines: Sequence[Line]) -> dict[str, Any]:
    return {
        "summary": [{**one._asdict(), "cell": one.cell._asdict()} for one in lines],
        "measurements": [{**one._asdict(), "cell": one.cell._asdict()} for one in results],
    }
