"""Who gets the rows of the next cycle.

The rows beyond one a request are shared by all requests: lanes that run and proposals that wait for a lane are
ranked by estimated survival, weighted up to twice for the depth already reached (work done is lost with a lane,
and what is nearly through pays soon). A parent ranks before its children, so no cut leaves an orphan. The
first child of a lane that d2 contradicts has the estimate of contested proposals and goes first.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from sglang_trunc.core.control import Control
from sglang_trunc.core.lane_tree import Lane, LaneTree, Proposal
from sglang_trunc.core.survival import SurvivalEstimator


class Birth(NamedTuple):
    tree: LaneTree
    parent: Lane
    proposal: Proposal
    survival: float


class Shares(NamedTuple):
    stays: set[Lane]  # running lanes that keep their row, roots included
    births: list[Birth]  # likeliest first


class _Entry(NamedTuple):
    priority: float
    ahead: int  # positions ahead of the root
    lane: Lane  # the running lane, or the parent
    birth: Birth | None


def share_out(
    trees: Collection[LaneTree],
    max_width: int,
    min_survival: float,
    recurrences: int,
    control: Control,
) -> Shares:
    """Divide ``max_width`` rows, or fewer where ``control`` says that more do not pay; sets every lane's ``survival``.
    Roots always stay."""
    roots = {tree.root for tree in trees if tree.root is not None}
    entries = [
        entry
        for tree in trees
        for entry in _entries(tree, recurrences, control.of(tree.key))
        if _survival(entry) >= min_survival
    ]
    entries.sort(key=lambda entry: (-entry.priority, entry.ahead))  # stable: older lanes first
    room = max(max_width - len(roots), 0)
    chosen = entries[: control.width(len(roots), [_survival(entry) for entry in entries], room)]
    stays = {entry.lane for entry in chosen if entry.birth is None}
    return Shares(roots | stays, [entry.birth for entry in chosen if entry.birth is not None])


def _survival(entry: _Entry) -> float:
    return entry.lane.survival if entry.birth is None else entry.birth.survival


def _entries(tree: LaneTree, recurrences: int, estimator: SurvivalEstimator) -> list[_Entry]:
    """Everything of one request that asks for a row, its root excepted."""
    entries: list[_Entry] = []
    root = tree.root
    if root is None:
        return entries
    root.survival = 1.0
    for lane in tree.lanes:  # parents before children, so a lane's survival stands when it is reached
        ahead = lane.position - root.position
        if lane is not root:
            entries.append(_Entry(lane.survival * (1 + lane.depth / recurrences), ahead, lane, None))
        for proposal in lane.proposals:
            survival = lane.survival * estimator.estimate(proposal.standing, proposal.probability)
            if proposal.running is not None:
                proposal.running.survival = survival
            elif lane.position < tree.limit:
                entries.append(_Entry(survival, ahead + 1, lane, Birth(tree, lane, proposal, survival)))
    return entries
