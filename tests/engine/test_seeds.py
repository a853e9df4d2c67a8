"""Which seed a request draws with: its own, SGLang's in deterministic mode, or one of its arrival."""

from __future__ import annotations

import types

import pytest

from sglang_trunc.engine import seeds
from tests.engine.sampling_stand import request

pytestmark = pytest.mark.usefixtures("sglang_context")


def scheduler(random_seed: int = 7) -> types.SimpleNamespace:
    return types.SimpleNamespace(random_seed=random_seed)


def assigned(at: types.SimpleNamespace, rid: str = "r", **sampling) -> int | None:
    req = request(rid, [1], **{"temperature": 1.0, **sampling})
    seeds.assign(at, req)
    return req.sampling_params.sampling_seed


@pytest.mark.parametrize("seed", [0, 5, -(2**63), 2**63 - 1])
def test_a_given_seed_stays(seed):
    at = scheduler()
    assert assigned(at, sampling_seed=seed) == seed
    assert vars(at) == {"random_seed": 7}


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.7, "top_k": 1}])
def test_a_greedy_request_needs_none(sampling):
    at = scheduler()
    assert assigned(at, **sampling) is None
    assert seeds.seed_of(request("r", [1], **sampling)) == 0
    assert seeds.is_greedy(request("r", [1], **sampling))
    assert assigned(at) == assigned(scheduler())  # nor does it count as an arrival


def test_requests_without_a_seed_get_different_ones():
    """Also when an id comes again, and on servers started with other seeds."""
    at = scheduler()
    found = [assigned(at, rid) for rid in ("a", "b", "a", "a")]
    found += [assigned(scheduler(8), "a"), assigned(scheduler(), "c")]
    assert len(set(found)) == len(found)
    assert all(0 <= seed < 2**53 for seed in found)
    assert len({seed % 2**32 for seed in found}) == len(found)
    assert max(found) > 2**40


def test_ranks_agree():
    one, other = scheduler(), scheduler()
    arrivals = ["a", "b", "a", "c"]
    assert [assigned(one, rid) for rid in arrivals] == [assigned(other, rid) for rid in arrivals]


def test_an_assigned_seed_is_not_assigned_again():
    """A retracted request comes back with the seed it drew its first tokens with."""
    at, req = scheduler(), request("r", [1], temperature=1.0)
    seeds.assign(at, req)
    first = seeds.seed_of(req)
    seeds.assign(at, req)
    assert seeds.seed_of(req) == first > 0


def test_deterministic_inference_means_sglangs_seed(monkeypatch):
    at = scheduler()
    deterministic = types.SimpleNamespace(enable_deterministic_inference=True)
    monkeypatch.setattr(seeds, "get_exec", lambda: types.SimpleNamespace(deterministic=deterministic))
    assert [assigned(at, rid) for rid in ("a", "b", "a")] == [42] * 3
    assert assigned(at, sampling_seed=6) == 6
    assert assigned(at, temperature=0.0) is None
    assert vars(at) == {"random_seed": 7}
