"""One slot, all depths: the KV pool of the looped models.

SGLang hands out one slot a token and shares slots through its radix cache. That stays. Each physical core
layer gets ONE K and ONE V tensor of ``R*N`` rows (``N`` = pool rows); the KV layer (step s, layer l) that
SGLang sees is the contiguous view ``[s*N : (s+1)*N]``. A lane at step s therefore addresses slot t as row
``s*N + t`` of the same tensor, and lanes of any mix of steps, requests and branches go through one attention
call. Bytes a token equal plain decoding's; nothing is copied when a draft is kept or dropped.

Prelude and coda layers keep one row a slot.

``pool_class_for`` makes the class that SGLang's configurator constructs; ``install`` hooks it in for looped
models only.
"""

from __future__ import annotations

import math
import os

import numpy as np
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from torch import Tensor

from sglang_trunc.engine.names import POISON_ENV
from sglang_trunc.engine.options import branch_slots
from sglang_trunc.models.layer_ids import PARTS, LoopShape, Part


class LoopedKVPool(MHATokenToKVPool):
    """``MHATokenToKVPool`` whose core layers are views of one tensor a physical layer.

    Class attributes are filled in by ``pool_class_for``.
    """

    shape: LoopShape
    branches: int = 0  # slots of the worker's own, behind those that SGLang hands out

    def __init__(self, size: int, page_size: int, *args, **options):
        """``size``: slots that SGLang hands out; the attribute counts the worker's, too."""
        self.handed_out = size
        super().__init__(size + -(-self.branches // page_size) * page_size, page_size, *args, **options)

    @property
    def rows_per_step(self) -> int:
        """N: what a lane adds to a slot id per step."""
        return self.size + self.page_size

    @property
    def branch_slots(self) -> range:
        """The worker's slots as they are at the start; later it may hold others, as many as these."""
        first = self.handed_out + self.page_size
        return range(first, first + self.branches)

    def rows(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """K and V of one KV layer as ``[N, H*D]``."""
        return self.k_buffer[layer_id].flatten(1), self.v_buffer[layer_id].flatten(1)

    def flat_rows(self, part: str, index: int) -> tuple[Tensor, Tensor]:
        """K and V of one physical layer over all its steps: ``[R*N, H*D]``, or ``[N, H*D]`` outside the core."""
        return self._flat[part, index]

    def clear_rows(self, slots: int) -> None:
        """Zero the first ``slots`` slots at every step (after a measurement; nothing may be cached yet)."""
        for buffer in (*self.k_buffer, *self.v_buffer):
            buffer[:slots] = 0

    def copy_rows(self, sources: Tensor, targets: Tensor) -> None:
        """Copy K/V of slots ``sources`` to slots ``targets``, at every step. Both int64 ``[n]``."""
        for buffer in (*self.k_buffer, *self.v_buffer):
            buffer[targets] = buffer[sources]

    def _create_buffers_normal(self) -> None:
        if self.layer_num != self.shape.num_kv_layers:
            raise ValueError(
                f"KV pool was asked for {self.layer_num} layers, the looped model has "
                f"{self.shape.num_kv_layers} (prelude {self.shape.prelude} + {self.shape.recurrences} x core "
                f"{self.shape.core} + coda {self.shape.coda})."
            )
        if self.use_hnd or self.kv_cache_layout != "nhd":
            raise ValueError(
                f"KV cache layout {'hnd' if self.use_hnd else self.kv_cache_layout!r} is not supported for "
                "looped models; accepted: nhd (unset SGLANG_USE_HND_KVCACHE)."
            )
        self.k_buffer: list[Tensor] = [torch.empty(0)] * self.layer_num
        self.v_buffer: list[Tensor] = [torch.empty(0)] * self.layer_num
        self._flat: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
        for part in PARTS:
            for index in range(getattr(self.shape, part)):
                self._create_layer(part, index)

    def _create_layer(self, part: Part, index: int) -> None:
        ids = self.shape.layer_ids(part, index)
        rows = self.rows_per_step
        keys = self._allocate(len(ids) * rows, self.head_dim)
        values = self._allocate(len(ids) * rows, self.v_head_dim)
        for step, layer_id in enumerate(ids):
            self.k_buffer[layer_id] = keys[step * rows : (step + 1) * rows]
            self.v_buffer[layer_id] = values[step * rows : (step + 1) * rows]
        self._flat[part, index] = keys.flatten(1), values.flatten(1)

    def _allocate(self, rows: int, head_dim: int) -> Tensor:
        shape = (rows, self.head_num, head_dim)
        if torch.device(self.device).type == "cpu":
            # calloc maps pages on first use: a server that never fills its pool never pays for it.
            memory = np.zeros(math.prod(shape) * self.store_dtype.itemsize, dtype=np.uint8)
            buffer = torch.from_numpy(memory).view(self.store_dtype).view(shape)
        else:
            buffer = torch.zeros(shape, dtype=self.store_dtype, device=self.device)
        if os.environ.get(POISON_ENV) == "1":
            _poison(buffer.view(-1, self.rows_per_step, *shape[1:]), self.page_size)
        return buffer

    def _init_kv_copy_and_warmup(self) -> None:
        if torch.device(self.device).type == "cpu":
            # The tiled copy is a Triton kernel; nothing of ours moves KV.
            self._kv_copy_config = None
            self.use_native_move_kv_cache = True
            return
        super()._init_kv_copy_and_warmup()


def _poison(by_step: Tensor, page_size: int) -> None:
    """Fill everything but the padding page with NaN, so that a read of an unwritten row shows (tests)."""
    by_step[:, page_size:] = float("nan")


def pool_class_for(shape: LoopShape, branches: int = 0) -> type[LoopedKVPool]:
    """The pool class of one model. ``branches``: slots that a worker needs beside SGLang's."""
    return type("LoopedKVPool", (LoopedKVPool,), {"shape": shape, "branches": branches})


def resolve_pool_class(original, self, *, kind: str, default: type) -> type:
    """Hook around ``KVCacheConfigurator._resolve_kv_pool_class``: looped models get their pool, others theirs."""
    chosen = original(self, kind=kind, default=default)
    shape = getattr(self.model_config.hf_config, "loop_shape", None)
    if kind != "mha" or shape is None:
        return chosen
    if chosen is not MHATokenToKVPool and not issubclass(chosen, LoopedKVPool):
        raise ValueError(
            f"KV pool {chosen.__name__} is not supported for looped models; "
            "switch off the page-major layout, KV sharding or unified memory option that selects it."
        )
    return pool_class_for(shape, branch_slots(self.model_config.hf_config))
