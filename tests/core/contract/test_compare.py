"""What may be compared, what is counted, and imported records."""

from __future__ import annotations

import json

import pytest

from sglang_trunc.core.contract.compare import ExperimentRecord, compare_decoding, compare_records, parse_record
from sglang_trunc.core.contract.decode import ChainDecoder, DecodeRun, PlainDecoder, TreeDecoder
from sglang_trunc.core.contract.readout import QueryCounts
from tests.core.contract.toy import ToyModel

PROMPT = (1, 2)
RECORD = ExperimentRecord("toy@4", PROMPT, (0, 1, 2), 3, 3, 3, 0, 0, 3, 0)


def test_actual_queries_are_told_from_hypothetical_batches():
    model = ToyModel(vocabulary=5)
    compared = compare_decoding(PlainDecoder(), TreeDecoder(model, 2), model, "toy@4", PROMPT, 10, seed=5)
    base, tree = compared
    assert (base.target_id, base.prompt, len(base.continuation)) == ("toy@4", PROMPT, 10)
    assert (tree.target_id, tree.prompt, len(tree.continuation)) == ("toy@4", PROMPT, 10)
    assert base[3:] == (10, 10, 10, 0, 0, 10, 0)
    asked = {depth: [c for at, c in model.calls if at == depth] for depth in (2, 4)}
    assert tree.draft_calls == len(asked[2])
    assert tree.draft_queries == sum(map(len, asked[2]))
    assert base.target_calls + tree.target_calls == len(asked[4])
    assert base.target_queries + tree.target_queries == sum(map(len, asked[4]))
    assert tree.target_batches == tree.rounds < tree.target_queries


def test_both_sides_get_the_same_draws():
    model = ToyModel()
    compared = compare_decoding(PlainDecoder(), PlainDecoder(), model, "toy", PROMPT, 12, seed=8)
    assert compared.baseline == compared.candidate
    again = compare_decoding(PlainDecoder(), ChainDecoder(model, 1, 2), model, "toy", PROMPT, 12, seed=8)
    assert again.baseline == compared.baseline


class Short:
    def decode(self, target, prompt, new_tokens, uniforms):
        return DecodeRun((0,) * (new_tokens - 1), 1, 0, 0, QueryCounts(), 1, 0)


def test_budgets_are_exact():
    with pytest.raises(ValueError, match="the candidate decoder returned 3 tokens, expected exactly 4"):
        compare_decoding(PlainDecoder(), Short(), ToyModel(), "toy", PROMPT, 4, seed=0)
    with pytest.raises(ValueError, match="the baseline decoder returned 3 tokens, expected exactly 4"):
        compare_decoding(Short(), PlainDecoder(), ToyModel(), "toy", PROMPT, 4, seed=0)
    with pytest.raises(ValueError, match="new_tokens = -1 is negative"):
        compare_decoding(PlainDecoder(), PlainDecoder(), ToyModel(), "toy", PROMPT, -1, seed=0)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"target_id": "other"}, "records of two targets, 'toy@4' and 'other'"),
        ({"prompt": (1, 3)}, "records of two prompts, [1, 2] and [1, 3]"),
        ({"continuation": (0, 1)}, "records of two continuation lengths, 3 and 2"),
    ],
)
def test_records_that_do_not_compare(change, sentence):
    with pytest.raises(ValueError, match="records of two") as refusal:
        compare_records(RECORD, RECORD._replace(**change))
    assert str(refusal.value) == sentence


def test_texts_need_not_match():
    other = RECORD._replace(continuation=(2, 2, 2), target_queries=9)
    assert compare_records(RECORD, other) == (RECORD, other)


def test_records_survive_json():
    assert parse_record(json.loads(json.dumps(RECORD._asdict()))) == RECORD


KEYS = ", ".join(ExperimentRecord._fields)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"target_id": 4}, "target_id = 4 is not a string"),
        ({"prompt": "ab"}, "prompt = 'ab' is not a list of token ids"),
        ({"prompt": [1, -1]}, "prompt[1] = -1 is not an integer from 0 on"),
        ({"continuation": [True]}, "continuation[0] = True is not an integer from 0 on"),
        ({"rounds": 1.5}, "rounds = 1.5 is not an integer from 0 on"),
        ({"tok_s": 1}, f"an experiment record has the keys {KEYS}; missing [], unknown ['tok_s']"),
    ],
)
def test_refused_imports(change, sentence):
    with pytest.raises(ValueError, match=r"\w") as refusal:
        parse_record(RECORD._asdict() | change)
    assert str(refusal.value) == sentence


def test_a_missing_key_is_named():
    given = RECORD._asdict()
    del given["draft_calls"]
    with pytest.raises(ValueError, match=r"missing \['draft_calls'\], unknown \[\]"):
        parse_record(given)
