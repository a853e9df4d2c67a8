"""Requests that a scripted worker serves and records, for the simulator's tests."""

from __future__ import annotations

from pathlib import Path

from sim_rounds import ride

from sglang_trunc.core.pipeline import Schedule
from sglang_trunc.core.trace import Trace, read_traces
from tests.core.scripted_engine import Script
from tests.core.traced_run import Request, Worker

EVERY_DEPTH = Script(7, {depth: 0.5 + 0.05 * depth for depth in range(1, 8)}, vocabulary=9)


def requests() -> list[Request]:
    """They come one after the other; one stops early, one is retracted, two want hardly anything."""
    return [
        Request([1, 2, 3], 25),
        Request([4], 40, arrives=1, stops=17),
        Request([2, 2], 20, arrives=2, retracted=4),
        Request([3], 1, arrives=2),
        Request([1, 4, 4], 30, arrives=3),
        Request([6, 4, 4], 2, arrives=8),
    ]


def recorded(path: Path, warm: bool, plan: Schedule, exchange: bool = True, asked=requests) -> tuple[Worker, Trace]:
    """A worker that has run, and its trace."""
    worker = Worker(plan, EVERY_DEPTH, asked(), path, exchange, ride if warm else None)
    worker.run()
    return worker, read_traces(path)[-1]
