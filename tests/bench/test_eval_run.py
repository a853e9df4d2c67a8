"""The whole bench against fake servers: every problem once, whatever happens, and a report of it."""

import json
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from evaluation import command, runner, sandbox, settings
from evaluation.store import read
from evaluation.tasks import catalogue
from fake_sglang import FakeSGLang, Model, Settings
from typer import Typer
from typer.testing import CliRunner

from tests.bench.eval_openai_server import OpenAI

pytestmark = pytest.mark.slow  # starts many processes

app = Typer()
app.command()(command.run)
QUESTIONS = ["How many legs have two cats?", "And three hens, in all?", "A cart has 4 wheels. How many have 6 carts?"]
ROUGH = 0.5  # gap of 4 ulps
CLOSE = 0.1  # less than one


@pytest.fixture
def data(tmp_path):
    """Three problems each, of one prompt length a task."""
    width = max(map(len, QUESTIONS))
    rows = [{"id": f"q{n}", "prompt": text.ljust(width, "."), "expected": "8"} for n, text in enumerate(QUESTIONS)]
    (tmp_path / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    test = "def check(candidate):\n    assert candidate(2) == 4\n"
    rows = [
        {"task_id": f"h{n}", "prompt": f'def twice(x):\n    """{n}"""\n', "entry_point": "twice", "test": test}
        for n in range(3)
    ]
    (tmp_path / "humaneval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "shots.jsonl").write_text('{"question": "1 + 1?", "answer": "The answer is 2."}\n')
    return tmp_path


@pytest.fixture
def bench(fake_servers, data):
    """``bench(*arguments)``: exit code, folder, what was said."""

    def run(*arguments, task="gsm8k", code=0):
        out = data / "out"
        basic = ["--model-path", "fake", "--task", task, "--shots", str(data / "shots.jsonl"), "--out", str(out)]
        result = CliRunner().invoke(app, [*basic, "--data", str(data / f"{task}.jsonl"), *arguments])
        assert result.exit_code == code, result.output
        return out, " ".join(result.output.split())

    return run


def prompt_length(data):
    """In bytes, which are the fake's tokens."""
    task = catalogue.task("gsm8k", data=str(data / "gsm8k.jsonl"), shots=str(data / "shots.jsonl"))
    return len(task.problems[0].text)


def lines(out, kind):
    return [line for line in read(out / command.LINES) if line["kind"] == kind]


def asked(out):
    """(contestant, concurrency, problem) of every answer."""
    runs = {line["run"]: line["settings"] for line in lines(out, "run")}
    return Counter(
        (runs[line["run"]]["contestant"]["name"], runs[line["run"]]["concurrency"], line["problem"])
        for line in lines(out, "answer")
    )


@pytest.mark.parametrize("mode", [[], ["--keep-alive"]])
def test_every_contestant_answers_every_problem_once(bench, fake_servers, mode):
    out, _ = bench("--concurrency", "1,2", *mode)
    names = ("plain", "block1", "trunc", "single", "dual")
    assert asked(out) == Counter((name, level, f"q{n}") for name in names for level in (1, 2) for n in range(3))
    assert len(fake_servers) == (5 if mode else 10)
    assert not any(server.is_alive() for server in fake_servers)
    assert len(lines(out, "grade")) == 30
    report = json.loads((out / "report.json").read_text())
    for one in report["runs"]:
        if one["settings"]["contestant"]["name"] != "plain":
            assert (one["compared"]["equal"], one["compared"]["problems"]) == (3, 3)
            assert one["compared"]["gained"] == one["compared"]["lost"] == 0
    assert "3/3" in (out / "report.md").read_text()


def test_a_finished_bench_asks_nothing_and_starts_nothing(bench, fake_servers):
    out, _ = bench("--arm", "trunc")
    before, started = read(out / command.LINES), len(fake_servers)
    bench("--arm", "trunc")
    assert read(out / command.LINES) == before
    assert len(fake_servers) == started


def test_more_problems_more_arms_and_more_levels_go_on_from_there(bench):
    bench("--arm", "trunc", "--limit", "1")
    out, _ = bench("--arm", "trunc", "--arm", "dual", "--limit", "2", "--concurrency", "1,2")
    expected = Counter(
        (name, level, f"q{n}") for name in ("plain", "trunc", "dual") for level in (1, 2) for n in (0, 1)
    )
    assert asked(out) == expected


def test_code_is_refused_before_anything_is_started(bench, fake_servers):
    out, said = bench(task="humaneval", code=2)
    assert sandbox.FLAG in said
    assert not fake_servers
    assert not out.exists()


def test_programs_are_run_with_the_flag(bench):
    out, _ = bench("--arm", "trunc", "--limit", "1", sandbox.FLAG, task="humaneval")
    grades = lines(out, "grade")
    assert [grade["score"] for grade in grades] == [0.0, 0.0]  # the fake writes no Python
    assert all("SyntaxError" in grade["reason"] or "limits]" in grade["reason"] for grade in grades)


@pytest.mark.parametrize(("gap", "verdict", "code"), [(CLOSE, "near tie", 0), (ROUGH, "gap over one ulp", 1)])
def test_differences_are_judged_and_a_fault_fails_the_bench(bench, data, monkeypatch, gap, verdict, code):
    prompt = prompt_length(data)
    monkeypatch.setenv("FAKE_SWAP", f"{prompt + 5}:{gap}")
    monkeypatch.setenv("FAKE_DEVICE", "cuda")
    out, said = bench("--arm", "trunc", code=code)
    found = lines(out, "difference")
    assert [line["position"] for line in found] == [5, 5, 5]
    assert {line["verdict"] for line in found} == {verdict}
    assert [line["taken_ulps"] for line in found] == pytest.approx([gap / 0.125] * 3)
    assert ("no near ties" in said) == bool(code)
    text = (out / "report.md").read_text()
    assert "## Differences from plain" in text
    assert verdict in text
    bench("--arm", "trunc", code=code)
    assert lines(out, "difference") == found  # judged once


def test_a_back_end_that_promises_bits_has_no_near_ties(bench, data, monkeypatch):
    prompt = prompt_length(data)
    monkeypatch.setenv("FAKE_SWAP", f"{prompt + 5}:{CLOSE}")
    out, _ = bench("--arm", "trunc", "--limit", "1", code=1)
    assert "promises equal bits" in lines(out, "difference")[0]["verdict"]


def test_a_contestant_that_does_not_start_leaves_the_others_alone(bench, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # the log of a failed start is kept
    out, said = bench("--arm", "trunc", "--arm", "broken:env.FAKE_FAIL=no such kernel", code=1)
    assert "broken failed: broken stopped with exit code 1: ValueError: no such kernel" in said
    assert {name for name, _, _ in asked(out)} == {"plain", "trunc"}
    assert "no such kernel" in (out / "report.md").read_text()
    # It is tried again, and its failure forgotten once it has run.
    bench("--arm", "trunc", "--arm", "broken")
    assert {name for name, _, _ in asked(out)} == {"plain", "trunc"} | {"broken"}
    assert "Did not run" not in (out / "report.md").read_text()


def test_ngram_may_be_missing_on_a_platform(bench, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(settings, "NGRAM_ARM", settings.arms.Arm("ngram", "NGRAM", env={"FAKE_FAIL": "CUDA only"}))
    out, said = bench("--arm", "trunc", "--arm", "ngram")
    assert "ngram failed" in said
    assert "CUDA only" in (out / "report.md").read_text()


def test_sampled_cells_are_asked_with_a_seed_and_not_judged(bench, monkeypatch, data):
    monkeypatch.setenv("FAKE_SWAP", ",".join(f"{n}:{ROUGH}" for n in range(1, 700)))
    out, _ = bench("--arm", "trunc", "--sampling", "sampled")
    assert not lines(out, "difference")
    compared = next(r["compared"] for r in json.loads((out / "report.json").read_text())["runs"] if r["compared"])
    assert (compared["equal"], compared["unjudged"], compared["faults"]) == (0, 3, 0)


def test_refusals_are_finished_problems_until_asked_for(bench):
    with OpenAI(status=400) as peer:
        arguments = ["--only-peers", "--peer", f"p={peer.url}"]
        out, _ = bench(*arguments)
        assert len(lines(out, "refused")) == 3
        assert "## Refused by the server" in (out / "report.md").read_text()
        sent = len(peer.requests)
        bench(*arguments)
        assert len(peer.requests) == sent
        peer.status = 200
        bench(*arguments, "--retry-refused")
        assert len(lines(out, "answer")) == 3
        assert "| 42 |" not in (out / "report.md").read_text()


def test_an_overloaded_server_is_a_failure_and_not_a_refusal(bench):
    with OpenAI(status=503) as peer:
        out, said = bench("--only-peers", "--peer", f"p={peer.url}", code=1)
    assert "p could not answer" in said
    assert not lines(out, "refused")


def test_peers_of_both_kinds_stand_in_the_same_report(bench):
    with OpenAI() as other, FakeSGLang(Settings(model=Model())) as same:
        out, _ = bench("--arm", "trunc", "--peer", f"openai={other.url}", "--peer", f"same={same.url}")
    runs = {r["settings"]["contestant"]["name"]: r for r in json.loads((out / "report.json").read_text())["runs"]}
    assert runs["openai"]["compared"]["equal"] == 0
    assert runs["openai"]["compared"]["faults"] == 0
    assert runs["openai"]["score"]["mean"] == 0
    assert runs["same"]["compared"]["equal"] == 3
    assert {name: one["server"]["kind"] for name, one in runs.items()}["openai"] == "OpenAI"


def test_every_server_of_the_bench_is_marked(bench, fake_servers):
    out, _ = bench("--arm", "trunc", "--limit", "1")
    marks = {server.env["EVALUATION_STORE"] for server in fake_servers}
    assert marks == {str((out / command.LINES).resolve())}


def test_contestants_take_turns(data):
    contestants = settings.contestants([], [])
    plan = runner.Plan("m", contestants, [catalogue.task("chat")], [settings.GREEDY], [1], limit=5, rounds=2)
    assert [one.name for one in plan.order(1)] == ["block1", "trunc", "single", "dual", "plain"]
    run = plan.runs(contestants[0])[0]
    parts = [[problem.id for problem in plan.part(run, number)] for number in range(2)]
    assert [len(part) for part in parts] == [3, 2]
    longer = runner.Plan("m", contestants, [catalogue.task("chat")], [settings.GREEDY], [1], limit=8, rounds=2)
    assert [problem.id for problem in longer.part(run, 0)][:3] == parts[0]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--sampling", "beam"], "'beam' is not one of greedy, sampled"),
        (["--concurrency", "0"], "numbers must be 1 or more"),
        (["--only-peers"], "--only-peers goes with --peer"),
        (["--peer", "nowhere"], "a peer is NAME="),
        (["--arm", "trunc:d1"], "lacks a value"),
    ],
)
def test_wrong_arguments_are_one_sentence(bench, arguments, sentence):
    assert sentence in bench(*arguments, code=2)[1].replace("│", "").replace("  ", " ")


def test_data_of_several_tasks_is_named():
    with pytest.raises(ValueError, match="with several tasks --data is TASK=x"):
        command.load_tasks(["chat", "copy"], catalogue.Style.BASE, ["x"], None)
    with pytest.raises(ValueError, match="no --task"):
        command.load_tasks([], catalogue.Style.BASE, [], None)


def test_the_thin_scripts_name_their_task():
    folder = Path(settings.__file__).parent.parent
    for name in ("gsm8k", "humaneval"):
        assert f'command.start("{name}", __doc__)' in (folder / f"{name}.py").read_text()
