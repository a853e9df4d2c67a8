"""What is refused: HTTP 400, the option's name in the sentence, and no trace in other requests.

Everything else is exact (``test_request_options``, ``test_sampling``). A custom logit processor is the client's own
code: one that does not load, or that fails when it is called, ends its own request and no other.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import httpx
import pytest

from sglang_trunc.serving.client import Client, Completion, RequestRefused
from sglang_trunc.serving.processors import ThinkingBudget, serialized
from tests.server.oracle import prompt_of
from tests.server.setups import BOTH_RUNS
from tests.server.side_by_side import side_by_side
from tests.server.test_sampling import RESIDUAL
from tests.server.walks import AGAIN, OURO, Visit, name_of, walk_of

PROMPT = prompt_of(6, seed=80)


def refused(client: Client, sampling: dict | None = None, extra: dict | None = None, **options: Any) -> str:
    with pytest.raises(RequestRefused) as caught:
        client.generate(PROMPT, max_new_tokens=8, sampling=sampling, extra=extra, **options)
    assert caught.value.status == 400
    return caught.value.message


def post(server, path: str, body: dict) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=300, trust_env=False)


# --- what no schedule can do ---

UNSUPPORTED = {
    "input_embeds": [[0.0] * 256] * 4,
    "lora_path": "adapter",
    "return_sampling_mask": True,
    "custom_logit_processor": serialized(ThinkingBudget),  # of a server that was not started for them
}


@BOTH_RUNS
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_request_option_is_refused_by_name(server, name):
    body = {"sampling_params": {"temperature": 0, "max_new_tokens": 8}, name: UNSUPPORTED[name]}
    if name != "input_embeds":
        body["input_ids"] = PROMPT
    answer = post(server, "/generate", body)
    assert answer.status_code == 400
    assert name.split("_")[0] in answer.text.lower()


GRAMMARS = {
    "json_schema": '{"type": "object"}',
    "regex": "[a-z]+",
    "ebnf": 'root ::= "a"',
    "structural_tag": '{"type": "structural_tag", "format": {"type": "any_text"}}',
}


@pytest.mark.parametrize("served", [RESIDUAL], ids=["without-grammars"], indirect=True)
@pytest.mark.parametrize("name", GRAMMARS)
def test_grammars_without_a_backend_are_refused_by_name(client, name):
    said = refused(client, sampling={name: GRAMMARS[name]})
    assert name in said
    assert "--grammar-backend none" in said


# --- values that mean nothing ---

INVALID: tuple[tuple[dict[str, Any], str], ...] = (
    ({"temperature": -1.0}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": 0}, "top_k"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"frequency_penalty": 2.5}, "frequency_penalty"),
    ({"presence_penalty": -2.5}, "presence_penalty"),
    ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"min_new_tokens": 9}, "min_new_tokens"),  # of 8 at most
    ({"logit_bias": {"512": 1.0}}, "logit_bias"),  # beyond the vocabulary
    ({"temperature": 1.0, "sampling_seed": 2**63}, "sampling_seed"),
    ({"temperature": 1.0, "sampling_seed": 0.5}, "sampling_seed"),
    ({"regex": "("}, "regex"),
    ({"json_schema": '{"type": 7}'}, "json"),
    ({"ebnf": "root ::="}, "ebnf"),
    ({"regex": "a", "ebnf": 'root ::= "a"'}, "Only one of json_schema, regex, ebnf"),
)


@BOTH_RUNS
@pytest.mark.parametrize(("sampling", "named"), INVALID, ids=[f"{given}" for given, _ in INVALID])
def test_invalid_value_is_refused_by_name(client, sampling, named):
    assert named in refused(client, sampling=sampling)


@BOTH_RUNS
def test_refused_requests_leave_others_alone(client, oracle):
    prompts = [prompt_of(7, seed=seed) for seed in (81, 82)]
    good = [partial(client.generate, prompt, max_new_tokens=120, ignore_eos=True) for prompt in prompts]

    def bad() -> None:
        for sampling, _ in INVALID:
            refused(client, sampling=sampling)

    *answers, _ = side_by_side([*good, bad])
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.output_ids) == 120
        assert oracle.mismatch(prompt, answer.output_ids) is None


# --- what is not refused any more, or never was ---


@BOTH_RUNS
def test_openai_requests_without_a_temperature_draw(server):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 16, "ignore_eos": True}
    texts = []
    for seed in (None, None, 5, 5):
        answer = post(server, "/v1/chat/completions", body if seed is None else {**body, "seed": seed})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 16
        texts.append(answer.json()["choices"][0]["message"]["content"])
    assert texts[2] == texts[3]
    assert len(set(texts)) == 3


@BOTH_RUNS
def test_options_at_their_neutral_values_change_nothing(client, oracle):
    neutral = {
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "logit_bias": {},
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
    }
    prompt = prompt_of(6, seed=83)
    answer = client.generate(prompt, max_new_tokens=12, ignore_eos=True, sampling=neutral)
    assert oracle.mismatch(prompt, answer.output_ids) is None


@BOTH_RUNS
def test_top_k_1_is_greedy(client, oracle):
    """temperature 0 and top_k 1 are the same request to SGLang."""
    prompt = prompt_of(6, seed=84)
    answer = client.generate(prompt, max_new_tokens=12, ignore_eos=True, temperature=0.8, sampling={"top_k": 1})
    assert oracle.mismatch(prompt, answer.output_ids) is None
    assert "sampling_seed" not in answer.meta_info


# --- custom logit processors that are broken ---

GOOD = {"thinking_budget": 9, "think_start_id": PROMPT[0], "think_end_id": 9}


def by_name(name: str) -> str:
    """A processor, by module and class."""
    return json.dumps({"callable": ("c" + name.replace(":", "\n") + "\n.").encode().hex()})


class Broken(NamedTuple):
    name: str
    processor: str
    params: dict[str, Any] | None
    said: str
    streamed: bool = False


BROKEN = (
    Broken("not JSON", "nonsense", None, "does not load"),
    Broken("no pickle", '{"callable": "00"}', None, "does not load"),
    Broken("no such module", by_name("no_such_module:Nothing"), None, "ModuleNotFoundError"),
    Broken("cannot be made", by_name("decimal:Context.create"), None, "does not load"),
    Broken("not callable", by_name("builtins:dict"), None, "TypeError"),
    Broken("parameter missing", serialized(ThinkingBudget), None, "think_start_id"),
    Broken("parameter missing, streamed", serialized(ThinkingBudget), None, "think_start_id", streamed=True),
    # The first tokens are fine.
    Broken(
        "fails later", serialized(ThinkingBudget), {**GOOD, "thinking_budget": 12, "think_end_id": 9999}, "IndexError"
    ),
)


class Visited(NamedTuple):
    refusals: dict[str, RequestRefused | Completion]
    meanwhile: list[Completion]
    afterwards: list[Completion]  # the same alone


def visit(found: Visit) -> Visited | None:
    if found.setup.schedule is None or found.setup is AGAIN:
        return None  # a plain server's scheduler ends with the first of them
    calls = list(_good(found.client))
    refusals: dict[str, RequestRefused | Completion] = {}

    def bad() -> None:
        for broken in BROKEN:
            refusals[broken.name] = _answer(found.client, broken)

    *meanwhile, _ = side_by_side([*calls, bad])
    return Visited(refusals, meanwhile, [call() for call in calls])


def _good(client: Client) -> Iterator[Callable[[], Completion]]:
    """One with a sound processor of the very class that fails for others, one greedy, one sampled."""
    options = {"max_new_tokens": 150, "ignore_eos": True}
    extra = {"custom_logit_processor": serialized(ThinkingBudget)}
    yield partial(client.generate, PROMPT, sampling={"custom_params": GOOD}, extra=extra, **options)
    yield partial(client.generate, PROMPT, **options)
    yield partial(client.generate, PROMPT, temperature=1.0, sampling={"sampling_seed": 3}, **options)


def _answer(client: Client, broken: Broken) -> RequestRefused | Completion:
    try:
        return client.generate(
            PROMPT,
            max_new_tokens=30,
            ignore_eos=True,
            sampling={} if broken.params is None else {"custom_params": broken.params},
            extra={"custom_logit_processor": broken.processor},
            stream=broken.streamed,
        )
    except RequestRefused as refusal:
        return refusal


@pytest.fixture
def visits(request, servers) -> list[Visited]:
    walk = walk_of(request, request.getfixturevalue("setups"), servers)
    return [visited for visited in walk.of(sys.modules[__name__]) if visited is not None]


@pytest.mark.parametrize("setups", [OURO], ids=name_of)
@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.name)
def test_broken_processor_ends_its_own_request(visits, broken):
    assert len(visits) == 3
    for visited in visits:
        refusal = visited.refusals[broken.name]
        assert isinstance(refusal, RequestRefused)
        assert refusal.status == 400
        assert "custom_logit_processor" in refusal.message
        assert broken.said in refusal.message


@pytest.mark.parametrize("setups", [OURO], ids=name_of)
def test_broken_processors_leave_others_alone(visits, oracle_of):
    oracle = oracle_of(OURO[0])
    for visited in visits:
        assert [answer.output_ids for answer in visited.meanwhile] == [
            answer.output_ids for answer in visited.afterwards
        ]
        budget, greedy, _ = visited.meanwhile
        assert GOOD["think_end_id"] in budget.output_ids
        assert oracle.mismatch(PROMPT, greedy.output_ids) is None
