"""``/metrics`` and ``meta_info["trunc"]``: what a server says of drafts is what it counts, and what clients get."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sglang_trunc.serving.client import Client
from sglang_trunc.serving.counters import STATE_KEY, counted_since
from sglang_trunc.serving.server import Server
from tests.server.idle import idle_problem
from tests.server.oracle import prompt_of
from tests.server.setups import LoopSpec, Setup, Trunc
from tests.server.side_by_side import side_by_side

# The pool of ``test_small_pool``: three long requests do not fit.
COMMON: dict[str, Any] = {
    "flags": ("--enable-metrics",),
    "context": 512,
    "pool": 320,
    "checkpoint": {"dial": 0.05, "seed": 4},
    "environment": {
        "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "16",
        "SGLANG_TRUNC_LOOKUP": "3",
        "SGLANG_TRUNC_LOOKUP_MIN_MATCH": "1",
    },
}
ROWS = (Setup("ouro", Trunc(1, 5), **COMMON), Setup("ouro", LoopSpec(1, 3, 32, 0.0), **COMMON))
pytestmark = pytest.mark.parametrize("served", ROWS, ids=lambda row: row.name, indirect=True)
RECURRENCES = 4
SOURCES = {"1": "d1", "3": "d2", "-1": "lookup"}
PLAIN = ("rounds", "runs", "tokens", "ticks", "rows", "request_ticks", "screened_out")
OF_PIPELINES = (
    *("restarts", "missed", "ended", "cold_starts", "warm_starts", "warm_rows", "lanes_dropped", "rows_wasted"),
)
OF_SGLANG = "sglang:num_running_reqs"


class Scrape:
    """``/metrics`` of one moment."""

    def __init__(self, server: Server):
        text = httpx.get(server.url + "/metrics", follow_redirects=True, trust_env=False).raise_for_status().text
        self.samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def labels(self, name: str) -> dict[str, str]:
        (found,) = [sample.labels for sample in self.samples if sample.name == name]
        return found

    def value(self, name: str) -> float:
        return self.by(name, None)[""]

    def by(self, name: str, label: str | None) -> dict[str, float]:
        """Values of one of our metrics by this label."""
        ours = [sample for sample in self.samples if sample.name == f"sglang_trunc_{name}"]
        return {sample.labels[label] if label else "": sample.value for sample in ours}


def moment(server: Server) -> tuple[dict[str, Any], Scrape]:
    """Counters and metrics of one moment: an idle server's last round may have been under way."""
    assert (problem := idle_problem(server)) is None, problem
    state = server.internal_state()[STATE_KEY]
    for _ in range(20):
        scrape, again = Scrape(server), server.internal_state()[STATE_KEY]
        if again == state:
            return state, scrape
        state = again
    raise AssertionError("an idle server goes on counting")


def check_metrics(server: Server) -> None:
    state, scrape = moment(server)
    counters = state["counters"]
    for name in (*PLAIN, *(OF_PIPELINES if "lanes" in state else ())):
        assert scrape.value(name + "_total") == counters[name], name
    assert scrape.by("readouts_total", "depth") == counters["readouts_by_depth"]
    widths = {int(rows): ticks for rows, ticks in counters["ticks_by_width"].items()}
    by_width = scrape.by("ticks_by_width_total", "le")
    assert by_width["+Inf"] == counters["ticks"] > by_width["1"]
    assert by_width["4"] == sum(ticks for rows, ticks in widths.items() if rows <= 4)
    drafted, accepted = scrape.by("drafted_total", "source"), scrape.by("accepted_total", "source")
    assert accepted == accepted_by_source(counters)
    assert sum(accepted.values()) == counters["accepted"] > 0
    if "lanes" in state:
        assert drafted == {SOURCES[depth]: count for depth, count in counters["drafted_by_depth"].items()}
        assert scrape.value("lanes") == 0
    else:
        assert drafted["lookup"] == counters["looked_up"]
        assert sum(drafted.values()) == counters["drafted"] + counters["screened_out"]
        assert scrape.by("accepted_by_position_total", "position") == counters["accepted_by_position"]


def accepted_by_source(counters: Mapping[str, Any]) -> dict[str, int]:
    if "accepted_by_depth" in counters:
        by_depth = counters["accepted_by_depth"]
        return {name: by_depth.get(depth, 0) for depth, name in SOURCES.items()}
    of_lookup = counters["looked_up_accepted"]
    return {"d1": counters["accepted"] - of_lookup, "lookup": of_lookup}


def check_account(meta_info: Mapping[str, Any], pipeline: bool, of_length: bool = False) -> dict[str, Any]:
    """An answer's account, which fits the tokens of that answer."""
    account = meta_info["trunc"]
    # A request that is retracted before its prefill's token has arrived is prefilled for the same token again.
    prefilled = meta_info["completion_tokens"] - account["tokens"]
    assert 1 <= prefilled <= 1 + meta_info["num_retractions"]
    explained = sum(account["drafts_accepted"].values()) + account["restarts"]
    assert explained == account["tokens"] - (pipeline and of_length)
    ticks = account["full_passes"] * RECURRENCES
    assert ticks == int(ticks)
    if not account["tokens"]:
        assert (ticks, account["tokens_per_full_pass"]) == (0, None)
        return account
    assert account["tokens_per_full_pass"] == pytest.approx(account["tokens"] / account["full_passes"])
    if not pipeline:  # SGLang counts rounds, and TRUNC's give one token of full depth each
        assert ticks >= account["restarts"] * RECURRENCES
    return account


