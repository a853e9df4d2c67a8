"""Killed, interrupted, started again: no answer is lost, none is asked for twice, no server stays behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
from evaluation import command, runner, settings, target
from evaluation.endpoint import Answer
from evaluation.store import Store, read
from evaluation.tasks import catalogue
from fake_sglang import FakeSGLang, Model, Settings
from rich.console import Console

pytestmark = pytest.mark.slow  # starts many processes

ANSWER = Answer("x", [1], 1, 1, "stop", 0.0, 0.1, 0.2, [(0.1, 1)], True, None)


def test_killed_in_the_middle_and_started_again(tmp_path):
    """No answered problem is asked twice, none is lost, whatever moment the kill comes at."""
    (tmp_path / "chat.jsonl").write_text(
        "".join(json.dumps({"id": f"c{n}", "instruction": f"Say {n:03}."}) + "\n" for n in range(24))
    )
    out, concurrency = tmp_path / "out", 2
    fake = Settings(delay=0.002, model=Model())
    bench = [sys.executable, str(command.Path(settings.__file__).parent), "run", "--only-peers", "--task", "chat"]
    with FakeSGLang(fake) as server:
        bench += ["--peer", f"p={server.url}", "--data", str(tmp_path / "chat.jsonl"), "--out", str(out)]
        bench += ["--concurrency", str(concurrency)]
        for kill_at in (3, 14):
            process = subprocess.Popen(bench, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            wait_for(lambda at=kill_at: out.exists() and len(done(out)) >= at)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        # a line that was being written
        with (out / command.LINES).open("ab") as file:
            file.write(b'{"kind":"answer","run":"')
        subprocess.run(bench, check=True, stdout=subprocess.DEVNULL)
    assert sorted(done(out)) == sorted(f"c{n}" for n in range(24))  # each exactly once
    measured = Counter(
        r["text"] for r in fake.requests if r["sampling_params"]["max_new_tokens"] > target.WARM_UP_TOKENS
    )
    assert len(measured) == 24
    # Only what was in flight at a kill may have been asked again.
    assert sum(measured.values()) - 24 <= 2 * concurrency
    assert (out / "report.md").exists()


def done(out):
    path = out / command.LINES
    return [line["problem"] for line in read(path) if line["kind"] == "answer"] if path.exists() else []


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_servers_that_a_killed_bench_left_are_ended(tmp_path):
    store = tmp_path / "answers.jsonl"
    mine, other = (
        subprocess.Popen(["/bin/sleep", "300"], env=target.environment(path), start_new_session=True)
        for path in (store, tmp_path / "other.jsonl")
    )
    try:
        assert target.end_leftovers(store) == 1
        assert mine.wait(10) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_an_interruption_keeps_the_answers_in_flight(tmp_path):
    """Ctrl-C while two requests run: both are in the store."""
    task = catalogue.task("chat")
    plan = runner.Plan(None, [], [task], [settings.GREEDY], [2])

    class Slow:
        def ask(self, problem, task, sampling):
            if problem is task.problems[2]:
                raise KeyboardInterrupt
            time.sleep(0.2)
            return ANSWER

    with Store(tmp_path / "a.jsonl") as store:
        bench = runner.Runner(plan, store, Console(quiet=True))
        run = settings.Run("m", settings.peer("p=http://h"), task, settings.GREEDY, 2)
        with runner.progress_bars(bench.console) as bars:
            bench._bars, bench._ids = bars, {run.key: bars.add_task("x")}
            with pytest.raises(KeyboardInterrupt):
                bench.ask_all(Slow(), run, task.problems)
        kept = store.problems("answer", run.key)
    assert {problem.id for problem in task.problems[:2]} <= kept
    assert len(kept) < len(task.problems)
