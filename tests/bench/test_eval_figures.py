"""Arithmetic of a report, and that it is a pure function of the store."""

import json

import pytest
from evaluation import figures, report
from evaluation.plots import acceptance
from evaluation.settings import GREEDY, Run, contestants
from evaluation.tasks import catalogue


def answer(
    problem="1", run="a", begin=0.0, first=0.5, end=2.5, events=((0.5, 1), (1.5, 4), (2.5, 9)), ids=None, **more
):
    tokens = events[-1][1]
    return {
        "kind": "answer", "run": run, "problem": problem, "text": str(ids), "output_ids": ids or list(range(tokens)),
        "prompt_tokens": 7, "completion_tokens": tokens, "finish": "stop", "begin": begin, "first": first, "end": end,
        "events": list(events), "counted": True, "speculation": [8, 2], **more,
    }  # fmt: skip


def grade(problem="1", run="a", score=1.0, **also):
    return {
        "kind": "grade",
        "run": run,
        "problem": problem,
        "score": score,
        "extracted": "x",
        "reason": "r",
        "also": also,
    }


def started(name, run, **changes):
    index = {"plain": 0, "block1": 1, "trunc": 2, "single": 3, "dual": 4}[name]
    one = Run("m", contestants([], [])[index], catalogue.task("chat"), GREEDY, 1)
    provenance = {"date": "d", "git": None, "argv": [], "python": "3", "packages": {}, "environment": {},
                  "machine": {"cpu": "c", "usable_cores": 2, "memory_gb": 1.0, "accelerator": None}}  # fmt: skip
    server = {"kind": "SGLang", "options": {"d1": 1, "recurrences": 4} if index else {}}
    return {"kind": "run", "run": run, "settings": {**one.settings, **changes}, "source": "8 rows of chat.jsonl",
            "task_facts": {}, "server": server, "provenance": provenance}  # fmt: skip


COUNTERS = {
    "rounds": 4, "runs": 4, "tokens": 8, "ticks": 20, "rows": 30, "request_ticks": 20, "drafted": 6, "accepted": 4,
    "ticks_by_width": {"1": 10, "2": 10}, "drafted_by_depth": {"1": 4, "2": 2}, "accepted_by_depth": {"1": 3, "2": 1},
}  # fmt: skip


def test_speeds_leave_out_what_they_say():
    found = figures.speed([answer(), answer("2", first=1.5, events=((1.5, 3), (2.5, 6)))])
    assert found.decode_tps == pytest.approx((8 + 3) / (2.0 + 1.0))
    assert found.total_tps == pytest.approx((9 + 6) / (2.5 + 2.5))


def test_throughput_counts_only_time_in_which_something_ran():
    together = figures.speed([answer(begin=100.0), answer("2", begin=101.0)])
    assert together.throughput == pytest.approx(18 / 3.5)
    # an interruption of an hour between them
    apart = figures.speed([answer(begin=100.0), answer("2", begin=3700.0)])
    assert apart.throughput == pytest.approx(18 / 5.0)


@pytest.mark.parametrize(
    ("intervals", "length"),
    [([], 0), ([(0, 1)], 1), ([(0, 1), (1, 2)], 2), ([(0, 4), (1, 2)], 4), ([(3, 4), (0, 2), (1, 3.5)], 4)],
)
def test_covered(intervals, length):
    assert figures.covered(intervals) == length


def test_an_answer_of_one_token_has_no_decode_speed():
    found = figures.speed([answer(first=0.5, end=0.5, events=((0.5, 1),))])
    assert found.decode_tps is None
    assert found.total_tps == 2.0
    assert figures.speed([]) == (None, None, None)


def test_waits_between_tokens_are_shared_by_the_tokens_of_an_event():
    assert figures.inter_token(answer()) == pytest.approx([1 / 3] * 3 + [0.2] * 5)
    assert figures.inter_token(answer(events=((0.5, 1), (0.7, 1), (0.9, 2)))) == pytest.approx([0.2])


def test_percentiles():
    assert figures.percentiles([]) is None
    assert figures.percentiles([3.0]) == {50: 3.0, 90: 3.0, 99: 3.0}
    found = figures.percentiles([float(n) for n in range(101)])
    assert found == {50: 50.0, 90: 90.0, 99: 99.0}


def test_scores_with_their_interval():
    found = figures.score([grade(score=s, strict=s / 2) for s in (1.0, 1.0, 0.0, 1.0)])
    assert (found.mean, found.number, found.also) == (0.75, 4, {"strict": 0.375})
    pytest.importorskip("scipy")
    assert found.low == pytest.approx(0.3006, abs=1e-3)  # Wilson, by hand
    assert found.high == pytest.approx(0.9544, abs=1e-3)
    assert figures.score([grade(score=None)]) == (None, 0, None, None, {})


def lines():
    return [
        started("plain", "p"), answer("1", "p"), answer("2", "p"), answer("3", "p"),
        started("dual", "d"), answer("1", "d", end=1.5, events=((0.5, 1), (1.5, 9))), answer("2", "d", ids=[0, 1, 7]),
        {"kind": "counters", "run": "d", "answers": 1, "counters": COUNTERS},
        {"kind": "counters", "run": "d", "answers": 1, "counters": COUNTERS},
        grade("1", "p", 1.0), grade("2", "p", 0.0), grade("3", "p", 0.0), grade("1", "d", 1.0), grade("2", "d", 1.0),
        {"kind": "difference", "run": "d", "problem": "2", "position": 2, "expected": 2, "taken": 7, "after_end": False,
         "gap_ulps": 0.5, "taken_ulps": 0.5, "verdict": "near tie", "passes": True},
        {"kind": "refused", "run": "d", "problem": "3", "reason": "too | long"},
        {"kind": "failed", "contestant": "ngram", "reason": "CUDA only\nsecond line"},
    ]  # fmt: skip


