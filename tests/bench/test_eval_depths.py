"""The depth report: what depths say, against the reference's own forward; envelope; simulated and served depths."""

import json
from pathlib import Path

import pytest
import torch
from evaluation import command, depth_figures, depth_report, lm_eval_task
from evaluation.depth_figures import Told
from evaluation.settings import GREEDY, Run, contestants
from evaluation.store import Store
from evaluation.tasks import catalogue
from evaluation.tasks.problem import Style
from typer import Typer
from typer.testing import CliRunner

from sglang_trunc.reference.checkpoint import load_checkpoint
from sglang_trunc.reference.decode import first_argmax, greedy

pytestmark = pytest.mark.slow  # starts many processes

app = Typer()
app.command()(command.depth)
PROMPT, NEW = list(range(5, 17)), 9


@pytest.fixture(params=["ouro", "retro-llama"])
def model(request, tiny_checkpoint):
    return load_checkpoint(tiny_checkpoint(request.param), torch.float32)


def test_every_depth_says_what_a_forward_of_that_depth_says(model):
    output = greedy(model, PROMPT, NEW)
    told = depth_figures.tell(model, PROMPT, output)
    ids = torch.tensor([*PROMPT, *output])
    with torch.inference_mode():
        full = model(ids)[len(PROMPT) - 1 : -1].softmax(-1)
        for depth in range(1, model.full_depth + 1):
            logits = model(ids, depth=depth)[len(PROMPT) - 1 : -1]
            own = logits.softmax(-1)
            assert told.choices[:, depth - 1].tolist() == first_argmax(logits).tolist()
            torch.testing.assert_close(told.probabilities[:, depth - 1], own.amax(-1))
            torch.testing.assert_close(told.distances[:, depth - 1], (own - full).abs().sum(-1) / 2)
    assert told.choices[:, -1].tolist() == output
    assert told.distances[:, -1].abs().max() == 0
    assert told.distances.min() >= 0
    assert told.distances.max() <= 1


def told(choices, distances=None):
    choices = torch.tensor(choices)
    distances = torch.zeros(choices.shape) if distances is None else torch.tensor(distances)
    return Told(choices, torch.full(choices.shape, 0.9), distances)


def test_means_are_by_token():
    texts = [told([[1, 2, 2]], [[0.5, 0.25, 0.0]]), told([[3, 3, 3]] * 3, [[0.1, 0.05, 0.0]] * 3)]
    found = depth_figures.summed_up(texts)
    assert (found.tokens, found.recurrences) == (4, 3)
    assert found.agreement == {1: 0.75, 2: 1.0}
    assert found.distance == pytest.approx({1: 0.2, 2: 0.1})
    with pytest.raises(ValueError, match="no text"):
        depth_figures.summed_up([])


def test_an_exact_power_law_is_found_with_its_closed_form():
    distance = {depth: 0.175 * depth**-1.03 for depth in range(1, 32)}
    found = depth_report.law(distance, 32)
    assert found.fitted == pytest.approx((1.03, 0.175))
    assert found.envelope == pytest.approx((1.03, 0.175))
    assert found.closed_form == pytest.approx((1.26, 8.85), abs=0.01)  # the paper's example
    assert found.nearest == (1, 9)


def test_the_envelope_covers_every_depth():
    distance = {1: 0.3, 2: 0.02, 3: 0.09, 4: 0.01, 6: 0.02}
    found = depth_report.law(distance, 8)
    assert all(found.envelope.at(depth) >= share - 1e-12 for depth, share in distance.items())
    assert any(found.envelope.at(depth) == pytest.approx(share) for depth, share in distance.items())
    assert depth_report.law({1: 0.1, 2: 0.2}, 4) is None


def ticks(texts, recurrences, schedule):
    best = depth_report.best_by_schedule(depth_report.simulated(texts, recurrences))
    return next(one.ticks for one in best if one.case.schedule == schedule)


