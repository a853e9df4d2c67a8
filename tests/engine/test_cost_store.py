"""Cost tables: what a measurement is made into, where one is kept, and who may use it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from sglang_trunc.core.control import Decision
from sglang_trunc.core.cycle_cost import CostTable
from sglang_trunc.core.options import ControlledOptions, DualOptions, OptionError, TruncOptions
from sglang_trunc.engine import cost, cost_store
from sglang_trunc.engine.decision_log import DecisionLog
from sglang_trunc.engine.names import CACHE_ENV, COST_ENV, DECISIONS_ENV
from sglang_trunc.engine.options import check_cost_file, decisions_file

TABLE = CostTable(256, {1: 0.01, 4: 0.02}, {1: 0.001, 4: 0.002})
JSON = json.dumps(TABLE._asdict())
CONTROLLED = ControlledOptions(1, 2, 32, 0.02)


@pytest.fixture
def runner() -> SimpleNamespace:
    pool = SimpleNamespace(size=4096)
    return SimpleNamespace(req_to_token=torch.zeros(1, 1, dtype=torch.int32), pool=pool)


@pytest.fixture
def measured(monkeypatch, tmp_path) -> list:
    """What was asked for, whenever a table was measured."""
    asked = []
    monkeypatch.setenv(CACHE_ENV, str(tmp_path / "cache"))
    monkeypatch.delenv(COST_ENV, raising=False)
    monkeypatch.setattr(cost, "measure", lambda runner, *given: asked.append(given) or TABLE)
    return asked


def config(**changes) -> SimpleNamespace:
    hf = {
        "architectures": ["OuroForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "recurrences": 4,
        "vocab_size": 300,
        "num_key_value_heads": 2,
    }
    given = {"model_path": "/models/tiny", "dtype": torch.float32, "hf_config": SimpleNamespace(**hf)}
    return SimpleNamespace(**{**given, **changes})


def test_a_table_is_measured_once_and_kept(runner, measured):
    assert [cost_store.table_for(runner, config(), 16) for _ in range(3)] == [TABLE] * 3
    assert measured == [(256, 16)]


def test_a_kept_table_serves_nothing_else(runner, measured):
    for changes in ({}, {"dtype": torch.bfloat16}, {"model_path": "/models/other"}, {"model_path": "/elsewhere/tiny"}):
        cost_store.table_for(runner, config(**changes), 16)
    cost_store.table_for(runner, config(), 32)
    assert len(measured) == 4


def test_a_damaged_file_is_measured_again(runner, measured, tmp_path):
    cost_store.table_for(runner, config(), 16)
    (kept,) = (tmp_path / "cache").iterdir()
    for text in ("{", "[]", "{}", kept.read_text().replace("tick", "tock")):
        kept.write_text(text)
        assert cost_store.table_for(runner, config(), 16) == TABLE
    assert len(measured) == 5


def test_a_folder_that_cannot_be_written_costs_a_measurement(runner, measured, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_ENV, str(tmp_path / "file" / "cache"))
    assert cost_store.table_for(runner, config(), 16) == TABLE
    assert "could not be kept" in caplog.text


def test_a_table_in_configs_serves_its_shape_and_device(runner, measured, monkeypatch, tmp_path):
    cost_store.table_for(runner, config(), 16)
    (kept,) = (tmp_path / "cache").iterdir()
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "tiny.json").write_text("{}")
    (folder / "tiny.cost.json").write_text(kept.read_text().replace("0.02", "0.03"))
    monkeypatch.setattr(cost_store, "preset_folder", lambda: folder)
    for changes, most, shipped in (
        ({}, 16, True),
        ({"model_path": "/models/other"}, 8, True),
        ({}, 32, False),
        ({"dtype": torch.bfloat16}, 16, False),
    ):
        table = cost_store.table_for(runner, config(**changes), most)
        assert (table.tick[4] == 0.03) is shipped


def test_a_named_file_is_used_as_it_is(runner, measured, monkeypatch, tmp_path):
    (tmp_path / "mine.json").write_text(JSON)
    monkeypatch.setenv(COST_ENV, str(tmp_path / "mine.json"))
    check_cost_file(CONTROLLED)
    assert cost_store.table_for(runner, config(), 16) == TABLE
    assert measured == []


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "holds no cost table: .*No such file"),
        ("{", "holds no cost table"),
        ("[]", "holds no cost table"),
        ("{}", "needs 'tick'"),
    ],
)
def test_a_file_without_a_table_is_refused_at_launch(monkeypatch, tmp_path, text, sentence):
    path = tmp_path / "mine.json"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv(COST_ENV, str(path))
    with pytest.raises(OptionError, match=f"{COST_ENV} is .*{sentence}"):
        check_cost_file(CONTROLLED)


@pytest.mark.parametrize("options", [TruncOptions(1, 4, 0.0), DualOptions(1, 2, 16, 0.0)])
def test_what_nobody_would_read_is_refused(monkeypatch, tmp_path, options):
    (tmp_path / "t").write_text(JSON)
    monkeypatch.setenv(COST_ENV, str(tmp_path / "t"))
    monkeypatch.setenv(DECISIONS_ENV, str(tmp_path / "d"))
    for check in (check_cost_file, decisions_file):
        with pytest.raises(OptionError, match=f"{options.algorithm} decides by it only where control is measured"):
            check(options)


def test_decisions_are_lines(monkeypatch, tmp_path):
    monkeypatch.setenv(DECISIONS_ENV, str(tmp_path / "d.jsonl"))
    path = decisions_file(CONTROLLED)
    said = [Decision(1, 5, 8, lanes, 2.0, 1.0, 0.5) for lanes in (0, 3)]
    log = DecisionLog(path)
    for decision in said:
        log(decision)
    assert [Decision(**json.loads(line)) for line in path.read_text().splitlines()] == said


def test_other_work_on_the_machine_shows_at_no_other_width():
    assert cost.rising({1: 2.0, 2: 9.0, 4: 3.0, 8: 5.0}) == {1: 2.0, 2: 3.0, 4: 3.0, 8: 5.0}
    assert list(cost.rising({4: 1.0, 1: 1.0})) == [1, 4]


@pytest.mark.parametrize(("pool", "context"), [(1_000_000, 256), (800, 99), (4, 1)])
def test_small_pools_are_measured_with_short_contexts(pool, context):
    assert cost.context_for(pool) == context
