"""Where a decode round's time goes: the model's own calls, and everything else that the worker does.

On where ``SGLANG_TRUNC_MEASURE`` is set; reported in ``/server_info`` as ``seconds``. What SGLang does between two
rounds is in neither figure. On a GPU each call is waited for, so speeds of a measuring server mean nothing there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from sglang_trunc.engine.rows import RowRunner, Rows


class Stopwatch:
    """Seconds by name."""

    def __init__(self) -> None:
        self.seconds = {"rounds": 0.0, "model": 0.0}

    @contextlib.contextmanager
    def running(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[name] += time.perf_counter() - begin


class TimedRunner(RowRunner):
    """``RowRunner`` whose calls are timed."""

    stopwatch: Stopwatch

    def embed(self, rows: Rows, token_ids: Tensor) -> None:
        with self.stopwatch.running("model"):
            super().embed(rows, token_ids)

    def advance(self, rows: Rows, ticks: int) -> None:
        with self.stopwatch.running("model"):
            super().advance(rows, ticks)

    def readout(self, rows: Rows) -> Tensor:
        with self.stopwatch.running("model"):
            return super().readout(rows)
