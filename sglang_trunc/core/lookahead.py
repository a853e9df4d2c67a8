"""Looked-up chains of a pipeline: which lanes bring one along, and what d1 makes of it.

A lane that starts asks for the continuation of its request's text and path; the tokens found start beside it, each the
child of the one before, and travel together. At d1 every one of them is screened by the choice of its parent: one
that d1 agrees with counts as its proposal from then on, one that it does not goes at once with all behind it.
``pipeline`` owns the trees and calls this between readouts; the text is the source's (``engine.lookahead``).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import TYPE_CHECKING, Protocol

from sglang_trunc.core.control import Control
from sglang_trunc.core.counters import PipelineCounters
from sglang_trunc.core.lane_tree import LOOKUP, Lane, LaneTree, Proposal
from sglang_trunc.core.survival import Standing

if TYPE_CHECKING:
    from sglang_trunc.core.pipeline import Choice, Schedule


class LookupSource(Protocol):
    """Continuations of requests' texts, by earlier occurrences."""

    def commit(self, key: Hashable, token: int) -> None:
        """A request's text is one token longer."""

    def continuation(self, key: Hashable, path: Sequence[int], most: int) -> tuple[Sequence[int], float]:
        """What may follow a request's text and the tokens of ``path`` behind it: at most ``most`` tokens, best guess,
        and a number in [0, 1) that says how good the match is."""


class Lookahead:
    """The chains of all requests; without a source there are none."""

    def __init__(
        self,
        schedule: Schedule,
        source: LookupSource | None,
        control: Control,
        counters: PipelineCounters,
    ):
        self._schedule = schedule
        self._source = source if schedule.lookup else None
        self._control = control
        self._counters = counters
        self._fresh: list[tuple[LaneTree, Lane]] = []

    def note(self, tree: LaneTree, lane: Lane) -> None:
        """A lane has started; it may bring a continuation along."""
        if self._source is not None:
            self._fresh.append((tree, lane))

    def commit(self, key: Hashable, token: int) -> None:
        """A request's text is one token longer."""
        if self._source is not None:
            self._source.commit(key, token)

    def awaits_screening(self, lane: Lane) -> bool:
        """Whether d1 has to say what it thinks of a looked-up token."""
        return lane.depth == self._schedule.d1 and any(proposal.depth == LOOKUP for proposal in lane.proposals)

    def screen(self, tree: LaneTree, lane: Lane, choice: Choice) -> tuple[bool, list[Lane]]:
        """Whether d1 agrees with what was looked up behind a lane that awaits it, and the lanes that go if not."""
        agrees, dropped = False, []
        for proposal in [proposal for proposal in lane.proposals if proposal.depth == LOOKUP]:
            if proposal.token == choice.token:
                proposal.depth, proposal.probability = lane.depth, choice.probability
                proposal.standing = Standing.OPEN
                agrees = True
                continue
            lane.proposals.remove(proposal)
            assert proposal.match is not None
            self._control.of(tree.key).observe([(Standing.LOOKED_UP, proposal.match, False)])
            if (gone := proposal.running) is not None:
                dropped += tree.keep(lambda other, gone=gone: other is not gone)  # type: ignore[misc]
        self._counters.screened_out += len(dropped)
        return agrees, dropped

    def start(self, trees: Collection[LaneTree]) -> None:
        """Chains beside the lanes that have just started, the likeliest first, while there are rows for them."""
        fresh, self._fresh = self._fresh, []
        if self._source is None:
            return
        fresh.sort(key=lambda pair: -pair[1].survival)
        for tree, lane in fresh:
            running = [other for tree in trees for other in tree.lanes]
            room = self._schedule.max_width - len(running)
            most = min(self._schedule.lookup, room, tree.limit - lane.position)
            if lane.alive and most > 0:
                tokens, match = self._source.continuation(tree.key, tree.tokens_to(lane), most)
                self._chain(tree, lane, tokens, match, running)

    def _chain(
        self,
        tree: LaneTree,
        lane: Lane,
        tokens: Sequence[int],
        match: float,
        running: Sequence[Lane],
    ) -> None:
        """Start as much of a lane's continuation as is worth its rows."""
        chance = self._control.of(tree.key).estimate(Standing.LOOKED_UP, match)
        survivals = [lane.survival * chance**ahead for ahead in range(1, len(tokens) + 1)]
        roots = sum(other.parent is None for other in running)
        value = sum(other.survival for other in running)
        tokens = tokens[: self._control.chain(len(running), roots, value, survivals)]
        for token, survival in zip(tokens, survivals, strict=False):
            if survival < self._schedule.min_survival or not tree.can_branch(lane.position + 1):
                return
            proposal = Proposal(LOOKUP, token, match, Standing.LOOKED_UP, match=match)
            lane.proposals.append(proposal)
            lane = tree.grow(lane, proposal)
            lane.survival = survival
            self._counters.drafted[LOOKUP] += 1
