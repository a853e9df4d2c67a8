"""Every request option, alone and mixed: a speculative server's answer is the plain server's.

The cases are those of ``sglang-trunc verify --options matrix``, with a few more. Each goes to each server alone, and
again with all others, streamed and whole, four at a time in an order of their own. Compared is everything a client
sees: tokens, text, finish reason, counts, logprobs and hidden states to the last bit.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest

from sglang_trunc.reference.tokenizer import STOP_IDS
from sglang_trunc.serving.client import RequestRefused
from sglang_trunc.serving.processors import ThinkingBudget, serialized
from sglang_trunc.serving.request_options import (
    GREEDY_TOKENS,
    SCHEMA,
    Case,
    OptionClient,
    body,
    cases,
    first_difference,
    visible,
)
from tests.server.oracle import prompt_of
from tests.server.rules import departure
from tests.server.setups import LoopSpec, Trunc
from tests.server.walks import AGAIN, HUGINN, OURO, Visit, Walk, name_of, walk_of

TOKENS = 44
IN_FLIGHT = 4
THINK, THOUGHT = 3, 4  # ids of <think> and </think>
# One that the model ends by itself, and one that it does not end.
PROMPTS = {"ouro": [prompt_of(3, seed=8), prompt_of(20, seed=7)], "huginn": [prompt_of(5, seed=1)]}
THINKING_PROMPT = [*prompt_of(9, seed=2), THINK]  # as Ouro-Thinking's template ends it
# One of each kind, where that is enough.
FEW = (
    "greedy",
    "greedy, to its own end",
    "temperature 1",
    "top_k, top_p, temperature",
    "all penalties",
    "min_new_tokens, sampled",
    "all changes, sampled",
    "json_schema, penalty",
    "regex, sampled",
    "stop string",
    "logprobs, sampled",
    "return_hidden_states",
)
# Options that leave the text alone.
SILENT = ("greedy", "greedy by top_k 1", "logprobs", "return_hidden_states")
both = pytest.mark.parametrize("setups", [OURO, HUGINN], ids=name_of)
ouro = pytest.mark.parametrize("setups", [OURO], ids=name_of)


class Key(NamedTuple):
    prompt: int
    case: str
    streamed: bool = False


class Job(NamedTuple):
    key: Key
    case: Case
    ids: list[int]


class Visited(NamedTuple):
    """One server's answers: those of the jobs alone, and mixed."""

    jobs: list[Job]  # without streams
    alone: dict[Key, list[dict]]
    mixed: dict[Key, list[dict]]


def visit(found: Visit) -> Visited | None:
    if found.setup is AGAIN:
        return None
    found.client.flush_cache()
    if found.setup.schedule is None:
        jobs = list(_jobs(found.client, found.setup.family))
        return Visited(jobs, _answers(found.client, [job for job in jobs if job.case.stock], 1), {})
    jobs = found.earlier[0].jobs
    alone = _answers(found.client, [job for job in jobs if job.key.prompt == 0], 1)
    streams = [job._replace(key=job.key._replace(streamed=True)) for job in jobs if job.key.prompt == 0]
    mixed = [*jobs, *streams]
    random.Random(7).shuffle(mixed)
    return Visited(jobs, alone, _answers(found.client, mixed, IN_FLIGHT))


def _jobs(client: OptionClient, family: str) -> Iterator[Job]:
    """From what a plain server says."""
    for index, ids in enumerate(PROMPTS[family]):
        greedy = client.generate(ids, max_new_tokens=GREEDY_TOKENS, ignore_eos=True)
        own = [case for case in cases(ids, greedy) if family == "ouro" or case.name in FEW]
        yield from (Job(Key(index, case.name), case, ids) for case in [*own, *(_closings() if index == 0 else ())])
    if family == "ouro":
        index = len(PROMPTS[family])
        yield from (Job(Key(index, case.name), case, THINKING_PROMPT) for case in _thoughts())


def _closings() -> list[Case]:
    """Grammars that close after few tokens, so at every place of a run; the mask makes most drafts right."""
    return [Case(f"closing {length}", {"regex": f"[a-d]{{{length}}}="}, ends=True) for length in range(1, 7)]


