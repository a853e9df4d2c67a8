"""``SGLANG_TRUNC_TRACE``: who writes a trace, what is refused at launch, and readouts that leave no mark."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sglang_trunc.core.options import ControlledOptions, DualOptions, OptionError, SingleOptions, TruncOptions
from sglang_trunc.core.pipeline import Schedule
from sglang_trunc.engine.names import TRACE_ENV
from sglang_trunc.engine.options import trace_file
from tests.engine.tree_stand import TreeStand

pytestmark = pytest.mark.usefixtures("sglang_context")


DUAL = DualOptions(1, 2, 8, 0.0)
LANES = ControlledOptions(1, 2, 8, 0.0, lookup=0)


@pytest.mark.parametrize("options", [SingleOptions(1, 8, 0.0), DUAL, LANES], ids=lambda options: options.algorithm)
def test_schedules_of_lanes_write_where_they_are_told(options, monkeypatch, tmp_path):
    assert trace_file(options) is None
    monkeypatch.setenv(TRACE_ENV, str(tmp_path / "t.jsonl"))
    assert trace_file(options) == tmp_path / "t.jsonl"


@pytest.mark.parametrize(
    ("options", "name", "sentence"),
    [
        (
            TruncOptions(1, 4, 0.0),
            "t.jsonl",
            "but TRUNC with a block size writes no trace, only schedules of lanes do.",
        ),
        (dataclasses.replace(LANES, lookup=8), "t.jsonl", "but lookup is 8, and a trace knows lanes that a depth"),
        (DUAL, "missing/t.jsonl", "but there is no folder"),
        (DUAL, "", "but must name a file."),
    ],
)
def test_what_cannot_be_written_is_refused(options, name, sentence, monkeypatch, tmp_path):
    monkeypatch.setenv(TRACE_ENV, str(tmp_path / name))
    with pytest.raises(OptionError, match=f"Environment variable {TRACE_ENV} is .*{sentence}") as caught:
        trace_file(options)
    assert str(caught.value).count(". ") == 0


@pytest.mark.parametrize("family", ["ouro", "huginn"])
def test_a_peek_is_a_readout_that_leaves_no_mark(family, served_model):
    """A coda's readout writes K/V; a peek puts back what was there."""
    model = served_model(family, **({} if family == "ouro" else {"full_depth": 8}))
    stand = TreeStand(model, Schedule(model.shape.recurrences, 1, 2, 8, 0.0), requests=2)
    engine, buffers = stand.engine, [*stand.pool.k_buffer, *stand.pool.v_buffer, stand.runner.hidden]
    marks = []

    def compared(lanes):
        before = [buffer.clone() for buffer in buffers]
        peeked = engine.peek(lanes)
        assert all(map(same, buffers, before))
        logits = type(engine).readout(engine, lanes)
        torch.testing.assert_close(peeked, logits, rtol=0, atol=0)
        marks.append(not all(map(same, buffers, before)))
        return logits

    engine.readout = compared
    for prompt in ([5, 9, 17, 33], [100, 7]):
        stand.submit(prompt, 12)
    stand.run()
    assert len(marks) > 20
    assert any(marks) == (family == "huginn")


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.nan_to_num(7), other.nan_to_num(7))
