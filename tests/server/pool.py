"""The servers of a test session, one after the other, the next one started while the present one is tested.

A start costs more than most modules' tests (three processes import SGLang), so tests that share a ``Setup`` run one
after the other (``conftest`` sorts them) and ``Servers`` knows which setup comes next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from sglang_trunc.serving.server import Server
from tests.server.setups import Setup


class Servers:
    """At most two servers exist: the one in use, and the next.

    Without an order there is no next.
    """

    def __init__(self, order: Sequence[Setup], model_of: Callable[[Setup], Path]):
        self._order = list(order)
        self._model_of = model_of
        self._starts: dict[Setup, Future[Server]] = {}
        self._starter = ThreadPoolExecutor(max_workers=1)

    def get(self, setup: Setup) -> Server:
        """The running server of this setup; ends all but this one, and begins to start the one after it, if known."""
        for other in [other for other in self._starts if other != setup]:
            if other != self._after(setup):
                self._end(other)
        self._begin(setup)
        server = self._starts[setup].result()
        following = self._after(setup)
        if following is not None:
            self._begin(following)
        return server

    def close(self) -> None:
        for setup in list(self._starts):
            self._end(setup)
        self._starter.shutdown()

    def _after(self, setup: Setup) -> Setup | None:
        if setup not in self._order:
            return None
        place = self._order.index(setup) + 1
        return self._order[place] if place < len(self._order) else None

    def _begin(self, setup: Setup) -> None:
        if setup not in self._starts:
            server = setup.server(self._model_of(setup))
            self._starts[setup] = self._starter.submit(server.start)

    def _end(self, setup: Setup) -> None:
        start = self._starts.pop(setup)
        if start.exception() is None:  # waits for a start in progress
            start.result().stop()
