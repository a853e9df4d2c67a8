"""A contestant that can be asked: its server started, or found at its URL; awake or asleep.

Several of our servers may be kept loaded; the ones that are not measured are stopped by signal, because an idle SGLang
scheduler polls and would take a core from the one that is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from evaluation.chat import ChatTemplate
from evaluation.endpoint import Answer, Endpoint, OpenAIEndpoint, Question, SGLangEndpoint
from evaluation.jail import processes
from evaluation.settings import Contestant, Sampling, seed_of
from evaluation.tasks.problem import Problem, Style, Task
from sglang_trunc.serving import counters
from sglang_trunc.serving.client import RequestRefused
from sglang_trunc.serving.server import Server, ServerError

WARM_UP_TOKENS = 8


@dataclass
class Target:
    contestant: Contestant
    endpoint: Endpoint
    chat: ChatTemplate | None
    server: Server | None = None
    info: dict[str, Any] = field(default_factory=dict)  # of an SGLang server

    @property
    def sglang(self) -> SGLangEndpoint | None:
        return self.endpoint if isinstance(self.endpoint, SGLangEndpoint) else None

    def ask(self, problem: Problem, task: Task, sampling: Sampling, tokens: int | None = None) -> Answer:
        prompt = self.prompt(problem, task.style)
        question = Question(
            prompt,
            problem.messages,
            task.style,
            tokens or task.max_new_tokens,
            task.stop,
            sampling,
            seed_of(problem),
        )
        return self.endpoint.ask(question)

    def prompt(self, problem: Problem, style: Style) -> str | list[int] | None:
        """Text, or ids where SGLang's own API needs a chat rendered; None where the server does that."""
        if problem.text is not None or self.sglang is None:
            return problem.text
        if self.chat is None:
            raise ValueError("chat prompts for an SGLang server need --model-path, for its tokenizer")
        return self.chat.ids(problem.messages, style)

    def warm_up(self, problem: Problem, task: Task, sampling: Sampling) -> None:
        """Compiled kernels, allocator, page cache; the prefix cache is empty again afterwards."""
        with contextlib.suppress(RequestRefused):
            self.ask(problem, task, sampling, WARM_UP_TOKENS)
        self.flush()

    def flush(self) -> None:
        if self.sglang is not None:
            self.sglang.client.flush_cache()

    def state(self) -> dict[str, Any]:
        """SGLang's internal state, with the engine's counters; empty for others."""
        if self.sglang is None:
            return {}
        return dict(self.sglang.client.server_info()["internal_states"][0])

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Inside the block a paused server runs."""
        if self.server is None:
            yield
            return
        with self.server.running():
            yield

    def facts(self) -> dict[str, Any]:
        """What a report says of a server."""
        state = (self.info.get("internal_states") or [{}])[0]
        return {
            "kind": "SGLang" if self.sglang else "OpenAI",
            "version": self.info.get("version"),
            "dtype": self.info.get("dtype"),
            "device": self.info.get("device"),
            "options": counters.engine_options(state),
            "start_seconds": self.server and self.server.start_seconds,
        }


def end_leftovers(store: Path) -> int:
    """Ends servers that a killed bench with this store left running; the number of processes. Hold the store's lock."""
    return processes.end_all(_sign(store), seconds=30.0)[0]


def environment(store: Path) -> dict[str, str]:
    """What marks the servers of a store."""
    name, _, value = _sign(store).partition("=")
    return {name: value}


def _sign(store: Path) -> str:
    return f"EVALUATION_STORE={store.resolve()}"


@contextlib.contextmanager
def started(
    contestant: Contestant,
    model_path: str | None,
    args: Sequence[str],
    env: Mapping[str, str],
    extra: Sequence[str] = (),
) -> Iterator[Target]:
    """The contestant for the length of the block. Raises ServerError with one sentence."""
    chat = ChatTemplate(model_path) if model_path else None
    if contestant.arm is None:
        with _found(contestant, chat) as target:
            yield target
        return
    if model_path is None:
        raise ServerError(f"{contestant.name} needs --model-path")
    arm = contestant.arm
    server = Server(model_path, [*arm.server_args, *args, *extra], {**env, **arm.env}, name=contestant.name)
    with server.start(), SGLangEndpoint(server.url) as endpoint:
        yield Target(contestant, endpoint, chat, server, server.info())


@contextlib.contextmanager
def _found(contestant: Contestant, chat: ChatTemplate | None) -> Iterator[Target]:
    assert contestant.url is not None
    try:
        info = {} if contestant.openai else server_info(contestant.url)
        if info:
            with SGLangEndpoint(contestant.url) as endpoint:
                yield Target(contestant, endpoint, chat, None, info)
        else:
            with OpenAIEndpoint(contestant.url) as other:
                yield Target(contestant, other, chat)
    except httpx.HTTPError as problem:
        raise ServerError(f"{contestant.name} at {contestant.url} broke off ({type(problem).__name__})") from problem


def server_info(url: str) -> dict[str, Any]:
    """An SGLang server's; empty for another kind."""
    with httpx.Client(base_url=url, timeout=30.0, trust_env=False) as http:
        answer = http.get("/server_info")
        return dict(answer.json()) if answer.status_code == 200 else {}
