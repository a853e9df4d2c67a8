"""Traces: what is written is what happened, nothing is decided by it, and what cannot be read is refused."""

from __future__ import annotations

import pytest

from sglang_trunc.core.pipeline import Schedule
from sglang_trunc.core.trace import NO_NODE, TraceError, read_traces
from tests.core.scripted_engine import Script, names
from tests.core.traced_run import Request, Worker, says

PLANS = [
    Schedule(4, 1, None, 4, 0.0),
    Schedule(4, 1, 2, 6, 0.05),
    Schedule(6, 1, 4, 3, 0.0),
    Schedule(8, 2, 4, 8, 0.1),
]
EVERY_PLAN = pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.recurrences}-{plan.d1}-{plan.d2}")


def script(plan: Schedule) -> Script:
    return Script(5, {plan.d1: 0.6, plan.d2: 0.8})


def requests() -> list[Request]:
    return [
        Request([1, 2, 3], 14),
        Request([4], 20, stops=9),
        Request([2, 2], 20, arrives=2, retracted=4),
        Request([3, 1], 1, arrives=1),
        Request([1, 4, 4], 16, arrives=2),
    ]


def recorded(plan: Schedule, path, **options):
    worker = Worker(plan, script(plan), requests(), path, **options)
    worker.run()
    return worker, read_traces(path)[0]


@EVERY_PLAN
@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "copy"])
def test_a_recorded_pipeline_decides_as_an_unrecorded_one(plan, exchange, tmp_path):
    worker, trace = recorded(plan, tmp_path / "t.jsonl", exchange=exchange)
    plain = Worker(plan, script(plan), requests(), None, exchange)
    assert plain.run().report() == worker.counters.report()
    assert [request.tokens for request in plain.requests] == [request.tokens for request in worker.requests]
    assert trace.header["exchange"] is exchange


@EVERY_PLAN
def test_texts_are_those_that_requests_got(plan, tmp_path):
    """A request that was retracted has two: no node verifies the token that its second prefill chose."""
    worker, trace = recorded(plan, tmp_path / "t.jsonl")
    texts: dict = {}
    for text in trace.texts:
        assert not text.warm
        request = worker.requests[text.key]
        # How long a request that stopped might have gone on is known as far as slots were reserved.
        assert text.end == request.end or (request.stops and text.first < text.end < request.end)
        texts.setdefault(text.key, []).append(text)
    for key, request in enumerate(worker.requests):
        whole = request.prompt + script(plan).continuation(request.prompt, request.wanted)
        for text in texts.get(key, ()):
            assert text.tokens == whole[text.first : text.first + len(text.tokens)]
        got = sum(len(text.tokens) for text in texts.get(key, ()))
        assert got >= len(request.tokens) or request.wanted == 1
    assert {key: len(found) for key, found in texts.items()} == {0: 1, 1: 1, 2: 2, 4: 1}


@EVERY_PLAN
def test_every_lane_is_read_out_at_every_depth_that_it_reaches(plan, tmp_path):
    worker, trace = recorded(plan, tmp_path / "t.jsonl")
    verified = {node for text in trace.texts for node in text.nodes}
    assert len(verified) == worker.counters.tokens
    said = 0
    for node, choices in trace.says.items():
        path = names(tokens_to(worker, trace, node))[-1]
        depths = sorted(choices)
        assert depths == list(trace.depths)[: len(depths)]
        assert node not in verified or depths == list(trace.depths)
        for depth, choice in choices.items():
            assert choice == says(worker.script, path, depth, plan.recurrences)
            said += 1
    assert said > sum(worker.counters.readouts.values())


def tokens_to(worker: Worker, trace, node: int) -> list[int]:
    """All tokens of a node's path, the prompt's first."""
    chain = [trace.nodes[node]]
    while chain[-1].parent != NO_NODE:
        chain.append(trace.nodes[chain[-1].parent])
    assert [one.position for one in chain[::-1]] == list(range(chain[-1].position, chain[0].position + 1))
    request = worker.requests[chain[-1].key]
    before = request.prompt + worker.script.continuation(request.prompt, request.wanted)
    return before[: chain[-1].position] + [one.token for one in reversed(chain)]


def test_a_lane_born_again_on_a_path_is_the_same_node(tmp_path):
    plan = Schedule(6, 1, 3, 6, 0.0)  # as wide as the requests are many and little more: lanes are cut and come back
    worker, trace = recorded(plan, tmp_path / "t.jsonl")
    paths = [tuple(tokens_to(worker, trace, node)) + (trace.nodes[node].key,) for node in trace.nodes]
    assert len(set(paths)) == len(paths)
    again = [said for event in trace.events if event.name == "read" for said in event.value]
    assert len({(said.node, said.depth) for said in again}) < len(again)


@EVERY_PLAN
def test_totals_are_written_after_every_round(plan, tmp_path):
    worker, trace = recorded(plan, tmp_path / "t.jsonl")
    totals = [event.value for event in trace.events if event.name == "counted"]
    assert [total["rounds"] for total in totals] == list(range(1, worker.counters.rounds + 1))
    assert totals[-1]["tokens"] == worker.counters.tokens
    assert totals[-1]["ticks_by_width"] == worker.counters.report()["ticks_by_width"]


def test_servers_append(tmp_path):
    path = tmp_path / "t.jsonl"
    for plan in PLANS[:2]:
        Worker(plan, script(plan), requests(), path).run()
    assert [trace.plan for trace in read_traces(path)] == PLANS[:2]


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    path = tmp_path / "t.jsonl"
    _, whole = recorded(PLANS[0], path)
    text = path.read_text()
    path.write_text(text[:-5])
    (cut,) = read_traces(path)
    assert cut.events == whole.events[:-1]
    assert cut.texts == whole.texts


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "t.jsonl holds no trace."),
        ('{"keep":[]}\n', "t.jsonl does not begin with a trace's header."),
        ('{"trace":99}\n', "t.jsonl has format 99, this version reads format 1."),
        ("{\n", "line 1 of t.jsonl is not readable JSON"),
        ("[]\n", "line 1 of t.jsonl is not an event of a trace."),
    ],
)
def test_what_is_no_trace_is_refused(text, sentence, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=sentence):
        read_traces(path)
