"""The sentence in an SGLang log that says why a server did not start.

A failing launch leaves several tracebacks: the scheduler's own, then the parent's that noticed a dead
child. The last line is usually the least useful one. ``failure_sentence`` returns the message of the
last exception that is a cause and not an echo of another process's death; without any exception it
returns the last lines of the log.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

EXCEPTION_LINE = re.compile(r"^(?:[\w.]+\.)?\w*(?:Error|Exception|Refused|Interrupt|Exit)\b:? ?(?P<message>.*)$")
LOG_STAMP = re.compile(r"^\[?\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d")
# Messages of processes that only report that another one died.
ECHOES = (
    "scheduler died during initialization",
    "Rank 0 scheduler",
    "Initialization failed",
    "Child process unexpectedly failed",
    "Killing",
)
TAIL_LINES = 12
LEAK = re.compile(r"memory leak detected|Mem Leak Detected|double free|use-after-free", re.IGNORECASE)


def _exceptions(lines: Sequence[str]) -> list[str]:
    """Every exception line with the unindented lines that continue its message."""
    found: list[str] = []
    open_message = False
    for line in lines:
        if match := EXCEPTION_LINE.match(line):
            open_message = bool(match["message"]) and not any(echo in line for echo in ECHOES)
            if open_message:
                found.append(line.strip())
        elif not line.strip() or LOG_STAMP.match(line) or line.startswith(("Traceback", " ", "\t")):
            open_message = False
        elif open_message:
            found[-1] += " " + line.strip()
    return found


def failure_sentence(log: str) -> str:
    """Why the server did not start, from its log."""
    lines = log.splitlines()
    exceptions = _exceptions(lines)
    if exceptions:
        return exceptions[-1]
    tail = [line for line in lines if line.strip()][-TAIL_LINES:]
    return "\n".join(tail) if tail else "the server wrote nothing to its log"


def leaks(log: str) -> list[str]:
    """Lines in which SGLang's own accounting reports a leak."""
    return [line for line in log.splitlines() if LEAK.search(line)]
