"""The truth for a served checkpoint: the reference model, one forward over prompt + output per verdict.

Verdicts are remembered, since servers that agree give the same outputs again and again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from sglang_trunc.reference.checkpoint import load_checkpoint
from sglang_trunc.reference.decode import Mismatch, output_logits, teacher_forced_check

VOCABULARY = 512
LENGTHS = (1, 2, 3, 15, 16, 17, 64, 250, 600)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Reproducible token ids without specials; prompts of different lengths or seeds share no prefix."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(5, VOCABULARY, (length,), generator=generator).tolist()


class Oracle:
    """Greedy truth of one checkpoint at one depth."""

    def __init__(self, directory: Path, depth: int | None = None):
        self.model = load_checkpoint(directory, torch.float32)
        self.depth = depth
        self._verdicts: dict[tuple[tuple[int, ...], tuple[int, ...]], Mismatch | None] = {}

    def mismatch(self, prompt: Sequence[int], output: Sequence[int]) -> Mismatch | None:
        """None if ``output`` is the greedy continuation of ``prompt``."""
        key = (tuple(prompt), tuple(output))
        if key not in self._verdicts:
            self._verdicts[key] = teacher_forced_check(self.model, prompt, output, self.depth)
        return self._verdicts[key]

    def logprobs(self, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
        """float32 [len(output), vocabulary]."""
        return output_logits(self.model, prompt, output, self.depth).float().log_softmax(-1)