def test_runs_are_compared_on_the_problems_of_both():
    plain, dual = figures.collect(lines())
    assert plain.compared is None
    assert (dual.answers, dual.refused, dual.counted) == (2, 1, 2)
    compared = dual.compared
    assert (compared.problems, compared.equal, compared.near_ties, compared.faults, compared.unjudged) == (
        2,
        1,
        1,
        0,
        0,
    )
    assert (compared.gained, compared.lost) == (1, 0)
    assert compared.decode_ratio == pytest.approx((16 / 3) / (16 / 4))
    assert dual.accept_length == 4.0
    assert dual.ticks_per_token == 2.5
    assert dual.counters["ticks_by_width"] == {"1": 20, "2": 20}
    assert acceptance(dual) == ("depth", {1: 0.75, 2: 0.5})
    assert acceptance(plain) is None


@pytest.mark.parametrize(("verdict", "ties", "faults"), [("near tie", 1, 0), ("gap over one ulp", 0, 1),
                                                         ("gap unknown", 0, 1)])  # fmt: skip
def test_only_near_ties_are_no_faults(verdict, ties, faults):
    changed = [{**line, "verdict": verdict} if line["kind"] == "difference" else line for line in lines()]
    compared = figures.collect(changed)[1].compared
    assert (compared.near_ties, compared.faults) == (ties, faults)


def test_sampled_schedules_are_held_to_one_another():
    sampled = {"name": "sampled", "temperature": 1.0, "top_p": 0.7}
    runs = [started(name, name, sampling=sampled) for name in ("plain", "trunc", "single", "dual")]
    texts = [answer("1", "plain", ids=[9]), answer("1", "trunc", ids=[1]), answer("1", "single", ids=[1])]
    found = figures.collect([*runs, *texts, answer("1", "dual", ids=[2]), answer("2", "dual", ids=[3])])
    assert [one.seeded for one in found] == [None, None, (1, 1), (0, 1)]
    assert all(one.seeded is None for one in figures.collect(lines()))


def test_cells_that_differ_are_not_compared():
    other = started("dual", "d", concurrency=2)
    found = figures.collect([other if line["kind"] == "run" and line["run"] == "d" else line for line in lines()])
    assert [one.compared for one in found] == [None, None]


def test_without_plain_the_first_is_the_reference():
    again = [{**line, "run": {"p": "x"}.get(line.get("run"), line.get("run"))} for line in lines() if "run" in line]
    again[0] = started("trunc", "x")
    found = figures.collect(again)
    assert found[0].compared is None
    assert found[1].compared.problems == 2


def test_servers_that_tell_no_tokens_are_compared_by_text():
    one, other = answer(ids=[1]), answer(output_ids=None)
    assert figures.same_text(one, {**other, "text": "[1]"})
    assert not figures.same_text(one, {**other, "text": "[2]"})


def test_added_counters():
    assert figures.added([]) == {}
    assert figures.added([{"a": 1, "b": {"x": 1}}, {"a": 2, "b": {"y": 5}}]) == {"a": 3, "b": {"x": 1, "y": 5}}


def test_mcnemar():
    pytest.importorskip("scipy")
    assert figures.p_value(0, 0) is None
    assert figures.p_value(0, 6) == pytest.approx(2 * 0.5**6)


def test_the_report_is_a_pure_function_of_the_store(tmp_path):
    first = report.write(lines(), tmp_path / "a").read_text()
    assert report.write(json.loads(json.dumps(lines())), tmp_path / "b").read_text() == first
    assert (tmp_path / "a" / "report.json").read_text() == (tmp_path / "b" / "report.json").read_text()


def test_the_report_shows_everything_that_was_measured(tmp_path):
    text = report.write(lines(), tmp_path).read_text()
    rows = [line for line in text.splitlines() if line.startswith("| dual")]
    assert "| dual | 1.000 |" in rows[0]
    assert "| 1/2 | 1 | 0 |" in rows[0]
    assert "1 answers gained, 0 lost" in text
    assert "| chat | dual | 1 | 2 | 2 | 2 | 7 | 0.50 | 0.50 | near tie |" in text
    assert "too \\| long" in text
    assert "| ngram | CUDA only |" in text
    assert "8 rows of chat.jsonl" in text
    pictures = ["speed-by-task.png", "acceptance-by-depth.png", "widths.png"]
    for name in pictures:
        assert f"]({name})" in text
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "speed-by-concurrency.png").exists()  # one level is no curve


def test_speed_by_concurrency_is_drawn_for_several_levels(tmp_path):
    more = [{**line, "run": f"{line['run']}2"} for line in lines() if "run" in line]
    more[0] = started("plain", "p2", concurrency=4)
    more[4] = started("dual", "d2", concurrency=4)
    assert "](speed-by-concurrency.png)" in report.write([*lines(), *more], tmp_path).read_text()


def test_a_failure_is_forgotten_once_its_contestant_has_run():
    failed = {"kind": "failed", "contestant": "dual", "reason": "no"}
    assert report.failures([failed, *lines()]) == [{"contestant": "ngram", "reason": "CUDA only\nsecond line"}]
    assert {"contestant": "dual", "reason": "no"} in report.failures([*lines(), failed])


def test_changed_code_between_two_starts_is_said():
    changed = lines()
    changed[0]["provenance"] = {**changed[0]["provenance"], "git": {"commit": "other", "modified": False}}
    assert "2 different settings" in report.markdown(changed, figures.collect(changed), [])
    assert "different settings" not in report.markdown(lines(), figures.collect(lines()), [])


def test_an_empty_store_has_a_report(tmp_path):
    assert "nothing measured" in report.write([], tmp_path).read_text()
