"""The controller's decisions as lines of JSON, one a cycle, where ``SGLANG_TRUNC_DECISIONS`` names a file."""

from __future__ import annotations

import json
from pathlib import Path

from sglang_trunc.core.control import Decision


class DecisionLog:
    """``core.control.Control``'s ``explain``."""

    def __init__(self, path: Path):
        self._file = path.open("w", encoding="utf-8", buffering=1)  # by line: a server may be killed

    def __call__(self, decision: Decision) -> None:
        self._file.write(json.dumps(decision._asdict()) + "\n")
