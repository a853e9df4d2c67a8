"""Tests of the Triton kernels: in the interpreter on the CPU, compiled on a GPU.

Triton decides when it is imported, so one process does one of the two. ``test_interpreter.py`` next door runs this
folder in a process with ``TRITON_INTERPRET=1``; without the variable the tests carry the mark ``gpu``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import triton

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if triton.knobs.runtime.interpret:
        return
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device() -> str:
    if triton.knobs.runtime.interpret:
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device, and TRITON_INTERPRET is not set")
    return "cuda"
