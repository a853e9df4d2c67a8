from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_trunc.core.control import Control
from sglang_trunc.core.id_bank import IdBank
from sglang_trunc.core.lane_tree import Lane, LaneTree, Proposal
from sglang_trunc.core.survival import Standing
from sglang_trunc.core.width_budget import share_out

FULL = 8


def planted(key: int = 0, depth: int = 4, reserved: int = 20) -> LaneTree:
    tree = LaneTree(key, key, IdBank(range(1000, 1100)), IdBank(range(100)))
    tree.reserve(0, list(range(reserved)), 50)
    tree.plant(0, 0).depth = depth
    return tree


def propose(lane: Lane, probability: float, standing: Standing = Standing.OPEN, depth: int = 1) -> Proposal:
    lane.proposals.append(Proposal(depth, len(lane.proposals), probability, standing))
    return lane.proposals[-1]


def child(tree: LaneTree, parent: Lane, probability: float, standing: Standing = Standing.OPEN, depth: int = 0) -> Lane:
    lane = tree.grow(parent, propose(parent, probability, standing))
    lane.depth = depth
    return lane


def share(*trees: LaneTree, width: int, least: float = 0.0):
    return share_out(trees, width, least, FULL, Control())


def test_roots_stay_whatever_the_width():
    trees = [planted(key) for key in range(3)]
    lane = child(trees[0], trees[0].root, 0.9)
    assert share(*trees, width=1).stays == {tree.root for tree in trees}
    assert share(*trees, width=4).stays == {tree.root for tree in trees} | {lane}


def test_requests_that_have_ended_ask_for_nothing():
    ended, going = planted(0), planted(1)
    ended.clear()
    waiting = propose(going.root, 0.5)
    shares = share(ended, going, width=2)
    assert shares.stays == {going.root}
    assert [birth.proposal for birth in shares.births] == [waiting]


def test_a_first_child_that_d2_contradicts_goes_before_any_other_lane():
    """Here its token was surer than all others, and it has a child of its own."""
    sure, doubtful = planted(0), planted(1)
    contested = child(sure, sure.root, 0.99, Standing.CONTESTED, depth=2)
    below = child(sure, contested, 0.99, depth=1)
    second = propose(sure.root, 0.4, Standing.SECOND, depth=2)
    other = child(doubtful, doubtful.root, 0.3, depth=2)
    wide = share(sure, doubtful, width=6)
    assert wide.stays == {sure.root, doubtful.root, contested, below, other}
    narrow = share(sure, doubtful, width=4)
    assert narrow.stays == {sure.root, doubtful.root, other}
    for shares in (wide, narrow):
        assert [birth.proposal for birth in shares.births] == [second]


def test_rows_go_to_the_likeliest_of_all_requests():
    trees = [planted(key) for key in range(3)]
    waiting = [propose(tree.root, probability) for tree, probability in zip(trees, (0.5, 0.9, 0.7), strict=True)]
    for width, count in [(3, 0), (4, 1), (5, 2), (6, 3), (7, 3)]:
        births = share(*trees, width=width).births
        assert [birth.proposal for birth in births] == [waiting[1], waiting[2], waiting[0]][:count]
    assert (births[0].tree, births[0].parent, births[0].survival) == (trees[1], trees[1].root, 0.9)


def test_work_done_counts_up_to_twice():
    waits, runs = planted(0), planted(1, depth=7)
    waiting = propose(waits.root, 0.8)
    lane = child(runs, runs.root, 0.5, depth=4)  # 0.75
    assert [birth.proposal for birth in share(waits, runs, width=3).births] == [waiting]
    lane.depth = 6  # 0.875
    assert share(waits, runs, width=3).stays == {waits.root, runs.root, lane}


def test_of_equal_chances_the_one_nearer_to_its_root_goes_first():
    far, near = planted(0), planted(1)
    propose(child(far, far.root, 0.5, depth=2), 0.5)
    waiting = propose(near.root, 0.25)
    assert [birth.proposal for birth in share(far, near, width=4).births] == [waiting]


def test_survival_is_the_product_along_the_path():
    tree = planted(depth=6)
    lane = child(tree, tree.root, 0.5, depth=4)
    below = child(tree, lane, 0.5, depth=2)
    propose(below, 0.5)
    births = share(tree, width=9).births
    assert (tree.root.survival, lane.survival, below.survival, births[0].survival) == (1.0, 0.5, 0.25, 0.125)


def test_lanes_and_proposals_below_the_threshold_get_no_row():
    tree = planted(depth=6)
    lane = child(tree, tree.root, 0.5, depth=4)
    child(tree, lane, 0.5, depth=2)
    propose(tree.root, 0.25)
    waiting = propose(tree.root, 0.75)
    shares = share(tree, width=9, least=0.3)
    assert shares.stays == {tree.root, lane}
    assert [birth.proposal for birth in shares.births] == [waiting]


def test_no_birth_behind_the_last_position_of_use():
    tree = planted(reserved=2)
    propose(tree.root, 0.9)
    lane = child(tree, tree.root, 0.9)
    propose(lane, 0.9)
    assert [birth.parent for birth in share(tree, width=9).births] == [tree.root]


@st.composite
def trees(draw, key: int) -> LaneTree:
    """Any tree that a pipeline of d1 = 1 could have, with some proposals that wait."""
    tree = planted(key, depth=draw(st.integers(1, FULL - 1)))
    for _ in range(draw(st.integers(0, 8))):
        parent = draw(st.sampled_from([lane for lane in tree.lanes if lane.depth > 0]))
        proposal = propose(parent, draw(st.sampled_from([0.0, 0.5, 1.0])), draw(st.sampled_from(Standing)))
        if draw(st.booleans()):
            tree.grow(parent, proposal).depth = draw(st.integers(0, parent.depth - 1))
    return tree


@given(st.integers(1, 3).flatmap(lambda count: st.tuples(*map(trees, range(count)))), st.integers(1, 20), st.booleans())
@settings(derandomize=True, deadline=None, max_examples=150, database=None)
def test_no_cut_leaves_an_orphan_and_no_row_is_left_over(all_trees, width, picky):
    least = 0.3 if picky else 0.0
    stays, births = share(*all_trees, width=width, least=least)
    roots = {tree.root for tree in all_trees}
    assert roots <= stays
    assert all(lane.parent in stays for lane in stays - roots)
    assert all(birth.parent in stays for birth in births)
    lanes = [lane for tree in all_trees for lane in tree.lanes]
    waiting = [p for lane in lanes for p in lane.proposals if p.running is None]
    assert len(stays) + len(births) <= max(width, len(roots))
    if not picky:
        assert len(stays) + len(births) == max(min(width, len(lanes) + len(waiting)), len(roots))
    assert len({id(birth.proposal) for birth in births}) == len(births)
    assert all(birth.proposal.running is None for birth in births)