def _thoughts() -> Iterator[Case]:
    """A thinking block that is unconstrained, then JSON."""
    schema = {"json_schema": json.dumps(SCHEMA)}
    budget = {"custom_params": {"thinking_budget": 6, "think_start_id": THINK, "think_end_id": THOUGHT}}
    processor = {"custom_logit_processor": serialized(ThinkingBudget)}
    reasoning = {"require_reasoning": True}
    drawn = {"temperature": 1.0, "sampling_seed": 77}
    yield Case("budget, then JSON", {**schema, **budget}, {**reasoning, **processor}, ends=True)
    yield Case("budget, then JSON, sampled", {**schema, **budget, **drawn}, {**reasoning, **processor}, ends=True)
    yield Case("thoughts, then JSON", {**schema, **drawn, "logit_bias": {str(THOUGHT): 5.0}}, reasoning, ends=True)


def _answers(client: OptionClient, jobs: Sequence[Job], in_flight: int) -> dict[Key, list[dict]]:
    def answer(job: Job) -> list[dict]:
        try:
            return (client.ask_streamed if job.key.streamed else client.ask)(body(job.case, job.ids, TOKENS))
        except RequestRefused as refused:
            raise AssertionError(f"{job.key} was refused: {refused}") from refused

    with ThreadPoolExecutor(max_workers=in_flight) as pool:
        return dict(zip([job.key for job in jobs], pool.map(answer, jobs), strict=True))


# --- the tests ---


@pytest.fixture
def walk(request, setups, servers) -> Walk:
    return walk_of(request, setups, servers)


@pytest.fixture
def visits(walk) -> list[Visited]:
    """Of the plain server, then of each schedule."""
    return [visited for visited in walk.of(sys.modules[__name__]) if visited is not None]


@pytest.fixture
def truth(visits) -> dict[Key, list[dict]]:
    """Plain decoding's answers; where it is no reference, the first schedule's, which the rules below check."""
    return {**visits[1].alone, **visits[1].mixed, **visits[0].alone}


def differences(truth: dict[Key, list[dict]], answers: dict[Key, list[dict]]) -> dict[Key, str]:
    found = {}
    for key, answer in answers.items():
        expected = truth[key._replace(streamed=False)]
        if (parting := first_difference(visible(expected), visible(answer))) is not None:
            found[key] = str(parting)
    return found


@both
def test_alone(visits, truth):
    for visited in visits[1:]:
        assert visited.alone
        assert differences(truth, visited.alone) == {}


@both
def test_mixed(visits, truth):
    for visited in visits[1:]:
        assert len(visited.mixed) > len(visited.alone)
        assert differences(truth, visited.mixed) == {}


@both
def test_streams_end_with_the_whole_answer(visits, truth):
    for visited in visits[1:]:
        streamed = {key: answer for key, answer in visited.mixed.items() if key.streamed}
        assert len(streamed) == len(visited.alone)
        assert differences(visited.alone, streamed) == {}


@both
def test_every_option_does_something(visits):
    plain = visits[0].alone
    for index in {key.prompt for key in plain if key.case == "greedy"}:
        greedy = plain[Key(index, "greedy")][0]["output_ids"]
        same = {key.case for key, (one, *_) in plain.items() if key.prompt == index and one["output_ids"] == greedy}
        (to_its_end,) = plain[Key(index, "greedy, to its own end")]
        unended = {"greedy, to its own end"} if to_its_end["meta_info"]["finish_reason"]["type"] == "length" else set()
        assert same <= {*SILENT} | unended


@ouro
def test_the_model_ends_some_answers(visits):
    ends = [answer for key, answer in visits[0].alone.items() if "own end" in key.case]
    assert len({one["meta_info"]["finish_reason"]["type"] for (one,) in ends}) == 2


@both
def test_nothing_is_left_on_any_server(walk):
    assert {setup.name: problem for setup, problem in walk.idle.items() if problem} == {}


