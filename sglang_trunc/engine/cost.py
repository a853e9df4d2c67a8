"""time(width): what a tick and a readout cost on this machine, measured through the engine itself.

Run at start-up when ``SGLANG_TRUNC_MEASURE`` names a context length: dummy requests of that length, each with its own
slots, are advanced through all recurrences at several widths. The pool is empty then, and is left zeroed. The result
is reported in ``/server_info``; ``bench/predict.py`` compares served speed with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import NamedTuple

import torch

from sglang_trunc.core.looped import Nodes
from sglang_trunc.engine.lanes import SGLangLanes
from sglang_trunc.engine.names import MEASURE_ENV
from sglang_trunc.engine.rows import RowRunner

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_REPEATS = 7


class CostTable(NamedTuple):
    """Seconds by number of rows."""

    context: int  # tokens each row attends to
    tick: dict[int, float]
    readout: dict[int, float]


def context_from(text: str) -> int:
    """The context length that ``SGLANG_TRUNC_MEASURE`` names."""
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"{MEASURE_ENV} is {text!r}, but must be a context length in tokens, 1 or more.")
    return int(text)


@torch.no_grad()
def measure(runner: RowRunner, context: int) -> CostTable:
    """Time ticks and readouts of ``runner``'s model over its pool; widths that the pool cannot hold are left out."""
    device = runner.req_to_token.device
    widths = [width for width in WIDTHS if width * (context + 1) <= runner.pool.size]
    most = max(widths, default=0)
    slots = torch.arange(1, most * (context + 1) + 1, dtype=torch.int32, device=device)
    rows = RowRunner(runner.model, runner.pool, slots.view(most, -1), runner.attention, capacity=most)
    probe = SGLangLanes(rows, width=1)
    table = CostTable(context, {}, {})
    for width in widths:
        requests = torch.arange(width, device=device)
        probe.begin(requests, torch.full((width,), context, device=device))
        nodes = Nodes(requests, torch.zeros_like(requests))
        probe.start(nodes, requests + 1)
        table.tick[width] = _time(partial(probe.advance, nodes, 0, runner.recurrences)) / runner.recurrences
        table.readout[width] = _time(partial(probe.readout, nodes))
    runner.pool.clear_rows(int(slots.numel()) + 1)
    return table


def _time(call: Callable[[], object]) -> float:
    call()  # first touch of the pages, first use of the kernels
    seconds = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return median(seconds)
