"""Lanes of the served models against the reference: every draft depth, block size and kernel, without a server."""

from __future__ import annotations

import pytest
import torch

from sglang_trunc.core.looped import Nodes
from sglang_trunc.core.options import TruncOptions
from sglang_trunc.reference.decode import output_logits, teacher_forced_check
from sglang_trunc.reference.tiny import FAMILIES

pytestmark = pytest.mark.usefixtures("sglang_context")
PROMPTS = [[5, 9, 17, 33, 250, 11, 99], [100], [7, 7, 7, 8, 8, 301, 4, 77, 13, 5, 6, 200, 8, 8]]
DEPTH = dict.fromkeys(FAMILIES, 4) | {"huginn": 8}
CHECKPOINT = {family: {} if family.startswith("ouro") else {"full_depth": DEPTH[family]} for family in FAMILIES}


@pytest.fixture(scope="module")
def reference_of(tiny_checkpoint):
    from sglang_trunc.reference.checkpoint import load_checkpoint

    loaded = {}

    def reference(family):
        if family not in loaded:
            loaded[family] = load_checkpoint(tiny_checkpoint(family, **CHECKPOINT[family]))
        return loaded[family]

    return reference


def pairs(depth: int) -> list[tuple[int, int]]:
    """(d1, block): every draft depth and every block size from 1 to 8, each at least once."""
    return [(1 + i % depth, 1 + 3 * i % 8) for i in range(8)]


@pytest.mark.parametrize(("family", "attention"), [*((family, "cpu") for family in FAMILIES), ("ouro-gqa", "torch")])
def test_tokens_equal_the_reference_at_every_depth_and_block_size(make_stand, reference_of, family, attention):
    reference = reference_of(family)
    for d1, block in pairs(DEPTH[family]) + [(DEPTH[family], 8), (1, 8)]:
        stand = make_stand(family, CHECKPOINT[family], width=block, requests=3, attention=attention)
        options = TruncOptions(d1=d1, block_size=block, draft_threshold=0.018 if d1 % 2 else 0.0)
        outputs = stand.decode(PROMPTS, 12, options)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            assert teacher_forced_check(reference, prompt, output) is None, f"d1 {d1}, block {block}"
        counters = stand.counters
        if d1 == DEPTH[family] and not options.draft_threshold:
            assert counters.accepted == counters.drafted


@pytest.mark.parametrize("family", FAMILIES)
def test_readout_at_every_depth_is_the_references(make_stand, reference_of, family):
    """A chain advanced in one call, read at each depth: early readouts are exact too while the coda has no past."""
    reference = reference_of(family)
    prompt = PROMPTS[0]
    for depth in range(1, DEPTH[family] + 1):
        stand = make_stand(family, CHECKPOINT[family], width=8, requests=1)
        stand.lanes.begin(stand.rows, torch.tensor([0]))
        nodes = Nodes(torch.zeros(len(prompt), dtype=torch.int64), torch.arange(len(prompt)))
        stand.lanes.start(nodes, torch.tensor(prompt))
        stand.lanes.advance(nodes, 0, depth)
        logits = stand.lanes.readout(nodes)
        want = output_logits(reference, prompt[:1], [*prompt[1:], 0], depth)
        torch.testing.assert_close(logits, want.float(), rtol=1e-4, atol=1e-4)


def test_unequal_budgets_and_lengths(make_stand, reference_of):
    stand = make_stand("ouro", width=6, requests=3)
    outputs = stand.decode(PROMPTS, 12, TruncOptions(d1=2, block_size=6, draft_threshold=0.0), budgets=[1, 6, 3])
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert teacher_forced_check(reference_of("ouro"), prompt, output) is None


def test_depths_advanced_one_by_one_give_the_bits_of_one_call(make_stand):
    node = Nodes(torch.zeros(3, dtype=torch.int64), torch.arange(3))
    states = []
    for stops in ([4], [1, 2, 3, 4], [3, 4]):
        stand = make_stand("ouro-gqa", width=3, requests=1)
        stand.lanes.begin(stand.rows, torch.tensor([0]))
        stand.lanes.start(node, torch.tensor([9, 8, 7]))
        for first, last in zip([0, *stops], stops, strict=False):
            stand.lanes.advance(node, first, last)
        states.append(stand.lanes.runner.hidden[:3].clone())
    assert torch.equal(states[0], states[1])
    assert torch.equal(states[0], states[2])


