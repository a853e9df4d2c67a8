"""One question to one server, timed: SGLang's own API, or any OpenAI-compatible one, with the same answer.

Tokens are counted from what the server says, never from the number of events, since a speculative server sends several
tokens in one (SGLang pull request 12064). An OpenAI server that gives no running counts (``continuous_usage_stats``)
gets one token for its first event and the rest spread evenly: its total is right, its percentiles between tokens
are not, and the answer says so (``counted``).

Times: ``begin`` is seconds since the epoch, so that the parts of an interrupted run can be laid side by side; all
others are seconds since ``begin``, from a clock that does not jump.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self

import httpx

from evaluation.settings import Sampling
from evaluation.tasks.problem import Message, Style
from sglang_trunc.serving import counters
from sglang_trunc.serving.client import Client, Completion, RequestRefused

TIMEOUT = 3600.0  # a long answer of a large model on a slow machine
DIGITS = 6  # of seconds


class Question(NamedTuple):
    """``prompt``: text or token ids; else ``messages`` for a server with a chat template."""

    prompt: str | list[int] | None
    messages: Sequence[Message]
    style: Style
    max_new_tokens: int
    stop: Sequence[str]
    sampling: Sampling
    seed: int


class Answer(NamedTuple):
    """JSON-ready."""

    text: str
    output_ids: list[int] | None  # None: the server does not tell
    prompt_tokens: int
    completion_tokens: int
    finish: str
    begin: float
    first: float  # the first event with a token
    end: float
    events: list[tuple[float, int]]  # (seconds, tokens so far)
    counted: bool  # events carry counts of the server's own
    speculation: tuple[int, int] | None  # (tokens, rounds); None where the server does not tell


class Endpoint(Protocol):
    """Raises ``RequestRefused`` for a question that the server will not answer."""

    def ask(self, question: Question) -> Answer: ...

    def close(self) -> None: ...


class SGLangEndpoint:
    """``/generate``, with token ids and speculation counters."""

    def __init__(self, url: str, timeout: float = TIMEOUT) -> None:
        self.client = Client(url, timeout=timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.client.close()

    def ask(self, question: Question) -> Answer:
        if question.prompt is None:
            raise ValueError("SGLang's own API needs the prompt as text or token ids")
        sampling: dict[str, Any] = {}
        if question.sampling.temperature > 0:
            sampling = {"top_p": question.sampling.top_p, "sampling_seed": question.seed}
        epoch = time.time() - time.perf_counter()
        completion = self.client.generate(
            question.prompt,
            max_new_tokens=question.max_new_tokens,
            temperature=question.sampling.temperature,
            stop=list(question.stop) or None,
            sampling=sampling,
            stream=True,
        )
        if completion.finish_reason.get("type") == "abort":
            raise RequestRefused(400, str(completion.finish_reason.get("message", "the server aborted the request")))
        return from_completion(completion, epoch)


def from_completion(completion: Completion, epoch: float) -> Answer:
    begin = completion.begin
    events = [(round(chunk.at - begin, DIGITS), chunk.tokens) for chunk in completion.chunks]
    # Only speculative servers count rounds; the key is read strictly where it belongs.
    speculative = any(name.startswith("spec_") for name in completion.meta_info)
    spent = counters.speculation(completion.meta_info) if speculative else None
    return Answer(
        completion.text,
        completion.output_ids,
        completion.prompt_tokens,
        completion.completion_tokens,
        str(completion.finish_reason.get("type")),
        epoch + begin,
        events[0][0],
        round(completion.end - begin, DIGITS),
        events,
        True,
        (spent.tokens, spent.rounds) if spent else None,
    )


class OpenAIEndpoint:
    """``/v1/completions``, or ``/v1/chat/completions`` for messages."""

    def __init__(self, url: str, model: str | None = None, timeout: float = TIMEOUT) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.Client(base_url=url, timeout=timeout, limits=limits, trust_env=False)
        self._model = model

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    @property
    def model(self) -> str:
        """The first that the server names."""
        if self._model is None:
            self._model = str(self._http.get("/v1/models").raise_for_status().json()["data"][0]["id"])
        return self._model

    def ask(self, question: Question) -> Answer:
        path, body = self._request(question)
        started, begin = time.time(), time.perf_counter()
        parts: list[str] = []
        arrivals: list[tuple[float, int | None]] = []
        usage: dict[str, int] = {}
        finish = "unknown"
        for event in self._events(path, body):
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                text = said_in(choice)
                finish = choice.get("finish_reason") or finish
                if text:
                    parts.append(text)
                    counted = (event.get("usage") or {}).get("completion_tokens")
                    arrivals.append((time.perf_counter() - begin, counted))
        end = time.perf_counter() - begin
        if not usage:
            raise RequestRefused(200, "the server gives no token counts (stream_options.include_usage)")
        total = int(usage["completion_tokens"])
        events, counted_all = spread(arrivals or [(end, None)], total)
        return Answer(
            "".join(parts),
            None,
            int(usage["prompt_tokens"]),
            total,
            finish,
            started,
            events[0][0],
            round(end, DIGITS),
            events,
            counted_all,
            None,
        )

    def _request(self, question: Question) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": question.max_new_tokens,
            "temperature": question.sampling.temperature,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        if question.stop:
            body["stop"] = list(question.stop)[:4]  # the API's limit; the graders cut the text again
        if question.sampling.temperature > 0:
            body |= {"top_p": question.sampling.top_p, "seed": question.seed}
        if not question.messages:
            return "/v1/completions", {**body, "prompt": question.prompt}
        messages = [message._asdict() for message in question.messages]
        thinking = {"enable_thinking": question.style is Style.THINKING}
        return "/v1/chat/completions", {**body, "messages": messages, "chat_template_kwargs": thinking}

    def _events(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        with self._http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                raise RequestRefused(response.status_code, response.read().decode("utf-8", "replace")[:500])
            for line in response.iter_lines():
                payload = line.removeprefix("data:").strip()
                if line.startswith("data:") and payload != "[DONE]":
                    event = json.loads(payload)
                    if "error" in event:
                        raise RequestRefused(400, str(event["error"]))
                    yield event


def said_in(choice: Mapping[str, Any]) -> str:
    """Text of one event; a reasoning parser's part counts as text, or its tokens would have none."""
    if "text" in choice:
        return choice["text"] or ""
    delta = choice.get("delta") or {}
    return (delta.get("reasoning_content") or "") + (delta.get("content") or "")


def spread(arrivals: Sequence[tuple[float, int | None]], total: int) -> tuple[list[tuple[float, int]], bool]:
    """Events with token counts; False where the server gave none and they are spread evenly."""
    times = [round(at, DIGITS) for at, _ in arrivals]
    if all(count is not None for _, count in arrivals):
        return [(at, int(count or 0)) for at, (_, count) in zip(times, arrivals, strict=True)], True
    steps = max(len(times) - 1, 1)
    first = min(1, total)
    return [(at, first + (total - first) * index // steps) for index, at in enumerate(times)], False
