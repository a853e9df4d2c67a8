"""Relaxed acceptance: which drafts take the place of a choice, and that its strictest setting changes nothing."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_trunc.core.relaxed import relax

INF, NAN = math.inf, math.nan
LOGITS = [math.log(4), 0.0, math.log(2), math.log(2), -INF]  # shares of the best: 1, 1/4, 1/2, 1/2, 0


def kept(draft: int, top: int, tau: float, logits=LOGITS) -> bool:
    choice = torch.tensor([99])
    return bool(relax(torch.tensor([logits]), choice, torch.tensor([draft]), top, tau) != choice)


@pytest.mark.parametrize(
    ("draft", "top", "tau", "expected"),
    [
        (0, 1, 1.0, True),
        (2, 1, 0.0, False),
        (2, 2, 0.0, True),  # of two equals the lower id is second ...
        (3, 2, 0.0, False),  # ... and the other third
        (3, 3, 0.0, True),
        (1, 3, 0.0, False),
        (1, 4, 0.0, True),
        (2, 64, 0.499, True),
        (2, 64, 0.501, False),
        (1, 64, 0.249, True),
        (1, 64, 0.251, False),
        (4, 64, 0.0, False),  # masked
        (-1, 64, 0.0, False),  # none
    ],
)
def test_rank_and_share_decide(draft, top, tau, expected):
    assert kept(draft, top, tau) is expected


def test_an_equal_of_the_best_has_its_whole_share():
    assert kept(1, 2, 1.0, [0.3, 0.3, 0.2])
    assert not kept(1, 1, 1.0, [0.3, 0.3, 0.2])
    assert not kept(2, 3, 1.0, [0.3, 0.3, 0.2999])


@pytest.mark.parametrize("logits", [[NAN, 1.0], [1.0, NAN], [INF, 1.0], [NAN, NAN], [-INF, -INF]])
def test_nothing_is_kept_where_logits_are_no_numbers(logits):
    assert not kept(0, 64, 0.0, logits)


def test_tau_is_not_rounded_to_the_logits_type():
    share = math.exp(float(torch.tensor(-0.7)))
    assert kept(1, 2, share, [0.0, -0.7])
    assert not kept(1, 2, share + 1e-12, [0.0, -0.7])


ROWS = st.lists(st.sampled_from([-INF, -1.0, 0.0, 0.5, 1.0]), min_size=1, max_size=6)


def naive(logits: list[float], choice: int, draft: int, top: int, tau: float) -> int:
    """The rule in words: sort by value, then by id; then compare probabilities."""
    ranks = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    masses = [math.exp(value) for value in logits]
    good = draft in ranks[:top] and 0 < masses[draft] >= tau * max(masses)
    return draft if good else choice


@settings(max_examples=200, deadline=None)
@given(ROWS, st.integers(1, 7), st.sampled_from([0.0, 0.1, 0.3, 0.45, 0.8, 1.0]), st.data())
def test_against_the_rule_in_words(logits, top, tau, data):
    draft = data.draw(st.integers(-1, len(logits) - 1))
    row, choice = torch.tensor([logits]), torch.tensor([0])
    assert int(relax(row, choice, torch.tensor([draft]), top, tau)) == naive(logits, 0, draft, top, tau)


def test_the_strictest_setting_is_exact_acceptance():
    noise = torch.Generator().manual_seed(0)
    logits = (torch.randn(5000, 12, generator=noise) * 2).round()
    choices, drafts = logits.argmax(1), torch.randint(-1, 12, (5000,), generator=noise)
    assert torch.equal(relax(logits, choices, drafts, 1, 1.0), choices)
    assert torch.equal(relax(logits, choices, drafts, 1, 0.0), choices)
    best = logits.amax(1)
    loose = relax(logits, choices, drafts, 64, 1.0)
    assert (loose != choices).any()
    assert torch.equal(logits.gather(1, loose[:, None])[:, 0], best)


def test_rows_stand_alone_and_inputs_stay():
    noise = torch.Generator().manual_seed(1)
    logits, drafts = torch.randn(40, 30, generator=noise), torch.randint(-1, 30, (40,), generator=noise)
    choices = logits.argmax(1)
    before = logits.clone(), choices.clone(), drafts.clone()
    together = relax(logits, choices, drafts, 5, 0.2)
    alone = [relax(logits[at : at + 1], choices[at : at + 1], drafts[at : at + 1], 5, 0.2) for at in range(40)]
    assert torch.equal(torch.cat(alone), together)
    assert 0 < (together != choices).sum() < 40
    assert all(torch.equal(a, b) for a, b in zip((logits, choices, drafts), before, strict=True))
    assert together.dtype == torch.int64


@pytest.mark.parametrize(("top", "tau"), [(0, 1.0), (1, -0.1), (1, 1.1), (1, NAN)])
def test_impossible_settings_are_errors(top, tau):
    with pytest.raises(ValueError, match="relaxed acceptance needs top >= 1 and tau from 0 to 1"):
        kept(0, top, tau)


def test_accelerators_never_wait_for_the_host():
    """A meta tensor has no values: whatever asks for one raises."""
    tokens = torch.zeros(4, dtype=torch.int64, device="meta")
    assert relax(torch.zeros(4, 7, device="meta"), tokens, tokens, 2, 0.5).shape == (4,)
