"""The supervisor of one program: a process between the bench and code that nobody has read.

Reads a job (one JSON line) from standard input, which stays open as a lifeline: when it closes, the bench is gone and
everything here ends. Answers with one JSON line. Whatever the program did, no process of it is left then.

    {"solution", "test", "entry_point", "folder", "token", "sign", "wall_seconds", "limits": [cpu, memory, processes],
     "namespaces": false to do without}
    {"passed": bool, "reason": str, "network": "namespace" | "audit hook", "own_user": bool, "left": int}
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import sys
import time
from typing import Any

from evaluation.jail import contain, inside, processes

SAID_BYTES = 4096
POLL_SECONDS = 0.05


def main() -> None:
    # Unbuffered: bytes behind the line must stay in the pipe, where select sees them.
    job = json.loads(_line(0))
    contain.become_subreaper()
    isolation = contain.isolate() if job["namespaces"] else contain.Isolation(False, _own_uid())
    ours, theirs = os.pipe()
    if isolation.uid is not None:
        os.chown(job["folder"], isolation.uid, isolation.uid)
    child = os.fork()
    if child == 0:
        os.close(ours)
        _become_the_program(job, isolation, theirs)
    os.close(theirs)
    status = _wait(child, time.monotonic() + job["wall_seconds"])
    left, unended = processes.end_all(job["sign"], os.getpid(), isolation.uid)
    if status == "gone":
        shutil.rmtree(job["folder"], ignore_errors=True)
        os._exit(1)
    reason = _reason(status, _said(ours), job["token"], left, unended)
    report = {
        "passed": reason is None,
        "reason": reason or "passed",
        "network": "namespace" if isolation.namespaces else "audit hook",
        "own_user": isolation.uid is not None,
        "left": left,
    }
    os.write(1, json.dumps(report).encode() + b"\n")


def _own_uid() -> int | None:
    return contain.FIRST_UID + os.getpid() if os.geteuid() == 0 else None


def _become_the_program(job: dict[str, Any], isolation: contain.Isolation, out: int) -> None:
    """In the child. Never returns."""
    try:
        os.chdir(job["folder"])
        nowhere = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(nowhere, standard)
        os.close(nowhere)
        contain.confine(isolation, contain.Limits(*job["limits"]))
        sys.path[:] = [path for path in sys.path if path != sys.argv[1]]
        inside.judge(job["solution"], job["test"], job["entry_point"], job["folder"], job["token"], out)
    except BaseException as problem:
        os.write(out, f"the jail failed: {type(problem).__name__}: {problem}".encode())
    finally:
        os._exit(1)


def _wait(child: int, deadline: float) -> int | str:
    """The child's wait status, "late", or "gone" when the bench has gone."""
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        if time.monotonic() > deadline:
            return "late"
        if select.select([0], [], [], POLL_SECONDS)[0]:
            return "gone"


def _said(pipe: int) -> str:
    os.set_blocking(pipe, False)
    try:
        return os.read(pipe, SAID_BYTES).decode("utf-8", "replace")
    except BlockingIOError:
        return ""


def _reason(status: int | str, said: str, token: str, left: int, unended: int) -> str | None:
    """Why the program failed; None if it passed."""
    if unended:
        return f"{unended} processes could not be ended"
    if status == "late":
        return "out of time"
    if said != token:
        return said.replace(token, "...") or _ended(int(status))
    return "the program left processes behind" if left else None


def _ended(status: int) -> str:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        limit = " (out of time)" if number in (signal.SIGXCPU, signal.SIGKILL) else ""
        return f"ended by {signal.Signals(number).name}{limit} before its tests had run"
    return f"exit code {os.waitstatus_to_exitcode(status)} before its tests had run"


def _line(descriptor: int) -> bytes:
    parts: list[bytes] = []
    while not parts or not parts[-1].endswith(b"\n"):
        part = os.read(descriptor, 1 << 16)
        if not part:
            raise EOFError("the job was cut off")
        parts.append(part)
    return b"".join(parts)
