from __future__ import annotations

import pytest

from sglang_trunc.core.id_bank import IdBank
from sglang_trunc.core.lane_tree import Lane, LaneTree, Move, Proposal
from sglang_trunc.core.survival import Standing

BRANCHES = [100, 101, 102]


def planted(exchange: bool = True, end: int = 20) -> LaneTree:
    """A root at position 5, slots 15 to 18 reserved from there."""
    tree = LaneTree("request", 3, IdBank(BRANCHES), IdBank(range(8)), exchange)
    tree.reserve(5, [15, 16, 17, 18], end)
    tree.plant(7, 5)
    return tree


def child(tree: LaneTree, parent: Lane, token: int, depth: int = 1) -> Lane:
    parent.proposals.append(Proposal(depth, token, 0.5, Standing.OPEN))
    return tree.grow(parent, parent.proposals[-1])


def held(tree: LaneTree) -> tuple[int, int]:
    """Slots and rows that are not free."""
    return tree._slots.size - tree._slots.free, tree._rows.size - tree._rows.free


def test_the_first_lane_at_a_position_has_the_reserved_slot_and_others_borrow():
    tree = planted()
    first, second = child(tree, tree.root, 1), child(tree, tree.root, 2, depth=2)
    below = child(tree, second, 3)
    assert [lane.slot for lane in tree.lanes] == [15, 16, 100, 17]
    assert (first.source, second.source, below.source) == (1, 2, 1)
    assert held(tree) == (1, 4)


def test_a_freed_reserved_slot_is_used_again():
    tree = planted()
    first = child(tree, tree.root, 1)
    child(tree, tree.root, 2)
    tree.keep(lambda lane: lane is not first)
    assert tree.grow(tree.root, tree.root.proposals[0]).slot == 16
    assert held(tree) == (1, 3)


def test_a_dropped_lane_takes_its_descendants_along():
    tree = planted()
    first, second = child(tree, tree.root, 1), child(tree, tree.root, 2)
    below = child(tree, first, 3)
    deepest = child(tree, below, 4)
    assert tree.keep(lambda lane: lane is not first) == [first, below, deepest]
    assert tree.lanes == [tree.root, second]
    assert not any(lane.alive for lane in (first, below, deepest))
    assert tree.root.proposals[0].running is None
    assert held(tree) == (1, 2)


def test_tails_name_the_path_behind_the_root_where_a_branch_is_in_it():
    tree = planted()
    first = child(tree, tree.root, 1)
    child(tree, first, 2)
    second = child(tree, tree.root, 3)
    below = child(tree, second, 4)
    deepest = child(tree, below, 5)
    tree.set_tails()
    assert [lane.tail for lane in tree.lanes] == [(), (), (), (100,), (100, 101), (100, 101, 18)]
    tree.keep(lambda lane: lane is not first)
    tree.reroot(second, 3)
    tree.set_tails()
    assert (second.tail, below.tail, deepest.tail) == ((), (101,), (101, 18))


@pytest.mark.parametrize("exchange", [True, False])
def test_a_branch_that_becomes_the_root_moves(exchange):
    tree = planted(exchange)
    first, second = child(tree, tree.root, 1), child(tree, tree.root, 3, depth=2)
    gone, below = child(tree, first, 2), child(tree, second, 4)
    dropped, move = tree.reroot(second, 3)
    assert dropped == [first, gone]
    assert move == Move(request_row=3, position=6, slot=100, reserved=16)
    assert (tree.root, second.parent, tree.lanes) == (second, None, [second, below])
    assert second.slot == tree.reserved[6] == (100 if exchange else 16)
    assert tree._slots.take() == (16 if exchange else 100)
    tree.clear()
    assert held(tree) == (1, 0)


def test_a_successor_in_its_reserved_slot_does_not_move():
    tree = planted()
    first = child(tree, tree.root, 1)
    dropped, move = tree.reroot(first, 1)
    assert (dropped, move, tree.root, first.slot) == ([], None, first, 16)


def test_a_restart_keeps_nothing():
    tree = planted()
    lanes = [child(tree, tree.root, 1), child(tree, tree.root, 2)]
    dropped, move = tree.reroot(None, 9)
    assert (dropped, move) == (lanes, None)
    root = tree.root
    assert tree.lanes == [root]
    assert (root.token, root.position, root.slot, root.source, root.depth) == (9, 6, 16, 0, 0)
    assert held(tree) == (0, 1)


def test_a_branch_needs_a_free_slot():
    tree = planted()
    assert tree.can_branch(6)
    for token in range(4):
        child(tree, tree.root, token)
    assert not tree.can_branch(6)
    assert tree.can_branch(7)


@pytest.mark.parametrize(("end", "limit"), [(6, 5), (7, 6), (9, 8), (10, 8), (20, 8)])
def test_lanes_stop_at_the_end_and_at_the_last_reserved_slot(end, limit):
    assert planted(end=end).limit == limit


def test_a_tree_has_one_root():
    with pytest.raises(AssertionError):
        planted().plant(1, 6)


def test_a_proposal_has_one_lane_at_a_time():
    tree = planted()
    child(tree, tree.root, 1)
    with pytest.raises(AssertionError):
        tree.grow(tree.root, tree.root.proposals[0])
