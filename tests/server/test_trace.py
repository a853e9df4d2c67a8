"""A served pipeline's trace: replayed without the model it gives the served counters; its texts are the answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib import resources
from pathlib import Path

import pytest

from sglang_trunc.core.trace import read_traces
from sglang_trunc.serving.counters import STATE_KEY
from tests.server.idle import idle_problem
from tests.server.setups import LoopSpec, Setup

ROOT = Path(__file__).parent.parent.parent
TRACE = Path(tempfile.gettempdir()) / f"sglang-trunc-{os.getpid()}.jsonl"
SETUP = Setup(
    "demo-ouro",
    LoopSpec(1, 2, 8),
    directory=Path(str(resources.files("sglang_trunc"))) / "demos" / "ouro",
    dtype="bfloat16",
    environment={"SGLANG_TRUNC_TRACE": str(TRACE)},
)
PROMPTS = [
    "def area(width, height):\n    return",
    "The old lighthouse stood at the end of the",
    "import os\n\n\ndef listed(folder):\n",
    "for number in range(10):\n    print(",
    "When the rain stopped, they went",
    "class Point:\n    def __init__(self, x, y):\n",
]


@pytest.fixture(scope="module")
def answers(client):
    """One at a time, then four, one of which stops early and one of which is told three tokens only."""
    said = client.generate_many(PROMPTS, 1, max_new_tokens=48, ignore_eos=True)
    client.flush_cache()
    said += client.generate_many(PROMPTS, 4, max_new_tokens=32, ignore_eos=True)
    middle = said[0].output_ids[20]
    said.append(client.generate(PROMPTS[0], max_new_tokens=48, stop_token_ids=[middle]))
    said.append(client.generate(PROMPTS[1], max_new_tokens=3, ignore_eos=True))
    yield said
    TRACE.unlink()


def test_the_replay_has_the_counters_that_were_served(server, answers, tmp_path):
    assert idle_problem(server) is None  # the lanes of the last request have gone
    info = server.info()
    (tmp_path / "info.json").write_text(json.dumps(info))
    command = [sys.executable, "bench/simulate.py", "replay", str(TRACE), "--served", str(tmp_path / "info.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    counters = info["internal_states"][0][STATE_KEY]["counters"]
    assert f"{counters['rounds']} rounds, {counters['tokens']} tokens" in " ".join(done.stdout.split())
    assert counters["accepted"] > counters["tokens"] / 3
    assert counters["warm_starts"] > 0
    assert len(counters["ticks_by_width"]) > 3


def test_its_texts_are_the_answers(answers):
    (trace,) = read_traces(TRACE)
    assert trace.header["model"] == "ouro"
    told = [text.tokens[text.warm :] for text in trace.texts]
    assert len(told) == len(answers)
    for answer in answers:
        ids = answer.output_ids
        assert any(tokens[: len(ids)] == ids for tokens in told)
