"""A custom logit processor is the client's own code: one that does not load or fails ends its own request and no other.

Stock plain decoding is not asked: any of these would end its scheduler.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest

from sglang_trunc.serving.client import Client, Completion, RequestRefused
from sglang_trunc.serving.processors import ThinkingBudget, serialized
from tests.server.oracle import prompt_of
from tests.server.side_by_side import side_by_side
from tests.server.walks import AGAIN, OURO, Visit, Walk, name_of, walk_of

pytestmark = pytest.mark.parametrize("setups", [OURO], ids=name_of)
PROMPT = prompt_of(6, seed=80)
GOOD = {"thinking_budget": 9, "think_start_id": PROMPT[0], "think_end_id": 9}
GOOD_TOKENS = 150


def by_name(module: str, name: str) -> str:
    """A processor that is a class of some module."""
    return json.dumps({"callable": f"c{module}\n{name}\n.".encode().hex()})


class Broken(NamedTuple):
    name: str
    processor: str
    said: str
    params: dict[str, Any] | None = None
    streamed: bool = False
    regex: str | None = None


BROKEN = (
    Broken("not JSON", "nonsense", "does not load"),
    Broken("no pickle", '{"callable": "00"}', "does not load"),
    Broken("no such module", by_name("no_such_module", "Nothing"), "ModuleNotFoundError"),
    Broken("no such class", by_name("decimal", "Nothing"), "does not load"),
    Broken("not callable", by_name("builtins", "dict"), "TypeError"),
    Broken("parameter missing", serialized(ThinkingBudget), "think_start_id"),
    Broken("parameter missing, streamed", serialized(ThinkingBudget), "think_start_id", streamed=True),
    # Its first tokens are fine.
    Broken("fails later", serialized(ThinkingBudget), "IndexError", {**GOOD, "think_end_id": 9999}),
    # SGLang itself refuses the grammar; the request passes through a batch all the same.
    Broken("with a grammar refused before", "nonsense", "regex", regex="("),
)


class Visited(NamedTuple):
    refusals: dict[str, RequestRefused | Completion]
    meanwhile: list[Completion]
    afterwards: list[Completion]  # the same alone


def visit(found: Visit) -> Visited | None:
    if found.setup.schedule is None or found.setup is AGAIN:
        return None
    calls = list(_good(found.client))
    refusals: dict[str, RequestRefused | Completion] = {}

    def bad() -> None:
        for broken in BROKEN:
            refusals[broken.name] = _answer(found.client, broken)

    *meanwhile, _ = side_by_side([*calls, bad])
    return Visited(refusals, meanwhile, [call() for call in calls])


def _good(client: Client) -> Iterator[Callable[[], Completion]]:
    """One with a sound processor of the class that fails for others, one greedy, one sampled."""
    options = {"max_new_tokens": GOOD_TOKENS, "ignore_eos": True}
    extra = {"custom_logit_processor": serialized(ThinkingBudget)}
    yield partial(client.generate, PROMPT, sampling={"custom_params": GOOD}, extra=extra, **options)
    yield partial(client.generate, PROMPT, **options)
    yield partial(client.generate, PROMPT, temperature=1.0, sampling={"sampling_seed": 3}, **options)


def _answer(client: Client, broken: Broken) -> RequestRefused | Completion:
    params = {} if broken.params is None else {"custom_params": broken.params}
    try:
        return client.generate(
            PROMPT,
            max_new_tokens=30,
            ignore_eos=True,
            sampling={**params, "regex": broken.regex},
            extra={"custom_logit_processor": broken.processor},
            stream=broken.streamed,
        )
    except RequestRefused as refusal:
        return refusal


@pytest.fixture
def walk(request, setups, servers) -> Walk:
    return walk_of(request, setups, servers)


@pytest.fixture
def visits(walk) -> list[Visited]:
    return [visited for visited in walk.of(sys.modules[__name__]) if visited is not None]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.name)
def test_it_ends_its_own_request(visits, broken):
    assert len(visits) == 3
    for visited in visits:
        refusal = visited.refusals[broken.name]
        if broken.streamed:  # HTTP 200 has been sent; the last event says how it ended
            assert isinstance(refusal, Completion)
            status, message = (refusal.finish_reason[name] for name in ("status_code", "message"))
        else:
            assert isinstance(refusal, RequestRefused)
            status, message = refusal.status, refusal.message
        assert status == 400
        assert broken.said in message
        assert "custom_logit_processor" in message or broken.regex


def test_it_leaves_others_alone(visits, oracle_of):
    oracle = oracle_of(OURO[0])
    for visited in visits:
        meanwhile, afterwards = (
            [answer.output_ids for answer in answers] for answers in (visited.meanwhile, visited.afterwards)
        )
        assert meanwhile == afterwards
        budget, greedy, _ = meanwhile
        assert GOOD["think_end_id"] in budget
        assert len(budget) == len(greedy) == GOOD_TOKENS
        assert oracle.mismatch(PROMPT, greedy) is None


def test_nothing_is_left(walk):
    assert [problem for problem in walk.idle.values() if problem] == []
