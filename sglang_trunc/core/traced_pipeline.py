"""A pipeline that writes down what it is asked and what the readouts say (``trace`` has the format).

Stands in the place of ``Pipeline``: every call that can change a decision becomes an event, so that replaying the
events through a plain ``Pipeline`` must give the same counters. Decides nothing itself. After every cycle the
lanes that no schedule reads at their depth are read out as well, through ``beside``, which must leave no mark in the
engine; so a trace taken with d1 = 1 knows what every depth would have said.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_trunc.core.control import Control
from sglang_trunc.core.counters import PipelineCounters
from sglang_trunc.core.lane_tree import NO_ROW, Lane, Move
from sglang_trunc.core.pipeline import Choice, Commit, Pipeline, Schedule
from sglang_trunc.core.trace import NO_NODE, VERSION, TraceWriter


class TracedPipeline(Pipeline):
    """``Pipeline`` with a record. A *node* is a token path of a request: lanes born again on a path are the same."""

    def __init__(
        self,
        schedule: Schedule,
        branch_slots: Sequence[int],
        state_rows: int,
        counters: PipelineCounters,
        exchange: bool,
        path: Path,
        about: Mapping[str, Any],
        beside: Callable[[Sequence[Lane]], Sequence[Choice]],
        control: Control | None = None,
    ):
        """``about``: for the header: "model", "schedule", "options". ``beside``: what lanes say at their depth. Nothing
        is looked up: a trace knows no such lanes."""
        self._writer = TraceWriter(path)
        self._beside = beside
        self._nodes: dict[Lane, int] = {}  # of lanes that live
        self._children: dict[tuple[int, int], int] = {}  # (parent node, token) -> node
        self._committed: dict[Hashable, tuple[int, int]] = {}  # node and position of a request's newest verified token
        self._count = 0  # nodes
        self._rounds = 0  # closed ones
        self._writer.write(trace=VERSION, **about, plan=schedule._asdict(), state_rows=state_rows, exchange=exchange)
        super().__init__(schedule, branch_slots, state_rows, counters, exchange, control=control)

    # What the worker asks.

    def reset(self, branch_slots: Sequence[int]) -> None:
        self._writer.write(reset=len(branch_slots))
        super().reset(branch_slots)

    def keep(self, keys: Collection[Hashable]) -> None:
        self._close_round()
        self._writer.write(keep=list(keys))
        super().keep(keys)

    def leave(self, key: Hashable) -> None:
        if key in self.trees:
            self._close_round()
            self._writer.write(leave=key)
        super().leave(key)

    def admit(
        self, key: Hashable, request_row: int, position: int, token: int, reserved: list[int], end: int
    ) -> Move | None:
        move = super().admit(key, request_row, position, token, reserved, end)  # a cold start has left first
        self._writer.write(admit=[key, position, token, end, len(reserved)])
        return move

    def watch(self, key: Hashable, request_row: int, position: int, token: int, slot: int, end: int) -> None:
        self._close_round()
        super().watch(key, request_row, position, token, slot, end)
        self._name_lanes()
        self._writer.write(watch=[key, position, token, end, self._root(key)[0]])

    def answer(self, key: Hashable, token: int) -> None:
        self._committed[key] = self._root(key)
        self._writer.write(answer=[key, token])
        super().answer(key, token)

    # What a cycle says.

    def advanced(self, lanes: Sequence[Lane]) -> list[Lane]:
        readers = super().advanced(lanes)
        self._name_lanes()
        read = set(readers)
        # A prompt's last token has no row of its own to be read from.
        others = [lane for lane in lanes if lane not in read and lane.row != NO_ROW]
        if others:
            self._writer.write(beside=self._said(others, self._beside(others)))
        return readers

    def absorb(self, readers: Sequence[Lane], choices: Sequence[Choice]) -> tuple[list[Commit], list[Move]]:
        if readers:
            self._writer.write(read=self._said(readers, choices))
        commits, moves = super().absorb(readers, choices)
        for commit in commits:
            self._committed[commit.key] = (self._nodes[commit.lane], commit.lane.position)
        return commits, moves

    # Within.

    def _close_round(self) -> None:
        """Totals after the newest round, before anything else happens."""
        if self.counters.rounds > self._rounds:
            self._rounds = self.counters.rounds
            self._writer.write(counted=self.counters.report())

    def _root(self, key: Hashable) -> tuple[int, int]:
        root = self.trees[key].root
        assert root is not None
        return self._nodes[root], root.position

    def _said(self, lanes: Sequence[Lane], choices: Sequence[Choice]) -> list[list[float]]:
        pairs = zip(lanes, choices, strict=True)
        return [[self._nodes[lane], lane.depth, choice.token, choice.probability] for lane, choice in pairs]

    def _name_lanes(self) -> None:
        """Give every living lane its node, parents first."""
        known, self._nodes = self._nodes, {}
        for key, tree in self.trees.items():
            for lane in tree.lanes:
                self._nodes[lane] = known[lane] if lane in known else self._node(key, lane)

    def _node(self, key: Hashable, lane: Lane) -> int:
        parent = self._nodes[lane.parent] if lane.parent is not None else self._before(key, lane.position)
        node = self._children.get((parent, lane.token)) if parent != NO_NODE else None
        if node is None:
            node = self._count
            self._count += 1
            self._children[parent, lane.token] = node
            self._writer.write(node=[node, parent, key, lane.position, lane.token])
        return node

    def _before(self, key: Hashable, position: int) -> int:
        """The node that a root at this position continues."""
        node, newest = self._committed.get(key, (NO_NODE, -1))
        return node if newest == position - 1 else NO_NODE
