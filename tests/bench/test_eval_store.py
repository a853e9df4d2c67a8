"""The store: what is written stays, half a line goes, and one process at a time writes."""

import json
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from evaluation import settings
from evaluation.store import Store, StoreError, read
from evaluation.tasks import catalogue

BENCH = Path(settings.__file__).parent.parent


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep" / "answers.jsonl"


def test_lines_come_back_in_order_and_by_run(path):
    with Store(path) as store:
        store.append("answer", run="a", problem="1", text="x\n\u20ac")
        store.append("answer", run="b", problem="1", text="y")
        store.append("grade", run="a", problem="1", score=1.0)
        assert store.problems("answer", "a") == {"1"}
    with Store(path) as store:
        assert [line["text"] for line in store.lines("answer")] == ["x\n\u20ac", "y"]
        assert [line["text"] for line in store.lines("answer", "b")] == ["y"]
        assert store.problems("answer", "c") == set()


@pytest.mark.parametrize("cut", range(1, 12))
def test_half_a_line_is_cut_off_and_written_again(path, cut):
    with Store(path) as store:
        store.append("answer", run="a", problem="1")
        store.append("answer", run="a", problem="2")
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert [line["problem"] for line in read(path)] == ["1"]
    with Store(path) as store:
        assert store.problems("answer", "a") == {"1"}
        store.append("answer", run="a", problem="2")
    assert path.read_bytes() == whole


def test_a_damaged_line_in_the_middle_is_an_error_with_its_number(path):
    with Store(path) as store:
        store.append("answer", run="a", problem="1")
    path.write_bytes(b'{"kind": "ans\n' + path.read_bytes())
    with pytest.raises(StoreError, match="line 1 of"):
        read(path)


def test_a_second_process_is_refused(path):
    open_too = f"""
        import sys
        sys.path.insert(0, {str(BENCH)!r})
        from pathlib import Path
        from evaluation.store import Store, StoreError
        try:
            with Store(Path({str(path)!r})):
                print("opened")
        except StoreError as problem:
            print(problem)
    """

    def other():
        command = [sys.executable, "-c", textwrap.dedent(open_too)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    with Store(path):
        assert "in use by another process" in other()
    assert other() == "opened\n"


def test_threads_do_not_mix_their_lines(path):
    with Store(path) as store, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: store.append("answer", run="a", problem=str(n), text="z" * 5000), range(200)))
    assert {line["problem"] for line in read(path)} == {str(n) for n in range(200)}


def run(**changes):
    task = catalogue.task("chat")
    contestant = settings.contestants([], [])[0]
    return settings.Run(**({"model": "m", "contestant": contestant, "task": task, "sampling": settings.GREEDY,
                            "concurrency": 1} | changes))  # fmt: skip


def test_a_key_is_of_all_that_changes_an_answer_or_its_speed():
    others = [
        run(model="n"),
        run(contestant=settings.contestants([], [])[1]),
        run(contestant=settings.contestants(["plain:--page-size=16"], [])[0]),
        run(contestant=settings.peer("plain=http://h:1")),
        run(contestant=settings.peer("plain=openai:http://h:1")),
        run(task=catalogue.task("copy")),
        run(task=catalogue.task("chat", catalogue.Style.CHAT)),
        run(sampling=settings.SAMPLED),
        run(concurrency=2),
        run(server_args=("--page-size", "16")),
    ]
    keys = {one.key for one in others}
    assert len(keys) == len(others)
    assert run().key not in keys
    assert run().key == run().key
    json.dumps(run().settings)


def test_contestants_are_plain_first_and_have_names_of_their_own():
    found = settings.contestants(["trunc", "ngram", "deep:d1=2"], ["v=http://h:1/v1/", "w=openai:https://h"])
    assert [one.name for one in found] == ["plain", "trunc", "deep", "ngram", "v", "w"]
    assert [one.url for one in found[-2:]] == ["http://h:1", "https://h"]
    assert [one.openai for one in found[-2:]] == [False, True]
    assert found[3].arm.server_args == ["--speculative-algorithm", "NGRAM"]
    with pytest.raises(ValueError, match="two contestants have the name 'trunc'"):
        settings.contestants(["trunc"], ["trunc=http://h"])
    for wrong in ("http://h:1", "v=h:1", "=http://h:1"):
        with pytest.raises(ValueError, match="a peer is NAME="):
            settings.peer(wrong)


def test_seeds_are_of_the_problem_alone():
    problems = catalogue.task("chat").problems
    seeds = [settings.seed_of(problem) for problem in problems]
    assert len(set(seeds)) == len(problems)
    assert seeds == [settings.seed_of(problem) for problem in catalogue.task("chat", catalogue.Style.CHAT).problems]
    assert all(0 <= seed < 2**31 for seed in seeds)
