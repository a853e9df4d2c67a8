"""The Triton kernels in Triton's interpreter: a process of its own, since Triton decides when it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "triton_kernels"


def test_kernels_agree_with_their_twins():
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(FOLDER), "-p", "no:cacheprovider"],
        env={**environment, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    # pytest's own code for "no test ran" is not 0 either.
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout, done.stdout[-2000:]