def test_simulated_depths_follow_what_the_depths_said():
    always = told([[n] * 4 for n in range(10, 60)])
    never = told([[1000 + n, 2000 + n, 3000 + n, n] for n in range(10, 60)])
    assert ticks([always], 4, "plain") == ticks([never], 4, "plain") == 4
    assert ticks([always], 4, "LOOPSPEC_SINGLE") < 1.2  # d1 = 1 a token, but for the start
    assert ticks([never], 4, "LOOPSPEC_SINGLE") == 4
    second = told([[1000 + n, n, n, n] for n in range(10, 60)])
    assert ticks([second], 4, "LOOPSPEC_DUAL") == pytest.approx(2, abs=0.15)
    assert depth_report.simulated([told([[1, 1]])], 2) == []


@pytest.fixture
def folder(tmp_path, tiny_checkpoint):
    """A store with the tiny model's own greedy answers to three prompts."""
    path = tiny_checkpoint("ouro")
    model = load_checkpoint(path)
    rows = [{"id": f"c{n}", "instruction": "abc" * (n + 1)} for n in range(3)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    from evaluation.chat import ChatTemplate

    chat, task = ChatTemplate(str(path)), catalogue.task("chat", data=str(tmp_path / "chat.jsonl"))
    with Store(tmp_path / command.LINES) as store:
        for level in (1, 2):  # the same texts twice: counted once
            run = Run(str(path), contestants([], [])[0], task, GREEDY, level)
            facts = {"kind": "SGLang", "options": {}}
            store.append("run", run=run.key, settings=run.settings, source=task.source, server=facts, provenance={})
            for problem in task.problems:
                ids = greedy(model, chat.text_ids(problem.text), 6)
                answer = {
                    "output_ids": ids,
                    "completion_tokens": len(ids),
                    "text": "",
                    "begin": 0,
                    "first": 1,
                    "end": 2,
                }
                extra = {"events": [[1, 1], [2, 6]], "counted": True, "speculation": None}
                store.append("answer", run=run.key, problem=problem.id, **answer, **extra)
    return tmp_path, path


def test_the_command_reports_the_stored_texts(folder):
    out, path = folder
    arguments = [str(out), "--model-path", str(path), "--data", str(out / "chat.jsonl")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    written = json.loads((out / "depths.json").read_text())
    assert written["tokens"] == 18
    assert written["recurrences"] == 4
    assert set(written["agreement"]) == {"1", "2", "3"}
    text = (out / "depths.md").read_text()
    assert "18 tokens of plain greedy answers" in text
    assert "| plain | 4.00 |" in text
    assert (out / "depths.png").read_bytes().startswith(b"\x89PNG")
    fewer = CliRunner().invoke(app, [*arguments, "--limit", "1"])
    assert fewer.exit_code == 0
    assert json.loads((out / "depths.json").read_text())["tokens"] == 6


def test_other_data_than_was_asked_gives_no_text(folder):
    out, path = folder
    result = CliRunner().invoke(app, [str(out), "--model-path", str(path)])
    assert result.exit_code == 2
    assert "no text" in result.output


def test_lm_evals_task_has_our_prompts_and_its_own_filters(tmp_path):
    rows = [{"id": f"q{n}", "prompt": f"{n} + {n}?", "expected": str(2 * n)} for n in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = catalogue.task("gsm8k", data=str(tmp_path / "rows.jsonl"), shots="own")
    path = lm_eval_task.write(task, tmp_path / "lm")
    import yaml

    found = yaml.safe_load(path.read_text())
    assert found["generation_kwargs"]["until"] == list(task.stop)
    assert [one["name"] for one in found["filter_list"]] == ["strict-match", "flexible-extract"]
    written = map(json.loads, Path(found["dataset_kwargs"]["data_files"]["test"]).read_text().splitlines())
    assert [row["prompt"] for row in written] == [problem.text for problem in task.problems]
    said = lm_eval_task.command("http://h:1/", "M", tmp_path, 4, 10)
    assert "base_url=http://h:1/v1/completions,num_concurrent=4" in said
    assert said.endswith("--limit 10")
    with pytest.raises(ValueError, match="base models"):
        lm_eval_task.write(catalogue.task("gsm8k", Style.CHAT, str(tmp_path / "rows.jsonl")), tmp_path)
