"""The one-forward check says exactly what greedy recompute says."""

import pytest
import torch

from sglang_trunc.reference.decode import (
    first_argmax,
    greedy,
    greedy_many,
    output_logits,
    teacher_forced_check,
)
from sglang_trunc.reference.tiny import FAMILIES, build_tiny

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = list(range(11, 31))


@pytest.mark.parametrize("family", FAMILIES)
def test_check_accepts_greedy_and_finds_the_first_departure(family):
    model = build_tiny(family)
    out = greedy(model, PROMPT, 16)
    assert len(out) == 16
    assert teacher_forced_check(model, PROMPT, out) is None
    wrong = list(out)
    wrong[9] = (wrong[9] + 1) % 512
    mismatch = teacher_forced_check(model, PROMPT, wrong)
    assert mismatch is not None
    assert (mismatch.index, mismatch.expected, mismatch.got) == (9, out[9], wrong[9])
    logits = output_logits(model, PROMPT, wrong)
    assert mismatch.margin == pytest.approx(float(logits[9, out[9]] - logits[9, wrong[9]]))
    assert mismatch.margin > 0


def test_depth_is_passed_on():
    model = build_tiny("ouro")
    shallow = greedy(model, PROMPT, 12, depth=1)
    assert shallow != greedy(model, PROMPT, 12)
    assert teacher_forced_check(model, PROMPT, shallow, depth=1) is None
    assert teacher_forced_check(model, PROMPT, shallow) is not None


def test_stop_ids_end_the_output_and_belong_to_it():
    model = build_tiny("ouro")
    out = greedy(model, PROMPT, 12)
    stop = out[5]
    first = out.index(stop)
    assert greedy(model, PROMPT, 12, stop_ids=(stop,)) == out[: first + 1]
    assert greedy_many(model, [PROMPT, PROMPT[:3]], 12, (stop,))[0] == out[: first + 1]
    assert greedy(model, PROMPT, 0) == []


def test_ties_go_to_the_lowest_id():
    assert first_argmax(torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]])).tolist() == [1, 0]


def test_edges():
    model = build_tiny("ouro")
    assert teacher_forced_check(model, PROMPT, []) is None
    with pytest.raises(ValueError, match="prompt_ids"):
        teacher_forced_check(model, [], [1])
