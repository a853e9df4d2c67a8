"""What a run is: a contestant, a task, a sampling rule, a concurrency. Its key names it in the store.

A contestant is a server that we start (``arms``: stock plain decoding, our schedules, SGLang's own n-gram speculation)
or one that runs already, by URL. Everything that could change an answer or its speed is in the key, so answers of other
settings are never taken for these; the number of problems is not, so a longer run continues a shorter one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import arms
import provenance

from evaluation.tasks.problem import Problem, Task, digest

SEED_BITS = 31  # OpenAI-compatible servers differ in what they take; all take these


class Sampling(NamedTuple):
    name: str
    temperature: float
    top_p: float


GREEDY = Sampling("greedy", 0.0, 1.0)
SAMPLED = Sampling("sampled", 1.0, 0.7)  # LoopSpec's rule for Thinking models
SAMPLINGS = {one.name: one for one in (GREEDY, SAMPLED)}

NGRAM = "ngram"
# Built into SGLang; needs no draft model. SGLang itself says where it does not run.
NGRAM_ARM = arms.Arm(NGRAM, "NGRAM")


class Contestant(NamedTuple):
    """Exactly one of ``arm`` and ``url``."""

    name: str
    arm: arms.Arm | None = None
    url: str | None = None
    openai: bool = False  # force the OpenAI API, also where the server is SGLang

    @property
    def facts(self) -> dict[str, Any]:
        if self.arm is None:
            return {"url": self.url, "openai": self.openai}
        return {"server_args": self.arm.server_args, "env": self.arm.env}


class Run(NamedTuple):
    model: str
    contestant: Contestant
    task: Task
    sampling: Sampling
    concurrency: int
    server_args: Sequence[str] = ()  # of every server that we start; a peer is compared with those

    @property
    def settings(self) -> dict[str, Any]:
        """JSON-ready, and all that the key is made of."""
        return {
            "model": provenance.shortened(self.model),
            "contestant": {"name": self.contestant.name, **self.contestant.facts},
            "task": self.task.name,
            "style": self.task.style.value,
            "data": self.task.digest,
            "max_new_tokens": self.task.max_new_tokens,
            "sampling": self.sampling._asdict(),
            "concurrency": self.concurrency,
            "server_args": list(self.server_args),
        }

    @property
    def key(self) -> str:
        return digest(self.settings)

    @property
    def title(self) -> str:
        return f"{self.task.name} {self.sampling.name} x{self.concurrency} {self.contestant.name}"


def contestants(arm_texts: Sequence[str], peer_texts: Sequence[str]) -> list[Contestant]:
    """Plain first. ``arm_texts`` as ``arms`` reads them, and ``ngram``; ``peer_texts``: NAME=URL or NAME=openai:URL."""
    ngram = [text for text in arm_texts if text.partition(":")[0] == NGRAM]
    own = arms.chosen([text for text in arm_texts if text not in ngram])
    found = [Contestant(arm.name, arm) for arm in own]
    if ngram:
        found.append(Contestant(NGRAM, NGRAM_ARM))
    found += [peer(text) for text in peer_texts]
    names = [one.name for one in found]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"two contestants have the name {sorted(twice)[0]!r}")
    return found


def peer(text: str) -> Contestant:
    name, _, url = text.partition("=")
    forced = url.startswith("openai:")
    url = url.removeprefix("openai:").rstrip("/")
    if not name or not url.startswith(("http://", "https://")):
        raise ValueError(f"a peer is NAME=http://HOST:PORT or NAME=openai:http://HOST:PORT, got {text!r}")
    return Contestant(name, url=url.removesuffix("/v1"), openai=forced)


def seed_of(problem: Problem) -> int:
    """The same for every contestant, so that servers with the same noise draw the same text."""
    return int.from_bytes(hashlib.sha256(problem.id.encode()).digest()[:4], "big") >> (32 - SEED_BITS)
