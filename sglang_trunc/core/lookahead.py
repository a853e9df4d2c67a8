"""Looked-up tokens of a pipeline: which lanes bring some along, and what d1 makes of them.

A lane that starts asks how its request's text and path may go on; the tokens found start beside it, a chain or, of
several candidates, a small tree, and travel together. At d1 every one of them is screened by its parent's readout: one
that d1 chooses counts as its proposal from then on, one outside of d1's ``screen_top`` best goes at once with all
behind it. ``pipeline`` owns the trees and calls this between readouts; the text is the source's (``engine.lookahead``).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from sglang_trunc.core.control import Control
from sglang_trunc.core.counters import PipelineCounters
from sglang_trunc.core.lane_tree import LOOKUP, Lane, LaneTree, Proposal
from sglang_trunc.core.lookup.candidates import Candidate
from sglang_trunc.core.lookup.merge import ROOT, merge
from sglang_trunc.core.survival import Standing

if TYPE_CHECKING:
    from sglang_trunc.core.pipeline import Choice, Schedule


_MATCHES_TOLD_APART = 16


class LookupSource(Protocol):
    """Continuations of requests' texts, by earlier occurrences."""

    def commit(self, key: Hashable, token: int) -> None:
        """A request's text is one token longer."""

    def candidates(self, key: Hashable, path: Sequence[int], most: int, count: int) -> Sequence[Candidate]:
        """What may follow a request's text and the tokens of ``path`` behind it: up to ``count`` guesses of at most
        ``most`` tokens each, the best first."""


class _Guess(NamedTuple):
    """A looked-up token that may get a lane."""

    token: int
    parent: int  # index of the guess before it; ROOT: it follows the lane itself
    standing: Standing
    match: float  # in [0, 1): how long the text agreed
    survival: float


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
        """Whether d1 chooses a token that was looked up behind a lane that awaits it, and the lanes that go."""
        agrees, dropped = False, []
        for proposal in [proposal for proposal in lane.proposals if proposal.depth == LOOKUP]:
            if proposal.token == choice.token:
                proposal.depth, proposal.probability = lane.depth, choice.probability
                proposal.standing = Standing.OPEN
                agrees = True
            elif self._schedule.screen_top and proposal.token not in choice.best:
                lane.proposals.remove(proposal)
                assert proposal.looked_up is not None
                self._control.of(tree.key).observe([(*proposal.looked_up, False)])
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
            room = min(self._schedule.lookup, self._schedule.max_width - len(running))
            longest = min(room, tree.limit - lane.position)
            if lane.alive and longest > 0:
                path, count = tree.tokens_to(lane), self._schedule.lookup_candidates
                guesses = self._guesses(tree, lane, self._source.candidates(tree.key, path, longest, count), room)
                self._grow(tree, lane, self._worth_it(guesses, running))

    def _guesses(self, tree: LaneTree, lane: Lane, candidates: Sequence[Candidate], room: int) -> list[_Guess]:
        """The candidates' tokens as one tree, the likeliest first, so that parents come before children."""
        merged = merge(candidates, room)
        estimates = self._control.of(tree.key)
        guesses: list[_Guess] = []
        firsts: set[int] = set()  # of these, and of the lane, the best continuation has been seen
        for token, parent, origin in zip(merged.tokens, merged.parents, merged.origins, strict=True):
            standing = Standing.BESIDE if parent in firsts else Standing.LOOKED_UP
            firsts.add(parent)
            match = min(candidates[origin].match, _MATCHES_TOLD_APART - 1) / _MATCHES_TOLD_APART
            before = lane.survival if parent == ROOT else guesses[parent].survival
            guesses.append(_Guess(token, parent, standing, match, before * estimates.estimate(standing, match)))
        order = sorted(range(len(guesses)), key=lambda index: -guesses[index].survival)
        place = {index: at for at, index in enumerate(order)} | {ROOT: ROOT}
        return [guesses[index]._replace(parent=place[guesses[index].parent]) for index in order]

    def _worth_it(self, guesses: list[_Guess], running: Sequence[Lane]) -> list[_Guess]:
        """As many as are worth their rows, the likeliest."""
        guesses = [guess for guess in guesses if guess.survival >= self._schedule.min_survival]
        roots = sum(other.parent is None for other in running)
        value = sum(other.survival for other in running)
        count = self._control.chain(len(running), roots, value, [guess.survival for guess in guesses])
        return guesses[:count]

    def _grow(self, tree: LaneTree, lane: Lane, guesses: Sequence[_Guess]) -> None:
        lanes: dict[int, Lane] = {ROOT: lane}
        for index, guess in enumerate(guesses):
            parent = lanes.get(guess.parent)
            if parent is None or not tree.can_branch(parent.position + 1):
                continue
            as_guessed = (guess.standing, guess.match)
            proposal = Proposal(LOOKUP, guess.token, guess.match, guess.standing, looked_up=as_guessed)
            parent.proposals.append(proposal)
            lanes[index] = tree.grow(parent, proposal)
            lanes[index].survival = guess.survival
            self._counters.drafted[LOOKUP] += 1
