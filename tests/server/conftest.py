"""Servers and oracles of the server tests.

A test asks for ``server`` or ``client`` and gets the server of its module's ``SETUP``, or of the setup it is
parametrised with (``served``). ``oracle`` is the reference model of the same checkpoint. After every test the KV pool
must be balanced, no lane left and the server alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from sglang_trunc.serving.client import Client
from sglang_trunc.serving.server import Server
from tests.server.company import in_company
from tests.server.idle import idle_problem
from tests.server.oracle import Oracle
from tests.server.pool import Servers
from tests.server.setups import PROMPT, WHOLE, LoopSpec, Setup

HERE = Path(__file__).parent


def setups_of(item: pytest.Item) -> tuple[Setup, ...]:
    """The setups whose servers a test uses, in that order."""
    if HERE not in item.path.parents:
        return ()
    params = item.callspec.params if hasattr(item, "callspec") else {}
    if "setups" in params:  # a test that goes through several servers
        return tuple(params["setups"])
    if "server" not in getattr(item, "fixturenames", ()):
        return ()
    return (params.get("served") or item.module.SETUP,)


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    """Mark the server tests, and bring those of one setup together in the order of first use."""
    mine = [item for item in items if HERE in item.path.parents]
    for item in mine:
        item.add_marker(pytest.mark.server)
        item.add_marker(pytest.mark.xdist_group("+".join(setup.name for setup in setups_of(item)) or str(item.path)))
    order = list(dict.fromkeys(map(setups_of, mine)))
    mine.sort(key=lambda item: order.index(setups_of(item)))
    places = [place for place, item in enumerate(items) if HERE in item.path.parents]
    for place, item in zip(places, mine, strict=True):
        items[place] = item


@pytest.fixture(scope="session")
def model_of(tiny_checkpoint) -> Callable[[Setup], Path]:
    """The checkpoint directory of a setup."""
    return lambda setup: setup.directory or tiny_checkpoint(setup.family, **setup.checkpoint)


@pytest.fixture(scope="session")
def servers(request, model_of) -> Iterator[Servers]:
    order = dict.fromkeys(setup for item in request.session.items for setup in setups_of(item))
    # Workers beside this one take setups out of the order as they go; the machine is busy with theirs, too.
    pool = Servers([] if hasattr(request.config, "workerinput") else list(order), model_of)
    yield pool
    pool.close()


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
    return getattr(request, "param", None) or request.module.SETUP


@pytest.fixture(scope="module")
def server(served: Setup, servers: Servers) -> Server:
    return servers.get(served)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Client]:
    with server.client() as connected:
        yield connected


@pytest.fixture(scope="module")
def oracle(served: Setup, oracle_of) -> Oracle:
    return oracle_of(served)


@pytest.fixture(scope="module")
def whole(client: Client, oracle: Oracle) -> list[int]:
    """What follows PROMPT, known to be right."""
    output = client.generate(PROMPT, max_new_tokens=WHOLE, ignore_eos=True).output_ids
    assert oracle.mismatch(PROMPT, output) is None
    return output


@pytest.fixture(scope="module")
def decode(served: Setup, model_of) -> Callable[[list[int]], str]:
    """The text of token ids, as a server shows it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_of(served))
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


@pytest.fixture
def company(served: Setup, client: Client, oracle: Oracle) -> Iterator[None]:
    """Where a pipeline is served, others ask as well: see ``company``."""
    with in_company(client, oracle) if isinstance(served.schedule, LoopSpec) else nullcontext():
        yield


@pytest.fixture(autouse=True)
def nothing_is_left(request) -> Iterator[None]:
    """No slot is lost or given back twice by any test, no lane stays, and the server survives it."""
    yield
    if "server" in request.fixturenames:
        assert (problem := idle_problem(request.getfixturevalue("server"))) is None, problem
