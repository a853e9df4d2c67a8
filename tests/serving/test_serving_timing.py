"""Arithmetic of speeds and counters on hand-made completions."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_trunc.serving import counters, timing
from sglang_trunc.serving.client import Chunk, Completion
from sglang_trunc.serving.counters import Speculation


def completion(*chunks, begin=0.0, end=None, **meta):
    tokens = chunks[-1][1]
    info = {"completion_tokens": tokens, "prompt_tokens": 3, **meta}
    last = chunks[-1][0] if end is None else end
    return Completion(list(range(tokens)), "", info, begin, last, tuple(Chunk(*c) for c in chunks))


def test_one_request_leaves_out_the_prefill():
    one = completion((2.0, 1), (3.0, 4), (4.0, 9))
    assert timing.ttft(one) == 2.0
    assert timing.decode_tokens_per_second([one]) == (9 - 1) / (4.0 - 2.0)
    assert timing.total_tokens_per_second([one]) == 9 / 4.0


def test_tokens_are_counted_and_events_are_not():
    blocks = completion((1.0, 1), (2.0, 5))
    assert timing.inter_token_seconds(blocks) == [0.25] * 4
    repeated = completion((1.0, 1), (1.5, 1), (2.0, 5))
    assert timing.inter_token_seconds(repeated) == [0.125] * 4


def test_a_first_event_with_several_tokens_is_not_credited_to_decoding():
    assert timing.decode_tokens_per_second([completion((1.0, 3), (2.0, 5))]) == 2.0


def test_window_of_a_batch_opens_with_the_last_first_token():
    early = completion((1.0, 1), (2.0, 2), (3.0, 5), (4.0, 9))
    late = completion((2.0, 1), (5.0, 7), begin=0.5)
    tokens, seconds = timing.decode_window([early, late])
    assert (tokens, seconds) == ((9 - 2) + (7 - 1), 3.0)
    assert timing.total_window([early, late]) == (16, 5.0)


def test_nothing_decoded_is_not_a_speed():
    assert math.isnan(timing.decode_tokens_per_second([completion((1.0, 1))]))
    with pytest.raises(ValueError, match="streamed"):
        timing.ttft(Completion([1], "", {"completion_tokens": 1}, 0.0, 1.0))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.floats(0.01, 1.0))
def test_one_request_agrees_with_the_documented_formula(runs, pace):
    chunks, tokens = [(1.0, 1)], 1
    for index, run in enumerate(runs, 1):
        tokens += run
        chunks.append((1.0 + index * pace, tokens))
    one = completion(*chunks)
    expected = (one.completion_tokens - 1) / (one.end - one.chunks[0].at)
    assert timing.decode_tokens_per_second([one]) == pytest.approx(expected)
    assert sum(timing.inter_token_seconds(one)) == pytest.approx(one.end - one.chunks[0].at)


def test_accept_length_leaves_out_the_prefills_token():
    found = counters.speculation({"completion_tokens": 13, "spec_verify_ct": 4})
    assert found == Speculation(12, 4)
    assert found.accept_length == 3.0
    assert counters.speculation({"completion_tokens": 1}) == Speculation(0, 0)
    with pytest.raises(KeyError):
        counters.speculation({"completion_tokens": 2})


def test_totals_add_tokens_and_rounds():
    both = counters.total([completion((1.0, 5), spec_verify_ct=2), completion((1.0, 9), spec_verify_ct=2)])
    assert both == Speculation(12, 4)


def test_block_size_one_is_counted_from_the_histogram():
    found = counters.speculation({"completion_tokens": 5, "spec_correct_drafts_histogram": [4]})
    assert found == Speculation(4, 4)


def state(**changes):
    numbers = {
        "rounds": 10,
        "runs": 10,
        "tokens": 30,
        "ticks": 70,
        "rows": 100,
        "request_ticks": 70,
        "drafted": 30,
        "accepted": 20,
    }
    report = {"counters": numbers | changes, "options": {"d1": 1, "block_size": 4}, "recurrences": 4}
    return {"sglang_trunc": report}


def test_options_and_totals_of_a_report():
    found = counters.totals(state()["sglang_trunc"]["counters"])
    assert (found.ticks, found.accept_rate) == (70, 20 / 30)
    assert counters.engine_options(state()) == {"d1": 1, "block_size": 4, "recurrences": 4}
    assert counters.engine_options({"memory_usage": {}}) == {}
    before, after = counters.engine_counters(state()), counters.engine_counters(state(ticks=140, rounds=20))
    assert ((after - before).ticks, (after - before).tokens) == (70, 0)
    assert counters.engine_counters({"memory_usage": {}}) is None


def test_the_whole_report_of_one_measurement():
    before, after = state(ticks_by_width={"1": 4}), state(ticks=90, ticks_by_width={"1": 6, "4": 9}, accept_rate=0.5)
    spent = counters.counted_since(before, after)
    assert (spent["ticks"], spent["rounds"]) == (20, 0)
    assert spent["ticks_by_width"] == {"1": 2, "4": 9}
    assert "accept_rate" not in spent
    assert counters.counted_since({}, {}) == {}


def totals(**changes):
    return counters.totals(state(**changes)["sglang_trunc"]["counters"])


def test_ticks_per_token_do_not_depend_on_the_batch():
    # Block size 1 is plain decoding: R = 4 ticks a token, alone or four requests at once.
    alone = totals(rounds=10, runs=10, tokens=10, ticks=40, request_ticks=40)
    four = totals(rounds=10, runs=40, tokens=40, ticks=40, request_ticks=160)
    assert counters.ticks_per_token(alone) == counters.ticks_per_token(four) == 4.0
    assert counters.ticks_per_token(totals()) == pytest.approx(70 / 30)
    assert counters.ticks_per_token(None) is None
    assert counters.ticks_per_token(totals(tokens=0)) is None
