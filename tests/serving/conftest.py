"""Makes ``fake_sglang`` importable here and in the processes that tests start."""

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


@pytest.fixture
def fake_path(monkeypatch):
    """``python -m fake_sglang`` works in child processes."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
