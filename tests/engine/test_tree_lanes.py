"""Lanes that outlive a round, of the served models: the cache-less reference's tokens, plain decoding's K/V."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from sglang_trunc.core.lane_tree import Lane
from sglang_trunc.core.pipeline import Schedule
from sglang_trunc.reference.decode import teacher_forced_check
from sglang_trunc.reference.tiny import FAMILIES
from tests.core.pipeline_stand import contents
from tests.engine.tree_stand import Says, TreeStand

pytestmark = pytest.mark.usefixtures("sglang_context")
PROMPTS = [[5, 9, 17, 33, 250, 11, 99], [100], [7, 7, 7, 8, 8, 301, 4, 77, 13, 5, 6, 200, 8, 8]]
WANTED = (16, 5, 9)  # the first one is alone in the end: narrow budgets bind then
DEPTHS = {
    4: [(1, None), (2, None), (1, 2), (1, 3)],  # all there are
    8: [(1, None), (4, None), (1, 2), (1, 7), (2, 4), (2, 6)],
    16: [(2, None), (8, None), (1, 8), (2, 4), (4, 12)],
}
WIDTHS = (1, 2, 8, 32)
SURVIVAL_AND_PAGE = ((0.0, 1), (0.05, 16), (0.0, 16), (0.05, 1))


def plans(recurrences: int, turn: int) -> list[tuple[Schedule, int]]:
    """(plan, page size): every width at every pair of depths; the others in turn."""
    return [
        (Schedule(recurrences, d1, d2, width, survival), page)
        for number, (d1, d2) in enumerate(DEPTHS[recurrences])
        for place, width in enumerate(WIDTHS)
        for survival, page in [SURVIVAL_AND_PAGE[(place + number + turn) % 4]]
    ]


def wide(cases: list[tuple[Schedule, int]]) -> list[tuple[Schedule, int]]:
    return [(plan, page) for plan, page in cases if plan.max_width > 2]


CASES = {
    **{(family, "cpu", 4): plans(4, turn) for turn, family in enumerate(FAMILIES)},
    ("huginn", "cpu", 8): plans(8, turn=1)[::2],
    ("ouro", "cpu", 8): plans(8, turn=2)[1::2],
    ("retro-llama", "cpu", 16): wide(plans(16, turn=3)),
    ("ouro-gqa", "torch", 4): wide(plans(4, turn=2)),
    ("huginn", "torch", 4): wide(plans(4, turn=1))[1::2],
}


@pytest.fixture(scope="module")
def check(tiny_checkpoint):
    """``check(family, checkpoint, prompt, answer)``: against the reference, each text once."""
    from sglang_trunc.reference.checkpoint import load_checkpoint

    models, right = {}, set()

    def compare(family: str, checkpoint: dict, prompt: list[int], answer: list[int]) -> None:
        directory = tiny_checkpoint(family, **checkpoint)
        text = (directory, *prompt, -1, *answer)
        if text not in right:
            if directory not in models:
                models[directory] = load_checkpoint(directory)
            assert teacher_forced_check(models[directory], prompt, answer) is None
            right.add(text)

    return compare


def started(stand: TreeStand, wanted=WANTED) -> TreeStand:
    for prompt, count in zip(PROMPTS, wanted, strict=True):
        stand.submit(prompt, count)
    return stand


@pytest.mark.parametrize(("family", "attention", "recurrences"), CASES)
def test_tokens_equal_the_references(make_tree_stand, check, family, attention, recurrences):
    checkpoint = {"full_depth": recurrences}
    totals = Counter()
    for plan, page in CASES[family, attention, recurrences]:
        stand = started(make_tree_stand(family, checkpoint, plan, attention=attention, page=page))
        for prompt, wanted, answer in zip(PROMPTS, WANTED, stand.run(), strict=True):
            assert len(answer) == wanted
            check(family, checkpoint, prompt, answer)
        assert max(stand.engine.widths) <= max(plan.max_width, len(PROMPTS))
        counters = stand.counters
        for depth, count in counters.accepted.items():
            totals["second" if depth == plan.d2 else "first"] += count
        totals["restarts"] += counters.restarts
        totals["moves"] += len(stand.engine.moves)
        totals["tails"] += stand.engine.tails
    assert all(totals[name] > 5 for name in ("first", "second", "restarts", "moves", "tails")), totals


# Drafters that are made to be right or wrong: only full depth decides the text.

SAME = (10, 10, 10)
STEPS = SAME[0] - 2  # tokens that a lane was ahead for: all but prefill's and the first round's
RIGHT_AT_D2_MOVES = {(1, 2): 1, (1, 3): STEPS, (2, 6): STEPS}  # a request


def drafts(answers: list[list[int]], right_at: int | None) -> Says:
    """The answer's token at this depth, elsewhere another one, a different one at every depth."""
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True)]

    def says(key: int, lane: Lane) -> int:
        token = texts[key][lane.position + 1]
        return token if lane.depth == right_at else (token + lane.depth) % 500

    return says


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize(
    ("family", "recurrences", "d1", "d2"),
    [
        *((family, 4, 1, d2) for family in FAMILIES for d2 in (None, 3)),
        ("ouro", 4, 2, None),
        ("ouro", 4, 1, 2),
        ("huginn", 8, 2, 6),
    ],
)
def test_a_token_costs_the_depth_that_drafted_it(make_tree_stand, plain, family, recurrences, d1, d2, page):
    plan, checkpoint = Schedule(recurrences, d1, d2, 64, 0.0), {"full_depth": recurrences}
    wanted = [plain(family, checkpoint, prompt, SAME[0]) for prompt in PROMPTS]
    answers = [answer for answer, _ in wanted]
    for right_at in {None, d1, d2}:
        forced = drafts(answers, right_at)
        stand = started(make_tree_stand(family, checkpoint, plan, page=page, forced=forced, buckets=(64,)), SAME)
        assert stand.run() == answers
        assert stand.counters.ticks == recurrences + STEPS * (right_at or recurrences)
        assert stand.counters.accepted == ({right_at: 3 * STEPS} if right_at else {})
        moves = stand.engine.moves
        assert len(moves) == (3 * RIGHT_AT_D2_MOVES[d1, d2] if d2 and right_at == d2 else 0)
        for move in moves:
            assert stand.table[move.request_row, move.position] == (move.slot if page == 1 else move.reserved)
        for key, (_, kv) in enumerate(wanted):
            stand.check_kv(key, kv)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_text_and_kv_are_plain_decodings_to_the_bit(make_tree_stand, plain, family, dtype):
    """Whatever was drafted, dropped, exchanged or copied meanwhile, and however many rows shared a tick."""
    checkpoint = {"full_depth": 4, "dtype": dtype}
    for page, depths, width in ((1, (1, 3), 32), (16, (1, 3), 32), (1, (1, 2), 7), (16, (2, None), 5)):
        stand = started(make_tree_stand(family, checkpoint, Schedule(4, *depths, width, 0.0), page=page))
        answers = stand.run()
        assert depths != (1, 3) or stand.engine.moves
        for key, (prompt, wanted) in enumerate(zip(PROMPTS, WANTED, strict=True)):
            answer, kv = plain(family, checkpoint, prompt, wanted)
            assert answers[key] == answer
            stand.check_kv(key, kv)


