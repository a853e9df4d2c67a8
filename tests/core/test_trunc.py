"""TRUNC over the cache-less reference: same tokens as plain greedy decoding, whatever is drafted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_trunc.core.counters import Counters
from sglang_trunc.core.options import TruncOptions
from sglang_trunc.core.trunc import count_accepted, trunc_round
from sglang_trunc.reference.decode import greedy
from sglang_trunc.reference.tiny import build_tiny
from tests.core.reference_engine import ReferenceLanes

PROMPTS = [[5, 9, 17, 33], [100], [7, 7, 7, 8, 8, 301, 4]]


@pytest.fixture(scope="module", params=["ouro", "huginn"])
def model(request):
    return build_tiny(request.param)


@pytest.fixture(scope="module")
def plain(model):
    """Plain greedy continuations of the prompts."""
    return [greedy(model, prompt, 16) for prompt in PROMPTS]


def decode(
    model, prompts, length: int, options: TruncOptions, budgets=None, look_up=lambda request, output, most: []
) -> tuple[list[list[int]], Counters]:
    """All prompts side by side, until each has ``length`` tokens; every request may overshoot its last round."""
    counters = Counters()
    outputs = [greedy(model, prompt, 1) for prompt in prompts]
    while min(map(len, outputs)) < length:
        committed = [prompt + output[:-1] for prompt, output in zip(prompts, outputs, strict=True)]
        engine = ReferenceLanes(model, committed)
        roots = torch.tensor([output[-1] for output in outputs])
        room = budgets or [options.block_size] * len(prompts)
        lookups = [look_up(index, output, room[index] - 1) for index, output in enumerate(outputs)]
        run = trunc_round(engine, roots, room, options, counters, lookups=lookups)
        for output, tokens, count in zip(outputs, run.tokens.tolist(), run.lengths.tolist(), strict=True):
            output += tokens[:count]
    return [output[:length] for output in outputs], counters


def options(d1: int, block: int, threshold: float = 0.0) -> TruncOptions:
    return TruncOptions(d1=d1, block_size=block, draft_threshold=threshold)


@pytest.mark.parametrize(("block", "threshold"), [(1, 0.0), (2, 0.0), (5, 0.0), (5, 0.3)])
def test_tokens_equal_plain_decoding_at_every_draft_depth(model, plain, block, threshold):
    for d1 in {1, model.full_depth // 2, model.full_depth}:
        got, _ = decode(model, PROMPTS, 12, options(d1, block, threshold))
        assert got == [output[:12] for output in plain], f"d1={d1}"


def test_full_depth_drafts_are_all_accepted(model):
    _, counters = decode(model, PROMPTS, 13, options(model.full_depth, 4))
    assert counters.accepted == counters.drafted > 0


def test_unequal_budgets(model, plain):
    got, counters = decode(model, PROMPTS, 10, options(1, 6), budgets=[1, 6, 3])
    assert got == [output[:10] for output in plain]
    assert counters.drafted == counters.rounds * (0 + 5 + 2)


def test_counters_obey_their_identities(model):
    _, counters = decode(model, PROMPTS, 16, options(1, 4))
    rounds, requests, full = counters.rounds, len(PROMPTS), model.full_depth
    assert counters.tokens == counters.accepted + counters.runs
    assert counters.runs == rounds * requests
    assert counters.drafted == rounds * requests * 3
    assert counters.ticks == rounds * (4 * 1 + full - 1)
    assert counters.rows == rounds * requests * (4 * 1 + 4 * (full - 1))
    assert sum(counters.accepted_by_position.values()) == counters.accepted
    assert sum(rows * ticks for rows, ticks in counters.widths.items()) == counters.rows
    assert counters.readouts[full] == rounds * requests * 4
    report = counters.report()
    assert report["accept_length"] == counters.tokens / counters.runs


class WrongOnPurpose(ReferenceLanes):
    """Early readouts name a token that full depth never chooses."""

    def path_logits(self, request, offset):
        logits = super().path_logits(request, offset)
        return logits if self.depth[request, offset] == self.recurrences else -logits


def test_a_drafter_wrong_on_every_token_changes_nothing():
    model = build_tiny("ouro")
    prompt, output = PROMPTS[0], greedy(build_tiny("ouro"), PROMPTS[0], 1)
    counters = Counters()
    while len(output) < 12:
        engine = WrongOnPurpose(model, [prompt + output[:-1]])
        run = trunc_round(engine, torch.tensor([output[-1]]), [4], options(1, 4), counters)
        output += run.tokens[0, : run.lengths[0]].tolist()
    assert output[:12] == greedy(model, prompt, 12)
    assert counters.accepted == 0


chain = st.lists(st.integers(0, 3), min_size=1, max_size=6)


@given(st.lists(st.tuples(chain, st.integers(1, 6)), min_size=1, max_size=4), st.data())
@settings(max_examples=200, deadline=None)
def test_count_accepted_is_the_longest_agreeing_prefix(rows, data):
    width = max(len(tokens) for tokens, _ in rows)
    lengths = [min(len(tokens), limit) for tokens, limit in rows]
    chains = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens, _ in rows])
    choices = torch.tensor([[data.draw(st.integers(0, 3)) for _ in range(width)] for _ in rows])
    want = []
    for tokens, verdicts, length in zip(chains.tolist(), choices.tolist(), lengths, strict=True):
        kept = 0
        while kept + 1 < length and tokens[kept + 1] == verdicts[kept]:
            kept += 1
        want.append(kept)
    assert count_accepted(chains, choices, torch.tensor(lengths)).tolist() == want


@pytest.mark.parametrize("wrong_from", [0, 1, 3, 99])
@pytest.mark.parametrize("threshold", [0.0, 0.3])
def test_looked_up_tokens_change_no_text(model, plain, wrong_from, threshold):
    """Right at first, wrong from some token on; one request finds nothing."""

    def look_up(request: int, output: list[int], most: int) -> list[int]:
        right = plain[request][len(output) : len(output) + min(most, 4)]
        return [] if request == 1 else [t if i < wrong_from else (t + 1) % 500 for i, t in enumerate(right)]

    for d1 in {1, model.full_depth // 2, model.full_depth}:
        got, counters = decode(model, PROMPTS, 12, options(d1, 6, threshold), look_up=look_up)
        assert got == [output[:12] for output in plain], f"d1={d1}"
        assert counters.looked_up > 0
        assert counters.tokens == counters.accepted + counters.runs
        assert counters.accepted <= counters.drafted
        if d1 == model.full_depth:
            assert (counters.screened_out > 0) == (wrong_from < 4)


def test_screening_costs_one_pass_to_d1(model, plain):
    """Four right tokens enter together: d1 ticks for all of them and the root."""
    counters, depth = Counters(), model.full_depth
    look_up = [plain[0][1:5]]
    engine = ReferenceLanes(model, [PROMPTS[0]])
    trunc_round(engine, torch.tensor(plain[0][:1]), [5], options(depth, 5), counters, lookups=look_up)
    assert counters.ticks == depth
    assert (counters.drafted, counters.accepted, counters.screened_out) == (4, 4, 0)
