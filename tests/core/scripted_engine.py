"""A ``TreeEngine`` without a model: readouts are a pure function of the path, K/V are names of paths.

``Script`` decides what a path says at each depth. ``ScriptedEngine`` keeps what a real engine keeps (a table of slots
for every request, K/V by slot and step, a state by row) and fails where a lane would read K/V that are not its own
path's, or where the pipeline breaks a rule of ``TreeEngine``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from sglang_trunc.core.lane_tree import KNOWN, LOOKUP, Lane, Move

MASK = (1 << 64) - 1
START = 0x9E3779B97F4A7C15


def extend(path: int, token: int) -> int:
    """Name of a path that goes on with a token: a hash, equal only for equal tokens from position 0 on."""
    value = (path ^ (token + 1)) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 29) * 0x94D049BB133111EB & MASK
    return value ^ value >> 32


def names(tokens: Sequence[int]) -> list[int]:
    """Name of the path up to each position."""
    paths, path = [], START
    for token in tokens:
        path = extend(path, token)
        paths.append(path)
    return paths


class Script:
    """What paths say. ``right``: depth -> chance that the choice at this depth is full depth's; 1.0 where not named."""

    def __init__(self, seed: int, right: Mapping[int, float], vocabulary: int = 5, echo: int | None = None):
        """``echo``: a depth that every shallower or deeper early depth repeats, so that t2 == t1."""
        self.seed = seed
        self.right = right
        self.vocabulary = vocabulary
        self.echo = echo

    def truth(self, path: int) -> int:
        return self._draw(path, 0) % self.vocabulary

    def says(self, path: int, depth: int, recurrences: int) -> int:
        if depth == recurrences:
            return self.truth(path)
        depth = self.echo or depth
        wrong = (self.truth(path) + 1 + depth % (self.vocabulary - 1)) % self.vocabulary
        return self.truth(path) if self._share(path, depth) < self.right.get(depth, 1.0) else wrong

    def height(self, path: int, depth: int) -> float:
        """Logit of the choice, above zeros."""
        return 6 * self._share(path, 1000 + depth) + 0.01

    def continuation(self, tokens: Sequence[int], count: int) -> list[int]:
        """Plain decoding: full depth's choices, one after the other."""
        path, out = names(tokens)[-1], []
        for _ in range(count):
            out.append(self.truth(path))
            path = extend(path, out[-1])
        return out

    def _draw(self, path: int, salt: int) -> int:
        return extend(extend(path, self.seed), salt) >> 8

    def _share(self, path: int, salt: int) -> float:
        return self._draw(path, salt) % 1000 / 1000


