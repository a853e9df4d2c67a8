"""Sparse penalties against a dense twin in plain torch and against SGLang's own penalizers, bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_trunc.core.penalties import Penalties, PenaltyRule

VOCABULARY = 23
TOKEN = st.integers(0, VOCABULARY - 1)
RULES = st.builds(
    PenaltyRule,
    frequency=st.just(0.0) | st.floats(-2, 2),
    presence=st.just(0.0) | st.floats(-2, 2),
    repetition=st.just(1.0) | st.floats(0.05, 2),
    min_new_tokens=st.integers(0, 40),
    stop_ids=st.lists(TOKEN, max_size=3).map(tuple),
)
OUTPUTS = st.lists(TOKEN, max_size=30)
PATHS = st.lists(st.lists(TOKEN, max_size=8), min_size=1, max_size=5)


def random_logits(rows: int, seed: int) -> torch.Tensor:
    logits = torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 10
    logits[:, 3] = -torch.inf  # as a grammar or a bias may leave it
    logits[:, 4] = 0.0
    return logits


def cumulate(rule: PenaltyRule, tokens: list[int], vocabulary: int = VOCABULARY) -> tuple[torch.Tensor, torch.Tensor]:
    """Additive and scaling penalties the slow way: one addition a token, over the whole vocabulary."""
    frequency, presence, scaling = torch.zeros(vocabulary), torch.zeros(vocabulary), torch.ones(vocabulary)
    for token in tokens:
        frequency[token] += torch.tensor(rule.frequency)
        presence[token] = rule.presence
        scaling[token] = rule.repetition
    additive = torch.zeros(vocabulary) - frequency - presence
    if len(tokens) < rule.min_new_tokens:
        additive[list(rule.stop_ids)] += -torch.inf
    return additive, scaling


def penalised(rule: PenaltyRule, logits: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """One row, the slow way."""
    additive, scaling = cumulate(rule, tokens, len(logits))
    logits = logits + additive
    return torch.where(logits < 0, logits * scaling, logits / scaling)


def check(rule: PenaltyRule, penalties: Penalties, output: list[int], paths: list[list[int]], seed: int = 0) -> None:
    logits = random_logits(len(paths), seed)
    expected = torch.stack([penalised(rule, row, output + path) for row, path in zip(logits, paths, strict=True)])
    penalties.apply(logits, range(len(paths)), paths)
    assert torch.equal(logits, expected)


@given(RULES, OUTPUTS, PATHS, st.integers(0, 99))
def test_every_row_is_as_if_its_path_had_been_emitted(rule, output, paths, seed):
    check(rule, Penalties(rule, output), output, paths, seed)


@given(RULES, OUTPUTS, OUTPUTS, PATHS)
def test_an_advanced_request_is_one_with_a_longer_output(rule, output, more, paths):
    penalties = Penalties(rule, output)
    check(rule, penalties, output, paths)
    for token in more:
        penalties.advance(token)
    check(rule, penalties, output + more, paths)
    check(rule, penalties, output + more, [[]])  # the paths have left nothing behind


@given(RULES, OUTPUTS)
def test_dense_form_is_what_sglang_accumulates(rule, output):
    additive, scaling = Penalties(rule, output).dense(VOCABULARY)
    expected = cumulate(rule, output)
    assert torch.equal(additive, expected[0])
    assert torch.equal(scaling, expected[1])


@given(RULES, OUTPUTS, PATHS)
@settings(max_examples=60, deadline=None)
def test_equals_sglangs_penalizers(rule, output, paths):
    penaltylib = pytest.importorskip("sglang.srt.sampling.penaltylib")
    logits = random_logits(len(paths), 1)
    expected = torch.cat(
        [stock(penaltylib, rule, row, output + path) for row, path in zip(logits.split(1), paths, strict=True)]
    )
    Penalties(rule, output).apply(logits, range(len(paths)), paths)
    assert torch.equal(logits, expected)


class Request:
    """What SGLang's penalizers read of a request."""

    def __init__(self, rule: PenaltyRule):
        self.sampling_params = self.tokenizer = self  # one object plays all three
        self.frequency_penalty = rule.frequency
        self.presence_penalty = rule.presence
        self.repetition_penalty = rule.repetition
        self.min_new_tokens = rule.min_new_tokens
        self.stop_token_ids = set(rule.stop_ids)
        self.eos_token_ids = self.additional_stop_token_ids = self.eos_token_id = None


class Batch:
    device = "cpu"

    def __init__(self, reqs: list[Request]):
        self.reqs = reqs


