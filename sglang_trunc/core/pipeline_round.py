"""One round of a pipelined schedule: the R ticks in which plain decoding would give every request one token.

In R/d1 cycles every root reaches full depth, so every request gets at least one token, and at most one a cycle. Less
would do for some, but what the scheduler spends on a round is then paid for every token; more would keep arrivals
waiting longer than plain decoding does. Lanes live on between rounds in ``Pipeline``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from sglang_trunc.core.account import ENDED
from sglang_trunc.core.lane_tree import Lane, Move
from sglang_trunc.core.pipeline import Choice, Pipeline


class TreeEngine(Protocol):
    """Runs lanes of many requests, each at its own depth. Lanes come by request, parents before children."""

    def start(self, lanes: Sequence[Lane]) -> None:
        """Embedding and prelude of new lanes."""

    def advance(self, lanes: Sequence[Lane], ticks: int) -> None:
        """Run steps ``[lane.depth, lane.depth + ticks)`` of every lane."""

    def readout(self, lanes: Sequence[Lane]) -> Tensor:
        """Logits at the lanes' depths: float32 ``[n, vocabulary]``."""

    def move(self, moves: Sequence[Move]) -> None:
        """Bring new roots from branch slots to where their requests look for them."""


@dataclass
class PipelineRun:
    """What one round commits for one request."""

    tokens: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)  # float32 [vocabulary] of each token, where asked for
    sources: list[int] = field(default_factory=list)  # where each token came from (``core.account``)
    begin: int = 0  # position of the first token
    ticks: int = 0  # that the request waited for: all of the round's, unless it came to its end before


def choose(logits: Tensor) -> list[Choice]:
    """Best token of each row, the lowest id on ties, with its probability. ``logits``: float32 ``[n, vocabulary]``."""
    tokens = logits.argmax(-1)
    picked = logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
    # A model that overflows must not take the scheduler down: its proposals count for nothing.
    probabilities = (picked - logits.logsumexp(-1)).exp().nan_to_num(0.0)
    return [Choice(*pair) for pair in zip(tokens.tolist(), probabilities.tolist(), strict=True)]


def choose_greedily(_lanes: Sequence[Lane], logits: Tensor) -> list[Choice]:
    """``choose`` as ``pipeline_round`` calls it: greedy decoding needs to know nothing of a lane."""
    return choose(logits)


def pipeline_round(
    engine: TreeEngine,
    pipeline: Pipeline,
    keys: Collection[Hashable],
    keep_logits: bool = False,
    choose: Callable[[Sequence[Lane], Any], list[Choice]] = choose_greedily,
) -> dict[Hashable, PipelineRun]:
    """Run R/d1 cycles, fewer where all requests come to their end; ``keys`` must have been admitted.

    ``choose`` turns the readout of these lanes into one choice each. It may change the logits in place: what is kept
    of them is what was chosen from.
    """
    counters = pipeline.counters
    runs: dict[Hashable, PipelineRun] = {key: PipelineRun() for key in keys}
    pipeline.make_room()
    ticks = 0
    for _ in range(pipeline.schedule.cycles):
        lanes = pipeline.lanes()
        if not lanes:
            break
        requests = sum(lane.parent is None for lane in lanes)
        new = [lane for lane in lanes if lane.depth == 0]
        if new:
            engine.start(new)
        engine.advance(lanes, pipeline.schedule.d1)
        counters.count_ticks(pipeline.schedule.d1, len(lanes), requests)
        ticks += pipeline.schedule.d1
        readers = pipeline.advanced(lanes)
        logits: Any = engine.readout(readers) if readers else None
        for lane in readers:
            counters.count_readout(lane.depth, 1)
        commits, moves = pipeline.absorb(readers, choose(readers, logits) if readers else [])
        pipeline.control.account(len(lanes), requests, len(readers), len(commits))
        if moves:
            engine.move(moves)
        at = {lane: index for index, lane in enumerate(readers)} if keep_logits else {}
        for key, token, lane in commits:
            _note(runs[key], token, lane, ticks)
            if keep_logits:
                runs[key].logits.append(logits[at[lane]])
    assert all(run.tokens for run in runs.values()), "a request was not admitted"
    for key, run in runs.items():
        _close(run, pipeline.trees[key].root, ticks)
    counters.rounds += 1
    counters.runs += len(runs)
    return runs


def _note(run: PipelineRun, token: int, lane: Lane, ticks: int) -> None:
    """One commit, after so many ticks of the round. Its lane is the one that went on from the token before."""
    if run.tokens:
        run.sources[-1] = lane.source
    else:
        run.begin = lane.position + 1
    run.tokens.append(token)
    run.sources.append(ENDED)
    run.ticks = ticks


def _close(run: PipelineRun, root: Lane | None, ticks: int) -> None:
    """The round is over. ``root``: what goes on from the run's last token; None where nothing was wanted after it."""
    if root is not None:
        run.sources[-1] = root.source
        run.ticks = ticks
