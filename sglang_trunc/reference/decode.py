"""Plain greedy decoding without a cache, and the one-forward check that stands in for it.

`greedy` recomputes the whole sequence for every token: nothing to get wrong, and slow. Because the models
are causal, a finished output can be judged by ONE forward over prompt + output: position by position the
argmax must be the next token. `teacher_forced_check` does that, some hundred times cheaper, and says how
close the two candidates were where it failed. Ties go to the lowest id, everywhere in this project.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from sglang_trunc.reference.looped import LoopedReference


@dataclass(frozen=True)
class Mismatch:
    index: int  # into output_ids
    expected: int  # the reference's own choice there
    got: int
    margin: float  # reference logit of `expected` minus that of `got`; 0 is an exact tie


def first_argmax(logits: torch.Tensor) -> torch.Tensor:
    """Index of the largest logit over the last dimension, the lowest one on ties."""
    best = logits.amax(dim=-1, keepdim=True)
    return (logits == best).int().argmax(dim=-1)


@torch.inference_mode()
def greedy(
    model: LoopedReference,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    stop_ids: Iterable[int] = (),
    depth: int | None = None,
) -> list[int]:
    """Continuation of the prompt; a stop id ends it and is part of the output."""
    stops = frozenset(stop_ids)
    ids = torch.tensor(list(prompt_ids), dtype=torch.int64)
    out: list[int] = []
    while len(out) < max_new_tokens and not (out and out[-1] in stops):
        token = first_argmax(model(ids, depth=depth, last_only=True)[-1])
        out.append(int(token))
        ids = torch.cat((ids, token.reshape(1)))
    return out


def greedy_many(
    model: LoopedReference,
    prompts: Iterable[Sequence[int]],
    max_new_tokens: int,
    stop_ids: Iterable[int] = (),
    depth: int | None = None,
) -> list[list[int]]:
    stops = frozenset(stop_ids)
    return [greedy(model, prompt, max_new_tokens, stops, depth) for prompt in prompts]


@torch.inference_mode()
def output_logits(
    model: LoopedReference, prompt_ids: Sequence[int], output_ids: Sequence[int], depth: int | None = None
) -> torch.Tensor:
    """Logits [len(output_ids), V]: row i is the distribution that output token i was chosen from."""
    if not prompt_ids:
        raise ValueError("prompt_ids must not be empty")
    ids = torch.tensor([*prompt_ids, *output_ids], dtype=torch.int64)
    return model(ids, depth=depth)[len(prompt_ids) - 1 : -1]


def teacher_forced_check(
    model: LoopedReference, prompt_ids: Sequence[int], output_ids: Sequence[int], depth: int | None = None
) -> Mismatch | None:
    """None if `output_ids` is the greedy continuation, else its first departure from it."""
    if not output_ids:
        return None
    logits = output_logits(model, prompt_ids, output_ids, depth)
    chosen, given = first_argmax(logits), torch.tensor(list(output_ids))
    wrong = (chosen != given).nonzero().flatten()
    if not len(wrong):
        return None
    index = int(wrong[0])
    expected, got = int(chosen[index]), int(given[index])
    margin = float(logits[index, expected].double() - logits[index, got].double())
    return Mismatch(index, expected, got, margin)
