"""Servers and oracles of the server tests.

``serve`` (module scope) starts the server of a ``Setup`` and keeps it while the tests that share it run.
``oracle`` gives the reference model of the same checkpoint. After every test that used a server the KV pool must be
balanced and the server alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_trunc.serving.server import Server
from tests.server.oracle import Oracle
from tests.server.setups import Setup

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.server)


@pytest.fixture(scope="session")
def model_of(tiny_checkpoint) -> Callable[[Setup], Path]:
    """The checkpoint directory of a setup."""

    def directory(setup: Setup) -> Path:
        return tiny_checkpoint(setup.family, **setup.checkpoint)

    return directory


@pytest.fixture(scope="session")
def oracle_of(model_of) -> Callable[[Setup], Oracle]:
    """The reference model of a setup, at the depth its override asks for; loaded once."""
    loaded: dict[tuple[Path, int | None], Oracle] = {}

    def oracle(setup: Setup) -> Oracle:
        depth = setup.override.get("total_ut_steps", setup.override.get("mean_recurrence"))
        key = model_of(setup), depth
        if key not in loaded:
            loaded[key] = Oracle(*key)
        return loaded[key]

    return oracle


@pytest.fixture(scope="module")
def served(request) -> Setup:
    """The setup of this module's server: its ``SETUP``, or a parameter given by ``served_with``."""
    return getattr(request, "param", None) or request.module.SETUP


@pytest.fixture(scope="module")
def server(served: Setup, model_of) -> Iterator[Server]:
    with served.server(model_of(served)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server):
    with server.client() as connected:
        yield connected


@pytest.fixture(scope="module")
def oracle(served: Setup, oracle_of) -> Oracle:
    return oracle_of(served)


@pytest.fixture(autouse=True)
def pool_is_balanced(request) -> Iterator[None]:
    """No slot is lost or given back twice by any test, and the server survives it."""
    yield
    if "server" in request.fixturenames:
        problem = request.getfixturevalue("server").pool_problem()
        assert problem is None, problem