# --- padding ---


def touched(before: list[torch.Tensor], after: list[torch.Tensor]) -> list[set[int]]:
    """Rows that changed; NaN counts as equal to NaN."""
    changed = []
    for old, new in zip(before, after, strict=True):
        same = (old == new) | (old.isnan() & new.isnan())
        changed.append(set((~same.all(1)).nonzero().flatten().tolist()))
    return changed


@pytest.mark.parametrize("family", ["ouro", "huginn"])
def test_padding_rows_touch_only_slot_0_and_the_spare_bank_row(make_stand, family):
    stand = make_stand(family, CHECKPOINT[family], width=2, requests=2)
    shape, stride = stand.model.shape, stand.pool.rows_per_step
    sites = [(part, i) for part in ("prelude", "core", "coda") for i in range(getattr(shape, part))]
    tensors = [rows for site in sites for rows in stand.pool.flat_rows(*site)]
    tensors.append(stand.lanes.runner.hidden)
    stand.lanes.begin(stand.rows[1:], torch.tensor([0]))
    before = [tensor.clone() for tensor in tensors]
    node = Nodes(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    stand.lanes.start(node, torch.tensor([42]))  # 1 real row, 3 padding rows
    stand.lanes.advance(node, 0, 3)
    stand.lanes.readout(node)
    slot = int(stand.req_to_token[2, 0])
    changed = touched(before, tensors)
    for (part, _), keys, values in zip(sites, changed[0:-1:2], changed[1:-1:2], strict=True):
        mine = {slot + step * stride for step in range(3)} if part == "core" else {slot}
        assert keys == values == mine | {0}
    assert changed[-1] <= {0, stand.lanes.runner.spare}


def test_padding_rows_read_only_slot_0(make_stand):
    """With NaN everywhere but in slot 0 of step 0, whatever else a padding row read would make it NaN."""
    stand = make_stand("ouro", width=2, requests=2)
    seen = []
    attend = stand.lanes.runner.attention.attend

    def recording(q, k_rows, v_rows, kv_indices, kv_start, kv_len, kv_offset, out, *rest):
        attend(q, k_rows, v_rows, kv_indices, kv_start, kv_len, kv_offset, out, *rest)
        read = [
            (kv_indices[start : start + length].long() + offset).tolist()
            for start, length, offset in zip(kv_start.tolist(), kv_len.tolist(), kv_offset.tolist(), strict=True)
        ]
        seen.append((read, out.isnan().any(1).tolist()))

    stand.lanes.runner.attention = stand.lanes.runner.attention._replace(attend=recording)
    # First a wide call, so that the static buffers hold something else than zeros behind the next call's row.
    stand.lanes.begin(stand.rows, torch.tensor([0, 0]))
    wide = Nodes(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1]))
    stand.lanes.start(wide, torch.tensor([5, 6, 7, 8]))
    stand.lanes.advance(wide, 0, 4)
    seen.clear()
    stand.lanes.begin(stand.rows[:1], torch.tensor([2]))
    node = Nodes(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    stand.lanes.start(node, torch.tensor([42]))
    stand.lanes.advance(node, 0, 4)
    assert len(seen) == 4 * stand.model.shape.core
    for read, not_a_number in seen:
        assert len(read) == 4
        assert read[1:] == [[0]] * 3
        assert not any(not_a_number)


def test_static_buffers_are_big_enough_for_every_request_at_full_width(make_stand, reference_of):
    prompts = [[10 + i, 20 + i] for i in range(5)]
    stand = make_stand("ouro", width=3, requests=5)
    outputs = stand.decode(prompts, 10, TruncOptions(d1=1, block_size=3, draft_threshold=0.0))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert teacher_forced_check(reference_of("ouro"), prompt, output) is None


def test_a_row_of_nan_shows(make_stand):
    """The suite's own trap works: a read of an unwritten slot is not silent."""
    stand = make_stand("ouro", width=2, requests=1)
    stand.prefill([[5, 6, 7]])
    stand.lanes.begin(stand.rows, torch.tensor([4]))  # position 3 was skipped
    node = Nodes(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    stand.lanes.start(node, torch.tensor([9]))
    stand.lanes.advance(node, 0, 4)
    assert stand.lanes.readout(node).isnan().all()
