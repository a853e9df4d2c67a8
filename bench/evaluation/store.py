"""What was measured: JSON lines, appended and never changed; one line for a finished problem.

    {"kind": "run", "run": key, "settings": {...}, "provenance": {...}, "source": ..., "server": {...}}   at each start
    {"kind": "answer", "run", "problem", ...}       one answer (``endpoint.Answer``); the problem is never asked again
    {"kind": "refused", "run", "problem", "reason"}   the server said no; not asked again unless wanted
    {"kind": "grade", "run", "problem", ...}        (``tasks.problem.Grade``)
    {"kind": "difference", "run", "problem", ...}   where a greedy text parts from plain's, judged
    {"kind": "counters", "run", "answers", ...}     the engine's own, of one uninterrupted part of a run
    {"kind": "failed", "contestant", "reason"}      a server that did not start, or broke off

Resume is a set difference: problems less those that have a line. A line is on disk before the next problem of
its worker starts. A process that is killed in the middle of a line leaves half of it; opening the store cuts that off.
A lock keeps a second process from asking the same problems at the same time.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

Line = dict[str, Any]


class StoreError(RuntimeError):
    """The file cannot be used; the text is one sentence."""


def read(path: Path) -> list[Line]:
    """All whole lines; a last one without an end is not there."""
    whole = path.read_bytes().rpartition(b"\n")[0]
    lines = []
    for number, line in enumerate(whole.split(b"\n") if whole else (), start=1):
        try:
            lines.append(json.loads(line))
        except ValueError as problem:
            raise StoreError(f"line {number} of {path} is damaged: {problem}") from problem
    return lines


class Store:
    """``with Store(path) as store:``; thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writing = threading.Lock()
        self._by_kind: dict[str, list[Line]] = {}

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            self._file.close()
            raise StoreError(f"{self.path} is in use by another process") from problem
        self._cut_half_line()
        for line in read(self.path):
            self._by_kind.setdefault(line["kind"], []).append(line)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _cut_half_line(self) -> None:
        content = self.path.read_bytes()
        if content and not content.endswith(b"\n"):
            self._file.truncate(content.rfind(b"\n") + 1)

    def append(self, kind: str, **fields: Any) -> None:
        line = {"kind": kind, **fields}
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        with self._writing:
            self._file.write(data)
            self._file.flush()
            os.fsync(self._file.fileno())
            self._by_kind.setdefault(kind, []).append(line)

    def lines(self, kind: str, run: str | None = None) -> Iterator[Line]:
        """In the order of the file."""
        found = list(self._by_kind.get(kind, ()))
        return (line for line in found if run is None or line["run"] == run)

    def problems(self, kind: str, run: str) -> set[str]:
        return {line["problem"] for line in self.lines(kind, run)}
