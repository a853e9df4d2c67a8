"""Rounds as a server would form them: so many requests at a time, each until its text ends.

The schedules are ``core``'s own. What stands around them here is what the workers do: a prompt's prefill lets
lanes run along (``ride``, as ``engine.warm_start``), a round admits its requests with the slots that SGLang reserves,
and a request that has its text makes room for the next one. Prefill itself takes no time: speeds are decode speeds.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cost_table import CostTable
from sim_engine import ChainPaths, TreePaths
from sim_paths import Text, TokenPath

from sglang_trunc.core.counters import Counters, PipelineCounters, TickCounters
from sglang_trunc.core.lane_tree import Lane
from sglang_trunc.core.options import TruncOptions
from sglang_trunc.core.pipeline import Choice, Pipeline, Schedule
from sglang_trunc.core.pipeline_round import pipeline_round
from sglang_trunc.core.trunc import trunc_round


@dataclass
class Outcome:
    """What a simulation counted."""

    recurrences: int
    counters: Any  # of core.counters, with ``tokens``
    readouts: Mapping[float, float]  # rows -> calls
    starts: Mapping[int, int]
    delivered: int  # tokens of the texts, those of prefills left out

    @property
    def tokens(self) -> int:
        """All of them, those past a text's end included."""
        return int(self.counters.tokens)

    @property
    def wasted(self) -> int:
        """Rows that led to no token; lanes that still ran when a text ended are among them."""
        if isinstance(self.counters, PipelineCounters):
            return self.counters.rows_wasted
        return int(self.counters.rows - self.recurrences * self.tokens)

    def seconds(self, cost: CostTable, round_overhead: float = 0.0) -> float:
        """Of all ticks, readouts and rounds."""
        counted: TickCounters = self.counters
        return cost.seconds(counted.widths, self.readouts, self.starts) + counted.rounds * round_overhead


def delivered(texts: Sequence[Text]) -> int:
    """Tokens that decoding gives."""
    return sum(len(text.tokens) - 1 - text.warm for text in texts)


@dataclass
class Live:
    """A request that is being served."""

    row: int
    text: Text
    done: int = 0  # index of its newest token
    known: int | None = None  # its position in the round before
    path: TokenPath = field(init=False)

    def __post_init__(self) -> None:
        self.path = self.text.start()

    @property
    def position(self) -> int:
        return self.text.first + self.done

    @property
    def token(self) -> int:
        return self.text.tokens[self.done]

    @property
    def ended(self) -> bool:
        return self.done + 1 >= len(self.text.tokens)

    def take(self, tokens: Sequence[int]) -> None:
        """Tokens of a round; what comes after the end of the text is a server's to trim."""
        left = self.text.tokens[self.done + 1 :]
        wanted = list(tokens[: len(left)])
        if wanted != left[: len(wanted)]:
            raise AssertionError(f"a schedule changed the text: {wanted} instead of {left[: len(wanted)]}")
        for token in wanted:
            self.path = self.path.child(token)
        self.done += len(wanted)


def waves(texts: Sequence[Text], concurrency: int) -> Iterator[tuple[list[Live], list[Live]]]:
    """Rounds: the requests that arrive before it, and all that are served in it."""
    waiting = deque(Live(row, text) for row, text in enumerate(texts))
    running: list[Live] = []
    while waiting or running:
        new = [waiting.popleft() for _ in range(min(concurrency - len(running), len(waiting)))]
        running += new
        yield new, running
        running = [one for one in running if not one.ended]


def run_pipeline(plan: Schedule, texts: Sequence[Text], concurrency: int) -> Outcome:
    """LOOPSPEC_SINGLE or LOOPSPEC_DUAL."""
    counters = PipelineCounters(recurrences=plan.recurrences)
    # A request may arrive while lanes hold all rows.
    pipeline = Pipeline(plan, range(plan.max_width), plan.max_width + concurrency, counters)
    engine = TreePaths(plan.recurrences)
    for new, running in waves(texts, concurrency):
        warm = [one for one in new if one.text.warm]
        if warm:
            _prefill(pipeline, engine, warm)
        going = [one for one in running if not one.ended]
        pipeline.keep([one.row for one in going])
        for one in going:
            _admit(pipeline, engine, one)
        if going:
            runs = pipeline_round(engine, pipeline, [one.row for one in going], choose=lambda _, said: list(said))
            for one in going:
                one.take(runs[one.row].tokens)
    pipeline.keep([])
    return Outcome(plan.recurrences, counters, engine.readouts, engine.starts, delivered(texts))