def test_answers_add_up_to_the_servers_counters(client, server, served, oracle):
    pipeline = isinstance(served.schedule, LoopSpec)
    before, _ = moment(server)
    lengths = [1, 2, 17, 30, 41, 60]
    prompts = [prompt_of(9, seed=60) * 3, [100] * 12, *(prompt_of(10, seed=seed) for seed in range(4))]
    ask = partial(client.generate, ignore_eos=True)
    calls = [partial(ask, prompt, max_new_tokens=most) for prompt, most in zip(prompts, lengths, strict=True)]
    answers = [answer for first in (0, 3) for answer in side_by_side(calls[first : first + 3])]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert oracle.mismatch(prompt, answer.output_ids) is None
        assert answer.meta_info["num_retractions"] == 0
    accounts = [check_account(answer.meta_info, pipeline, len(answer.output_ids) > 1) for answer in answers]
    after, _ = moment(server)
    spent = counted_since({STATE_KEY: before}, {STATE_KEY: after})
    assert [account["tokens"] for account in accounts] == [most - 1 for most in lengths]
    told = {name: sum(a["drafts_accepted"][name] for a in accounts) for name in accounts[0]["drafts_accepted"]}
    assert told == accepted_by_source(spent)
    assert all(told.values())
    passes = sum(account["full_passes"] for account in accounts) * RECURRENCES
    restarts = sum(account["restarts"] for account in accounts)
    if pipeline:
        assert (restarts, passes) == (spent["restarts"], spent["request_ticks"])
    else:  # under overlap scheduling a request that has ended is in one more round
        assert spent["runs"] - len(answers) <= restarts <= spent["runs"]
        assert passes <= spent["request_ticks"]
    check_metrics(server)


def stream(client: Client, seed: int, served: Setup, abort_after: int | None = None) -> list[dict[str, Any]]:
    """Every part's ``meta_info`` of one streamed answer."""
    rid, parts = f"metrics-{seed}", []
    sampling = {"max_new_tokens": 50, "ignore_eos": True, "temperature": 0}
    body = {"input_ids": prompt_of(10, seed=seed), "rid": rid, "sampling_params": sampling}
    for event in client.stream(body):
        assert len(event["output_ids"]) == event["meta_info"]["completion_tokens"]
        parts.append(event["meta_info"])
        if len(parts) == abort_after:
            client.abort(rid)
    return parts


def test_every_part_of_a_stream_has_its_own_account(client, server, served):
    """Three at a time, one of which is aborted on its way."""
    pipeline = isinstance(served.schedule, LoopSpec)
    calls = [partial(stream, client, seed, served, 5 if seed == 72 else None) for seed in range(70, 73)]
    streams = side_by_side(calls)
    for parts in streams:
        ends = parts[-1]["finish_reason"]["type"]
        told = [check_account(part, pipeline) for part in parts[:-1]]
        told.append(check_account(parts[-1], pipeline, ends == "length"))
        assert told[0]["tokens"] < told[-1]["tokens"]
        for name in ("tokens", "restarts", "full_passes"):
            values = [account[name] for account in told]
            assert values == sorted(values)
    ends = [parts[-1]["finish_reason"]["type"] for parts in streams]
    assert ends == ["length", "length", "abort"]
    assert streams[2][-1]["trunc"]["tokens"] < 49
    check_metrics(server)


def test_an_answer_that_stops_inside_a_run_tells_of_what_it_has(client, server, served):
    pipeline = isinstance(served.schedule, LoopSpec)
    prompt = prompt_of(10, seed=80)
    whole = client.generate(prompt, max_new_tokens=40, ignore_eos=True).output_ids
    for place in range(4, 16):
        answer = client.generate(prompt, max_new_tokens=40, stop_token_ids=[whole[place]])
        assert answer.finish_reason["type"] == "stop"
        check_account(answer.meta_info, pipeline)


def test_retracted_answers_tell_of_what_was_not_lost(client, server, served, oracle):
    pipeline = isinstance(served.schedule, LoopSpec)
    prompts = [prompt_of(40, seed=seed) for seed in range(5)]
    answers = client.generate_many(prompts, 5, max_new_tokens=150, ignore_eos=True)
    assert sum(answer.meta_info["num_retractions"] for answer in answers) > 0
    told = [check_account(answer.meta_info, pipeline, True) for answer in answers]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert oracle.mismatch(prompt, answer.output_ids) is None
    assert sum(account["tokens"] for account in told) < 5 * 149, "resumed requests have a token of their prefill"
    check_metrics(server)


def test_labels_are_those_of_sglangs_scheduler(server, served):
    scrape = Scrape(server)
    assert scrape.labels("sglang_trunc_tokens_total") == scrape.labels(OF_SGLANG)
