"""time(width): seconds of a tick and of a readout by number of rows, as a served model reported them.

``engine.cost`` measures them at start-up (``SGLANG_TRUNC_MEASURE``) and ``/server_info`` reports them; ``loaded``
reads a file with any part of that answer, ``measured`` starts a server to ask. Between measured widths a line is
drawn, outside of them nothing is guessed.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sglang_trunc.serving.server import Server


class CostTable(NamedTuple):
    """Seconds by rows."""

    context: int | None  # tokens that each row attended to
    tick: Mapping[int, float]
    readout: Mapping[int, float]
    start: Mapping[int, float] = {}  # embedding and prelude of new rows; where not measured, the tick is to cover it

    def seconds(
        self, ticks: Mapping[int, float], readouts: Mapping[float, float], starts: Mapping[int, float] | None = None
    ) -> float:
        """Rows -> how many calls, each."""
        total = sum(count * interpolated(self.tick, rows) for rows, count in ticks.items())
        total += sum(count * interpolated(self.readout, rows) for rows, count in readouts.items())
        if self.start and starts:
            total += sum(count * interpolated(self.start, rows) for rows, count in starts.items())
        return total


# One unit a tick whatever its width, readouts free: compares schedules where the machine has room to spare.
UNIT = CostTable(None, {1: 1.0, 1 << 20: 1.0}, {1: 0.0, 1 << 20: 0.0})


def interpolated(times: Mapping[int, float], rows: float) -> float:
    """Seconds at a number of rows, linear between measured neighbours."""
    known = sorted(times)
    if not known or not known[0] <= rows <= known[-1]:
        measured = f"the measured {known[0]} to {known[-1]}" if known else "an empty cost table"
        raise ValueError(f"width {rows:g} is outside {measured}")
    after = bisect_left(known, rows)
    if known[after] == rows:
        return times[known[after]]
    low, high = known[after - 1], known[after]
    return times[low] + (times[high] - times[low]) * (rows - low) / (high - low)


def table(report: Mapping[str, Any]) -> CostTable:
    """From a served model's ``cost``, whose widths JSON has turned into texts."""

    def by_rows(name: str) -> dict[int, float]:
        return {int(rows): float(seconds) for rows, seconds in report.get(name, {}).items()}

    return CostTable(report.get("context"), by_rows("tick"), by_rows("readout"), by_rows("start"))


def loaded(path: Path) -> CostTable:
    """From a file with ``/server_info``, its ``internal_states[0]``, that one's ``sglang_trunc``, or its ``cost``."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is not readable JSON: {error}") from error
    if "internal_states" in found:
        found = found["internal_states"][0]
    for key in ("sglang_trunc", "cost"):
        found = found.get(key, found)
    if not isinstance(found, Mapping) or "tick" not in found:
        raise ValueError(f"{path.name} has no cost table; was the server started with SGLANG_TRUNC_MEASURE?")
    return table(found)


def from_file_or_server(
    path: Path | None, model_path: str | None, context: int, threads: int, server_args: Sequence[str]
) -> CostTable | None:
    """None where neither is named."""
    if path is not None:
        return loaded(path)
    return None if model_path is None else table(measured(model_path, context, threads, server_args)["cost"])


def measured(model_path: str, context: int, threads: int, server_args: Sequence[str]) -> dict[str, Any]:
    """``sglang_trunc`` of a server that measured ticks and readouts at this context length."""
    env = {"OMP_NUM_THREADS": str(threads), "SGLANG_TRUNC_MEASURE": str(context)}
    args = ["--speculative-algorithm", "trunc", "--max-total-tokens", str(40 * (context + 1)), *server_args]
    with Server(model_path, args, env, name="measure") as server:
        return dict(server.internal_state()["sglang_trunc"])
