"""SGLang's slot tables in torch, against a loop, and the room behind the context limit."""

from __future__ import annotations

import types

import pytest
import torch

from sglang_trunc.core.options import DualOptions, SingleOptions, TruncOptions
from sglang_trunc.engine import slots

pytestmark = pytest.mark.usefixtures("sglang_context")


@pytest.fixture
def without_triton(monkeypatch):
    monkeypatch.setattr(slots, "_triton_runs", lambda table: False)


def fail(*_):
    raise AssertionError("SGLang's Triton kernel must not run here")


@pytest.mark.usefixtures("without_triton")
def test_assigned_rows_are_a_loops():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        table = torch.zeros(6, 50, dtype=torch.int32)
        want = table.clone()
        count = int(torch.randint(1, 5, (1,), generator=generator))
        rows = torch.randperm(6, generator=generator)[:count]
        start = torch.randint(0, 30, (count,), generator=generator)
        end = start + torch.randint(0, 12, (count,), generator=generator)  # some requests get nothing
        slot_ids = torch.randint(1, 1000, (int((end - start).sum()),), generator=generator)
        at = 0
        for row, first, last in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
            want[row, first:last] = slot_ids[at : at + last - first]
            at += last - first
        slots.assign_rows(fail, rows, table, start.int(), end.int(), slot_ids, count)
        assert torch.equal(table, want)


@pytest.mark.usefixtures("without_triton")
def test_last_slot_of_a_prefix():
    table = torch.arange(40, dtype=torch.int32).view(4, 10)
    last = slots.last_loc(fail, table, torch.tensor([3, 1, 2]), torch.tensor([4, 0, 10]))
    assert last.tolist() == [33, -1, 29]


def test_where_triton_runs_sglangs_own_are_called(monkeypatch):
    monkeypatch.setattr(slots, "_triton_runs", lambda table: True)
    assert slots.last_loc(lambda *args: "theirs", None, None, None) == "theirs"
    assert slots.assign_rows(lambda *args: "theirs", None, None, None, None, None, 0) == "theirs"


@pytest.mark.parametrize(("page", "block"), [(1, 1), (1, 8), (1, 64), (16, 4)])
def test_a_row_has_room_for_a_whole_reserve_behind_the_context(monkeypatch, page, block):
    """A request at its last position reserves two blocks; SGLang alone leaves 4 + block columns at page size 1."""
    spec = types.SimpleNamespace(speculative_algorithm="TRUNC")
    monkeypatch.setattr(slots, "get_spec", lambda: spec)
    monkeypatch.setattr(slots, "get_alloc_reserve_per_decode", lambda: 2 * block)
    monkeypatch.setattr(slots, "get_alloc_page_size", lambda: page)
    assert slots.extra_context_len(4 + block) >= 2 * block + page - 1
    spec.speculative_algorithm = None
    assert slots.extra_context_len(4 + block) == 4 + block


# --- what a round takes ---

PIPELINES = [
    (recurrences, d1, d2)
    for recurrences in (2, 3, 4, 6, 8, 12, 16, 32, 64)
    for d1 in range(1, recurrences)
    if recurrences % d1 == 0
    for d2 in (None, *range(2 * d1, recurrences, d1)[:1])
]


@pytest.mark.parametrize("block", [1, 4, 64])
def test_a_block_schedule_takes_its_block(block):
    assert slots.tokens_per_round(TruncOptions(d1=1, block_size=block, draft_threshold=0.0), 4) == block


@pytest.mark.parametrize(("recurrences", "d1", "d2"), PIPELINES)
def test_a_pipeline_takes_half_of_three_times_its_cycles(recurrences, d1, d2):
    """C commits in a round, lanes C positions ahead of them, and C commits of a round that SGLang knows nothing of.

    That these are just enough: ``test_pipeline_worker``.
    """
    options = SingleOptions(d1, 8, 0.0) if d2 is None else DualOptions(d1, d2, 8, 0.0)
    options.check(recurrences)
    cycles = recurrences // d1
    tokens = slots.tokens_per_round(options, recurrences)
    assert tokens >= cycles  # the stride of a round's tokens
    assert 2 * (tokens - 1) < 3 * cycles <= 2 * tokens


# --- what a round reserves ---


@pytest.fixture
def ours(monkeypatch):
    spec = types.SimpleNamespace(speculative_algorithm="TRUNC")
    monkeypatch.setattr(slots, "get_spec", lambda: spec)
    monkeypatch.setattr(slots, "get_alloc_reserve_per_decode", lambda: 8)
    return spec


def request_at(committed: int, allocated: int, prompt: int = 100, most: int = 50) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        origin_input_ids=[0] * prompt,
        sampling_params=types.SimpleNamespace(max_new_tokens=most),
        kv=types.SimpleNamespace(kv_committed_len=committed, kv_allocated_len=allocated),
    )


@pytest.mark.parametrize(
    ("committed", "allocated", "page", "following"),
    [
        (100, 100, 1, 108),  # the reserve
        (104, 108, 1, 112),
        (145, 148, 1, 150),  # 150 positions are all it can ever use
        (149, 150, 1, 150),
        (149, 160, 1, 160),  # never less than it has
        (100, 112, 16, 112),
        (140, 144, 16, 160),  # whole pages
        (148, 160, 16, 160),
    ],
)
def test_nothing_is_reserved_behind_the_last_position(ours, committed, allocated, page, following):
    request = request_at(committed, allocated)
    assert slots.decode_alloc_lens(None, [request], reserve=8, page_size=page) == (
        [allocated],
        [following],
        following - allocated,
    )
    assert slots.decode_tokens_required(None, None, [request], page) == following - allocated


def test_a_round_on_an_ended_request_still_has_a_slot(ours):
    """Under overlap scheduling one more node is run at the position of the last token."""
    request = request_at(committed=149, allocated=149)
    (_, (following,), _) = slots.decode_alloc_lens(None, [request], reserve=8, page_size=1)
    assert following > slots.last_position(request) == 149


def test_other_algorithms_keep_sglangs_reserve(ours):
    ours.speculative_algorithm = None
    assert slots.decode_alloc_lens(lambda *_, **kw: kw, [], reserve=8, page_size=4) == {"reserve": 8, "page_size": 4}
    assert slots.decode_tokens_required(lambda *args: args, "batch", [], 4) == ("batch", [], 4)
