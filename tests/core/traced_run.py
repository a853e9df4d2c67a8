"""A worker around ``TracedPipeline``, over a ``Script`` instead of a model: what a served pipeline writes down."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sglang_trunc.core.counters import PipelineCounters
from sglang_trunc.core.lane_tree import Lane, Move
from sglang_trunc.core.pipeline import Choice, Pipeline, Schedule
from sglang_trunc.core.pipeline_round import pipeline_round
from sglang_trunc.core.traced_pipeline import TracedPipeline
from tests.core.scripted_engine import Script, extend, names

ABOUT = {"model": "script", "schedule": "LOOPSPEC", "options": {}}
BRANCHES = range(1, 9)


@dataclass
class Request:
    prompt: list[int]
    wanted: int
    arrives: int = 0  # round
    stops: int | None = None  # tokens after which it ends before its time
    retracted: int | None = None  # round before which it loses its place, to be prefilled again two rounds later
    tokens: list[int] = field(default_factory=list)
    row: int | None = None  # of the slot table, while it is served
    known: int = 0  # its position as the scheduler knows it under overlap: that of a round ago

    @property
    def done(self) -> bool:
        return len(self.tokens) >= (self.stops or self.wanted)

    @property
    def position(self) -> int:
        """Of the newest token."""
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def end(self) -> int:
        return len(self.prompt) + self.wanted - 1


class ScriptedLanes:
    """``TreeEngine``; a readout is a list of choices."""

    def __init__(self, script: Script, recurrences: int, exchange: bool):
        self.script = script
        self.recurrences = recurrences
        self.exchange = exchange
        self.before: dict[int, int] = {}  # request row -> name of the path before its root
        self.paths: dict[Lane, int] = {}
        self.slots: dict[int, dict[int, int]] = {}

    def start(self, lanes: Sequence[Lane]) -> None:
        for lane in lanes:
            before = self.before[lane.request_row] if lane.parent is None else self.paths[lane.parent]
            self.paths[lane] = extend(before, lane.token)

    def advance(self, lanes: Sequence[Lane], ticks: int) -> None:
        pass

    def readout(self, lanes: Sequence[Lane]) -> list[Choice]:
        said = self.say(lanes)
        for lane in lanes:
            if lane.depth == self.recurrences:
                self.before[lane.request_row] = self.paths[lane]
        return said

    def say(self, lanes: Sequence[Lane]) -> list[Choice]:
        return [says(self.script, self.paths[lane], lane.depth, self.recurrences) for lane in lanes]

    def move(self, moves: Sequence[Move]) -> None:
        for move in moves:
            if self.exchange:
                self.slots[move.request_row][move.position] = move.slot


def says(script: Script, path: int, depth: int, recurrences: int) -> Choice:
    height = script.height(path, depth)
    return Choice(script.says(path, depth, recurrences), height / (height + 1))


class Worker:
    """``ride``: runs a prefill's cycles, so that requests start warm."""

    def __init__(
        self,
        plan: Schedule,
        script: Script,
        requests: Sequence[Request],
        trace: Path | None,
        exchange: bool = True,
        ride: Callable | None = None,
    ):
        self.requests = list(requests)
        self.ride = ride
        self.script = script
        self.engine = ScriptedLanes(script, plan.recurrences, exchange)
        self.counters = PipelineCounters(recurrences=plan.recurrences)
        given = (plan, BRANCHES, plan.max_width + len(requests), self.counters, exchange)
        traced = trace and TracedPipeline(*given, trace, ABOUT, self.engine.say)
        self.pipeline = traced or Pipeline(*given)
        self.reserve = 2 * -(-3 * plan.cycles // 2)
        self.free_slots = itertools.count(100)
        self.free_rows = itertools.count()

    def run(self) -> PipelineCounters:
        for number in itertools.count():
            for key, request in enumerate(self.requests):
                if request.row is not None and number == request.retracted:
                    self._end(key)
            waiting = [
                key
                for key, request in enumerate(self.requests)
                if request.row is None and not request.done and number >= self._arrival(request, number)
            ]
            if waiting:
                self._prefill(waiting)
            going = [key for key, request in enumerate(self.requests) if request.row is not None]
            if going:
                self._round(going)
            elif all(request.done for request in self.requests):
                return self.counters
        raise AssertionError

    def _arrival(self, request: Request, number: int) -> int:
        back = request.retracted is not None and request.retracted <= number
        return request.retracted + 2 if back else request.arrives

    def _slots(self, row: int, position: int, count: int) -> list[int]:
        own = self.engine.slots.setdefault(row, {})
        return [own.setdefault(place, next(self.free_slots)) for place in range(position, position + count)]

    def _prefill(self, keys: Sequence[int]) -> None:
        watched = []
        for key in keys:
            request = self.requests[key]
            request.row = next(self.free_rows)
            text = request.prompt + request.tokens
            path = names(text)[-1]
            if self.ride and request.end > len(text):
                slot = self._slots(request.row, len(text) - 1, 1)[0]
                self.pipeline.watch(key, request.row, len(text) - 1, text[-1], slot, request.end)
                self.engine.paths[self.pipeline.trees[key].root] = path
                watched.append(key)
            self.engine.before[request.row] = path
            request.tokens.append(self.script.truth(path))
            request.known = request.position
        if watched:
            self.ride(self.pipeline, watched, self.engine.start, self.engine.readout)
        for key in watched:
            self.pipeline.answer(key, self.requests[key].tokens[-1])

    def _round(self, keys: Sequence[int]) -> None:
        self.pipeline.keep(keys)
        for key in keys:
            request = self.requests[key]
            if request.done:
                self._end(key)
                continue
            count = min(request.known + self.reserve, request.end + 1) - request.position
            request.known = request.position
            own = self._slots(request.row, request.position, count)
            end = min(request.end, request.position + count)
            move = self.pipeline.admit(key, request.row, request.position, request.tokens[-1], own, end)
            if move is not None:
                self.engine.move([move])
        keys = [key for key in keys if self.requests[key].row is not None]
        for key, run in (
            pipeline_round(self.engine, self.pipeline, keys, choose=lambda _, said: list(said)).items() if keys else ()
        ):
            request = self.requests[key]
            request.tokens += run.tokens
            if request.done:
                self._end(key)

    def _end(self, key: int) -> None:
        self.pipeline.leave(key)
        self.requests[key].row = None
