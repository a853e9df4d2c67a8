"""What an answer owes to drafts: whatever is cut, taken back or handed out in parts, and as the schedules tell it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_trunc.core.account import ENDED, Account, chain_sources, draft_names
from sglang_trunc.core.counters import Counters
from sglang_trunc.core.lane_tree import KNOWN, LOOKUP
from sglang_trunc.core.options import TruncOptions
from sglang_trunc.core.pipeline import Schedule
from sglang_trunc.core.trunc import Readout, trunc_round
from sglang_trunc.reference.decode import greedy
from sglang_trunc.reference.tiny import build_tiny
from tests.core.pipeline_stand import ScriptedLookups, Stand
from tests.core.reference_engine import ReferenceLanes
from tests.core.scripted_engine import Script

NAMES = {1: "d1", 4: "d2", LOOKUP: "lookup"}
FULL = 8


def said(tokens: list[tuple[int, int]]) -> dict:
    """Of the tokens that rounds gave: source, ticks."""
    sources, ticks = Counter(source for source, _ in tokens), sum(ticks for _, ticks in tokens)
    return {
        "tokens": len(tokens),
        "drafts_accepted": {name: sources[source] for source, name in NAMES.items()},
        "restarts": sources[KNOWN],
        "full_passes": ticks / FULL,
        "tokens_per_full_pass": len(tokens) * FULL / ticks if ticks else None,
    }


@pytest.mark.parametrize(
    ("given", "names"),
    [((1, None, False), {1: "d1"}), ((2, 0, True), {2: "d1", -1: "lookup"}), ((1, 4, True), NAMES)],
)
def test_a_schedule_has_only_its_own_sources(given, names):
    assert draft_names(*given) == names


def test_before_the_first_round():
    account = Account(NAMES)
    assert account.settle(0) == account.settle(1) == said([])


def test_a_run_is_counted_as_far_as_it_is_handed_out():
    account = Account(NAMES)
    account.add(1, [1, LOOKUP, KNOWN], 6, FULL)
    account.add(4, [4, ENDED], 8, FULL)
    assert account.settle(1) == said([])
    assert account.settle(2) == said([(1, 6)])
    assert account.settle(5) == said([(1, 6), (LOOKUP, 0), (KNOWN, 0), (4, 8)])
    assert account.settle(5) == account.settle(3), "nothing is counted twice, or taken back"
    assert account.settle(6)["tokens_per_full_pass"] == 5 * FULL / 14


def test_what_a_retraction_takes_back_is_not_said():
    """The next token is the prefill's; it is handed out before the worker is called again."""
    account = Account(NAMES)
    account.add(1, [1, KNOWN], 8, FULL)
    account.add(3, [4, 4, 4], 8, FULL)
    account.take_back(3)
    assert account.settle(4) == said([(1, 8), (KNOWN, 0)])
    account.add(4, [1], 4, FULL)
    assert account.settle(5) == said([(1, 8), (KNOWN, 0), (1, 4)])


run = st.lists(st.sampled_from([1, 4, LOOKUP, KNOWN, ENDED]), min_size=1, max_size=4)


@given(st.lists(st.tuples(run, st.integers(0, 9), st.sampled_from(["keep", "keep", "lose"]), st.integers(0, 5))))
@settings(max_examples=300, deadline=None, database=None, derandomize=True)
def test_against_a_list_of_all_tokens(rounds):
    """A prefill, then rounds; after some of them the last run is lost to a retraction, and prefilled again."""
    account, truth, sent = Account(NAMES), [None], 0
    for sources, ticks, fate, part in rounds:
        account.add(len(truth), sources, ticks, FULL)
        if fate == "lose":
            account.take_back(len(truth))
            truth.append(None)
        else:
            truth += [(sources[0], ticks), *((source, 0) for source in sources[1:])]
        sent = min(len(truth), sent + part)
        assert account.settle(sent) == said([token for token in truth[:sent] if token is not None])
    assert account.settle(len(truth)) == said([token for token in truth if token is not None])


# As pipelines tell it.


