"""A worker around ``Pipeline``, as small as it gets: a pool of slots, requests that come and go, checks every cycle."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

from torch import Tensor

from sglang_trunc.core.control import Control
from sglang_trunc.core.counters import PipelineCounters
from sglang_trunc.core.id_bank import IdBank
from sglang_trunc.core.lane_tree import LOOKUP, Lane
from sglang_trunc.core.lookup.candidates import Candidate, Source
from sglang_trunc.core.pipeline import Choice, Pipeline, Schedule
from sglang_trunc.core.pipeline_round import PipelineRun, choose, pipeline_round
from tests.core.scripted_engine import Script, ScriptedEngine, names


class ScriptedLookups:
    """Looked-up continuations that are right with a given chance, token by token; ``text`` is what they know."""

    def __init__(self, script: Script, right: float, length: int, match: int = 8):
        self.script = script
        self.right = right
        self.length = length
        self.match = match
        self.text: dict[int, list[int]] = {}
        self.asked = 0

    def commit(self, key: int, token: int) -> None:
        self.text[key].append(token)

    def candidates(self, key: int, path: Sequence[int], most: int, count: int) -> list[Candidate]:
        self.asked += 1
        found = [self._guess(key, path, min(most, self.length), number) for number in range(count)]
        return [Candidate(tokens, self.match, Source.OWN) for tokens in dict.fromkeys(found) if tokens]

    def _guess(self, key: int, path: Sequence[int], length: int, number: int) -> tuple[int, ...]:
        found: list[int] = []
        for _ in range(length):
            name = names([*self.text[key], *path, *found])[-1]
            wrong = (self.script.truth(name) + 1) % self.script.vocabulary
            right = self.script._share(name, 77 + number) < self.right
            found.append(self.script.truth(name) if right else wrong)
        return tuple(found)


FIRST_BRANCH = 10_000
UNLIMITED = 1_000


def schedule(recurrences: int, d1: int, d2: int | None, max_width: int = UNLIMITED, min_survival: float = 0.0):
    return Schedule(recurrences, d1, d2, max_width, min_survival)


def contents(bank: IdBank) -> list[int]:
    copy = deepcopy(bank)
    return [copy.take() for _ in range(copy.free)]


@dataclass
class Request:
    """``tokens`` are the prompt and the first token; a request wants ``wanted`` more."""

    row: int
    prompt: int
    tokens: list[int]
    wanted: int
    joined: bool = False

    @property
    def end(self) -> int:
        return self.prompt + self.wanted - 1

    @property
    def done(self) -> bool:
        return len(self.tokens) - self.prompt >= self.wanted


class Stand:
    """Requests by key. ``lookahead``: positions reserved from the root's on; at least R/d1 + 1 are needed."""

    def __init__(
        self,
        plan: Schedule,
        script: Script,
        requests: Sequence[tuple[list[int], int]],
        exchange: bool = True,
        branches: int = UNLIMITED,
        lookahead: int = 64,
        state_rows: int | None = None,
        lookups: ScriptedLookups | None = None,
        control: Control | None = None,
    ):
        """``requests``: tokens (prompt and first token), and how many more are wanted."""
        self.plan = plan
        self.script = script
        self.lookahead = lookahead
        self.requests = {
            key: Request(10 + key, len(tokens), list(tokens), wanted) for key, (tokens, wanted) in enumerate(requests)
        }
        self.branch_slots = range(FIRST_BRANCH, FIRST_BRANCH + branches)
        self.state_rows = state_rows or plan.max_width + len(requests)
        self.counters = PipelineCounters(recurrences=plan.recurrences)
        self.pipeline = Pipeline(plan, self.branch_slots, self.state_rows, self.counters, exchange, lookups, control)
        self.lookups = lookups
        self.engine = ScriptedEngine(script, plan.recurrences, plan.d1, plan.d2, exchange, self.check_cycle)
        per_request = max((len(r.tokens) + r.wanted for r in self.requests.values()), default=0) + lookahead + 1
        self.every_slot = set(range(1, 1 + per_request * len(requests)))
        self.pool = sorted(self.every_slot)
        self.joins = 0
        self.root_ticks = 0
        self.widths: list[int] = []  # rows of every cycle
        self.born: list[int] = []  # lanes started in every cycle

    def _choose(self, _lanes: Sequence[Lane], logits: Tensor) -> list[Choice]:
        best = logits.topk(min(self.plan.screen_top, logits.shape[1])).indices.tolist()
        return [choice._replace(best=tokens) for choice, tokens in zip(choose(logits), best, strict=True)]

    # What a scheduler does.

    @property
    def active(self) -> list[int]:
        return [key for key, request in self.requests.items() if request.joined]

    @property
    def unfinished(self) -> list[int]:
        return [key for key, request in self.requests.items() if not request.done]

    def join(self, key: int, prefill: bool = True) -> None:
        """Start a request, or continue it from its committed text."""
        request = self.requests[key]
        request.joined = True
        if prefill:
            self.engine.table[request.row] = {}
            self._reserve(request)
            self.engine.prefill(request.row, request.tokens)
        self._admit(key)
        self.joins += 1

    def leave(self, key: int, free: bool = True) -> None:
        """Drop a request's lanes; ``free``: its K/V as well."""
        request = self.requests[key]
        request.joined = False
        self.pipeline.leave(key)
        if free:
            self.pool += self.engine.table.pop(request.row).values()

    def round(self, keep_logits: bool = False) -> dict[int, PipelineRun]:
        keys = self.active
        self.pipeline.keep(keys)
        for key in keys:
            self._reserve(self.requests[key])
            self._admit(key)
        cycles = self.engine.cycles
        runs = pipeline_round(self.engine, self.pipeline, keys, keep_logits, self._choose)
        assert self.engine.cycles - cycles <= self.plan.cycles
        assert runs.keys() == set(keys)
        for key, run in runs.items():
            assert 1 <= len(run.tokens) <= self.plan.cycles * (1 + self.plan.lookup)
            self.requests[key].tokens += run.tokens
            self.check_text(key)
            assert self.requests[key].done == (self.pipeline.trees[key].root is None)
            if self.requests[key].done:
                self.requests[key].joined = False
                self.pool += self.engine.table.pop(self.requests[key].row).values()
        self.check_identities()
        return runs

    def run(self) -> PipelineCounters:
        """All requests side by side, from start to end."""
        for key in self.requests:
            self.join(key)
        while self.active:
            self.round()
        self.check_empty()
        return self.counters

    def _reserve(self, request: Request) -> None:
        table = self.engine.table[request.row]
        for position in range(len(table), len(request.tokens) - 1 + self.lookahead):
            table[position] = self.pool.pop()

    def _admit(self, key: int) -> None:
        request = self.requests[key]
        table, root = self.engine.table[request.row], len(request.tokens) - 1
        slots = [table[position] for position in range(root, len(table))]
        if self.lookups is not None:
            self.lookups.text[key] = list(request.tokens)
        move = self.pipeline.admit(key, request.row, root, request.tokens[-1], slots, request.end)
        assert move is None, "its root has a slot of its own since it became the root"

    # What must hold.

    def check_text(self, key: int) -> None:
        request = self.requests[key]
        prompt, answer = request.tokens[: request.prompt], request.tokens[request.prompt :]
        assert len(answer) <= request.wanted
        assert answer == self.script.continuation(prompt, len(answer))

    def check_cycle(self, lanes: Sequence[Lane]) -> None:
        roots = [lane for lane in lanes if lane.parent is None]
        waiting = [tree for tree in self.pipeline.trees.values() if tree.root is not None]
        assert roots == [tree.root for tree in waiting], "a root stands still"
        assert len(lanes) <= max(self.plan.max_width, len(roots))
        self.root_ticks += self.plan.d1 * len(roots)
        self.widths.append(len(lanes))
        self.born.append(sum(lane.depth == 0 for lane in lanes))
        branches = sum(lane.slot not in self.engine.table[lane.request_row].values() for lane in lanes)
        assert self.pipeline.slots.free + branches == self.pipeline.slots.size == len(self.branch_slots)
        assert self.pipeline.rows.free + len(lanes) == self.state_rows
        self.check_slots(lanes)

    def check_slots(self, lanes: Sequence[Lane]) -> None:
        """Every slot is in one place: the pool, a table, the bank, or a lane's branch."""
        tables = [slot for table in self.engine.table.values() for slot in table.values()]
        branches = {lane.slot for lane in lanes} - set(tables)
        everywhere = [*self.pool, *tables, *contents(self.pipeline.slots), *branches]
        assert len(everywhere) == len(set(everywhere))
        assert set(everywhere) == self.every_slot | set(self.branch_slots)

    def check_identities(self) -> None:
        c, plan, lanes = self.counters, self.plan, self.pipeline.lanes()
        made = sum(len(request.tokens) - request.prompt for request in self.requests.values())
        by_source = c.accepted[plan.d1] + c.accepted[plan.d2] + c.accepted[LOOKUP]
        assert made == c.tokens == by_source + c.restarts + c.ended
        assert c.rows == self.engine.rows == plan.recurrences * made + c.rows_wasted + sum(x.depth for x in lanes)
        assert c.cold_starts + c.restarts + c.drafted.total() == made + c.lanes_dropped + len(lanes)
        assert c.missed <= c.restarts
        assert c.cold_starts == self.joins
        assert c.ticks == self.engine.cycles * plan.d1
        assert c.request_ticks == self.root_ticks
        assert sum(ticks * width for width, ticks in c.widths.items()) == c.rows
        early = {depth: count for depth, count in c.readouts.items() if depth != plan.recurrences}
        if self.lookups is None:
            assert c.readouts[plan.recurrences] == made
            assert early == c.proposed
        else:  # a chain is read out as a whole, whatever its first rows say
            assert c.readouts[plan.recurrences] >= made
            assert all(count >= c.proposed[depth] for depth, count in early.items())
        assert c.proposed.keys() <= {plan.d1, plan.d2}
        assert all(c.accepted[depth] <= c.drafted[depth] for depth in (plan.d1, plan.d2, LOOKUP))

    def check_empty(self) -> None:
        """After all have left."""
        for key in list(self.pipeline.trees):
            self.pipeline.leave(key)
        assert not self.pipeline.lanes()
        assert self.pipeline.slots.free == len(self.branch_slots)
        assert sorted(contents(self.pipeline.rows)) == list(range(self.state_rows))
        self.check_slots([])
        assert set(self.pool).isdisjoint(contents(self.pipeline.slots))
