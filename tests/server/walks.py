"""Walks: one visit to each of several servers, plain first, for the tests of all modules that need them.

A server start costs more than what is asked of it, and plain decoding's answers are needed when the others have come.
So the modules do not go to the servers themselves: each has a ``visit``, called once for every server of a walk, and
its tests look at what the visits brought. Only modules that are collected pay visits, so any selection of tests works,
on any worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from sglang_trunc.serving.request_options import PLAIN_FLAGS, SERVER_FLAGS, OptionClient
from sglang_trunc.serving.server import Server
from tests.server.idle import idle_problem
from tests.server.pool import Servers
from tests.server.setups import LoopSpec, Setup, Trunc

# Compact JSON: a model that has learned nothing would fill an answer with white space.
FLAGS = (*SERVER_FLAGS, "--constrained-json-disable-any-whitespace")
THINKING = (*FLAGS, "--reasoning-parser", "qwen3")
_OURO: dict[str, Any] = {"context": 512, "checkpoint": {"dial": 0.05, "seed": 4}, "flags": THINKING}
DUAL = Setup("ouro", LoopSpec(1, 3, 32, 0.0), **_OURO)
OURO = (
    Setup("ouro", None, overlap=False, **{**_OURO, "flags": (*THINKING, PLAIN_FLAGS[0])}),
    Setup("ouro", Trunc(2, 4), **_OURO),
    Setup("ouro", LoopSpec(1, None, 32, 0.0), page=16, chunk=16, **_OURO),
    DUAL,
    Setup("ouro", DUAL.schedule, **{**_OURO, "environment": {"STARTED": "again"}}),
)
AGAIN = OURO[-1]
_HUGINN: dict[str, Any] = {"context": 512, "flags": FLAGS}
HUGINN = (
    Setup("huginn", None, overlap=False, **{**_HUGINN, "flags": (*FLAGS, PLAIN_FLAGS[0])}),
    Setup("huginn", Trunc(3, 4), page=16, overlap=False, **_HUGINN),
    Setup("huginn", LoopSpec(2, 4, 32, 0.0), **_HUGINN),
)
_DONE = pytest.StashKey[dict[str, "Walk"]]()


def name_of(setups: Sequence[Setup]) -> str:
    """As in test ids."""
    return setups[0].family


class Visit(NamedTuple):
    """A server, and what this module's earlier visits of the walk brought; the first one is plain."""

    setup: Setup
    server: Server
    client: OptionClient
    earlier: Sequence[Any]


class Walk:
    """What the visits brought, by module."""

    def __init__(self, setups: Sequence[Setup], modules: Sequence[Any]):
        self.setups = setups
        self.idle: dict[Setup, str | None] = {}  # what an idle server had kept
        self._brought: dict[Any, list[Any]] = {module: [] for module in modules}

    def go(self, servers: Servers) -> None:
        for setup in self.setups:
            server = servers.get(setup)
            with OptionClient(server.url) as client:
                for module, brought in self._brought.items():
                    try:
                        brought.append(module.visit(Visit(setup, server, client, tuple(brought))))
                    except Exception as problem:  # raised again in this module's tests, and in no other's
                        brought.append(problem)
            self.idle[setup] = idle_problem(server)

    def of(self, module: Any) -> list[Any]:
        """One entry for each setup."""
        for brought in self._brought[module]:
            if isinstance(brought, Exception):
                raise brought
        return self._brought[module]


def walk_of(request: pytest.FixtureRequest, setups: Sequence[Setup], servers: Servers) -> Walk:
    """The walk through these servers, made at its first use in a session."""
    done = request.config.stash.setdefault(_DONE, {})
    key = name_of(setups)
    if key not in done:
        modules = dict.fromkeys(
            item.module for item in request.session.items if getattr(item, "callspec", None) and _walks(item, setups)
        )
        done[key] = Walk(setups, list(modules))
        done[key].go(servers)
    return done[key]


def _walks(item: Any, setups: Sequence[Setup]) -> bool:
    return item.callspec.params.get("setups") == setups and hasattr(item.module, "visit")
