"""Held-out figures of a demo model: loss per depth, and how often early depths already agree with depth R.

Agreement is the share of positions where the argmax at depth d equals the argmax at full depth: over
held-out text (teacher-forced), and over the model's own greedy continuations of held-out prompts, which is
what drafting meets. All figures are for the stored weights (bfloat16 values, computed in float32).
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from sglang_trunc.reference.decode import first_argmax
from sglang_trunc.reference.looped import LoopedReference

WINDOW = 512
MAX_WINDOWS = 40
NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 24, 96, 96
LONG_PROMPT = 768


@torch.inference_mode()
def evaluate(model: LoopedReference, held_out: torch.Tensor) -> dict[str, object]:
    """`held_out` is one int64 [n] token stream."""
    windows = _windows(held_out, WINDOW + 1, MAX_WINDOWS)
    losses, agreement = [], []
    for window in windows:
        logits = model.all_depths(window[:-1])
        losses.append(torch.stack([F.cross_entropy(x, window[1:]) for x in logits]))
        agreement.append(_agreement(logits))
    long = _windows(held_out, LONG_PROMPT + 1, 4)
    long_losses = [F.cross_entropy(model(x[:-1])[-128:], x[-128:]) for x in long]
    prompts = torch.stack(_windows(held_out, PROMPT_TOKENS, NUM_PROMPTS))
    texts = batch_greedy(model, prompts, NEW_TOKENS)
    own = torch.stack([_agreement(model.all_depths(text)[:, PROMPT_TOKENS - 1 : -1]) for text in texts])
    distinct = [len(set(text[PROMPT_TOKENS:].tolist())) for text in texts]
    return {
        "held_out_tokens": sum(len(w) - 1 for w in windows),
        "loss_per_depth": _rounded(torch.stack(losses).mean(0)),
        "loss_at_positions_640_to_768": round(float(torch.stack(long_losses).mean()), 4),
        "agreement_teacher_forced": _rounded(torch.stack(agreement).mean(0)),
        "agreement_greedy": _rounded(own.mean(0)),
        "greedy_tokens": NUM_PROMPTS * NEW_TOKENS,
        "distinct_tokens_per_continuation": round(sum(distinct) / len(distinct), 1),
    }


@torch.inference_mode()
def batch_greedy(model: LoopedReference, prompts: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """[B, S] prompts of one length -> [B, S + new_tokens], by full recompute, no stopping."""
    ids = prompts
    for _ in range(new_tokens):
        ids = torch.cat((ids, first_argmax(model(ids, last_only=True))), dim=1)
    return ids


def _agreement(logits: torch.Tensor) -> torch.Tensor:
    chosen = first_argmax(logits)
    return (chosen == chosen[-1]).float().mean(-1)


def _windows(stream: torch.Tensor, length: int, count: int) -> list[torch.Tensor]:
    """`count` windows spread evenly over the stream."""
    last = len(stream) - length
    count = min(count, max(1, last // length))
    return [stream[start : start + length] for start in torch.linspace(0, last, count).long().tolist()]


def _rounded(values: torch.Tensor) -> list[float]:
    return [round(float(x), 4) for x in values]
