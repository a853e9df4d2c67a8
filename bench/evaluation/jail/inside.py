"""In the process of the program under test: guard, run, and prove that every assert has run.

The proof is a token that was drawn for this run. It is written to a pipe after the last assert, so a program that
ends early, by whatever exit code, gives none. Solution and test are compiled apart: no open string or block of
the solution can swallow the test.

A guard (an audit hook, which cannot be taken off again) refuses processes, signals to others, sockets and changes to
files outside the folder. No task needs them, so an attempt fails the program even where it catches the error. What
gets past the hook meets the kernel's limits.

Not covered: a program that reads this module's variables to forge the proof, or whose results compare equal to
anything. Both need intent; a model's answers have none.
"""

from __future__ import annotations

import os
import sys

# Taken now: a program may replace the names in their modules.
from os import WNOHANG, _exit, waitpid, write
from os.path import realpath
from typing import Any

REFUSED = {
    *("os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen", "pty.spawn"),
    *("os.kill", "os.killpg", "signal.pthread_kill"),
    *("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.gethostbyname"),
    *("os.remove", "os.rmdir", "os.rename", "os.link", "os.symlink", "os.chmod", "os.chown", "os.truncate"),
    *("shutil.rmtree", "shutil.move", "ftplib.connect", "urllib.Request"),
}
# C functions that would do the same behind the hook's back.
REFUSED_SYMBOLS = {
    *(
        "fork",
        "vfork",
        "clone",
        "clone3",
        "daemon",
        "system",
        "popen",
        "posix_spawn",
        "posix_spawnp",
        "execve",
        "execv",
    ),
    *("kill", "killpg", "tkill", "tgkill", "sigqueue", "syscall", "ptrace", "unshare", "setns"),
    *("socket", "connect", "bind", "sendto"),
}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
MESSAGE_BYTES = 500


class Guard:
    """Notes and refuses what no program under test may do."""

    def __init__(self, folder: str) -> None:
        self.offences: list[str] = []
        allowed = (realpath(folder) + os.sep, os.devnull)

        def outside(path: Any) -> bool:
            return isinstance(path, str | bytes) and not realpath(os.fsdecode(path)).startswith(allowed)

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            forbidden = event in REFUSED
            if event == "ctypes.dlsym":
                forbidden = arguments[1] in REFUSED_SYMBOLS
            if event == "open":
                path, _, flags = arguments
                forbidden = bool((flags or 0) & WRITING) and outside(path)
            if forbidden:
                self.offences.append(event)
                raise PermissionError(f"{event} is refused to a program under test")

        sys.addaudithook(hook)


def run(solution: str, test: str, entry_point: str) -> None:
    """Runs ``check(entry_point)`` as HumanEval's test code defines it; raises whatever it raises."""
    # Not "__main__": a solution's own demonstration must not run.
    names: dict[str, Any] = {"__name__": "solution"}
    exec(compile(solution, "solution", "exec"), names)
    if entry_point not in names:
        raise NameError(f"the program defines no {entry_point!r}")
    subject = names[entry_point]
    exec(compile(test, "test", "exec"), names)
    names["check"](subject)


def judge(solution: str, test: str, entry_point: str, folder: str, token: str, out: int) -> None:
    """Runs the program, writes the proof or the reason to ``out``, ends this process."""
    guard = Guard(folder)
    try:
        run(solution, test, entry_point)
        said = f"the program tried {guard.offences[0]}" if guard.offences else _children() or token
    except BaseException as problem:  # SystemExit and KeyboardInterrupt are failures as well
        said = f"{type(problem).__name__}: {problem}"
    write(out, said.encode("utf-8", "replace")[:MESSAGE_BYTES])
    _exit(0)


def _children() -> str | None:
    """The program is alone in its process; in a process namespace it also gets its orphans."""
    try:
        waitpid(-1, WNOHANG)
    except ChildProcessError:
        return None
    return "the program left processes behind"