class ScriptedEngine:
    """Requests are rows of ``table``; lanes are checked at every call. ``on_cycle`` sees all lanes before they run."""

    def __init__(
        self,
        script: Script,
        recurrences: int,
        d1: int,
        d2: int | None,
        exchange: bool,
        on_cycle: Callable[[Sequence[Lane]], None] = lambda lanes: None,
    ):
        self.script = script
        self.recurrences = recurrences
        self.d1 = d1
        self.read_depths = {d1, d2, recurrences}
        self.exchange = exchange
        self.on_cycle = on_cycle
        self.table: dict[int, dict[int, int]] = {}  # request row -> position -> slot
        self.text: dict[int, list[int]] = {}  # request row -> names of its committed paths, the next root's excepted
        self.next: dict[int, int] = {}  # request row -> token of the next root
        self.kv: dict[int, list[int | None]] = {}  # slot -> step -> the path whose last token's K/V are there
        self.state: dict[int, tuple[int, int]] = {}  # state row -> path and depth of the state in it
        self.paths: dict[Lane, list[int]] = {}  # lane -> names of its path up to each position
        self.said: dict[tuple[Lane, int], int] = {}  # lane, depth -> token
        self.live: list[Lane] = []  # of the last cycle
        self.rows = 0
        self.cycles = 0
        self.moves = 0

    # What the tests do between rounds.

    def prefill(self, request_row: int, tokens: Sequence[int]) -> None:
        """Every step's K/V of all tokens but the last, which is the next root."""
        self.text[request_row] = names(tokens[:-1])
        self.next[request_row] = tokens[-1]
        for position, path in enumerate(self.text[request_row]):
            self.kv[self.table[request_row][position]] = [path] * self.recurrences

    # The protocol.

    def start(self, lanes: Sequence[Lane]) -> None:
        assert lanes
        for lane in lanes:
            assert lane.depth == 0
            assert lane.alive
            assert lane not in self.paths, "started twice"
            if lane.parent is None:
                assert lane.source == KNOWN
                before = self.text[lane.request_row]
                assert lane.token == self.next[lane.request_row]
            else:
                assert lane.parent in self.paths, "started before its parent"
                before = self.paths[lane.parent]
                looked_up = lane.source == LOOKUP
                assert looked_up or self.said[lane.parent, lane.source] == lane.token, "not what its parent proposed"
            assert lane.position == len(before)
            self.paths[lane] = [*before, extend(before[-1] if before else START, lane.token)]
            self.state[lane.row] = (self.paths[lane][-1], 0)

    def advance(self, lanes: Sequence[Lane], ticks: int) -> None:
        assert ticks == self.d1
        self._check_lanes(lanes)
        self.on_cycle(lanes)
        self.live = list(lanes)
        seen_by = {lane: self._slots(lane) for lane in lanes}
        for tick in range(ticks):
            for lane in lanes:
                path = self.paths[lane][-1]
                assert self.state[lane.row] == (path, lane.depth + tick), "another lane's state"
                self.state[lane.row] = (path, lane.depth + tick + 1)
                self.kv.setdefault(lane.slot, [None] * self.recurrences)[lane.depth + tick] = path
            for lane in lanes:
                found = [self.kv[slot][lane.depth + tick] for slot in seen_by[lane]]
                assert found == self.paths[lane], f"K/V of another path at position {lane.position}"
        self.rows += ticks * len(lanes)
        self.cycles += 1

    def readout(self, lanes: Sequence[Lane]) -> Tensor:
        assert lanes
        logits = torch.zeros(len(lanes), self.script.vocabulary)
        through: set[Lane] = set()  # lanes at full depth that the committed text goes through
        for index, lane in enumerate(lanes):
            path = self.paths[lane][-1]
            assert lane.depth in self.read_depths
            assert self.state[lane.row] == (path, lane.depth)
            token = self.script.says(path, lane.depth, self.recurrences)
            assert (lane, lane.depth) not in self.said, "read out twice"
            self.said[lane, lane.depth] = token
            logits[index, token] = self.script.height(path, lane.depth)
            if lane.depth == self.recurrences:
                assert lane.parent is None or lane.parent.depth == lane.depth, "a final lane behind one that is not"
                if lane.parent is not None and not (
                    lane.parent in through and self.said[lane.parent, lane.depth] == lane.token
                ):
                    continue
                through.add(lane)
                self.text[lane.request_row] = self.paths[lane]
                self.next[lane.request_row] = token
        return logits

    def move(self, moves: Sequence[Move]) -> None:
        """Moved lanes are found by where they ran: their ``slot`` names their new place already."""
        assert moves
        ran = {self._ran_in[lane]: lane for lane in self.live}
        for move in moves:
            root, table = ran[move.slot], self.table[move.request_row]
            assert (root.request_row, root.position) == (move.request_row, move.position)
            if root.alive:
                self._check_root(root)
            else:  # committed in the cycle in which it became the root
                assert self.paths[root] == self.text[move.request_row][: root.position + 1]
            assert table[move.position] == move.reserved != move.slot
            if self.exchange:
                table[move.position] = move.slot
            else:
                self.kv[move.reserved] = list(self.kv[move.slot])
            assert root.slot == table[move.position]
        self.moves += len(moves)

    # Rules.

    def _check_lanes(self, lanes: Sequence[Lane]) -> None:
        assert len({lane.slot for lane in lanes}) == len(lanes), "two lanes write one slot"
        assert len({lane.row for lane in lanes}) == len(lanes), "two lanes have one state row"
        requests = [lane.request_row for lane in lanes]
        assert sum(a != b for a, b in zip(requests, requests[1:], strict=False)) == max(len(set(requests)) - 1, 0)
        before = set()
        for lane in lanes:
            assert lane.alive
            if lane.parent is None:
                self._check_root(lane)
            else:
                assert lane.parent in before, "a lane without its parent, or ahead of it"
                assert lane.request_row == lane.parent.request_row
                assert lane.position == lane.parent.position + 1
                assert lane.source in self.read_depths - {self.recurrences} | {LOOKUP}
                assert lane.parent.depth >= lane.depth + max(lane.source, 0), "too close behind its parent"
            before.add(lane)
        self._ran_in = {lane: lane.slot for lane in lanes}

    def _check_root(self, root: Lane) -> None:
        """A root continues the committed text, whether it is fresh or was a child."""
        assert root.parent is None
        assert self.paths[root][:-1] == self.text[root.request_row]
        assert root.token == self.next[root.request_row], "a root that full depth did not choose"

    def _slots(self, lane: Lane) -> list[int]:
        """Slots of a lane's positions, its own last, as an attention kernel finds them: the table's, then the tail."""
        table = self.table[lane.request_row]
        slots = [table[position] for position in range(lane.position + 1 - len(lane.tail))] + list(lane.tail)
        behind_root, ancestor = [], lane
        while ancestor.parent is not None:
            behind_root.append(ancestor.slot)
            ancestor = ancestor.parent
        assert table[ancestor.position] == ancestor.slot, "the table names another slot for the root"
        behind_root.reverse()
        reserved = [table[position] for position in range(ancestor.position + 1, lane.position + 1)]
        assert list(lane.tail) == ([] if behind_root == reserved else behind_root)
        return slots
