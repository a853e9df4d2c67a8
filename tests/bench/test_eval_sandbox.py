"""Programs that a grader must fail, and nothing of which may outlive the call."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
from evaluation import sandbox
from evaluation.jail import processes
from evaluation.sandbox import Budget, Program

pytestmark = pytest.mark.slow  # starts many processes

TEST = """
def check(candidate):
    assert candidate(1, 2) == 3
    assert candidate(-1, 2) == 1
"""
RIGHT = "def add(a, b):\n    return a + b\n"
QUICK = Budget(wall_seconds=3, cpu_seconds=20)
SECONDS = f"300.{os.getpid()}"  # of our own sleepers, so that other ones are told apart
# Starts a process without an audit event, so that only the kernel stands in its way.
SPAWN = f"""
import os
from multiprocessing.util import spawnv_passfds
SECONDS = "{SECONDS}"
def spawn(*words):
    return spawnv_passfds(words[0].encode(), [word.encode() for word in words], [])
"""


@pytest.fixture(params=[True, False], ids=["namespaces", "without"])
def check(request, monkeypatch):
    """Both levels of isolation; afterwards no process of a jail and no folder of one is left."""
    signs, folders = [], []
    make_folder = tempfile.TemporaryDirectory
    end_all = processes.end_all

    def recorded_folder(**options):
        made = make_folder(**options)
        folders.append(Path(made.name))
        return made

    def recorded_sign(sign, *rest):
        signs.append(sign)
        return end_all(sign, *rest)

    monkeypatch.setattr(sandbox.tempfile, "TemporaryDirectory", recorded_folder)
    monkeypatch.setattr(sandbox.processes, "end_all", recorded_sign)

    def one(solution, budget=QUICK, test=TEST):
        return sandbox.check(Program(textwrap.dedent(solution), test, "add"), budget, request.param)

    yield one
    assert signs
    assert not any(processes.marked(sign) for sign in signs)
    assert not any(folder.exists() for folder in folders)


@pytest.mark.parametrize(
    "solution",
    [
        RIGHT,
        "import math, random, hashlib, collections, re\n" + RIGHT,
        "open('notes.txt', 'w').write('x')\nassert open('notes.txt').read() == 'x'\n" + RIGHT,
        RIGHT + "print('x' * 100_000)\n",
        RIGHT + "if __name__ == '__main__':\n    raise RuntimeError('a demonstration')\n",
    ],
)
def test_right_programs_pass(check, solution):
    assert check(solution).passed


FAILURES = {
    "wrong": ("def add(a, b): return a - b", "AssertionError"),
    "right once": ("def add(a, b): return 3", "AssertionError"),
    "syntax": ("def add(a, b) return a + b", "SyntaxError"),
    "no such function": ("def subtract(a, b): return a - b", "defines no 'add'"),
    "raises": ("def add(a, b): raise ValueError('no')", "ValueError: no"),
    "swallows the test": (RIGHT + 'def f():\n    """', "SyntaxError"),
    "replaces check": ("def add(a, b): return 0\ndef check(candidate): pass", "AssertionError"),
    "too deep": ("def add(a, b): return add(a, b)", "RecursionError"),
    "prints the answer, exits": ("import sys\nprint(3)\nprint('passed')\nsys.exit(0)", "SystemExit"),
    "exits when called": ("import os\ndef add(a, b):\n    print(3, flush=True)\n    os._exit(0)", "exit code 0"),
    "kills itself": ("import signal\ndef add(a, b): signal.raise_signal(signal.SIGKILL)", ""),
    "crashes": ("import ctypes\ndef add(a, b): ctypes.string_at(0)", ""),
    "too much memory": ("x = bytearray(64 << 30)\n" + RIGHT, "MemoryError"),
    "too large a file": ("open('x', 'wb').write(bytes(8 << 20))\n" + RIGHT, ""),
    "writes elsewhere": ("open('/tmp/sglang-trunc-planted', 'w')\n" + RIGHT, "PermissionError"),
    "50 children": (
        "import os, time\nfor _ in range(50):\n    if os.fork() == 0:\n        time.sleep(300)\n" + RIGHT,
        "os.fork",
    ),
    "catches the refusal": ("import os\ntry: os.fork()\nexcept BaseException: pass\n" + RIGHT, "tried os.fork"),
    "forks in C": ("import ctypes\nctypes.CDLL(None).fork()\n" + RIGHT, "ctypes.dlsym"),
    "shell": ("import subprocess\nsubprocess.Popen(['sleep', '300'], start_new_session=True)\n" + RIGHT, "Popen"),
    "kills its parent's children": (
        """
        import os, signal
        for name in filter(str.isdigit, os.listdir('/proc')):
            try:
                stat = open(f'/proc/{name}/stat').read()
                if int(stat.rpartition(')')[2].split()[1]) == os.getppid():
                    os.kill(int(name), signal.SIGKILL)
            except OSError:
                pass
        def add(a, b): return a + b
        """,
        "tried os.kill",
    ),
    "kills its parent": ("import os\ntry: os.kill(os.getppid(), 9)\nexcept OSError: pass\n" + RIGHT, "tried os.kill"),
    "connects": (
        "import socket\ntry: socket.create_connection(('127.0.0.1', 9), 1)\nexcept OSError: pass\n" + RIGHT,
        "tried socket",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_planted_failures(check, name):
    solution, reason = FAILURES[name]
    verdict = check(solution)
    assert not verdict.passed
    assert reason in verdict.reason
    assert not Path("/tmp/sglang-trunc-planted").exists()


@pytest.mark.parametrize("body", ["while True: pass", "import time; time.sleep(300)"], ids=["busy", "asleep"])
def test_an_endless_program_is_stopped(check, body):
    begin = time.monotonic()
    verdict = check(f"def add(a, b):\n    {body}", Budget(wall_seconds=1))
    assert verdict[:2] == (False, "out of time")
    assert time.monotonic() - begin < 15


def test_processor_time_is_limited_apart_from_the_clock(check):
    verdict = check("def add(a, b):\n    while True: pass", Budget(wall_seconds=60, cpu_seconds=1))
    assert not verdict.passed
    assert "out of time" in verdict.reason


HIDDEN = {
    "50 children past the guard": "for _ in range(50): spawn('/bin/sleep', SECONDS)",
    "a child": "spawn('/bin/sleep', SECONDS)",
    "a child in its own session": "spawn('/usr/bin/setsid', '/bin/sleep', SECONDS)",
    "a child without the marker": "spawn('/usr/bin/env', '-i', '/bin/sleep', SECONDS)",
    "an orphan": "spawn('/bin/sh', '-c', '/usr/bin/setsid /usr/bin/env -i /bin/sleep ' + SECONDS + ' & exit 0')",
}


@pytest.mark.parametrize("name", HIDDEN)
def test_hidden_children_fail_the_program_and_die(check, name):
    before = sleepers()
    verdict = check(SPAWN + HIDDEN[name] + "\nimport time; time.sleep(0.3)\n" + RIGHT)
    assert not verdict.passed
    assert sleepers() == before


def test_hidden_children_die_with_a_program_that_does_not_end(check):
    before = sleepers()
    solution = SPAWN + "spawn('/usr/bin/setsid', '/usr/bin/env', '-i', '/bin/sleep', SECONDS)\nwhile True: pass"
    assert check(solution, Budget(wall_seconds=1)).reason == "out of time"
    assert sleepers() == before


def sleepers():
    """Every ``sleep`` that a program of this module started."""
    found = set()
    for pid, _ in processes.alive():
        try:
            if Path(f"/proc/{pid}/cmdline").read_bytes() == f"/bin/sleep\0{SECONDS}\0".encode():
                found.add(pid)
        except OSError:
            continue
    return found


def test_nothing_is_left_when_the_bench_is_killed(tmp_path):
    """The supervisor notices, and takes the program along."""
    started = tmp_path / "started"
    bench = f"""
        import sys
        sys.path.insert(0, {str(sandbox.BENCH)!r})
        from evaluation.sandbox import Budget, Program, check
        open({str(started)!r}, "w").close()
        check(Program("while True: pass", "", "add"), Budget(wall_seconds=300, cpu_seconds=300))
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(bench)])
    wait_for(lambda: started.exists() and len(processes.descendants(process.pid)) == 2)
    jailed = processes.descendants(process.pid)
    folders = {Path(f"/proc/{pid}/cwd").readlink() for pid in jailed} - {Path.cwd()}
    assert len(folders) == 1
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_for(lambda: not jailed & {pid for pid, _ in processes.alive()})
    wait_for(lambda: not any(folder.exists() for folder in folders))


def wait_for(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_code_is_refused_unless_asked_for():
    with pytest.raises(PermissionError, match="--allow-code-execution"):
        sandbox.refused_without(False)
    sandbox.refused_without(True)


def test_the_verdict_says_how_the_program_was_kept_in():
    for namespaces in (True, False):
        said = sandbox.check(Program(RIGHT, TEST, "add"), QUICK, namespaces).isolation
        assert "namespaces" in said or "audit hook" in said
        assert ("own user id" in said) == (os.geteuid() == 0)


def test_the_network_is_gone_even_past_the_guard():
    """In a namespace there is not even a loopback."""
    probe = """
        import _socket
        def add(a, b):
            names = [name for _, name in _socket.if_nameindex()]
            return a + b if names == ['lo'] and 'up' not in open('/sys/class/net/lo/operstate').read() else 0
    """
    verdict = sandbox.check(Program(textwrap.dedent(probe), TEST, "add"), QUICK)
    if "network in namespaces" in verdict.isolation:
        assert verdict.passed, verdict.reason
