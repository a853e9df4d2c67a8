"""What the contract's tests share: a small pure model, faulty ones, and ways to count a law."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence

import torch
from scipy.stats import chisquare
from torch import Tensor

from sglang_trunc.core.contract.readout import Context, ScoredContext

LAST_UNIFORM = 1 - 2**-53  # the largest float64 below 1
P_LIMIT = 1e-4  # chi-square tests with fixed seeds fail under it


def row(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64)


def random_rows(seed: int, count: int, vocabulary: int, zeros: int = 0) -> Tensor:
    """Rows with ``zeros`` tokens of probability zero each."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(count, vocabulary, generator=generator, dtype=torch.float64) ** 2 + 1e-3
    for at in range(count):
        rows[at, torch.randperm(vocabulary, generator=generator)[:zeros]] = 0
    return rows / rows.sum(1, keepdim=True)


class ToyModel:
    """A pure function of (context, depth): early depths are blurred versions of the last. Remembers what was asked."""

    def __init__(self, vocabulary: int = 3, recurrences: int = 4, sharpness: float = 1.5, seed: int = 0):
        self.vocabulary = vocabulary
        self.recurrences = recurrences
        self.sharpness = sharpness
        self.seed = seed
        self.calls: list[tuple[int, tuple[Context, ...]]] = []
        self._rows: dict[tuple[Context, int], Tensor] = {}

    def next_rows(self, contexts: Sequence[Context], depth: int) -> list[ScoredContext]:
        self.calls.append((depth, tuple(contexts)))
        return [ScoredContext(context, self.row(context, depth)) for context in contexts]

    def row(self, context: Context, depth: int | None = None) -> Tensor:
        depth = self.recurrences if depth is None else depth
        if (context, depth) not in self._rows:
            number = self.seed
            for token in context:
                number = (number * 31 + token + 1) % 1_000_003
            noise = torch.Generator().manual_seed(number)
            logits = torch.randn(2, self.vocabulary, generator=noise, dtype=torch.float64) * self.sharpness
            share = depth / self.recurrences
            self._rows[context, depth] = (share * logits[0] + (1 - share) * logits[1]).softmax(-1)
        return self._rows[context, depth]

    def joint(self, prompt: Context, length: int) -> dict[Context, float]:
        """Probability of every continuation of that length, at full depth."""
        law = {}
        for tokens in itertools.product(range(self.vocabulary), repeat=length):
            probability = 1.0
            for at, token in enumerate(tokens):
                probability *= float(self.row(prompt + tokens[:at])[token])
            law[tokens] = probability
        return law


class Spoiled(ToyModel):
    """A model whose answers pass through ``spoil`` first."""

    def __init__(self, spoil: Callable[[list[ScoredContext]], list[ScoredContext]], **options):
        super().__init__(**options)
        self.spoil = spoil

    def next_rows(self, contexts: Sequence[Context], depth: int) -> list[ScoredContext]:
        return self.spoil(super().next_rows(contexts, depth))


def grid(points: int, dimensions: int) -> Iterator[tuple[float, ...]]:
    """Cartesian grid of cell midpoints: every probability that is a multiple of 1 / points is counted exactly."""
    return itertools.product([(at + 0.5) / points for at in range(points)], repeat=dimensions)


def assert_law(counts: Counter[Hashable], law: dict[Hashable, float]) -> None:
    """Chi-square and total variation of counts against a law; nothing outside its support."""
    total = counts.total()
    support = {outcome: probability for outcome, probability in law.items() if probability}
    assert set(counts) <= set(support)
    expected = [total * probability for probability in support.values()]
    found = [counts[outcome] for outcome in support]
    assert chisquare(found, expected).pvalue > P_LIMIT
    variation = sum(abs(a - b) for a, b in zip(found, expected, strict=True)) / (2 * total)
    assert variation < 1.5 * (len(support) / total) ** 0.5


def step(outcome: Callable[[float], Hashable], first: Hashable, steps: int = 46) -> float:
    """Where ``outcome(u)`` stops being ``first`` as u grows from 0 to 1, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if outcome(middle) == first else (low, middle)
    return low


def law_of(outcome: Callable[[float], int], vocabulary: int) -> Tensor:
    """Law of an inverse-CDF draw, measured from outside: outcomes grow with u, each on one interval."""
    law = torch.zeros(vocabulary, dtype=torch.float64)
    start = 0.0
    for _ in range(vocabulary):  # a token has one interval
        if start >= 1 - 1e-9:
            break
        token = outcome(start + 1e-12)
        end = step(lambda u, start=start: outcome(start + u * (LAST_UNIFORM - start)), token)
        law[token] += end * (1 - start)
        start += end * (1 - start)
    return law
