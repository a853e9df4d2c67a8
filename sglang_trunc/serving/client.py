"""SGLang's HTTP API as typed calls.

``Client.generate`` sends one request and returns a ``Completion``; ``generate_many`` keeps a fixed number
in flight. Greedy by default. Times are taken with ``perf_counter`` on this side of the connection.

Contract on counting: tokens are counted from ``meta_info.completion_tokens``, never from the number
of streamed events, since a speculative server sends several tokens in one event.

A request the server refuses raises ``RequestRefused`` with the server's own sentence; a missing key in an
answer raises ``KeyError`` instead of reading as zero.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self

import httpx

Prompt = str | Sequence[int]  # text, or token ids


class RequestRefused(RuntimeError):
    """The server answered with an error; ``status`` is its HTTP code."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status
        self.message = message


class Chunk(NamedTuple):
    """One streamed event."""

    at: float  # perf_counter
    tokens: int  # completion tokens so far


@dataclass(frozen=True)
class Completion:
    """One answer. ``chunks`` is empty for a request that was not streamed."""

    output_ids: list[int]
    text: str
    meta_info: dict[str, Any]
    begin: float
    end: float
    chunks: tuple[Chunk, ...] = ()

    @property
    def latency(self) -> float:
        """Seconds from sending to the last byte."""
        return self.end - self.begin

    @property
    def completion_tokens(self) -> int:
        return int(self.meta_info["completion_tokens"])

    @property
    def prompt_tokens(self) -> int:
        return int(self.meta_info["prompt_tokens"])

    @property
    def cached_tokens(self) -> int:
        return int(self.meta_info["cached_tokens"])

    @property
    def finish_reason(self) -> dict[str, Any]:
        return dict(self.meta_info["finish_reason"])

    def top_logprobs(self, position: int) -> list[tuple[float, int]]:
        """(logprob, token id) pairs at a generated position, best first."""
        pairs = self.meta_info["output_top_logprobs"][position]
        return sorted(((float(value), int(token)) for value, token, *_ in pairs), key=lambda p: (-p[0], p[1]))


class Client:
    """``with Client(url) as client: client.generate("def f(", max_new_tokens=16)``. Thread-safe."""

    def __init__(self, url: str, timeout: float = 600.0) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        # trust_env off: a proxy set for downloads must not see requests to this machine.
        self._http = httpx.Client(base_url=url, timeout=timeout, limits=limits, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        ignore_eos: bool = False,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        sampling: Mapping[str, Any] | None = None,
        return_logprob: bool = False,
        top_logprobs_num: int = 0,
        token_ids_logprob: Sequence[int] | None = None,
        stream: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> Completion:
        """``sampling`` adds sampling parameters, ``extra`` top-level request fields (``rid``...)."""
        base: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "ignore_eos": ignore_eos,
            "stop": stop,
            "stop_token_ids": stop_token_ids,
            **(sampling or {}),
        }
        given = {key: value for key, value in base.items() if value is not None}
        body: dict[str, Any] = {"sampling_params": given, **(extra or {})}
        body |= {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
        if return_logprob:
            body |= {"return_logprob": True, "top_logprobs_num": top_logprobs_num}
            if token_ids_logprob is not None:
                body["token_ids_logprob"] = list(token_ids_logprob)
        return self._streamed(body) if stream else self._whole(body)

    def _whole(self, body: Mapping[str, Any]) -> Completion:
        begin = time.perf_counter()
        answer = self._checked(self._http.post("/generate", json=body)).json()
        end = time.perf_counter()
        return Completion(answer["output_ids"], answer["text"], answer["meta_info"], begin, end)

    def _streamed(self, body: Mapping[str, Any]) -> Completion:
        chunks: list[Chunk] = []
        ids: list[int] = []
        text, answer = "", None
        begin = time.perf_counter()
        for answer in self.stream(body):
            tokens = int(answer["meta_info"]["completion_tokens"])
            chunks.append(Chunk(time.perf_counter(), tokens))
            # With --incremental-streaming-output an event carries its own tokens only.
            whole = len(answer["output_ids"]) == tokens
            ids = answer["output_ids"] if whole else ids + answer["output_ids"]
            text = answer["text"] if whole else text + answer["text"]
        end = time.perf_counter()
        if answer is None:
            raise RequestRefused(200, "the stream ended without a token")
        return Completion(ids, text, answer["meta_info"], begin, end, tuple(chunks))

    def stream(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Raw events of a streamed request; closing the iterator hangs up, which aborts the request."""
        with self._http.stream("POST", "/generate", json={**body, "stream": True}) as response:
            if response.status_code != 200:
                response.read()
            self._checked(response)
            for line in response.iter_lines():
                payload = line.removeprefix("data:").strip()
                if not line.startswith("data:") or payload == "[DONE]":
                    continue
                event = json.loads(payload)
                if "error" in event:
                    raise RequestRefused(int(event["error"].get("code") or 400), event["error"]["message"])
                yield event

    def generate_many(self, prompts: Sequence[Prompt], concurrency: int, **options: Any) -> list[Completion]:
        """All prompts with at most ``concurrency`` in flight; answers in the order of the prompts."""
        with ThreadPoolExecutor(max_workers=concurrency) as pool:
            return list(pool.map(lambda prompt: self.generate(prompt, **options), prompts))

    def abort(self, rid: str) -> None:
        self._checked(self._http.post("/abort_request", json={"rid": rid}))

    def flush_cache(self, wait: float = 30.0) -> None:
        """Empty the prefix cache, waiting up to ``wait`` seconds for running requests to end."""
        self._checked(self._http.post("/flush_cache", params={"timeout": wait}))

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids from the served model's own tokenizer."""
        body = {"prompt": text, "add_special_tokens": add_special_tokens}
        return list(self._checked(self._http.post("/v1/tokenize", json=body)).json()["tokens"])

    def model_info(self) -> dict[str, Any]:
        return self._json("/model_info")

    def server_info(self) -> dict[str, Any]:
        return self._json("/server_info")

    def loads(self) -> list[dict[str, Any]]:
        return list(self._json("/v1/loads")["loads"])

    def _json(self, path: str) -> dict[str, Any]:
        return dict(self._checked(self._http.get(path)).json())

    @staticmethod
    def _checked(response: httpx.Response) -> httpx.Response:
        if response.status_code == 200:
            return response
        try:
            problem = response.json()
            problem = problem.get("error", problem)
            message = problem["message"] if isinstance(problem, dict) else str(problem)
        except (ValueError, KeyError, AttributeError):
            message = response.text.strip()
        raise RequestRefused(response.status_code, message)
