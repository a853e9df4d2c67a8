"""One request's lanes: a tree of tokens that travel through the depths. Pure integers, no tensors.

The root is the request's newest committed token; every other lane is a proposal of its parent's readout at d1 or
d2. All lanes advance together, so a lane stays at least one proposal depth behind a parent whose readout proposed it.
Looked-up tokens start beside their parents, and reach full depth with them: then a cycle commits several tokens.

Slots: position p of the request has a slot that SGLang reserved; the first lane at p uses it, further ones
(*branches*) borrow one from a bank, as do all lanes that start while their prompt is still being prefilled.
``pipeline`` decides what is born and what goes; this module keeps the tree whole: no lane without its ancestors, no
slot twice.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from sglang_trunc.core.id_bank import IdBank
from sglang_trunc.core.survival import Standing

NO_ROW = -1  # of a prompt's last token: its state is the prefill's
KNOWN = 0  # source of a token that nobody had to propose: a prompt's first token, a restart
LOOKUP = -1  # source of a token that was looked up, in the place of the depth that proposed it


@dataclass(eq=False, slots=True)
class Proposal:
    """A token that a readout of a lane chose for the position after it."""

    depth: int  # of the readout: d1 or d2; LOOKUP until d1 has agreed
    token: int
    probability: float  # of a looked-up token: how long a match it continues (``lookahead``)
    standing: Standing
    lane: Lane | None = None  # the child that started on it last, if any did
    looked_up: tuple[Standing, float] | None = None  # standing and probability that it was looked up with

    @property
    def running(self) -> Lane | None:
        """The child that travels on this proposal."""
        return self.lane if self.lane is not None and self.lane.alive else None


@dataclass(eq=False, slots=True)
class Lane:
    """A token on its way through the depths."""

    token: int
    position: int
    slot: int  # KV slot
    row: int  # row of the state bank
    request_row: int  # row of the slot table
    parent: Lane | None
    source: int  # depth of the readout that proposed it, or KNOWN
    depth: int = 0  # recurrences done
    survival: float = 1.0  # estimated chance to be kept
    alive: bool = True
    proposals: list[Proposal] = field(default_factory=list)
    tail: tuple[int, ...] = ()  # slots of its path behind the root's, itself included; () where all are reserved ones


@dataclass(frozen=True, slots=True)
class Move:
    """A new root stood in a branch slot: the engine names that slot in the table, or copies K/V, by its page size."""

    request_row: int
    position: int
    slot: int  # where the token's K/V are
    reserved: int  # the slot that SGLang had reserved for the position


class LaneTree:
    """Lanes of one request, oldest first, parents before children."""

    def __init__(self, key: Hashable, request_row: int, slots: IdBank, rows: IdBank, exchange: bool = True):
        """``exchange``: a root in a branch slot keeps it and gives the reserved one away; else it is moved there."""
        self.key = key
        self.request_row = request_row
        self.exchange = exchange
        self.root: Lane | None = None
        self.lanes: list[Lane] = []
        self.end = 0  # position of the last token that the request may emit
        self.limit = -1  # the last position at which a lane is of use
        self.reserved: dict[int, int] = {}  # position -> slot, from the root's position on
        self._slots = slots
        self._rows = rows
        self._taken: set[int] = set()  # positions whose reserved slot a lane uses
        self._branches = 0  # lanes in slots of the bank

    def fits(self, request_row: int, position: int, token: int, slot: int) -> bool:
        """Whether the root is this token at this position; its slot counts once there are reserved ones."""
        root = self.root
        if root is None or (self.request_row, root.position, root.token) != (request_row, position, token):
            return False
        return root.slot == slot or not self.reserved

    def reserve(self, first: int, slots: list[int], end: int) -> Move | None:
        """Name the reserved slots from position ``first`` on, and the last position that a token may have.

        The move, if any, brings a root that started without a reserved slot to its own.
        """
        self.reserved = dict(enumerate(slots, start=first))
        self.end = end
        self.limit = min(end - 1, first + len(slots) - 1)
        return self._settle(self.root) if self.root is not None else None

    def watch(self, token: int, position: int, slot: int, end: int) -> Lane:
        """Take a prompt's last token for the root; its prefill runs it, and nothing behind it is reserved yet."""
        assert not self.lanes
        self.end = end
        self.limit = end - 1
        self.reserved = {position: slot}
        self._taken.add(position)
        self.root = Lane(token, position, slot, NO_ROW, self.request_row, None, KNOWN)
        self.lanes.append(self.root)
        return self.root

    def plant(self, token: int, position: int) -> Lane:
        """Start on a known token; the tree must be empty."""
        assert not self.lanes
        self.root = self._add(None, token, position, KNOWN)
        return self.root

    def can_branch(self, position: int) -> bool:
        """Whether a further lane at this position finds a slot."""
        return self._is_free(position) or self._slots.free > 0

    def grow(self, parent: Lane, proposal: Proposal) -> Lane:
        """Start a child on a proposal."""
        assert parent.alive
        assert proposal.running is None
        proposal.lane = self._add(parent, proposal.token, parent.position + 1, proposal.depth)
        return proposal.lane

    def keep(self, wanted: Callable[[Lane], bool]) -> list[Lane]:
        """Drop every lane that is not wanted, and with it all its descendants; returns the dropped ones."""
        kept: list[Lane] = []
        dropped: list[Lane] = []
        for lane in self.lanes:
            orphan = lane.parent is not None and not lane.parent.alive
            if orphan or not wanted(lane):
                self._release(lane)
                dropped.append(lane)
            else:
                kept.append(lane)
        self.lanes = kept
        return dropped

    def reroot(self, successor: Lane | None, token: int) -> tuple[list[Lane], Move | None]:
        """Commit the root, go on from ``successor``, or from a fresh lane on ``token``.

        Returns the lanes that were dropped (the old root is not among them) and what to do about the new root's slot.
        A fresh lane needs its position's slot to be reserved.
        """
        root = self.root
        assert root is not None
        assert self.lanes[0] is root
        self.lanes = self.lanes[1:]
        self._release(root)
        del self.reserved[root.position]
        if successor is not None:
            successor.parent = None
        dropped = self.keep(lambda lane: lane.parent is not None or lane is successor)
        if successor is None:
            self.plant(token, root.position + 1)
            return dropped, None
        self.root = successor
        return dropped, self._settle(successor)

    def clear(self) -> list[Lane]:
        """Drop all lanes."""
        self.root = None
        return self.keep(lambda lane: False)

    def set_tails(self) -> None:
        """Give every lane its path, where a branch is in it. To be called before the lanes run."""
        for lane in self.lanes:
            if not self._branches or lane.parent is None:
                lane.tail = ()
            elif lane.parent.tail or self.reserved.get(lane.position) != lane.slot:
                lane.tail = (*self._path(lane.parent), lane.slot)
            else:
                lane.tail = ()

    def tokens_to(self, lane: Lane) -> list[int]:
        """Tokens of a lane's path below the root, its own included."""
        tokens = []
        while lane.parent is not None:
            tokens.append(lane.token)
            lane = lane.parent
        return tokens[::-1]

    def _path(self, lane: Lane) -> tuple[int, ...]:
        slots = []
        while lane.parent is not None:
            slots.append(lane.slot)
            lane = lane.parent
        return tuple(reversed(slots))

    def _add(self, parent: Lane | None, token: int, position: int, source: int) -> Lane:
        if self._is_free(position):
            slot = self.reserved[position]
            self._taken.add(position)
        else:
            slot = self._slots.take()
            self._branches += 1
        lane = Lane(token, position, slot, self._rows.take(), self.request_row, parent, source)
        self.lanes.append(lane)
        return lane

    def _is_free(self, position: int) -> bool:
        """Whether a lane at this position would use its reserved slot."""
        return position in self.reserved and position not in self._taken

    def _release(self, lane: Lane) -> None:
        lane.alive = False
        if lane.row != NO_ROW:
            self._rows.give(lane.row)
        if lane.slot == self.reserved.get(lane.position):
            self._taken.discard(lane.position)
        else:
            self._slots.give(lane.slot)
            self._branches -= 1

    def _settle(self, root: Lane) -> Move | None:
        """Make a root's slot the one of its position: ids change places, or its K/V go to the reserved slot."""
        reserved = self.reserved.get(root.position)
        if reserved is None or root.slot == reserved:
            return None
        move = Move(self.request_row, root.position, root.slot, reserved)
        self._branches -= 1
        self._taken.add(root.position)
        if self.exchange:
            self._slots.give(reserved)
            self.reserved[root.position] = root.slot
        else:
            self._slots.give(root.slot)
            root.slot = reserved
        return move
