"""What follows the batch between rounds when requests leave it, join it, or travel through the overlap relay."""

from __future__ import annotations

import torch

from sglang_trunc.engine.state import TruncState


def state(*tokens: int) -> TruncState:
    return TruncState(torch.tensor(tokens), torch.tensor(tokens) * 10)


def test_filter_keeps_the_named_requests_in_order():
    kept = state(5, 6, 7, 8)
    kept.filter_batch(torch.tensor([3, 1]))
    assert kept.bonus_tokens.tolist() == [8, 6]
    assert kept.new_seq_lens.tolist() == [80, 60]


def test_merge_appends():
    merged = state(5, 6)
    merged.merge_batch(state(7))
    assert merged.bonus_tokens.tolist() == [5, 6, 7]
    assert merged.new_seq_lens.tolist() == [50, 60, 70]


def test_under_overlap_only_the_relay_indices_follow():
    first, second = state(5, 6), state(7)
    first.future_indices, second.future_indices = torch.tensor([2, 3]), torch.tensor([9])
    first.merge_batch(second)
    first.filter_batch(torch.tensor([2, 0]))
    assert first.future_indices.tolist() == [9, 2]
    assert first.bonus_tokens.tolist() == [5, 6]  # stale, and replaced by the relay before the next round


def test_sglang_sees_a_state_and_no_draft_or_verify_input():
    spec = state(1)
    assert not spec.is_draft_input()
    assert not spec.is_verify_input()
    assert spec.hidden_states is spec.topk_p is spec.topk_index is None
    assert bool(spec)