def _admit(pipeline: Pipeline, engine: TreePaths, one: Live) -> None:
    # SGLang reserves twice what a round takes (``engine.slots``) behind the length that it knows, which under overlap
    # scheduling is that of a round ago, and nothing behind the last position.
    known = one.position if one.known is None or not one.text.overlap else one.known
    one.known = one.position
    reserve = 2 * -(-3 * pipeline.schedule.cycles // 2)
    count = min(known + reserve, one.text.end + 1) - one.position
    reserved = engine.table.reserved(one.row, one.position, count)
    engine.expect(one.row, one.path)
    move = pipeline.admit(one.row, one.row, one.position, one.token, reserved, min(one.text.end, one.position + count))
    if move is not None:
        engine.move([move])


def _prefill(pipeline: Pipeline, engine: TreePaths, requests: Sequence[Live]) -> None:
    """Watch the prompts, let lanes run along, take the first tokens."""
    for one in requests:
        slot = engine.table.reserved(one.row, one.position, 1)[0]
        engine.expect(one.row, one.path)
        pipeline.watch(one.row, one.row, one.position, one.token, slot, one.text.end)
        root = pipeline.trees[one.row].root
        assert root is not None
        engine.watch(root)
    before = Counter(engine.readouts), Counter(engine.starts)
    ride(pipeline, [one.row for one in requests], engine.start, engine.readout)
    engine.readouts, engine.starts = before  # part of the prefill
    for one in requests:
        one.take(one.text.tokens[1:2])
        engine.expect(one.row, one.path)
        pipeline.answer(one.row, one.token)


def ride(
    pipeline: Pipeline,
    keys: Collection[Hashable],
    start: Callable[[list[Lane]], Any],
    readout: Callable[[list[Lane]], Sequence[Choice]],
) -> None:
    """The cycles of a prefill: ``engine.warm_start`` without its model."""
    plan = pipeline.schedule
    riding: list[Lane] = []
    for depth in range(plan.d1, plan.recurrences + 1, plan.d1):
        pipeline.counters.warm_rows += len(riding) * plan.d1
        readers = pipeline.advanced(pipeline.lanes(keys))
        if depth == plan.recurrences:
            readers = [lane for lane in readers if lane.parent is not None]
        for lane in readers:
            if lane.parent is not None:
                pipeline.counters.count_readout(lane.depth, 1)
        pipeline.absorb(readers, readout(readers) if readers else [])
        riding = [lane for lane in pipeline.lanes(keys) if lane.parent is not None]
        new = [lane for lane in riding if lane.depth == 0]
        if new and depth < plan.recurrences:
            start(new)


def run_trunc(options: TruncOptions, recurrences: int, texts: Sequence[Text], concurrency: int) -> Outcome:
    """TRUNC; a block size of 1 is plain decoding."""
    counters, engine = Counters(), ChainPaths(recurrences)
    for new, running in waves(texts, concurrency):
        for one in new:
            if one.text.warm:
                one.take(one.text.tokens[1:2])
        going = [one for one in running if not one.ended]
        if not going:
            continue
        budgets = [max(1, min(options.block_size, one.text.end - one.position)) for one in going]
        roots = engine.begin([one.path for one in going], [one.token for one in going], options.block_size)
        run = trunc_round(engine, roots, budgets, options, counters)
        for one, numbers, length in zip(going, run.tokens.tolist(), run.lengths.tolist(), strict=True):
            one.take([engine.token(number) for number in numbers[:length]])
    return Outcome(recurrences, counters, engine.readouts, engine.starts, delivered(texts))