@both
def test_drafts_are_accepted_under_every_kind_of_option(walk, visits):
    """Or nothing of all this was tested. Alone, a pipeline commits one token a round."""
    kinds = {
        "sampled": lambda case: case.draws and not case.filtered,
        "filtered": lambda case: case.filtered,
        "penalties": lambda case: any("penalty" in name for name in case.options),
        "grammar": lambda case: {"json_schema", "regex", "ebnf", "structural_tag"} & {*case.options},
        "processor": lambda case: "custom_logit_processor" in case.options,
        "logprobs": lambda case: "return_logprob" in case.options,
        "hidden states": lambda case: "return_hidden_states" in case.options,
    }
    for setup, visited in zip(walk.setups[1:], visits[1:], strict=False):
        for kind, belongs in kinds.items():
            answers = [one for job in visited.jobs if belongs(job.case) for one in visited.mixed[job.key]]
            assert sum(accepted(one["meta_info"]) for one in answers) > 0, f"{setup.name}: {kind}"


def accepted(meta: dict) -> int:
    return meta.get("spec_num_correct_drafts", 0)


@both
def test_seeds_are_reported_where_they_matter(visits):
    for visited in visits[1:]:
        for job in visited.jobs:
            for one in visited.mixed[job.key]:
                wanted = job.case.sampling["sampling_seed"] if job.case.draws else None
                assert one["meta_info"].get("sampling_seed") == wanted, job.key


# --- grammars ---


def is_valid(text: str) -> bool:
    """By ``SCHEMA``, written out."""
    said = json.loads(text)
    assert list(said) == list(SCHEMA["properties"])
    kinds = type(said["n"]) is int and type(said["s"]) is str and type(said["b"]) is bool
    return kinds and 0 <= said["n"] <= 999 and len(said["s"]) <= 6


def by_itself(answers: dict[Key, list[dict]], *names: str) -> list[str]:
    """Texts of these cases that the model ended."""
    found = [one for key, many in answers.items() if key.case in names for one in many]
    return [one["text"] for one in found if one["meta_info"]["finish_reason"]["type"] == "stop"]


@ouro
def test_json_is_valid_when_it_ended_by_itself(visits):
    for visited in visits[1:]:
        texts = by_itself(visited.mixed, "json_schema", "json_schema, sampled", "json_schema, penalty")
        assert texts
        assert all(map(is_valid, texts))


@ouro
def test_a_thinking_block_comes_before_the_json(visits):
    """The reasoner's wrapper around the grammar, with the token that ends the block at any place of a run."""
    names = [case.name for case in _thoughts()]
    for visited in visits:
        answers = visited.alone if not visited.mixed else visited.mixed
        for text in by_itself(answers, *names):
            thoughts, _, answer = text.partition("</think>")
            assert is_valid(answer)
            assert "<think>" not in thoughts
        for name in names[:2]:
            (one,) = answers[Key(len(PROMPTS["ouro"]), name)]
            assert one["output_ids"].index(THOUGHT) == 6
            assert one["meta_info"]["reasoning_tokens"] == 6 + 1
    assert by_itself(visits[0].alone, *names)


@ouro
def test_a_grammar_that_closes_inside_a_run_ends_the_answer(walk, visits):
    names = [case.name for case in _closings()]
    for setup, visited in zip(walk.setups[1:], visits[1:], strict=False):
        inside = 0
        for name in names:
            (one,) = visited.mixed[Key(0, name)]
            meta = one["meta_info"]
            assert one["text"][-1] == "="
            assert len(one["text"]) == int(name.split()[1]) + 1
            assert meta["finish_reason"]["matched"] == one["output_ids"][-1]
            assert one["output_ids"][-1] in STOP_IDS
            inside += accepted(meta)
        assert isinstance(setup.schedule, LoopSpec) or inside > 0


# --- where stock plain decoding is no reference ---


@both
def test_the_rules_where_plain_decoding_is_no_reference(walk, visits, oracle_of):
    oracle = oracle_of(walk.setups[0])
    checked = 0
    for visited in visits[1:]:
        for job in visited.jobs:
            if job.case.stock:
                continue
            (one,) = visited.mixed[job.key]
            assert len(one["output_ids"]) == TOKENS
            assert departure(oracle, job.ids, one["output_ids"], job.case.sampling) is None, job.key
            checked += 1
    assert checked


def test_the_walks_have_all_schedules():
    schedules = [type(setup.schedule) for setups in (OURO, HUGINN) for setup in setups]
    assert {Trunc, LoopSpec, type(None)} == {*schedules}
    assert {setup.schedule.algorithm for setup in OURO[1:]} == {"trunc", "loopspec_single", "loopspec_dual"}
