"""What every part of the suite shares: tiny checkpoints and their reference models, made once a session."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

# Tests run beside a server or two: one thread each is faster than two, and results must not depend on it.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny_checkpoint(family, **options)``: the directory of a tiny random checkpoint."""
    from sglang_trunc.reference.tiny import write_tiny

    written: dict[str, Path] = {}

    def checkpoint(family: str, **options) -> Path:
        key = repr((family, sorted(options.items(), key=lambda item: item[0])))
        if key not in written:
            written[key] = write_tiny(family, tmp_path_factory.mktemp(family), **options)
        return written[key]

    return checkpoint
