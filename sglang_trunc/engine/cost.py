"""time(width): what a tick and a readout cost on this machine, measured through the engine itself.

Measured at start-up, where a schedule's ``control`` needs it or ``SGLANG_TRUNC_MEASURE`` names a context length:
dummy requests of that length, each with its own slots, are advanced through all recurrences at several widths. The
pool is empty then, and is left zeroed. Reported in ``/server_info``; ``cost_store`` keeps the table for later starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate

import torch

from sglang_trunc.core.cycle_cost import CostTable
from sglang_trunc.core.looped import Nodes
from sglang_trunc.core.pipeline_round import choose
from sglang_trunc.engine.lanes import SGLangLanes
from sglang_trunc.engine.names import MEASURE_ENV
from sglang_trunc.engine.rows import RowRunner

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
CONTEXT = 256  # tokens, where nobody asks for another length
_LEAST_WIDTHS = 8  # what even a small pool is to be measured at
_REPEATS = (3, 9)  # least and most calls that are timed
_ENOUGH = 0.5  # seconds of one measurement


def context_from(text: str) -> int:
    """The context length that ``SGLANG_TRUNC_MEASURE`` names."""
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"{MEASURE_ENV} is {text!r}, but must be a context length in tokens, 1 or more.")
    return int(text)


def context_for(pool_size: int) -> int:
    """A context length that leaves room for several rows in a pool of so many tokens."""
    return max(1, min(CONTEXT, pool_size // _LEAST_WIDTHS - 1))


@torch.no_grad()
def measure(runner: RowRunner, context: int, most: int = WIDTHS[-1]) -> CostTable:
    """Time ticks and readouts (with the choice of a token) of ``runner``'s model over its pool.

    ``most``: rows that are of interest. Widths that the pool cannot hold are left out.
    """
    device = runner.req_to_token.device
    enough = next((width for width in WIDTHS if width >= most), WIDTHS[-1])
    widths = [width for width in WIDTHS if width <= enough and width * (context + 1) <= runner.pool.size]
    most = max(widths, default=0)
    slots = torch.arange(1, most * (context + 1) + 1, dtype=torch.int32, device=device)
    rows = RowRunner(runner.model, runner.pool, slots.view(most, -1), runner.attention, capacity=most)
    probe = SGLangLanes(rows, width=1)
    tick, readout = {}, {}
    for width in widths:
        requests = torch.arange(width, device=device)
        probe.begin(requests, torch.full((width,), context, device=device))
        nodes = Nodes(requests, torch.zeros_like(requests))
        probe.start(nodes, requests + 1)
        tick[width] = _time(partial(probe.advance, nodes, 0, runner.recurrences)) / runner.recurrences
        readout[width] = _time(partial(_choose, probe, nodes))
    runner.pool.clear_rows(int(slots.numel()) + 1)
    return CostTable(context, rising(tick), rising(readout))


def rising(times: Mapping[int, float]) -> dict[int, float]:
    """At each width the least that it or any larger one took: padding makes it as cheap, and so other work on the
    machine during one measurement shows in no other."""
    least = accumulate((times[width] for width in sorted(times, reverse=True)), min)
    return dict(reversed([*zip(sorted(times, reverse=True), least, strict=True)]))


def _choose(probe: SGLangLanes, nodes: Nodes) -> None:
    choose(probe.readout(nodes))


def _time(call: Callable[[], object]) -> float:
    """The least seconds of several calls: other work on the machine only ever adds."""
    call()  # first touch of the pages, first use of the kernels
    seconds: list[float] = []
    least, most = _REPEATS
    while len(seconds) < least or (len(seconds) < most and sum(seconds) < _ENOUGH):
        begin = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
