"""What every depth would have said along served texts: agreement with full depth, and distance to it.

Teacher-forced: one pass of the cache-less reference over prompt and answer gives the distribution of every depth at
every position of the answer, with the prefix that a served lane would have had. The texts are plain greedy answers.

TV distance at a position is half the L1 distance between the two distributions at temperature 1, without top-p.
Needs the checkpoint on this machine, and memory for two [tokens, vocabulary] matrices in float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_trunc.core.pipeline import Choice
from sglang_trunc.reference.decode import first_argmax
from sglang_trunc.reference.looped import LoopedReference


class Told(NamedTuple):
    """One text. Rows are answer tokens, columns depths 1..R."""

    choices: Tensor  # int64 [T, R]
    probabilities: Tensor  # float32 [T, R]: of the choice, by its own depth
    distances: Tensor  # float32 [T, R]: TV distance to full depth, the last column 0


class DepthFigures(NamedTuple):
    """Means over all tokens; keys are depths below R."""

    tokens: int
    recurrences: int
    agreement: dict[int, float]
    distance: dict[int, float]


@torch.inference_mode()
def tell(model: LoopedReference, prompt: Sequence[int], output: Sequence[int]) -> Told:
    """``output``: int ids of an answer, at least one."""
    ids = torch.tensor([*prompt, *output], dtype=torch.int64)
    context, state = model.begin(ids)
    states = []
    for _ in range(model.full_depth):
        state = model.advance(context, state)
        states.append(state)
    rows = slice(len(prompt) - 1, -1)
    full = model.readout(context, states[-1])[0, rows].float().softmax(-1)
    columns = []
    for state in states:
        logits = model.readout(context, state)[0, rows].float()
        own = logits.softmax(-1)
        chosen = first_argmax(logits)
        distance = (own - full).abs().sum(-1) / 2
        columns.append((chosen, own.gather(-1, chosen[:, None])[:, 0], distance))
    return Told(*(torch.stack(parts, dim=1) for parts in zip(*columns, strict=True)))


def summed_up(told: Iterable[Told]) -> DepthFigures:
    """Token-weighted. Raises ValueError without a token."""
    texts = list(told)
    if not texts:
        raise ValueError("there is no text to look at")
    choices, _, distances = (torch.cat(parts) for parts in zip(*texts, strict=True))
    agree = (choices == choices[:, -1:]).double().mean(0)
    distance = distances.double().mean(0)
    depths = range(1, choices.shape[1])
    return DepthFigures(
        len(choices),
        choices.shape[1],
        {depth: float(agree[depth - 1]) for depth in depths},
        {depth: float(distance[depth - 1]) for depth in depths},
    )


class ToldText:
    """A text for the simulator (``sim_paths.Text``): on the text's path every depth says what it said.

    Beside it a path answers like the text at the same position, under tokens of its own.
    """

    def __init__(self, told: Told):
        self._choices = told.choices.tolist()
        self._probabilities = told.probabilities.tolist()
        # The first answer token is the prefill's; the simulated text starts with it.
        self.tokens = [row[-1] for row in self._choices]
        self.first, self.end = 0, len(self.tokens) - 1
        self.warm = self.overlap = False

    def start(self):
        from sim_paths import TokenPath

        return TokenPath(self, 0, on_text=True, node=None)

    def says(self, path, depth: int) -> Choice:
        row = min(path.index + 1, len(self._choices) - 1)
        token, probability = self._choices[row][depth - 1], self._probabilities[row][depth - 1]
        inside = path.on_text and path.index + 1 < len(self._choices)
        return Choice(token if inside else path.stand_in(token), probability)

    def node_after(self, path, token: int) -> None:
        return None
