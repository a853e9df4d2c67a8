"""Runs a model's program against a task's tests and says whether it passed; nothing of it outlives the call.

    verdict = check(Program(solution, test, "add"), Budget(wall_seconds=30))

Each program gets a supervisor (``evaluation.jail``) in a session of its own. It isolates the program as far as the
machine permits, and the verdict says how far: namespaces for processes and network; an own user id where the bench runs
as root; always an audit hook against processes, signals and sockets, and limits on processor time, address space,
processes and file size. Afterwards every process of the jail is killed: the whole namespace, children by parent
(orphans come to the supervisor), by a marker in the environment, by user id. If the bench itself is killed, the
supervisor notices.

A pass needs a token that is written after the last assert. Code runs only where the caller was told to run it
(``refused_without``): model-written programs are not safe because they look harmless.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from evaluation.jail import processes

BENCH = Path(__file__).parent.parent
BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from evaluation.jail.supervise import main; main()"
GRACE_SECONDS = 20.0  # beyond the wall limit: interpreter start and clearing up on a busy machine
FLAG = "--allow-code-execution"


class Program(NamedTuple):
    solution: str
    test: str  # defines check(candidate)
    entry_point: str


@dataclass(frozen=True)
class Budget:
    """Far above what a right answer takes: tight limits make scores depend on the machine (evalplus issue 5)."""

    wall_seconds: float = 30.0
    cpu_seconds: int = 20
    memory_bytes: int = 4 << 30  # of address space: numpy reserves much more than it uses
    processes: int = 8


DEFAULT_BUDGET = Budget()


class Verdict(NamedTuple):
    passed: bool
    reason: str  # "passed", or why not
    isolation: str  # what kept the program in


def refused_without(allowed: bool) -> None:
    """Raises before anything was generated, not after an hour of it (lm-eval pull request 4198)."""
    if not allowed:
        raise PermissionError(
            f"this task runs programs that a model wrote; give {FLAG} if this machine may run them (they run without "
            "network, under limits, and are killed afterwards, but a container is safer still)"
        )
    if not sys.platform.startswith("linux"):
        raise PermissionError(f"model-written programs run on Linux only; this is {sys.platform}")


def check(program: Program, budget: Budget = DEFAULT_BUDGET, namespaces: bool = True) -> Verdict:
    """One program. ``namespaces`` False does without them, as on a machine that forbids them."""
    sign, token = f"{processes.MARKER}={secrets.token_hex(16)}", secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="sglang-trunc-jail-", ignore_cleanup_errors=True) as folder:
        job = {
            **program._asdict(),
            "folder": folder,
            "token": token,
            "sign": sign,
            "wall_seconds": budget.wall_seconds,
            "limits": [budget.cpu_seconds, budget.memory_bytes, budget.processes],
            "namespaces": namespaces,
        }
        try:
            report = _supervised(job, budget.wall_seconds + GRACE_SECONDS, folder)
        finally:
            _, unended = processes.end_all(sign)
    if unended:
        raise RuntimeError(f"{unended} processes of a program under test could not be ended")
    return report


def _supervised(job: dict[str, Any], seconds: float, folder: str) -> Verdict:
    supervisor = subprocess.Popen(
        [sys.executable, "-I", "-B", "-c", BOOT, str(BENCH)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=_environment(job["sign"], folder),
        start_new_session=True,
    )
    assert supervisor.stdin is not None
    assert supervisor.stdout is not None
    with supervisor.stdin, supervisor.stdout:
        try:
            supervisor.stdin.write(json.dumps(job).encode() + b"\n")
            supervisor.stdin.flush()
            # Standard input stays open: its end would tell the supervisor that nobody waits any more.
            answer = _read_line(supervisor, seconds)
        except (OSError, TimeoutError) as problem:
            return Verdict(False, f"the supervisor was lost ({problem})", "unknown")
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(supervisor.pid, signal.SIGKILL)
            supervisor.wait()
    try:
        said = json.loads(answer)
    except ValueError:
        return Verdict(False, "the supervisor was lost (killed by the program, or by the machine)", "unknown")
    return Verdict(said["passed"], said["reason"], isolation_sentence(said))


def isolation_sentence(report: dict[str, Any]) -> str:
    kept = "processes and network in namespaces" if report["network"] == "namespace" else "sockets by an audit hook"
    return f"{kept}, {'own user id' if report['own_user'] else 'the same user id'}, limits"


def _read_line(supervisor: subprocess.Popen[bytes], seconds: float) -> bytes:
    """The answer, or what came of it. ``communicate`` would close standard input at once."""
    assert supervisor.stdout is not None
    if not select.select([supervisor.stdout], [], [], seconds)[0]:
        raise TimeoutError(f"no answer in {seconds:.0f} s")
    return supervisor.stdout.readline()


def _environment(sign: str, folder: str) -> dict[str, str]:
    name, _, value = sign.partition("=")
    return {
        name: value,
        "PATH": "/usr/bin:/bin",
        "HOME": folder,
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
    }
