"""Lookups with everything that may go wrong in them: one token is a match, the corpus misleads and ends texts early."""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from pathlib import Path

import pytest

from sglang_trunc.serving.counters import counted_since
from tests.server.oracle import prompt_of
from tests.server.setups import LoopSpec, Setup

FOLDER = Path(tempfile.gettempdir()) / f"sglang-trunc-lookups-{os.getpid()}"
CORPUS = FOLDER / "corpus.jsonl"
LOOKUPS = {"LOOKUP": 6, "LOOKUP_MIN_MATCH": 1, "LOOKUP_CANDIDATES": 3, "SCREEN_TOP": 2, "LOOKUP_CORPUS": CORPUS}
SETUP = Setup(
    "ouro",
    LoopSpec(1, 3, 24, 0.0),
    context=512,
    checkpoint={"dial": 0.05, "seed": 4},
    environment={f"SGLANG_TRUNC_{name}": str(value) for name, value in LOOKUPS.items()},
)
END = 0  # the tiny checkpoints' end of text
TOKENS = 80


@pytest.fixture(scope="module", autouse=True)
def corpus():
    FOLDER.mkdir()
    draw = random.Random(3)
    documents = [[END if draw.random() < 0.3 else draw.randrange(1, 300) for _ in range(60)] for _ in range(40)]
    CORPUS.write_text("".join(json.dumps({"tokens": tokens}) + "\n" for tokens in documents))
    yield
    shutil.rmtree(FOLDER)


def echoes(count: int) -> list[list[int]]:
    """Random ids, and the same again."""
    return [prompt_of(24 + number, seed=500 + number) * 2 for number in range(count)]


@pytest.mark.parametrize("concurrency", [1, 3, 8])
@pytest.mark.parametrize("ignore_eos", [True, False])
def test_tokens_are_the_oracles(server, client, oracle, concurrency, ignore_eos):
    before = server.internal_state()
    asked = echoes(8)
    answers = client.generate_many(asked, concurrency, max_new_tokens=TOKENS, ignore_eos=ignore_eos)
    for prompt, answer in zip(asked, answers, strict=True):
        assert oracle.mismatch(prompt, answer.output_ids) is None
        assert len(answer.output_ids) == TOKENS or (not ignore_eos and answer.output_ids[-1] == END)
    spent = counted_since(before, server.internal_state())
    assert spent["drafted_by_depth"]["-1"] > spent["screened_out"] > 0
