"""Sampled texts follow full depth's law: two tokens jointly, under every schedule and policy, by counting draws.

The model is a table (``markov_stand``), so the law is known exactly. Thousands of requests with seeds of their own
share the rounds, as they would in a server: their lanes compete for rows, are dropped and started again.
"""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from sglang.srt.layers.sampler import top_p_normalize_probs_torch

from sglang_trunc.core.lane_tree import LaneTree
from sglang_trunc.core.options import RESIDUAL, SEEDED, DualOptions, SingleOptions, TruncOptions
from tests.engine.markov_stand import FULL_DEPTH, Tables, TableServer
from tests.engine.sampling_stand import request

pytestmark = pytest.mark.usefixtures("sglang_context")
VOCABULARY, ROOT = 40, 3
DRAWS = 20_000
SIDE_BY_SIDE = 2_000  # requests
LEAST = 5.0  # expected draws of a cell of its own

WIDE, NARROW = 100 * SIDE_BY_SIDE, SIDE_BY_SIDE
OPTIONS = {
    "trunc": lambda policy: TruncOptions(1, 3, 0.0, sampling_policy=policy),
    "trunc at 2": lambda policy: TruncOptions(2, 4, 0.0, sampling_policy=policy),
    "trunc threshold": lambda policy: TruncOptions(1, 4, 0.15, sampling_policy=policy),
    "trunc lookup": lambda policy: TruncOptions(1, 4, 0.0, sampling_policy=policy, lookup=3, lookup_min_match=1),
    "single": lambda policy: SingleOptions(1, WIDE, 0.0, sampling_policy=policy),
    "single narrow": lambda policy: SingleOptions(1, NARROW, 0.0, sampling_policy=policy),
    "dual": lambda policy: DualOptions(1, 2, WIDE, 0.0, sampling_policy=policy),
    "single lookup": lambda policy: SingleOptions(1, WIDE, 0.0, sampling_policy=policy, lookup=2, lookup_min_match=1),
    "dual narrow": lambda policy: DualOptions(1, 2, NARROW * 5 // 4, 0.0, sampling_policy=policy),
}
SAMPLING: dict[str, dict[str, float]] = {
    "open": {"temperature": 0.8},
    "top-p": {"temperature": 1.2, "top_p": 0.9},
}
CASES = [
    ("trunc", SEEDED, "open"),
    ("trunc", RESIDUAL, "open"),
    ("trunc at 2", RESIDUAL, "top-p"),
    ("trunc lookup", RESIDUAL, "open"),
    ("trunc threshold", SEEDED, "top-p"),
    ("trunc threshold", RESIDUAL, "top-p"),
    ("single narrow", SEEDED, "top-p"),
    ("single", RESIDUAL, "top-p"),
    ("single narrow", RESIDUAL, "open"),
    ("single lookup", RESIDUAL, "top-p"),
    ("dual narrow", SEEDED, "open"),
    ("dual", RESIDUAL, "open"),
    ("dual narrow", RESIDUAL, "top-p"),
]


@pytest.fixture(autouse=True)
def _no_collector():
    """Thousands of lanes live at once: looking for garbage among them takes half of the time."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def tables() -> Tables:
    return Tables(VOCABULARY, seed=1, spread=0.7, forbidden=0.15)


def law(tables: Tables, wanted: int, temperature: float, top_p: float = 1.0) -> torch.Tensor:
    """Of the last two of so many tokens behind the root: float64 ``[V, V]``."""
    probabilities = torch.softmax(tables.at[FULL_DEPTH].double() / temperature, -1)
    step = top_p_normalize_probs_torch(probabilities, torch.full((VOCABULARY,), top_p))
    before = step[ROOT]
    for _ in range(wanted - 2):
        before = before @ step
    return before.unsqueeze(1) * step


def run(tables: Tables, options: Any, sampling: dict[str, float], wanted: int, waves: int) -> tuple[torch.Tensor, list]:
    """Texts int64 ``[DRAWS, wanted]``, and the counters of all servers that drew them."""
    texts, counters, rng = [], [], random.Random(0)
    # What has just started looks at all that runs: with a continuation each, fewer at a time are quicker.
    count = SIDE_BY_SIDE // 10 if options.lookup else SIDE_BY_SIDE
    for first in range(0, DRAWS, count):
        reqs = []
        for seed in range(first, first + count):
            prompt = [ROOT, *rng.choices(range(VOCABULARY), k=1 + seed % 3), ROOT, seed % VOCABULARY]  # to look up in
            reqs.append(request(f"request {seed}", prompt, wanted + 2, sampling_seed=seed, **sampling))
            reqs[-1].output_ids = [ROOT]
        server = TableServer(tables, options, reqs)
        texts += server.run(wanted, waves)
        counters.append(server.worker.counters)
    return torch.tensor(texts), counters


def check_law(texts: torch.Tensor, exact: torch.Tensor) -> None:
    counts = (texts[:, -2] * VOCABULARY + texts[:, -1]).bincount(minlength=exact.numel())
    expected = exact.flatten() * DRAWS
    assert not counts[expected == 0].any(), "a token without probability"
    alone = expected >= LEAST
    assert alone.sum() > 200
    pooled = [torch.cat((x[alone], x[~alone].sum().view(1))) for x in (counts.double(), expected)]
    assert chisquare(*pooled).pvalue > 0.001


@pytest.mark.parametrize(("options", "policy", "filters"), CASES, ids=[", ".join(case) for case in CASES])
def test_two_tokens_follow_the_exact_law(tables, monkeypatch, options, policy, filters):
    again, original = [], LaneTree.grow
    monkeypatch.setattr(LaneTree, "grow", lambda *args: again.append(args[2].lane is not None) or original(*args))
    # Arrivals push lanes out, and endings make room for them again.
    wanted, waves = (3, 3) if "narrow" in options else (2, 1)
    texts, counters = run(tables, OPTIONS[options](policy), SAMPLING[filters], wanted, waves)
    check_law(texts, law(tables, wanted, **SAMPLING[filters]))
    if "trunc" in options:
        drafted, accepted = (sum(getattr(c, name) for c in counters) for name in ("drafted", "accepted"))
        assert 0.05 * drafted < accepted < 0.95 * drafted
    else:
        assert sum(n for c in counters for depth, n in c.accepted.items() if depth) > 1000
        assert sum(c.restarts for c in counters) > 1000
        assert sum(again) > 100 or "narrow" not in options or policy == SEEDED
