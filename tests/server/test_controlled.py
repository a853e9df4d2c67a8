"""``--speculative-algorithm trunc`` as it comes: the controller's rows and lookups change no token."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from sglang_trunc.core.control import Decision
from sglang_trunc.serving.counters import STATE_KEY, counted_since
from tests.server.oracle import prompt_of
from tests.server.setups import Controlled, Setup

# Few rows are almost free, as on a GPU, so that the controller has something to decide at any number of requests.
TABLE = {
    "tick": {rows: 1 + max(0, rows - 6) / 8 for rows in (1, 6, 64)},
    "readout": {rows: 0.1 + rows / 60 for rows in (1, 64)},
}
FOLDER = Path(tempfile.gettempdir()) / f"sglang-trunc-controlled-{os.getpid()}"
SCHEDULE = Controlled(1, cost_table=FOLDER / "cost.json", decisions=FOLDER / "decisions.jsonl")
SETUP = Setup("ouro", SCHEDULE, context=512, checkpoint={"dial": 0.05, "seed": 4})
TOKENS = 120


@pytest.fixture(scope="module", autouse=True)
def folder():
    FOLDER.mkdir()
    SCHEDULE.cost_table.write_text(json.dumps(TABLE))
    yield
    shutil.rmtree(FOLDER)


def prompts(count: int) -> list[list[int]]:
    """Every other one repeats itself, so that there is something to look up."""
    some = [prompt_of(20 + 3 * number, seed=300 + number) for number in range(count)]
    return [prompt * 3 if number % 2 else prompt for number, prompt in enumerate(some)]


@pytest.mark.parametrize("concurrency", [1, 3, 8])
def test_tokens_are_the_oracles(server, client, oracle, concurrency):
    before = server.internal_state()
    asked = prompts(8)
    answers = client.generate_many(asked, concurrency, max_new_tokens=TOKENS, ignore_eos=True)
    for prompt, answer in zip(asked, answers, strict=True):
        assert len(answer.output_ids) == TOKENS
        assert oracle.mismatch(prompt, answer.output_ids) is None
    spent = counted_since(before, server.internal_state())
    if concurrency < 8:  # where a row beside the roots costs what they cost, none pays
        assert spent["accepted"] > 0
        assert spent["drafted_by_depth"]["-1"] > 0


def test_sampled_tokens_depend_on_the_seed_alone(client):
    def texts(concurrency: int) -> list[list[int]]:
        sampling = {"sampling_seed": 11, "top_p": 0.9}
        answers = client.generate_many(
            prompts(4), concurrency, max_new_tokens=60, ignore_eos=True, temperature=1.0, sampling=sampling
        )
        return [answer.output_ids for answer in answers]

    assert texts(1) == texts(4)


def test_what_decides_is_shown(server):
    state = server.internal_state()[STATE_KEY]
    assert state["options"]["control"] == "measured"
    assert state["cost"]["tick"] == {str(rows): seconds for rows, seconds in TABLE["tick"].items()}
    said = [Decision(**json.loads(line)) for line in SCHEDULE.decisions.read_text().splitlines()[:-1]]
    assert all(0 <= decision.lanes <= min(decision.room, decision.asked) for decision in said)
    assert {decision.requests for decision in said} >= {1, 3, 8}
    some = [decision for decision in said if decision.lanes]
    assert some
    assert all(decision.tokens_per_second > decision.plain_tokens_per_second for decision in some)
