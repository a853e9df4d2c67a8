"""One tick of lanes at many depths: what each reads, what each writes, and the bits it would get alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from sglang_trunc.core.lane_tree import Lane
from sglang_trunc.core.pipeline import Schedule
from sglang_trunc.engine.tree_lanes import TreeLanes
from sglang_trunc.reference.tiny import FAMILIES
from tests.engine.tree_stand import TreeStand

pytestmark = pytest.mark.usefixtures("sglang_context")
PROMPTS = [[5, 9, 17, 33, 250], [100], [7, 7, 7, 8, 8, 301, 4, 77, 13]]
PLAN = Schedule(4, 1, 2, 20, 0.0)


@pytest.fixture
def midway(make_tree_stand):
    """``midway(family, ...)``: a stand in the middle of its run, and all its lanes, the new ones started."""

    def stand(family: str, plan: Schedule = PLAN, dtype=torch.float32, **options) -> tuple[TreeStand, list[Lane]]:
        # Drafts that contradict each other: the tree is as bushy as it gets.
        options.setdefault("forced", lambda key, lane: 300 + 10 * lane.depth + key)
        stand = make_tree_stand(family, {"full_depth": plan.recurrences, "dtype": dtype}, plan, **options)
        for prompt in PROMPTS:
            stand.submit(prompt, 30)
        stand.round()
        while len({lane.depth for lane in stand.pipeline.lanes()}) < plan.cycles:
            cycle(stand)
        lanes = stand.pipeline.lanes()
        assert len({lane.depth for lane in lanes}) == plan.cycles
        assert len(lanes) == plan.max_width
        assert plan.d2 is None or sum(bool(lane.tail) for lane in lanes) >= 3
        new = [lane for lane in lanes if lane.depth == 0]
        stand.engine.start(new)
        return stand, lanes

    return stand


def cycle(stand: TreeStand) -> None:
    """One cycle of ``pipeline_round``; no request is to be final in it."""
    lanes = stand.pipeline.lanes()
    new = [lane for lane in lanes if lane.depth == 0]
    if new:
        stand.engine.start(new)
    stand.engine.advance(lanes, stand.plan.d1)
    readers = stand.pipeline.advanced(lanes)
    choices = stand.chooser(range(len(stand.requests)))(readers, stand.engine.readout(readers))
    commits, _ = stand.pipeline.absorb(readers, choices)
    assert not commits


def path(lane: Lane) -> list[Lane]:
    """From the root down to a lane."""
    return [] if lane is None else [*path(lane.parent), lane]


def slots_of(stand: TreeStand, lane: Lane) -> list[int]:
    """Slots of all positions up to a lane's: committed ones as the table has them, then its path's."""
    way = path(lane)
    return stand.table[lane.request_row, : way[0].position].tolist() + [ancestor.slot for ancestor in way]


def memory(stand: TreeStand) -> list[Tensor]:
    """Everything a call may write, as integers: NaN equals itself. Last the state bank."""
    runner = stand.runner
    states = runner.hidden if runner.injected is None else torch.cat((runner.hidden, runner.injected), 1)
    tensors = [buffer.flatten(1) for buffer in (*stand.pool.k_buffer, *stand.pool.v_buffer)] + [states]
    return [tensor.view(torch.int16).clone() for tensor in tensors]


def restore(stand: TreeStand, saved: Sequence[Tensor]) -> None:
    for buffer, before in zip((*stand.pool.k_buffer, *stand.pool.v_buffer), saved, strict=False):
        buffer.copy_(before.view(buffer.dtype).view(buffer.shape))
    states = saved[-1].view(stand.runner.hidden.dtype)
    stand.runner.hidden.copy_(states[:, : stand.runner.hidden.shape[1]])
    if stand.runner.injected is not None:
        stand.runner.injected.copy_(states[:, stand.runner.hidden.shape[1] :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_lane_in_a_mixed_tick_gets_the_bits_it_gets_alone(midway, family, dtype):
    stand, lanes = midway(family, dtype=dtype, buckets=())
    engine = TreeLanes(stand.runner)
    before = memory(stand)
    engine.advance(lanes, 1)
    together = memory(stand)
    logits = engine.readout(lanes)
    together_read = memory(stand)

    restore(stand, before)
    assert all(map(torch.equal, memory(stand), before))
    for lane in reversed(lanes):
        engine.advance([lane], 1)
    alone = memory(stand)
    # A child's readout reads its parent's K/V of the coda, so here the order matters.
    alone_logits = torch.cat([engine.readout([lane]) for lane in lanes])
    alone_read = memory(stand)

    page, spare = stand.pool.page_size, stand.runner.spare
    for ours, theirs in ((together, alone), (together_read, alone_read)):
        assert all(torch.equal(a[page:], b[page:]) for a, b in zip(ours[:-1], theirs[:-1], strict=True))
        assert torch.equal(ours[-1][:spare], theirs[-1][:spare])
    assert torch.equal(logits, alone_logits)
    assert not torch.equal(together[-1], before[-1])


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("family", ["ouro", "huginn"])
def test_a_lane_reads_its_own_path_at_its_own_step(midway, family, page):
    stand, lanes = midway(family, page=page)
    want = [slots_of(stand, lane) for lane in lanes]
    seen = recorded(stand)
    engine = TreeLanes(stand.runner)
    engine.advance(lanes, 1)
    core = stand.pool.shape.core
    assert len(seen) == core
    for slots, offsets in seen:
        assert slots[: len(lanes)] == want
        assert offsets[: len(lanes)] == [lane.depth * stand.pool.rows_per_step for lane in lanes]
    seen.clear()
    engine.readout(lanes)
    assert len(seen) == stand.pool.shape.coda
    for slots, offsets in seen:
        assert slots[: len(lanes)] == want
        assert not any(offsets)


def recorded(stand: TreeStand) -> list[tuple[list[list[int]], list[int]]]:
    """(slots, offset) of every row, for each attention call from now on."""
    seen = []
    attend = stand.runner.attention.attend

    def recording(*args):
        kv_indices, kv_start, kv_len, kv_offset = (tensor.tolist() for tensor in args[3:7])
        tails, shared = (tensor.tolist() for tensor in args[10:])
        slots = [
            kv_indices[start : start + many] + tail[: length - many]
            for start, many, length, tail in zip(kv_start, shared, kv_len, tails, strict=True)
        ]
        seen.append((slots, kv_offset))
        attend(*args)

    stand.runner.attention = stand.runner.attention._replace(attend=recording)
    return seen


@pytest.mark.parametrize("family", ["ouro", "huginn"])
def test_padding_rows_touch_only_slot_0_and_the_spare_bank_row(midway, family):
    """After a wide call with tails, so that the static buffers hold something behind the next call's rows."""
    stand, lanes = midway(family, Schedule(8, 2, 4, 20, 0.0))
    engine = TreeLanes(stand.runner)
    engine.advance(lanes, 2)
    for lane in lanes:
        lane.depth += 2
    early = [lane for lane in lanes if lane.depth < 8]
    some = [lane for lane in early if lane.tail][:3] + [lane for lane in early if not lane.tail][:2]
    assert len(some) == 5  # of a bucket of 8
    assert max(len(lane.tail) for lane in lanes) > 1
    before, seen = memory(stand), recorded(stand)
    engine.advance(some, 2)
    engine.readout(some)
    for slots, offsets in seen:
        assert slots[5:] == [[0]] * 3
        assert offsets[5:] == [0] * 3
    after, shape = memory(stand), stand.pool.shape
    touched = [set((a != b).any(1).nonzero().flatten().tolist()) for a, b in zip(before, after, strict=True)]
    assert touched[-1] <= {lane.row for lane in some} | {stand.runner.spare}
    assert touched[-1] >= {lane.row for lane in some}
    for layer_id, (keys, values) in enumerate(
        zip(touched[: len(touched) // 2], touched[len(touched) // 2 : -1], strict=True)
    ):
        part, step, _ = shape.place(layer_id)
        mine = {lane.slot for lane in some if part == "coda" or (part == "core" and 0 <= step - lane.depth < 2)}
        assert mine <= keys <= mine | {0}
        assert mine <= values <= mine | {0}


def test_a_slot_nobody_wrote_shows(midway):
    """The stand's own trap works: with one slot of a path taken away the readout is not a number."""
    stand, lanes = midway("ouro")
    lane = next(lane for lane in lanes if lane.tail)
    lane.tail = (*lane.tail[:-1], stand.trap)
    engine = TreeLanes(stand.runner)
    engine.advance([lane], 1)
    assert engine.readout([lane]).isnan().all()
