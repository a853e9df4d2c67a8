"""The fake SGLang server in place of the real one, for every command that starts servers."""

import os
import sys
from pathlib import Path

import pytest
from rich.console import Console

FAKE = Path(__file__).parent.parent / "serving"
sys.path.insert(0, str(FAKE))


@pytest.fixture
def fake_servers(monkeypatch):
    """``Server`` starts ``fake_sglang``; configure it with FAKE_* variables."""
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


@pytest.fixture
def console():
    return Console(width=200, record=True, file=open(os.devnull, "w"))


@pytest.fixture
def model(tmp_path):
    """A checkpoint folder with just the files that say what ends an answer."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"eos_token_id": 0}')
    return str(folder)