def stock(penaltylib, rule: PenaltyRule, logits: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """A row [1, vocabulary] as plain decoding under overlap scheduling leaves it after these tokens.

    A second request keeps every penalizer in use, as other requests of a batch may.
    """
    from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties

    batch = Batch([Request(rule), Request(PenaltyRule(1.0, 1.0, 1.5, 5, (0,)))])
    kinds = {getattr(penaltylib, f"Batched{name}Penalizer") for name in KINDS}
    orchestrator = penaltylib.BatchedPenalizerOrchestrator(VOCABULARY, batch, kinds)
    for token in tokens:
        orchestrator.cumulate_output_tokens(torch.tensor([token, 7]))
    additive = torch.zeros(2, VOCABULARY)
    orchestrator.accumulate_additive_penalties(additive)
    logits = torch.cat((logits, logits)) + additive
    apply_scaling_penalties(logits, orchestrator.accumulate_scaling_penalties())
    return logits[:1]


KINDS = ("Frequency", "Presence", "Repetition", "MinNewTokens")


def test_frequency_is_added_up_not_multiplied():
    rule = PenaltyRule(frequency=0.1)
    logits = torch.zeros(1, 4)
    Penalties(rule, [2] * 7).apply(logits, [0], [[2] * 3])
    total = torch.tensor(0.0)
    for _ in range(10):
        total += 0.1
    assert logits[0, 2] == -total
    assert logits[0, 2] != -10 * torch.tensor(0.1)


def test_a_stop_id_is_forbidden_until_the_path_makes_the_output_long_enough():
    rule = PenaltyRule(min_new_tokens=4, stop_ids=(1, 5))
    logits = torch.ones(3, 6)
    Penalties(rule, [0, 0]).apply(logits, [0, 1, 2], [[], [2], [2, 2]])
    forbidden = [row.isinf().nonzero().flatten().tolist() for row in logits]
    assert forbidden == [[1, 5], [1, 5], []]


def test_a_forbidden_stop_id_stays_forbidden_whatever_else_is_asked_of_it():
    rule = PenaltyRule(-2.0, -2.0, 0.5, 9, (1,))
    logits = torch.tensor([[0.0, 5.0, 5.0]])
    Penalties(rule, [1, 2]).apply(logits, [0], [[1]])
    assert logits.tolist() == [[0.0, -torch.inf, 18.0]]


def test_stop_ids_beyond_the_vocabulary_are_passed_over():
    logits = torch.zeros(2, 4)
    Penalties(PenaltyRule(min_new_tokens=1, stop_ids=(2, 4, 9))).apply(logits, [0], [[]])
    assert logits.tolist() == [[0.0, 0.0, -torch.inf, 0.0], [0.0] * 4]


def test_only_the_rows_named_change_also_in_a_view():
    wide = random_logits(4, 0)
    before, logits = wide.clone(), wide[:, :-3]
    rule = PenaltyRule(1.0, 0.5, 1.2)
    Penalties(rule, [0, 6]).apply(logits, [3, 1], [[5], [6, 6]])
    for row, tokens in ((3, [0, 6, 5]), (1, [0, 6, 6, 6])):
        before[row, :-3] = penalised(rule, before[row, :-3], tokens)
    assert torch.equal(wide, before)


def test_no_rows_and_no_tokens_are_nothing_to_do():
    logits = random_logits(1, 0)
    before = logits.clone()
    Penalties(PenaltyRule(1.0, 1.0, 1.2, 5, (0,)), [1, 2]).apply(logits, [], [])
    Penalties(PenaltyRule(1.0, 1.0, 1.2)).apply(logits, [0], [[]])
    assert torch.equal(logits, before)


def test_rows_and_paths_must_agree():
    with pytest.raises(ValueError, match="zip"):
        Penalties(PenaltyRule(1.0)).apply(torch.zeros(2, 4), [0, 1], [[]])


def test_another_scaling_may_stand_in():
    """A GPU's server passes SGLang's compiled function; it sees just the logits of tokens that occurred."""
    seen = []

    def scale(logits, penalties):
        seen.append((logits.tolist(), penalties.tolist()))
        logits.fill_(7.0)

    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    Penalties(PenaltyRule(repetition=1.5), [1], scale).apply(logits, [0], [[3]])
    assert seen == [([2.0, 4.0], [1.5, 1.5])]
    assert logits.tolist() == [[1.0, 7.0, 3.0, 7.0]]


@pytest.mark.parametrize(
    ("rule", "active"),
    [
        (PenaltyRule(), False),
        (PenaltyRule(frequency=-0.5), True),
        (PenaltyRule(presence=0.5), True),
        (PenaltyRule(repetition=0.9), True),
        (PenaltyRule(min_new_tokens=1, stop_ids=(0,)), True),
        (PenaltyRule(min_new_tokens=1), False),  # nothing to forbid
        (PenaltyRule(stop_ids=(0,)), False),
    ],
)
def test_active_says_whether_any_logit_can_change(rule, active):
    assert rule.active is active
