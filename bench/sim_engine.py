"""Engines that run no model: ``core``'s schedules over paths (``sim_paths``) instead of rows of a tensor.

They keep what a served engine keeps (slots by position, a path by lane or node) and count calls by number of rows,
which is what a cost table is asked about.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import torch
from sim_paths import TokenPath
from torch import Tensor

from sglang_trunc.core.lane_tree import Lane, Move
from sglang_trunc.core.looped import Nodes
from sglang_trunc.core.pipeline import Choice

FIRST_SLOT = 1 << 20  # of requests; below are the slots of branches


class SlotTable:
    """SGLang's slot table: every request position has a slot, which an exchange may replace."""

    def __init__(self, exchange: bool):
        self._exchange = exchange
        self._slots: dict[int, dict[int, int]] = {}  # request row -> position -> slot
        self._fresh = itertools.count(FIRST_SLOT)

    def reserved(self, request_row: int, position: int, count: int) -> list[int]:
        """Slots from a position on."""
        own = self._slots.setdefault(request_row, {})
        return [own.setdefault(place, next(self._fresh)) for place in range(position, position + count)]

    def move(self, moves: Sequence[Move]) -> None:
        for move in moves:
            assert self._slots[move.request_row][move.position] == move.reserved
            if self._exchange:
                self._slots[move.request_row][move.position] = move.slot


class TreePaths:
    """``core.pipeline_round.TreeEngine``; a readout is a list of choices."""

    def __init__(self, recurrences: int):
        self.table = SlotTable(exchange=True)
        self.readouts: Counter[float] = Counter()  # rows -> calls
        self.starts: Counter[int] = Counter()
        self._recurrences = recurrences
        self._paths: dict[Lane, TokenPath] = {}
        self._roots: dict[int, TokenPath] = {}  # request row -> path of the token that is verified next

    def expect(self, request_row: int, root: TokenPath) -> None:
        """Name the path that a request goes on from; for a prompt's last token there is no ``start``."""
        self._roots[request_row] = root

    def watch(self, lane: Lane) -> None:
        """A prompt's last token runs without being started."""
        self._paths[lane] = self._roots[lane.request_row]

    def start(self, lanes: Sequence[Lane]) -> None:
        self.starts[len(lanes)] += 1
        self._paths = {lane: path for lane, path in self._paths.items() if lane.alive}
        for lane in lanes:
            root = lane.parent is None
            self._paths[lane] = self._roots[lane.request_row] if root else self._paths[lane.parent].child(lane.token)

    def advance(self, lanes: Sequence[Lane], ticks: int) -> None:
        """Nothing to run."""

    def readout(self, lanes: Sequence[Lane]) -> list[Choice]:
        self.readouts[len(lanes)] += 1
        choices = [self._paths[lane].says(lane.depth) for lane in lanes]
        for lane, choice in zip(lanes, choices, strict=True):
            if lane.depth == self._recurrences:
                self._roots[lane.request_row] = self._paths[lane].child(choice.token)
        return choices

    def move(self, moves: Sequence[Move]) -> None:
        self.table.move(moves)


class ChainPaths:
    """``core.looped.LaneEngine``. Tokens of a round are numbered as they come, so that few columns hold all logits."""

    def __init__(self, recurrences: int):
        self.recurrences = recurrences
        self.readouts: Counter[float] = Counter()
        self.starts: Counter[int] = Counter()

    def begin(self, roots: Sequence[TokenPath], tokens: Sequence[int], width: int) -> Tensor:
        """Name the requests' newest tokens; returns their numbers, int64 ``[bs]``."""
        self._roots = roots
        self._paths: dict[tuple[int, int], TokenPath] = {}
        self._depths: dict[tuple[int, int], int] = {}
        self._tokens: list[int] = []
        self._numbers: dict[int, int] = {}
        self._columns = max(512, 4 * width * len(roots))
        return torch.tensor([self._number(token) for token in tokens])

    def token(self, number: int) -> int:
        return self._tokens[number]

    def start(self, nodes: Nodes, token_ids: Tensor) -> None:
        self.starts[len(nodes)] += 1
        for (request, offset), number in zip(_keys(nodes), token_ids.tolist(), strict=True):
            before = self._paths[request, offset - 1] if offset else None
            path = self._roots[request] if before is None else before.child(self.token(number))
            self._paths[request, offset] = path

    def advance(self, nodes: Nodes, first_step: int, last_step: int) -> None:
        for key in _keys(nodes):
            self._depths[key] = last_step

    def readout(self, nodes: Nodes) -> Tensor:
        """The choice above others that are equal, by as much as its probability asks for (1/512 at least)."""
        self.readouts[len(nodes)] += 1
        logits = torch.zeros(len(nodes), self._columns)
        for row, key in enumerate(_keys(nodes)):
            said = self._paths[key].says(self._depths[key])
            odds = max(said.probability, 1.01 / self._columns) * (self._columns - 1) / max(1 - said.probability, 1e-6)
            logits[row, self._number(said.token)] = torch.tensor(odds).log()
        return logits

    def _number(self, token: int) -> int:
        if token not in self._numbers:
            self._numbers[token] = len(self._tokens)
            self._tokens.append(token)
        return self._numbers[token]


def _keys(nodes: Nodes) -> list[tuple[int, int]]:
    return list(zip(nodes.request.tolist(), nodes.offset.tolist(), strict=True))
