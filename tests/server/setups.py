"""One server of the suite as data: checkpoint, algorithm, and every dimension that must not change a token."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from sglang_trunc.serving.server import Server
from tests.server.oracle import prompt_of

# Scheduler and kernels on one thread each; unwritten KV is NaN; SGLang checks its slots every round.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
POISON = {"SGLANG_TRUNC_POISON_KV": "1"}


class Schedule:
    """Options of a speculative algorithm, set through the environment; one that is None is not set."""

    def environment(self) -> dict[str, str]:
        given = {name: value for name, value in vars(self).items() if value is not None}
        return {f"SGLANG_TRUNC_{name.upper()}": str(value) for name, value in given.items()}


@dataclass(frozen=True)
class Trunc(Schedule):
    d1: int
    block_size: int
    draft_threshold: float = 0.0
    algorithm: ClassVar[str] = "trunc"

    @property
    def name(self) -> str:
        return f"trunc{self.d1}x{self.block_size}" + (f"p{self.draft_threshold}" if self.draft_threshold else "")


@dataclass(frozen=True)
class LoopSpec(Schedule):
    """With a second depth it is ``loopspec_dual``. A minimum survival of 0 lets trees grow to their width."""

    d1: int
    d2: int | None = None
    max_width: int | None = None
    min_survival: float | None = None

    @property
    def algorithm(self) -> str:
        return "loopspec_single" if self.d2 is None else "loopspec_dual"

    @property
    def name(self) -> str:
        parts = [f"single{self.d1}" if self.d2 is None else f"dual{self.d1}+{self.d2}"]
        parts += [] if self.max_width is None else [f"w{self.max_width}"]
        parts += [] if self.min_survival is None else [f"s{self.min_survival:g}"]
        return "".join(parts)


@dataclass(frozen=True)
class Controlled(Schedule):
    """TRUNC without blocks: the cost table decides how many lanes run."""

    d1: int
    cost_table: Path | None = None  # measured where there is none
    decisions: Path | None = None
    algorithm: ClassVar[str] = "trunc"

    @property
    def name(self) -> str:
        return f"controlled{self.d1}"


@dataclass(frozen=True)
class Setup:
    """Arguments of one launch. ``schedule`` None is plain decoding; two setups of equal fields share a server."""

    family: str  # of reference.tiny
    schedule: Trunc | LoopSpec | Controlled | None = None
    page: int = 1
    chunk: int = -1  # --chunked-prefill-size; -1 is off
    radix: bool = True
    overlap: bool = True
    dtype: str = "float32"
    context: int = 1024
    pool: int = 4096  # tokens
    requests: int = 8
    checkpoint: Mapping[str, Any] = field(default_factory=dict)  # options of write_tiny
    override: Mapping[str, Any] = field(default_factory=dict)  # --json-model-override-args
    directory: Path | None = None  # of another checkpoint than a tiny one
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As in test ids and log names."""
        parts = [self.family, {"float32": "fp32", "bfloat16": "bf16"}[self.dtype]]
        parts.append("plain" if self.schedule is None else self.schedule.name)
        parts += [f"page{self.page}", "whole" if self.chunk < 0 else f"chunk{self.chunk}"]
        parts += [name for name in ("radix", "overlap") if getattr(self, name)]
        return "-".join(parts)

    def __hash__(self) -> int:
        return hash(self.name)

    def arguments(self) -> list[str]:
        args = ["--dtype", self.dtype, "--page-size", str(self.page), "--chunked-prefill-size", str(self.chunk)]
        args += ["--context-length", str(self.context), "--max-total-tokens", str(self.pool)]
        args += ["--max-running-requests", str(self.requests), "--skip-server-warmup", "--sleep-on-idle"]
        if self.schedule is not None:
            args += ["--speculative-algorithm", self.schedule.algorithm]
        if not self.radix:
            args.append("--disable-radix-cache")
        if not self.overlap:
            args.append("--disable-overlap-schedule")
        if self.override:
            args += ["--json-model-override-args", json.dumps(self.override)]
        return [*args, *self.flags]

    def variables(self) -> dict[str, str]:
        poison = POISON if self.dtype == "float32" else {}
        options = {} if self.schedule is None else self.schedule.environment()
        return {**ENVIRONMENT, **poison, **options, **self.environment}

    def server(self, model: Path) -> Server:
        return Server(str(model), self.arguments(), self.variables(), name=self.name)


def slow(setup: Setup) -> Any:
    """For tables of setups: one that the default suite has no time for, since each costs a server."""
    return pytest.param(setup, marks=pytest.mark.slow)


# Drafts at full depth are all accepted: every run is a whole block.
LONG_RUNS = Setup("ouro", Trunc(4, 16), context=256)
# In company, runs of one to four tokens; branches win often.
UNEVEN_RUNS = Setup("ouro", LoopSpec(1, 3, 32, 0.0), context=256, checkpoint={"dial": 0.05, "seed": 4})
BOTH_RUNS = pytest.mark.parametrize("served", [LONG_RUNS, UNEVEN_RUNS], ids=lambda row: row.name, indirect=True)
PROMPT = prompt_of(12, seed=5)
WHOLE = 64  # tokens of the known continuation of PROMPT, see the fixture ``whole``
