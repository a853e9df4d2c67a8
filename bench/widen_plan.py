"""The arithmetic of function-preserving widening, tensor by tensor.

A width d becomes D = d * copies * 4^k: channels are repeated `copies` times and the rest is zero. RMSNorm
over D channels then sees (copies * d / D) = 4^-k of the mean square, which multiplying its weight by 2^-k and
its eps by 4^-k undoes, both exact in binary floating point. Matrices read the first copy only and write all
copies. Added heads and MLP units have zero weights. Added layers are copies of existing ones whose branches
are multiplied by zero where they join the residual stream.

Added vocabulary ids must never be chosen, in no state the model can be in. One spare channel carries a
small positive constant from the embedding to the head; added head rows read it with a large negative weight,
sized from the weights so that their logit lies at least GUARD_MARGIN under any real one. The constant is far
too small to move a float32 sum of squares, so real logits do not notice it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

GUARD_VALUE = 2.0**-20
GUARD_MARGIN = 64.0
RAVEN_RMS_LIMIT = 1024.0  # residual streams of a trained model stay far below


@dataclass(frozen=True)
class Channels:
    """How `narrow` channels are laid out in `wide` ones."""

    narrow: int
    wide: int
    copies: int

    @property
    def norm_gain(self) -> float:
        return math.sqrt(self.copies * self.narrow / self.wide)

    @property
    def spare(self) -> int | None:
        """Index of a channel that nothing else uses."""
        return self.wide - 1 if self.copies * self.narrow < self.wide else None

    def read(self, weight: torch.Tensor) -> torch.Tensor:
        """[out, narrow] -> [out, wide]: the first copy is read."""
        return _pad(weight, 1, self.wide)

    def write(self, weight: torch.Tensor) -> torch.Tensor:
        """[narrow, in] -> [wide, in]: every copy is written."""
        return _pad(weight.repeat(self.copies, 1), 0, self.wide)

    def norm(self, weight: torch.Tensor) -> torch.Tensor:
        return _pad(weight.repeat(self.copies) * self.norm_gain, 0, self.wide)


def plan_channels(narrow: int, wide: int) -> Channels:
    """The layout with the fewest copies, which leaves most channels zero."""
    if wide % narrow:
        raise ValueError(f"the new width must be a multiple of {narrow}, got {wide}")
    copies = ratio = wide // narrow
    while copies % 4 == 0:
        copies //= 4
    assert math.isqrt(ratio // copies) ** 2 == ratio // copies
    return Channels(narrow, wide, copies)


def pad_heads(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Zero rows until there are `heads` (rows) of them."""
    return _pad(weight, 0, heads)


def pad_columns(weight: torch.Tensor, columns: int) -> torch.Tensor:
    return _pad(weight, 1, columns)


def widen_embedding(weight: torch.Tensor, channels: Channels, vocab: int, guard: bool) -> torch.Tensor:
    """[V, narrow] -> [vocab, wide]; added ids repeat real ones, so that random test prompts are sane."""
    rows = weight[torch.arange(vocab) % weight.shape[0]]
    wide = _pad(rows.repeat(1, channels.copies), 1, channels.wide)
    if guard:
        assert channels.spare is not None
        wide[:, channels.spare] = GUARD_VALUE
    return wide


def widen_head(weight: torch.Tensor, channels: Channels, vocab: int, last_norm: torch.Tensor) -> torch.Tensor:
    """[V, narrow] -> [vocab, wide]; added rows hold nothing but the guard weight."""
    wide = _pad(channels.read(weight), 0, vocab)
    if vocab > weight.shape[0]:
        assert channels.spare is not None
        wide[weight.shape[0] :, channels.spare] = -guard_weight(weight, last_norm)
    return wide


def guard_weight(head: torch.Tensor, last_norm: torch.Tensor) -> float:
    """A power of two W with W * GUARD_VALUE >= 2 * (largest possible |real logit| + margin)."""
    # a normed row has at most length sqrt(d), each channel then times the norm's weight
    longest = float((head.float() * last_norm.float()).norm(dim=1).max()) * math.sqrt(head.shape[1])
    return 2.0 ** math.ceil(math.log2(2 * (longest + GUARD_MARGIN) / GUARD_VALUE))


def guard_norm_gain(rms_limit: float) -> float:
    """Norm weight of the guard channel (before norm_gain) that keeps it from shrinking."""
    return 2.0 ** math.ceil(math.log2(max(1.0, rms_limit)))


def _pad(weight: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    missing = size - weight.shape[dim]
    if missing < 0:
        raise ValueError(f"cannot shrink dimension {dim} from {weight.shape[dim]} to {size}")
    shape = list(weight.shape)
    shape[dim] = missing
    return torch.cat((weight, weight.new_zeros(shape)), dim=dim)
