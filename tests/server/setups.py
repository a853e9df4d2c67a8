"""One server of the suite as data: checkpoint, algorithm, and every dimension that must not change a token."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_trunc.serving.server import Server
from tests.server.oracle import prompt_of

# Scheduler and kernels on one thread each; unwritten KV is NaN; SGLang checks its slots every round.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
POISON = {"SGLANG_TRUNC_POISON_KV": "1"}


@dataclass(frozen=True)
class Trunc:
    """Options of the speculative schedule, set through the environment."""

    d1: int
    block_size: int
    draft_threshold: float = 0.0

    def environment(self) -> dict[str, str]:
        return {f"SGLANG_TRUNC_{name.upper()}": str(value) for name, value in vars(self).items()}


@dataclass(frozen=True)
class Setup:
    """Arguments of one launch. ``trunc`` None is plain decoding; two setups of equal fields share a server."""

    family: str  # of reference.tiny
    trunc: Trunc | None = None
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
        parts += ["plain"] if self.trunc is None else [f"trunc{self.trunc.d1}x{self.trunc.block_size}"]
        if self.trunc is not None and self.trunc.draft_threshold:
            parts.append(f"p{self.trunc.draft_threshold}")
        parts += [f"page{self.page}", "whole" if self.chunk < 0 else f"chunk{self.chunk}"]
        parts += [name for name in ("radix", "overlap") if getattr(self, name)]
        return "-".join(parts)

    def __hash__(self) -> int:
        return hash(self.name)

    def arguments(self) -> list[str]:
        args = ["--dtype", self.dtype, "--page-size", str(self.page), "--chunked-prefill-size", str(self.chunk)]
        args += ["--context-length", str(self.context), "--max-total-tokens", str(self.pool)]
        args += ["--max-running-requests", str(self.requests), "--skip-server-warmup", "--sleep-on-idle"]
        if self.trunc is not None:
            args += ["--speculative-algorithm", "trunc"]
        if not self.radix:
            args.append("--disable-radix-cache")
        if not self.overlap:
            args.append("--disable-overlap-schedule")
        if self.override:
            args += ["--json-model-override-args", json.dumps(self.override)]
        return [*args, *self.flags]

    def variables(self) -> dict[str, str]:
        poison = POISON if self.dtype == "float32" else {}
        options = {} if self.trunc is None else self.trunc.environment()
        return {**ENVIRONMENT, **poison, **options, **self.environment}

    def server(self, model: Path) -> Server:
        return Server(str(model), self.arguments(), self.variables(), name=self.name)


# Drafts at full depth are all accepted: every run is a whole block.
LONG_RUNS = Setup("ouro", Trunc(4, 16), context=256)
PROMPT = prompt_of(12, seed=5)
WHOLE = 64  # tokens of the known continuation of PROMPT, see the fixture ``whole``
