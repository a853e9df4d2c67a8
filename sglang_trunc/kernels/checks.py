"""Argument checks of the Triton wrappers: one sentence that names the argument, what is wanted and what came.

A kernel reads raw addresses, so a wrong shape or type would read foreign memory instead of failing. Checks look at
shapes, types, strides and devices only, never at values: nothing waits for the device, so they may run while a graph
is captured.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64)


def check(
    name: str, tensor: Tensor, dtypes: torch.dtype | Sequence[torch.dtype], shape: Sequence[int | None], like: Tensor
) -> None:
    """Raise ``ValueError`` unless ``tensor`` has one of ``dtypes``, this shape (None: any size), a last
    dimension without gaps, and the device of ``like``."""
    accepted = [dtypes] if isinstance(dtypes, torch.dtype) else list(dtypes)
    fits = tensor.dim() == len(shape) and all(
        wanted in (None, found) for wanted, found in zip(shape, tensor.shape, strict=True)
    )
    dense = tensor.dim() == 0 or tensor.shape[-1] <= 1 or tensor.stride(-1) == 1
    if tensor.dtype in accepted and fits and dense and tensor.device == like.device:
        return
    types = " or ".join(str(dtype).removeprefix("torch.") for dtype in accepted)
    sizes = ", ".join("any" if size is None else str(size) for size in shape)
    gaps = "" if dense else f" with strides {list(tensor.stride())}"
    raise ValueError(
        f"{name}: wanted {types} [{sizes}] on {like.device}, the last dimension without gaps; "
        f"got {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}{gaps}."
    )


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least ``size`` (and at least 1): extents of Triton blocks."""
    return 1 << max(size - 1, 0).bit_length()
