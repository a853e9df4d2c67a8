"""LOOPSPEC_SINGLE and LOOPSPEC_DUAL: while a token climbs to full depth, the next ones are on their way.

A cycle is d1 ticks of all lanes of all requests, then one readout of the lanes that stand at d1, d2 or R:

* at d1 a lane proposes its choice for the next position, at d2 (dual) its choice if that is another;
* at R the choice f is final: the child that started on f becomes the root, everything else goes; where no such
  child lives, a fresh lane starts on f (a restart);
* a lane that starts may bring a looked-up continuation along, a chain of lanes that start beside it; d1 screens them:
  where it chooses another token, the rest of the chain goes. Lanes that are through together are committed together;
* then the budget is shared out: of all lanes and all proposals without a lane, of all requests, those with the
  best estimated survival get the rows of the next cycle. Roots always run.

A proposal that finds no row is kept and may start later, as soon as there is room. Pure integers: ``pipeline_round``
runs the lanes, ``survival`` estimates, ``lane_tree`` keeps each request's tree whole.

Source: LoopSpec (arXiv 2609.17184) for the schedule of one request; budget, late starts and many requests are
this package's.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import NamedTuple

from sglang_trunc.core.control import Control
from sglang_trunc.core.counters import PipelineCounters
from sglang_trunc.core.id_bank import IdBank
from sglang_trunc.core.lane_tree import KNOWN, LOOKUP, Lane, LaneTree, Move, Proposal
from sglang_trunc.core.lookahead import Lookahead, LookupSource
from sglang_trunc.core.survival import Standing
from sglang_trunc.core.width_budget import share_out


class Schedule(NamedTuple):
    """Depths and budget; ``core.options`` checks them."""

    recurrences: int  # R
    d1: int  # divides R
    d2: int | None  # multiple of d1 below R; None: LOOPSPEC_SINGLE
    max_width: int  # rows of a tick; more only where there are more requests
    min_survival: float  # a lane below it is not worth its row
    lookup: int = 0  # most looked-up tokens that start beside one lane
    lookup_candidates: int = 1  # continuations they are taken from
    screen_top: int = 1  # of d1's best tokens, those that a looked-up one may be; 0: d1 does not screen

    @property
    def cycles(self) -> int:
        """Cycles from a lane's start to its full depth."""
        return self.recurrences // self.d1


class Choice(NamedTuple):
    """What a readout says of a lane's next position."""

    token: int
    probability: float  # of that token, at that depth
    best: Sequence[int] = ()  # at d1, where ``screen_top`` is above 1: so many of the row's best tokens


class Commit(NamedTuple):
    key: Hashable
    token: int  # of the position after the lane
    lane: Lane  # the lane whose full-depth readout chose it


