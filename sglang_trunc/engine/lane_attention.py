"""Choice of the lane-attention implementation by device.

All have one signature, that of ``kernels.lane_attention``. On the GPU-less platform it is the compiled kernel
that plain decoding uses too, so that both give the same bits; elsewhere the torch reference, until a faster
kernel is chosen here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sglang.srt.runtime_context import get_exec

from sglang_trunc.kernels import lane_attention as reference
from sglang_trunc.platform.names import ATTENTION_BACKEND


class LaneAttention(NamedTuple):
    """The two calls a lane makes in every layer."""

    name: str
    store_rows: Callable[..., object]
    attend: Callable[..., object]


def choose() -> LaneAttention:
    """The implementation for the running server."""
    if get_exec().kernel.attention_backend == ATTENTION_BACKEND:
        from sglang_trunc.platform.cpu_attention import lane_attention
        from sglang_trunc.platform.cpu_elementwise import store_rows

        return LaneAttention("cpu", store_rows, lane_attention)
    return LaneAttention("torch", reference.store_rows, reference.lane_attention)
