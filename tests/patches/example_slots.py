"""Examples for the slot table: room of a row, the reserve of a round, and writing it without Triton."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import torch
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache import allocation, allocation_sizing
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from tests.patches.example_spec import registered
from tests.patches.run_examples import replaced

CONTEXT = 2048


@contextlib.contextmanager
def serving(algorithm: str | None, steps: int = 1, topk: int = 1, tokens: int = 4, page: int = 1):
    """SGLang's arguments as ``allocation_sizing`` reads them, and those of this package's part."""
    from sglang_trunc.engine import slots

    spec = types.SimpleNamespace(
        speculative_algorithm=algorithm, speculative_num_steps=steps, speculative_eagle_topk=topk
    )
    with (
        replaced(
            allocation_sizing,
            get_spec=lambda: spec,
            max_speculative_num_draft_tokens=lambda: tokens if algorithm else None,
            get_schedule=lambda: types.SimpleNamespace(page_size=page),
            get_parallel=lambda: types.SimpleNamespace(attn_dcp_size=1),
        ),
        replaced(slots, get_spec=lambda: spec, is_ours=lambda algorithm: True),
    ):
        yield


def request_at(committed: int, allocated: int, prompt: int = 100, most: int = 50) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        origin_input_ids=[0] * prompt,
        sampling_params=types.SimpleNamespace(max_new_tokens=most),
        kv=types.SimpleNamespace(kv_committed_len=committed, kv_allocated_len=allocated),
    )


# --- req-to-token-row-headroom ---

SERVERS: dict[str, dict[str, Any]] = {
    "eagle, 64 drafts": {"algorithm": "EAGLE", "steps": 8, "topk": 8, "tokens": 64},
    "ngram, 12 drafts": {"algorithm": "NGRAM", "tokens": 12},
    "eagle, 4 drafts": {"algorithm": "EAGLE", "steps": 3, "tokens": 4},
    "eagle, 12 drafts, page 16": {"algorithm": "EAGLE", "steps": 11, "tokens": 12, "page": 16},
    "uno, 12 drafts": {"algorithm": "UNO", "tokens": 12},
    "registered, 9 drafts": {"algorithm": "EXAMPLE", "steps": 8, "tokens": 9},
    "no speculation": {"algorithm": None},
}


def row_overflow(side: str) -> dict[str, int]:
    """Columns that a request next to the context limit is given beyond its row; negative: columns to spare."""
    registered("EXAMPLE")
    answers = {}
    for name, server in SERVERS.items():
        with serving(**server):
            extra = allocation_sizing.get_req_to_token_extra_context_len()
            if side == "ours":
                from sglang_trunc.engine import slots

                extra = slots.extra_context_len(extra) if server["algorithm"] else extra
            page = server.get("page", 1)
            # Prompt and output are context - 2 together; the last token but one has KV, the last has none.
            last = request_at(CONTEXT - 4, CONTEXT - 4, prompt=CONTEXT - 10, most=1 << 20)
            _, (end,), _ = allocation_sizing.page_aligned_decode_alloc_lens(
                [last], reserve=allocation_sizing.get_alloc_reserve_per_decode(), page_size=page
            )
            answers[name] = end - (CONTEXT + extra) if server["algorithm"] else extra
    return answers


# --- bounded-decode-reserve ---


class Bounded(CustomSpecAlgo):
    def drafts_within_max_new_tokens(self) -> bool:
        return True


# (committed, allocated, page) of a request of 100 + 50 tokens, reserve 8
MOMENTS = [(100, 100, 1), (104, 108, 1), (145, 148, 1), (149, 150, 1), (149, 160, 1), (140, 144, 16), (148, 160, 16)]


def reserves(side: str, spec_class: type = Bounded) -> list[list[int]]:
    """Per moment: allocated length after the next step, and what the retraction check asks for (at page size 1)."""
    registered("EXAMPLE", spec_class)
    answers = []
    for committed, allocated, page in MOMENTS:
        request = request_at(committed, allocated)
        with serving("EXAMPLE", tokens=4, page=page), replaced(schedule_batch, get_alloc_reserve_per_decode=lambda: 8):
            if side == "ours":
                from sglang_trunc.engine import slots

                allocate = slots.decode_alloc_lens(None, [request], reserve=8, page_size=page)
                with replaced(slots, get_alloc_reserve_per_decode=lambda: 8):
                    check = slots.decode_tokens_required(None, None, [request], page)
            else:
                allocate = allocation_sizing.page_aligned_decode_alloc_lens([request], reserve=8, page_size=page)
                check = ScheduleBatch._new_tokens_required_next_decode_spec_v2(None, [request], page)
        answers.append([allocate[1][0], check if page == 1 else 0])
    return answers


def reserves_by_default(side: str) -> list[list[int]]:
    """A registered algorithm that promises nothing."""
    return reserves(side, CustomSpecAlgo)


# --- spec-alloc-without-triton ---


@contextlib.contextmanager
def without_triton():
    """A device that Triton cannot launch on, with an attention backend of its own."""
    from sglang_trunc.engine import slots

    platform = types.SimpleNamespace(capabilities=types.SimpleNamespace(supports_triton=False))
    with (
        replaced(allocation, current_platform=platform, attention_backends=lambda: ("its_own", "its_own")),
        replaced(slots, current_platform=platform),
    ):
        yield


def assigned_rows(side: str) -> list[list[int]]:
    """Three requests, of which one gets nothing."""
    table = torch.zeros(4, 8, dtype=torch.int32)
    rows = torch.tensor([2, 1, 3])
    start, end = torch.tensor([1, 5, 0], dtype=torch.int32), torch.tensor([4, 5, 2], dtype=torch.int32)
    slot_ids = torch.tensor([11, 12, 13, 14, 15])
    with without_triton():
        if side == "ours":
            from sglang_trunc.engine import slots

            slots.assign_rows(allocation.assign_req_to_token_pool_func, rows, table, start, end, slot_ids, 3)
        else:
            allocation.assign_req_to_token_pool_func(rows, table, start, end, slot_ids, 3)
    return table.tolist()


def last_slots(side: str) -> list[int]:
    """Of prefixes of 4, 0 and 8 tokens."""
    table = torch.arange(32, dtype=torch.int32).view(4, 8)
    rows, lengths = torch.tensor([3, 1, 2]), torch.tensor([4, 0, 8])
    with without_triton():
        if side == "ours":
            from sglang_trunc.engine import slots

            return slots.last_loc(allocation.get_last_loc, table, rows, lengths).tolist()
        return allocation.get_last_loc(table, rows, lengths).tolist()


EXAMPLES = {
    "row overflow": row_overflow,
    "reserves": reserves,
    "reserves by default": reserves_by_default,
    "assigned rows": assigned_rows,
    "last slots": last_slots,
}
