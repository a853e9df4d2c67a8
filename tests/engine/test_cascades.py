"""The residual policy over readouts of many rows: which of them draw, draw again or settle, and with what."""

from __future__ import annotations

import pytest
import torch

from sglang_trunc.core.residual import NONE, Drafts, ResidualMemory, draw_first, draw_second, settle
from sglang_trunc.engine.cascades import Cascade

VOCABULARY = 12


def random_laws(rows: int, seed: int) -> torch.Tensor:
    logits = 2 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return logits.softmax(-1)


def keys_of(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(rows) * 1000 + 3, torch.arange(rows) + 5


@pytest.fixture
def cascade() -> Cascade:
    return Cascade(ResidualMemory(64))


def test_a_row_draws_draws_again_and_settles(cascade):
    """As ``core.residual`` does it for each row alone."""
    rows = 40
    seeds, positions = keys_of(rows)
    q1, q2, p = (random_laws(rows, seed) for seed in (1, 2, 3))
    keys = [f"lane {row}" for row in range(rows)]
    t1 = cascade.choose(keys, [False] * rows, q1, seeds, positions)
    assert t1.tolist() == draw_first(q1, seeds, positions).tolist()
    t2 = cascade.choose(keys, [False] * rows, q2, seeds, positions)
    second = draw_second(q1, t1, q2, seeds, positions)
    assert t2.tolist() == second.tokens.tolist()
    assert 0 < int(second.open.sum()) < rows
    assert [cascade.memory.get(key).t2 != NONE for key in keys] == second.open.tolist()
    found = cascade.choose(keys, [True] * rows, p, seeds, positions)
    assert len(cascade.memory) == 0
    drafts = Drafts(q1, t1, q2, torch.where(second.open, t2, NONE))
    assert found.tolist() == settle(p, seeds, positions, drafts).tolist()
    assert 0 < int((found == t1).sum()) < rows
    assert int(((found == t2) & (t2 != t1)).sum()) > 0


def test_rows_of_one_readout_are_each_at_their_own_point(cascade):
    """Company and order change nothing; a row that has never proposed settles from its own law."""
    rows = 9
    seeds, positions = keys_of(rows)
    before, now = random_laws(rows, 1), random_laws(rows, 2)
    alone = Cascade(ResidualMemory(64))
    proposed = [0, 2, 3, 5, 8]
    for one in (cascade, alone):
        at = torch.tensor(proposed)
        one.choose(proposed, [False] * len(proposed), before[at], seeds[at], positions[at])
    final = [row % 3 == 0 for row in range(rows)]
    order = torch.tensor([4, 8, 0, 1, 7, 2, 6, 3, 5])
    found = torch.zeros(rows, dtype=torch.int64)
    found[order] = cascade.choose(
        order.tolist(), [final[row] for row in order.tolist()], now[order], seeds[order], positions[order]
    )
    for row in range(rows):
        at = torch.tensor([row])
        assert alone.choose([row], [final[row]], now[at], seeds[at], positions[at]).item() == found[row]
        assert cascade.memory.get(row).t1 == alone.memory.get(row).t1
        assert cascade.memory.get(row).t2 == alone.memory.get(row).t2


def test_no_proposal_at_all_is_a_plain_draw_of_its_own(cascade):
    seeds, positions = keys_of(30)
    p = random_laws(30, 4)
    found = cascade.choose(list(range(30)), [True] * 30, p, seeds, positions)
    assert found.tolist() == settle(p, seeds, positions).tolist()


def test_a_second_readout_may_be_the_first_that_proposes(cascade):
    """Where there was no room at d1, d2 draws as d1 would have."""
    seeds, positions = keys_of(3)
    q2 = random_laws(3, 5)
    found = cascade.choose([1, 2, 3], [False] * 3, q2, seeds, positions)
    assert found.tolist() == draw_first(q2, seeds, positions).tolist()
    assert [cascade.memory.get(key).t2 for key in (1, 2, 3)] == [NONE] * 3


def test_laws_of_one_token_settle_on_it(cascade):
    """Requests at temperature 0, whatever was proposed."""
    seeds, positions = keys_of(8)
    for number, law in enumerate((3, 3, 7)):
        certain = torch.zeros(8, VOCABULARY, dtype=torch.float64)
        certain[:, law] = 1.0
        found = cascade.choose(list(range(8)), [number == 2] * 8, certain, seeds, positions)
        assert found.tolist() == [law] * 8


def test_no_rows_are_nothing_to_do(cascade):
    empty = torch.zeros(0, dtype=torch.int64)
    assert cascade.choose([], [], random_laws(0, 0), empty, empty).tolist() == []