@pytest.mark.parametrize("lookups", [False, True])
@pytest.mark.parametrize(("depths", "width"), [((4, 1, None), 6), ((6, 1, 3), 9), ((8, 2, 4), 40)])
def test_accounts_of_a_pipeline_add_up_to_its_counters(depths, width, lookups):
    """Requests of different lengths, one of which loses its lanes on the way."""
    plan = Schedule(*depths, width, 0.0, 3 if lookups else 0)
    script = Script(7, {plan.d1: 0.6, plan.d2: 0.8}, 3)
    source = ScriptedLookups(script, 0.6, 3) if lookups else None
    stand = Stand(plan, script, [([1, 2], 23), ([4], 11), ([0, 3], 1)], lookups=source)
    names = draft_names(plan.d1, plan.d2, lookups)
    accounts = {key: Account(names) for key in stand.requests}
    for key in stand.requests:
        stand.join(key)
    rounds = 0
    while stand.active:
        for key, told in stand.round().items():
            request = stand.requests[key]
            made = len(request.tokens) - request.prompt
            assert len(told.sources) == len(told.tokens)
            assert (told.sources[-1] == ENDED) == request.done
            assert told.begin == len(request.tokens) - len(told.tokens)
            accounts[key].add(made - len(told.tokens), told.sources, told.ticks, plan.recurrences)
        rounds += 1
        if rounds == 2:
            stand.leave(0, free=False)
            stand.join(0, prefill=False)
    found = {key: account.settle(stand.requests[key].wanted) for key, account in accounts.items()}
    total, counters = list(found.values()), stand.counters
    assert [one["tokens"] for one in total] == [23, 11, 1]
    for depth, name in names.items():
        assert sum(one["drafts_accepted"][name] for one in total) == counters.accepted[depth]
    assert counters.accepted.total() > 5
    assert sum(one["restarts"] for one in total) == counters.restarts > 0
    assert counters.ended == 3
    assert sum(one["full_passes"] for one in total) * plan.recurrences == pytest.approx(counters.request_ticks)


# As TRUNC tells it.


class Watched:
    """Greedy choices; what d1 let pass of the looked-up tokens, of every request."""

    def __init__(self, looked_up: list[list[int]], full_depth: int):
        self.looked_up = looked_up
        self.full_depth = full_depth
        self.passed: list[int] | None = None

    def __call__(self, readout: Readout) -> torch.Tensor:
        chosen = readout.logits.argmax(-1)
        if self.passed is None:
            said = dict(zip(zip(*(t.tolist() for t in readout.nodes), strict=True), chosen.tolist(), strict=True))
            self.passed = []
            for request, tokens in enumerate(self.looked_up):
                agrees = [said.get((request, place)) == token for place, token in enumerate(tokens)]
                self.passed.append((*agrees, False).index(False))
        return chosen


@pytest.mark.parametrize("d1", [1, 2])
def test_sources_of_a_trunc_run(d1):
    """Looked-up tokens that are right, wrong from the third on, and none."""
    model, prompts = build_tiny("ouro"), [[5, 9, 17, 33], [100], [7, 7, 8]]
    texts, counters, of_lookup = [greedy(model, prompt, 30) for prompt in prompts], Counters(), 0
    for at in range(12):
        looked_up = [texts[0][at + 1 : at + 4], [*texts[1][at + 1 : at + 3], 3], []]
        engine = ReferenceLanes(model, [prompt + text[:at] for prompt, text in zip(prompts, texts, strict=True)])
        watched = Watched(looked_up, model.full_depth)
        roots = torch.tensor([text[at] for text in texts])
        options = TruncOptions(d1=d1, block_size=6, draft_threshold=0.0)
        told = trunc_round(engine, roots, [6, 6, 6], options, counters, watched, looked_up)
        assert watched.passed is not None
        for index, count in enumerate(told.lengths.tolist()):
            sources = chain_sources(told.tokens[index, :count].tolist(), looked_up[index], d1)
            kept = min(count - 1, watched.passed[index])
            assert sources == [LOOKUP] * kept + [d1] * (count - 1 - kept) + [KNOWN]
            of_lookup += kept
    assert 0 < of_lookup < counters.accepted
    assert counters.round_ticks * counters.rounds == counters.ticks


def test_a_draft_that_happens_to_say_what_was_screened_out_before_is_a_draft():
    assert chain_sources([5, 7, 9], [4, 7], 2) == [2, 2, KNOWN]
    assert chain_sources([5], [5], 2) == [KNOWN], "the bonus token is full depth's own"
