"""Logit processors on logits made by hand, and how they travel."""

import json
import pickle
from types import SimpleNamespace

import pytest
import torch

from sglang_trunc.serving.probe import ZeroLogit
from sglang_trunc.serving.processors import ThinkingBudget, serialized

START, END = 7, 8


def allowed(prompt, output, budget, end=END):
    """Tokens left to a request, by SGLang's way of calling."""
    request = SimpleNamespace(origin_input_ids=prompt, output_ids=output)
    params = {"thinking_budget": budget, "think_start_id": START, "think_end_id": end, "__req__": request}
    logits = ThinkingBudget()(torch.zeros(1, 12), [params])
    return (logits[0] > -torch.inf).nonzero().squeeze(1).tolist()


EVERY = list(range(12))


@pytest.mark.parametrize(
    ("prompt", "output", "left"),
    [
        ([1, START], [], EVERY),
        ([1, START], [2], EVERY),
        ([1, START], [2, 3], [END]),  # the budget is used up
        ([1, START, 4], [2], [END]),  # tokens of the prompt count
        ([1], [2, 3, 4], EVERY),  # no block was opened
        ([1, START], [2, END, 3, 4], EVERY),  # it is over
        ([1, START, 2, END], [3, START, 4], EVERY),  # another one, from its own start
        ([1, START, 2, END], [3, START, 4, 5], [END]),
        ([1, START], [2, START, 3], EVERY),  # the newest start counts
    ],
)
def test_thinking_ends_with_its_budget(prompt, output, left):
    assert allowed(prompt, output, budget=2) == left


def test_no_budget_at_all_ends_thinking_at_once():
    assert allowed([START], [], budget=0) == [END]


def test_rows_are_judged_one_by_one():
    paths = ([2], [2, 3], [END, 3])
    params = [
        {
            "thinking_budget": 2,
            "think_start_id": START,
            "think_end_id": END,
            "__req__": SimpleNamespace(origin_input_ids=[START], output_ids=path),
        }
        for path in paths
    ]
    logits = ThinkingBudget()(torch.ones(3, 12), params)
    assert logits.isfinite().sum(-1).tolist() == [12, 1, 12]


@pytest.mark.parametrize(
    ("given", "missing"), [({"think_start_id": 1, "thinking_budget": 1}, "think_end_id"), (None, "think_start_id")]
)
def test_a_parameter_that_is_missing_is_named(given, missing):
    with pytest.raises(KeyError, match=missing):
        ThinkingBudget()(torch.zeros(1, 12), [given])


@pytest.mark.parametrize("processor", [ThinkingBudget, ZeroLogit])
def test_a_processor_travels_by_reference(processor):
    given = bytes.fromhex(json.loads(serialized(processor))["callable"])
    assert processor.__module__.encode() in given
    assert pickle.loads(given) is processor


def test_a_class_that_cannot_be_named_is_refused():
    class Local:
        pass

    with pytest.raises(ValueError, match="not at the top of its module"):
        serialized(Local)
