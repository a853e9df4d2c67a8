"""Exact replay: a trace's events through a plain ``Pipeline`` must give the counters that the server had.

Rounds run through ``pipeline_round``, prefills through ``sim_rounds.ride``; readouts are the recorded ones, in
order, and every one must be asked of the same lane at the same depth. Totals are compared after each round, so the
first one that differs is named. Any difference is a bug, or another version of the policies than the recording's.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from sim_engine import SlotTable
from sim_rounds import ride

from sglang_trunc.core.counters import PipelineCounters
from sglang_trunc.core.lane_tree import Lane, Move
from sglang_trunc.core.pipeline import Choice, Pipeline
from sglang_trunc.core.pipeline_round import pipeline_round
from sglang_trunc.core.trace import Event, Said, Trace


class ReplayError(RuntimeError):
    """Where the replay leaves the recording."""


class _End(Exception):
    """The recording stops in the middle of a round."""


class Replay:
    """One server's trace. ``run`` raises where a difference shows."""

    def __init__(self, trace: Trace):
        self.trace = trace
        self.counters = PipelineCounters(recurrences=trace.plan.recurrences)
        header = trace.header
        self.pipeline = Pipeline(trace.plan, (), header["state_rows"], self.counters, header["exchange"])
        self.table = SlotTable(header["exchange"])
        self.rounds = 0  # that were compared
        self.cut = False  # the last round was not recorded to its end
        self._rows: dict[Hashable, int] = {}  # request rows, numbered as they come
        self._admitted: list[Hashable] = []  # of the round that is next
        self._watched: list[Hashable] = []  # of the prefill that is next
        self._events = list(reversed(trace.events))

    def run(self) -> dict[str, Any]:
        """The totals at the end."""
        try:
            while self._events:
                self._do(self._events[-1])
            self.cut = bool(self._admitted or self._watched)
        except _End:
            self.cut = True
        return self.counters.report()

    def _do(self, event: Event) -> None:
        if event.name == "read" or (event.name == "answer" and self._watched):
            return self._run_cycles()
        self._events.pop()
        match event:
            case ("reset", slots):
                self.pipeline.reset(range(slots))
            case ("keep", keys):
                self.pipeline.keep(keys)
            case ("leave", key):
                self.pipeline.leave(key)
            case ("watch", (key, position, token, end, _)):
                slot = self.table.reserved(self._row(key), position, 1)[0]
                self.pipeline.watch(key, self._row(key), position, token, slot, end)
                self._watched.append(key)
            case ("answer", (key, token)):
                self.pipeline.answer(key, token)
            case ("admit", (key, position, token, end, count)):
                reserved = self.table.reserved(self._row(key), position, count)
                move = self.pipeline.admit(key, self._row(key), position, token, reserved, end)
                if move is not None:
                    self.table.move([move])
                self._admitted.append(key)
            case ("counted", totals):
                self._compare(totals)
            case _:
                raise ReplayError(f"event {event.name!r} is unknown")
        return None

    def _run_cycles(self) -> None:
        watched, self._watched = self._watched, []
        admitted, self._admitted = self._admitted, []
        if watched:
            ride(self.pipeline, watched, lambda lanes: None, self.readout)
        elif admitted:
            pipeline_round(self, self.pipeline, admitted, choose=lambda _, said: list(said))
        else:
            raise ReplayError(f"{self._where}: a readout that no round asks for")

    def _row(self, key: Hashable) -> int:
        return self._rows.setdefault(key, len(self._rows))

    @property
    def _where(self) -> str:
        return f"round {self.rounds + 1}"

    def _compare(self, recorded: Mapping[str, Any]) -> None:
        found = differences(self.counters.report(), recorded)
        if found:
            raise ReplayError(f"{self._where} differs from the recording: {'; '.join(found)}")
        self.rounds += 1

    # ``core.pipeline_round.TreeEngine``, from the recording.

    def start(self, lanes: Sequence[Lane]) -> None:
        """Nothing to run."""

    def advance(self, lanes: Sequence[Lane], ticks: int) -> None:
        """Nothing to run."""

    def readout(self, lanes: Sequence[Lane]) -> list[Choice]:
        if not self._events:
            raise _End
        name, said = self._events.pop()
        asked = [(lane.position, lane.token, lane.depth) for lane in lanes]
        known = [_address(one) for one in said] if name == "read" else name
        if asked != known:
            raise ReplayError(
                f"{self._where}: the readouts are of other lanes, (position, token, depth) {asked} instead of {known}"
            )
        return [one.choice for one in said]

    def move(self, moves: Sequence[Move]) -> None:
        self.table.move(moves)


def _address(said: Said) -> tuple[int, int, int]:
    return said.node.position, said.node.token, said.depth


def differences(mine: Mapping[str, Any], recorded: Mapping[str, Any]) -> list[str]:
    """Every total that is not the same, in words."""
    mine = json.loads(json.dumps(mine))
    return [
        f"{name} {mine.get(name)} instead of {recorded.get(name)}"
        for name in dict.fromkeys([*mine, *recorded])
        if mine.get(name) != recorded.get(name)
    ]
