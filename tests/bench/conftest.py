"""``bench/`` and the fake server importable, here and in started processes."""

import os
import sys
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
FAKE = ROOT / "tests" / "serving"
sys.path[:0] = [str(ROOT / "bench"), str(FAKE)]


@pytest.fixture
def fake_servers(monkeypatch):
    """``Server`` starts ``fake_sglang``; the servers that were started."""
    from sglang_trunc.serving.server import Server

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FAKE), os.environ.get("PYTHONPATH", "")]))
    started = []
    start = Server.start

    def start_fake(self):
        self.module = "fake_sglang"
        started.append(self)
        return start(self)

    monkeypatch.setattr(Server, "start", start_fake)
    return started


@pytest.fixture(params=[False, True], ids=["cold", "warm"])
def warm(request) -> bool:
    """Whether requests' lanes start while their prompts are being prefilled."""
    return request.param


@pytest.fixture
def record(tmp_path, warm):
    """``record(plan)``: a worker that has run, and its trace, which is in ``t.jsonl``."""
    from tests.bench.recording import recorded

    return partial(recorded, tmp_path / "t.jsonl", warm)
