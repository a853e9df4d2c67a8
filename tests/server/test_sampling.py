"""Seeded sampling: the text of a seed is plain decoding's, whatever happens around it.

Fifty seeds over temperatures and filters, the three schedules, eight requests in flight; again with their prompts in
the prefix cache and greedy requests between them; after a restart. Requests without a seed report the one they got. The
residual policy draws a text of its own. For retractions, see ``test_retracted_options``.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from sglang_trunc.reference.decode import output_logits
from sglang_trunc.serving.client import Client, Completion, RequestRefused
from sglang_trunc.serving.counters import STATE_KEY
from tests.server.oracle import prompt_of
from tests.server.rules import departure
from tests.server.setups import Setup, Trunc
from tests.server.side_by_side import side_by_side
from tests.server.walks import AGAIN, DUAL, OURO, Visit, Walk, name_of, walk_of

TOKENS = 64
IN_FLIGHT = 8
SEEDS = 50
PROMPTS = [prompt_of(length, seed=70) for length in (1, 4, 9, 16, 40)]
TEMPERATURES = (0.7, 1.0)
FILTERS: tuple[dict[str, float], ...] = (
    {},
    {"top_p": 0.7},
    {"top_p": 0.95},
    {"top_k": 20},
    {"top_k": 50, "top_p": 0.9},
    {"min_p": 0.05},
)
walked = pytest.mark.parametrize("setups", [OURO], ids=name_of)


class Draw(NamedTuple):
    """A seeded request."""

    prompt: tuple[int, ...]
    seed: int
    temperature: float
    filter: tuple[tuple[str, float], ...] = ()

    @property
    def sampling(self) -> dict[str, Any]:
        return {"sampling_seed": self.seed, **dict(self.filter)}


def draws(temperatures: Sequence[float], filters: Sequence[Mapping[str, float]]) -> Iterator[Draw]:
    """One for each seed, spread over the rest."""
    for number in range(SEEDS):
        seed = 2654435761 * (number - SEEDS // 2) + number  # of either sign, and beyond 32 bits
        chosen = filters[number // len(temperatures) % len(filters)]
        prompt = tuple(PROMPTS[number % len(PROMPTS)])
        yield Draw(prompt, seed, temperatures[number % len(temperatures)], tuple(chosen.items()))


SPREAD = tuple(draws(TEMPERATURES, FILTERS))
COMPANY = tuple(Draw(tuple(prompt), 0, 0.0) for prompt in PROMPTS)


def ask(client: Client, draw: Draw, tokens: int = TOKENS) -> Completion:
    return client.generate(
        draw.prompt, max_new_tokens=tokens, ignore_eos=True, temperature=draw.temperature, sampling=draw.sampling
    )


def answers(client: Client, asked: Sequence[Draw], order: int | None = None) -> dict[Draw, Completion]:
    """Eight at a time, shuffled where an order is given."""
    mixed = list(asked)
    if order is not None:
        random.Random(order).shuffle(mixed)
    with ThreadPoolExecutor(max_workers=IN_FLIGHT) as pool:
        return dict(zip(mixed, pool.map(partial(ask, client), mixed), strict=True))


def plain_answers(client: Client, asked: Sequence[Draw]) -> dict[Draw, Completion]:
    """Stock plain decoding's: filtered ones apart, since they change others' noise; without min-p, which stops it."""
    possible = [draw for draw in asked if "min_p" not in draw.sampling]
    kinds = [[draw for draw in possible if bool(draw.filter) is kind] for kind in (False, True)]
    return {draw: answer for kind in kinds for draw, answer in answers(client, kind).items()}


class Visited(NamedTuple):
    """Of one server."""

    first: dict[Draw, Completion]
    again: dict[Draw, Completion]  # with prompts in the prefix cache, and company
    unseeded: list[Completion]
    resent: list[Completion]  # the unseeded requests, with the seeds they had reported


def unseeded(client: Client, seed: int | None = None) -> Completion:
    sampling = {} if seed is None else {"sampling_seed": seed}
    return client.generate(PROMPTS[2], max_new_tokens=TOKENS, ignore_eos=True, temperature=1.0, sampling=sampling)


def visit(found: Visit) -> Visited:
    found.client.flush_cache()
    if found.setup.schedule is None:
        return Visited(plain_answers(found.client, SPREAD), {}, [], [])
    if found.setup is AGAIN:  # what DUAL had said, two servers ago, is said again
        seeds = [answer.meta_info["sampling_seed"] for answer in found.earlier[-1].unseeded]
        resent = [unseeded(found.client, seed) for seed in seeds]
        return Visited(answers(found.client, SPREAD[:12], order=3), {}, found.earlier[-1].unseeded, resent)
    first = answers(found.client, SPREAD, order=1)
    again = answers(found.client, [*SPREAD, *COMPANY], order=2)
    drawn = side_by_side([partial(unseeded, found.client)] * 3)
    resent = [unseeded(found.client, answer.meta_info["sampling_seed"]) for answer in drawn]
    return Visited(first, again, drawn, resent)


@pytest.fixture
def walk(request, setups, servers) -> Walk:
    return walk_of(request, setups, servers)


@pytest.fixture
def visits(walk) -> list[Visited]:
    return walk.of(sys.modules[__name__])


def departures(plain: Mapping[Draw, Completion], answers: Mapping[Draw, Completion]) -> dict[Draw, tuple]:
    return {
        draw: (plain[draw].output_ids, answer.output_ids)
        for draw, answer in answers.items()
        if draw in plain and answer.output_ids != plain[draw].output_ids
    }


# --- seeded ---


@walked
def test_the_text_of_a_seed_is_plain_decodings(visits):
    plain, *others = visits
    assert len(plain.first) > 0.8 * SEEDS
    assert len({tuple(answer.output_ids) for answer in plain.first.values()}) == len(plain.first)
    for visited in others:
        assert departures(plain.first, visited.first) == {}


@walked
def test_neither_order_nor_company_nor_a_cached_prompt_changes_it(visits, oracle_of):
    oracle = oracle_of(OURO[0])
    for visited in visits[1:-1]:
        assert departures(visits[0].first, visited.again) == {}
        assert departures(visited.first, visited.again) == {}
        assert any(answer.cached_tokens for answer in visited.again.values())
        for draw in COMPANY:
            assert oracle.mismatch(draw.prompt, visited.again[draw].output_ids) is None


@walked
def test_min_p_by_the_rules(visits, oracle_of):
    oracle = oracle_of(OURO[0])
    asked = [draw for draw in SPREAD if "min_p" in draw.sampling]
    assert asked
    for draw in asked:
        sampling = {**draw.sampling, "temperature": draw.temperature}
        texts = {tuple(visited.first[draw].output_ids) for visited in visits[1:-1]}
        assert len(texts) == 1
        assert departure(oracle, draw.prompt, texts.pop(), sampling) is None


@walked
def test_drafts_are_accepted_at_every_filter(visits):
    for visited in visits[1:-1]:
        for chosen in FILTERS:
            own = [answer for draw, answer in visited.first.items() if dict(draw.filter) == chosen]
            assert sum(answer.meta_info["spec_num_correct_drafts"] for answer in own) > 0


@walked
def test_after_a_restart(walk, visits):
    assert walk.setups[-1] is AGAIN
    assert len(visits[-1].first) == 12
    assert departures(visits[0].first, visits[-1].first) == {}
    assert departures(visits[-2].first, visits[-1].first) == {}


# --- unseeded ---


@walked
def test_an_unseeded_text_can_be_had_again_by_its_seed(visits):
    for visited in visits[1:]:  # the last one's come from a server that is gone
        assert visited.unseeded
        for answer, resent in zip(visited.unseeded, visited.resent, strict=True):
            assert resent.output_ids == answer.output_ids
            assert resent.meta_info["sampling_seed"] == answer.meta_info["sampling_seed"]


@walked
def test_unseeded_texts_differ(visits):
    seeds = [answer.meta_info["sampling_seed"] for visited in visits[1:-1] for answer in visited.unseeded]
    texts = {tuple(answer.output_ids) for visited in visits[1:-1] for answer in visited.unseeded}
    assert len(set(seeds)) == len(texts) == len(seeds) == 9


# --- the residual policy ---

_RESIDUAL: dict[str, Any] = {
    "context": 512,
    "checkpoint": DUAL.checkpoint,
    "environment": {"SGLANG_TRUNC_SAMPLING_POLICY": "residual"},
    "flags": ("--grammar-backend", "none"),
}
RESIDUAL = Setup("ouro", DUAL.schedule, **_RESIDUAL)
residual = pytest.mark.parametrize(
    "served",
    [RESIDUAL, pytest.param(Setup("ouro", Trunc(2, 4), **_RESIDUAL), marks=pytest.mark.slow)],
    ids=lambda row: row.name,
    indirect=True,
)
TOP_K = 12


def residual_draws() -> list[Draw]:
    return [
        Draw(tuple(PROMPTS[number % 5]), 100 + number, TEMPERATURES[number % 2], (("top_k", TOP_K),))
        for number in range(10)
    ]


@residual
def test_residual_text_of_a_seed_is_reproducible(client):
    """Alone: whether there is a draft to accept depends on the width that company leaves."""
    asked = residual_draws()[:5]
    first = [ask(client, draw).output_ids for draw in asked]
    client.flush_cache()
    assert [ask(client, draw).output_ids for draw in asked] == first
    other = [ask(client, draw._replace(seed=draw.seed + 50)).output_ids for draw in asked]
    assert not any(one == another for one, another in zip(first, other, strict=True))


@residual
def test_residual_texts_are_possible_and_greedy_ones_exact(client, oracle):
    given = answers(client, [*residual_draws(), *COMPANY], order=5)
    assert sum(answer.meta_info["spec_num_correct_drafts"] for answer in given.values()) > 0
    for draw, answer in given.items():
        ids = answer.output_ids
        assert len(ids) == TOKENS
        if not draw.temperature:
            assert oracle.mismatch(draw.prompt, ids) is None
            continue
        best = output_logits(oracle.model, draw.prompt, ids, oracle.depth).topk(TOP_K).indices
        assert (best == torch.tensor(ids).unsqueeze(1)).any(-1).all()


@residual
def test_residual_policy_is_reported(server, client):
    assert server.internal_state()[STATE_KEY]["options"]["sampling_policy"] == "residual"
    draw = residual_draws()[0]
    assert ask(client, draw, 4).meta_info["sampling_seed"] == draw.seed
    seed = unseeded(client).meta_info["sampling_seed"]
    assert unseeded(client).meta_info["sampling_seed"] != seed


@residual
@pytest.mark.parametrize(("name", "value"), [("json_schema", '{"type": "object"}'), ("regex", "a"), ("ebnf", "root")])
def test_grammars_without_a_backend_are_refused_by_name(client, name, value):
    """As the server of this policy is started."""
    with pytest.raises(RequestRefused, match="--grammar-backend none") as caught:
        client.generate(PROMPTS[0], max_new_tokens=8, sampling={name: value})
    assert caught.value.status == 400
    assert name in caught.value.message


# --- the whole product ---


@pytest.mark.slow
@pytest.mark.parametrize("setups", [OURO[:4]], ids=["product"])
def test_every_seed_at_every_temperature_and_filter(setups, servers):
    every = [draw for t in TEMPERATURES for kept in FILTERS for draw in draws((t,), (kept,))]
    with servers.get(setups[0]).client() as client:
        plain = plain_answers(client, every)
    seen: dict[Draw, list[int]] = {}
    for setup in setups[1:]:
        with servers.get(setup).client() as client:
            given = answers(client, every, order=6)
        assert departures(plain, given) == {}, setup.name
        for draw, answer in given.items():
            assert seen.setdefault(draw, answer.output_ids) == answer.output_ids, setup.name