# Requests that come, go and return.


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("depths", [(1, None), (1, 3)], ids=str)
@pytest.mark.parametrize("family", ["ouro", "huginn"])
def test_requests_come_go_and_return(make_tree_stand, plain, family, depths, page):
    checkpoint = {"full_depth": 4}
    stand = make_tree_stand(family, checkpoint, Schedule(4, *depths, 24, 0.0), page=page)
    stand.submit(PROMPTS[0], 16)
    stand.round()
    stand.submit(PROMPTS[1], 16)
    stand.round()
    stand.leave(0)  # retracted, and resumed from its text
    stand.submit(PROMPTS[2], 16)
    stand.round()
    stand.resume(0)
    stand.leave(1)
    stand.round()
    stand.leave(2)
    stand.resume(1)
    stand.resume(2)
    stand.round()
    stand.round()
    stand.leave(1)  # aborted
    stand.submit(PROMPTS[1], 7)
    answers = stand.run()
    assert [len(answer) for answer in answers] == [16, len(answers[1]), 16, 7]
    for key, prompt in enumerate((*PROMPTS, PROMPTS[1])):
        answer, kv = plain(family, checkpoint, prompt, 16)
        assert answers[key] == answer[: len(answers[key])]
        if key != 1:
            stand.check_kv(key, kv)
            stand.leave(key)
    assert not stand.pipeline.lanes()
    assert sorted(contents(stand.pipeline.rows)) == list(range(24 + 3))
    assert stand.counters.lanes_dropped > 0
    if depths[1]:
        kept = set(contents(stand.pipeline.slots)) & set(stand.pool.branch_slots)
        assert (len(kept) < 24) == (page == 1), "slots are exchanged, or they are not"


@pytest.mark.parametrize("page", [1, 16])
def test_after_a_flush_every_slot_is_where_it_was(make_tree_stand, plain, page):
    checkpoint = {"full_depth": 4}
    stand = started(make_tree_stand("retro-llama", checkpoint, Schedule(4, 1, 3, 24, 0.0), page=page), SAME)
    for _ in range(4):
        stand.round()
    assert stand.engine.moves
    stand.flush()
    assert not stand.pipeline.lanes()
    assert sorted(contents(stand.pipeline.slots)) == list(stand.pool.branch_slots)
    for key in range(3):
        stand.resume(key)
    for key, answer in enumerate(stand.run()):
        want, kv = plain("retro-llama", checkpoint, PROMPTS[key], SAME[key])
        assert answer == want
        stand.check_kv(key, kv)


def test_requests_may_arrive_while_another_uses_the_whole_width(make_tree_stand, plain):
    stand = make_tree_stand("huginn", {"full_depth": 4}, Schedule(4, 1, None, 4, 0.0))
    says = plain("huginn", {"full_depth": 4}, PROMPTS[0], 16)[0]
    stand.forced = lambda key, lane: (PROMPTS[0] + says)[lane.position + 1] if key == 0 else 0
    stand.submit(PROMPTS[0], 16)
    stand.round()
    assert stand.engine.widths[-1] == 4
    stand.submit(PROMPTS[1], 9)
    stand.submit(PROMPTS[2], 9)
    stand.round()
    assert stand.engine.widths[-1] <= 4
    for key, answer in enumerate(stand.run()):
        assert answer == plain("huginn", {"full_depth": 4}, PROMPTS[key], 16)[0][: len(answer)]