class Pipeline:
    """The lanes of all requests. One cycle: ``lanes``, run them, ``readers``, read them out, ``absorb``."""

    def __init__(
        self,
        schedule: Schedule,
        branch_slots: Sequence[int],
        state_rows: int,
        counters: PipelineCounters,
        exchange: bool = True,
        lookups: LookupSource | None = None,
        control: Control | None = None,
    ):
        """``branch_slots``: KV slots of the worker's own. ``state_rows``: of the state bank, ``max_width`` and one a
        request, since a request may arrive while others use the whole width. ``exchange``: see ``LaneTree``.
        ``lookups``: asked only if ``schedule.lookup`` is above 0. ``control``: without one all rows are used."""
        self.schedule = schedule
        self.counters = counters
        self.trees: dict[Hashable, LaneTree] = {}
        self.exchange = exchange
        self.control = control or Control()
        self.lookahead = Lookahead(schedule, lookups, self.control, counters)
        self._state_rows = state_rows
        self.reset(branch_slots)

    def reset(self, branch_slots: Sequence[int]) -> None:
        """Forget every lane and every slot; the pool has been emptied."""
        for key in list(self.trees):
            self.leave(key)
        self.slots = IdBank(branch_slots)
        self.rows = IdBank(range(self._state_rows))

    def join(self, key: Hashable, request_row: int) -> LaneTree:
        """A tree for a request that has none, without lanes yet."""
        assert key not in self.trees
        tree = self.trees[key] = LaneTree(key, request_row, self.slots, self.rows, self.exchange)
        return tree

    def admit(
        self, key: Hashable, request_row: int, position: int, token: int, reserved: list[int], end: int
    ) -> Move | None:
        """Make a request ready for a round: its lanes if they fit what is said of it, else a cold start.

        ``position``, ``token``: of its newest token, which has no K/V yet. ``reserved``: slots from that position on.
        ``end``: position of the last token that it may emit, above ``position``.
        """
        tree = self.trees.get(key)
        if tree is not None and tree.fits(request_row, position, token, reserved[0]):
            return tree.reserve(position, reserved, end)
        self.leave(key)
        tree = self.join(key, request_row)
        tree.reserve(position, reserved, end)
        self.lookahead.note(tree, tree.plant(token, position))
        self.counters.cold_starts += 1
        return None

    def watch(self, key: Hashable, request_row: int, position: int, token: int, slot: int, end: int) -> None:
        """A request's prompt is being prefilled: the lanes of its first tokens may start meanwhile.

        ``position``, ``token``, ``slot``: of the prompt's last token, the root until ``answer``. ``end``:
        as in ``admit``, above ``position + 1``.
        """
        self.leave(key)
        self.join(key, request_row).watch(token, position, slot, end)

    def answer(self, key: Hashable, token: int) -> None:
        """The prefill is through and chose the first token: keep the lanes that started on it."""
        tree = self.trees[key]
        root = tree.root
        assert root is not None
        self._learn(tree, root, token)
        self.lookahead.commit(key, token)
        right = next((p.running for p in root.proposals if p.token == token), None)
        if right is None:
            self._count_dropped([lane for lane in tree.clear() if lane is not root])
            del self.trees[key]
            return
        self.counters.warm_starts += 1
        dropped, _ = tree.reroot(right, token)
        self._count_dropped(dropped)

    def leave(self, key: Hashable) -> None:
        """Drop a request's lanes, if it has any; its branch slots and state rows are free again."""
        if tree := self.trees.pop(key, None):
            self._count_dropped(tree.clear())
            self.control.forget(key)

    def keep(self, keys: Collection[Hashable]) -> None:
        """Drop the lanes of every request but these."""
        for key in [key for key in self.trees if key not in keys]:
            self.leave(key)

    def make_room(self) -> None:
        """Cut the trees to the budget after arrivals."""
        if sum(len(tree.lanes) for tree in self.trees.values()) > self.schedule.max_width:
            self._share_out()
        self.lookahead.start(self.trees.values())

    def lanes(self, keys: Collection[Hashable] | None = None) -> list[Lane]:
        """Lanes to be advanced by d1 steps, of these requests or all: by request, oldest first. New ones stand at 0."""
        lanes = []
        for key, tree in self.trees.items():
            if keys is None or key in keys:
                tree.set_tails()
                lanes += tree.lanes
        return lanes

    def advanced(self, lanes: Sequence[Lane]) -> list[Lane]:
        """Note that the lanes have run d1 steps; returns those to be read out."""
        for lane in lanes:
            lane.depth += self.schedule.d1
        ran, spare = set(lanes), self._spare if self.control.listens else 0
        return [
            lane
            for tree in self.trees.values()
            for lane in tree.lanes
            if lane in ran and self._is_read(tree, lane, spare)
        ]

    def absorb(self, readers: Sequence[Lane], choices: Sequence[Choice]) -> tuple[list[Commit], list[Move]]:
        """What the readouts said: commits of this cycle, each request's in order, and moves of new roots.

        A request commits more than one token where looked-up lanes come through together.
        """
        finals = {}
        owners = {tree.request_row: tree for tree in self.trees.values()}
        for lane, choice in zip(readers, choices, strict=True):
            if lane.depth == self.schedule.recurrences:
                finals[lane] = choice.token
            elif lane.alive:  # d1 may have screened it out a row earlier
                self._propose(owners[lane.request_row], lane, choice)
        commits, moves = [], []
        for tree in self.trees.values():
            while (root := tree.root) is not None and root in finals:
                token = finals.pop(root)
                move = self._commit(tree, token)
                commits.append(Commit(tree.key, token, root))
                if move is not None:
                    moves.append(move)
        assert not any(lane.alive for lane in finals), "a lane reached full depth before its parent"
        self._share_out()
        self.lookahead.start(self.trees.values())
        return commits, moves

    # Within a cycle.

    @property
    def _spare(self) -> int:
        """Rows beyond one a request."""
        return self.schedule.max_width - sum(tree.root is not None for tree in self.trees.values())

    def _is_read(self, tree: LaneTree, lane: Lane, spare: int) -> bool:
        """Proposals are read only where a child could find a row and a position."""
        if lane.depth == self.schedule.recurrences:
            return True
        proposes = lane.depth in (self.schedule.d1, self.schedule.d2)
        return proposes and lane.position < tree.limit and (spare > 0 or self.lookahead.awaits_screening(lane))

    def _propose(self, tree: LaneTree, lane: Lane, choice: Choice) -> None:
        """Record what a lane proposes at its depth."""
        self.counters.proposed[lane.depth] += 1
        if self.lookahead.awaits_screening(lane):
            agrees, dropped = self.lookahead.screen(tree, lane, choice)
            self._count_dropped(dropped)
            if agrees:
                return
        # Looked-up tokens that d1 let pass without choosing them are no depth's proposals.
        first = next((proposal for proposal in lane.proposals if proposal.depth != LOOKUP), None)
        if first is not None and first.token == choice.token:
            first.standing = Standing.CONFIRMED
            return
        if first is not None:
            first.standing = Standing.CONTESTED
        standing = Standing.OPEN if lane.depth == self.schedule.d1 else Standing.SECOND
        found = next((proposal for proposal in lane.proposals if proposal.token == choice.token), None)
        if found is None:
            lane.proposals.append(Proposal(lane.depth, choice.token, choice.probability, standing))
        else:
            found.depth, found.probability, found.standing = lane.depth, choice.probability, standing

    def _commit(self, tree: LaneTree, token: int) -> Move | None:
        root = tree.root
        assert root is not None
        self._learn(tree, root, token)
        self.lookahead.commit(tree.key, token)
        right = next((p for p in root.proposals if p.token == token), None)
        if root.position + 1 >= tree.end:
            self.counters.ended += 1
            self._count_dropped([lane for lane in tree.clear() if lane is not root])
            return None
        successor = right.running if right is not None else None
        self.counters.count_commit(successor.source if successor else KNOWN, proposed=right is not None)
        dropped, move = tree.reroot(successor, token)
        self._count_dropped(dropped)
        if successor is None:
            assert tree.root is not None
            self.lookahead.note(tree, tree.root)
        return move

    def _learn(self, tree: LaneTree, root: Lane, token: int) -> None:
        """What became of a verified lane's proposals. One that d2 has spoken on had been open before that."""
        outcomes = []
        for proposal in root.proposals:
            standings = (
                {proposal.standing, Standing.OPEN} if proposal.depth == self.schedule.d1 else {proposal.standing}
            )
            outcomes += [(standing, proposal.probability, proposal.token == token) for standing in standings]
            if proposal.looked_up is not None and proposal.depth != LOOKUP:
                outcomes.append((*proposal.looked_up, proposal.token == token))
        self.control.of(tree.key).observe(outcomes)

    def _share_out(self) -> None:
        """Cut the trees to the budget, then start what it has room for."""
        schedule = self.schedule
        shares = share_out(
            self.trees.values(),
            schedule.max_width,
            schedule.min_survival,
            schedule.recurrences,
            self.control,
        )
        for tree in self.trees.values():
            self._count_dropped(tree.keep(shares.stays.__contains__))
        for tree, parent, proposal, survival in shares.births:
            if parent.alive and tree.can_branch(parent.position + 1):
                lane = tree.grow(parent, proposal)
                lane.survival = survival
                self.counters.drafted[proposal.depth] += 1
                self.lookahead.note(tree, lane)

    def _count_dropped(self, lanes: Sequence[Lane]) -> None:
        self.counters.lanes_dropped += len(lanes)
        wasted = sum(lane.depth for lane in lanes)
        self.counters.rows_wasted += wasted
        self.control.note_gone(len(lanes), wasted // self.schedule.d1)
