"""Corrections of SGLang 0.5.23's slot tables under speculation.

* A decode round reserves twice the block behind a request's committed length, but at page size 1 a row of
  ``req_to_token`` has less headroom than that, and a request close to the context limit would write into the
  next request's row.
* The same reserve is asked for when a request wants only a few tokens more. A request that just fits into the pool
  would be aborted near its end, where plain decoding finishes; so no slot is reserved behind its last position.
* The table is read and written by Triton kernels, chosen by the name of the attention backend; a CPU can only
  run them through the interpreter.
"""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.allocation_sizing import get_alloc_page_size, get_alloc_reserve_per_decode
from sglang.srt.platforms import current_platform
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch import Tensor

from sglang_trunc.core.options import ControlledOptions, DualOptions, Options, SingleOptions, TruncOptions
from sglang_trunc.engine.names import is_ours


def tokens_per_round(options: Options, recurrences: int) -> int:
    """What to tell SGLang that a round takes; it reserves twice that behind a request's committed length.

    A block schedule takes its block. A pipeline of C = R/d1 cycles commits up to C tokens in a round and has lanes up
    to C positions ahead, and under overlap scheduling SGLang knows the length of the round before: 3 C slots. A chain
    of looked-up tokens may be committed together with its root; two of them are made room for.
    """
    if isinstance(options, TruncOptions):
        return options.block_size
    assert isinstance(options, SingleOptions | DualOptions | ControlledOptions)
    cycles = recurrences // options.d1
    return 2 * (cycles + options.lookup) if options.lookup else -(-3 * cycles // 2)


def extra_context_len(result: int) -> int:
    """After ``get_req_to_token_extra_context_len``: room for the whole reserve at every page size."""
    if not _ours():
        return result
    return max(result, get_alloc_reserve_per_decode() + get_alloc_page_size() - 1)


def last_position(req) -> int:
    """Position of the last token that a request may emit. That token needs no KV; a round on an ended request does."""
    return len(req.origin_input_ids) + req.sampling_params.max_new_tokens - 1


def decode_alloc_lens(original, reqs, *, reserve: int, page_size: int) -> tuple[list[int], list[int], int]:
    """Around ``page_aligned_decode_alloc_lens``: present and next allocated lengths, and the slots needed."""
    if not _ours():
        return original(reqs, reserve=reserve, page_size=page_size)
    present = [req.kv.kv_allocated_len for req in reqs]
    following = [max(req.kv.kv_allocated_len, _reserved_length(req, reserve, page_size)) for req in reqs]
    return present, following, sum(following) - sum(present)


def decode_tokens_required(original, batch, requests, page_size: int) -> int:
    """Around ``ScheduleBatch._new_tokens_required_next_decode_spec_v2``: what ``decode_alloc_lens`` will ask for."""
    if not _ours():
        return original(batch, requests, page_size)
    return decode_alloc_lens(None, requests, reserve=get_alloc_reserve_per_decode(), page_size=page_size)[2]


def _reserved_length(req, reserve: int, page_size: int) -> int:
    wanted = min(req.kv.kv_committed_len + reserve, last_position(req) + 1)
    return -(-wanted // page_size) * page_size


def _ours() -> bool:
    return is_ours(SpeculativeAlgorithm.from_string(get_spec().speculative_algorithm))


def last_loc(original, req_to_token: Tensor, req_pool_indices: Tensor, prefix_lens: Tensor) -> Tensor:
    """Around ``get_last_loc``: each request's last slot before ``prefix_lens``, -1 for an empty prefix."""
    if _triton_runs(req_to_token):
        return original(req_to_token, req_pool_indices, prefix_lens)
    last = req_to_token[req_pool_indices.long(), (prefix_lens.long() - 1).clamp(min=0)].to(prefix_lens.dtype)
    return torch.where(prefix_lens > 0, last, -1)


def assign_rows(
    original,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    batch_size: int,
) -> None:
    """Around ``assign_req_to_token_pool_func``: in torch where Triton cannot launch."""
    if _triton_runs(req_to_token):
        return original(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, batch_size)
    counts = (end_offset - start_offset).to(torch.int64)
    rows = req_pool_indices.to(torch.int64).repeat_interleave(counts)
    first = (counts.cumsum(0) - counts).repeat_interleave(counts)
    within = torch.arange(len(rows)) - first
    columns = start_offset.to(torch.int64).repeat_interleave(counts) + within
    req_to_token[rows, columns] = out_cache_loc[: len(rows)].to(req_to_token.dtype)
    return None


def _triton_runs(table: Tensor) -> bool:
    return table.device.type != "cpu" or current_platform.capabilities.supports_triton
