"""Processes of one jail: found by parent, by a marker in the environment, by user id; and ended.

Three signs, since each can be shaken off alone: a double fork changes the parent (but a subreaper gets the
orphan), an exec with an empty environment loses the marker, and an own user id exists only where the bench runs
as root. Read from /proc; processes of other users whose environment cannot be read are no concern of ours.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

MARKER = "SGLANG_TRUNC_JAIL"  # environment variable of a jail's processes
PAUSE_SECONDS = 0.01


def alive() -> Iterator[tuple[int, int]]:
    """(pid, parent's pid) of every process that is not a zombie."""
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            # The command in parentheses may hold anything, so fields are counted from its last one.
            state, parent = file.read().rpartition(b")")[2].split()[:2]
            if state not in (b"Z", b"X"):
                yield int(name), int(parent)


def descendants(root: int) -> set[int]:
    """All living processes under ``root``, itself left out."""
    children: dict[int, list[int]] = {}
    for pid, parent in alive():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    waiting = [root]
    while waiting:
        fresh = [pid for pid in children.get(waiting.pop(), ()) if pid not in found]
        found.update(fresh)
        waiting += fresh
    return found


def marked(sign: str) -> set[int]:
    """Living processes whose environment has the entry ``sign`` (NAME=value)."""
    found = set()
    for pid, _ in alive():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            if sign.encode() in file.read().split(b"\0"):
                found.add(pid)
    return found


def of_user(uid: int) -> set[int]:
    """Living processes of a user."""
    found = set()
    for pid, _ in alive():
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid == uid or _real_uid(pid) == uid:
                found.add(pid)
    return found


def _real_uid(pid: int) -> int:
    """/proc/PID belongs to root where the process has changed its user, so its status is asked as well."""
    with open(f"/proc/{pid}/status", "rb") as file:
        line = next(line for line in file if line.startswith(b"Uid:"))
    return int(line.split()[1])


def belonging(sign: str, root: int | None = None, uid: int | None = None) -> set[int]:
    """Every process with one of the three signs; the caller and ``root`` left out."""
    found = marked(sign)
    if root is not None:
        found |= descendants(root)
    if uid is not None:
        found |= of_user(uid)
    return found - {os.getpid(), root}


def end_all(sign: str, root: int | None = None, uid: int | None = None, seconds: float = 5.0) -> tuple[int, int]:
    """Kill all of them until a look at /proc finds none. (processes found at first, processes that would not end)."""
    first = found = belonging(sign, root, uid)
    deadline = time.monotonic() + seconds
    while found and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        time.sleep(PAUSE_SECONDS)
        found = belonging(sign, root, uid)
    return len(first), len(found)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
