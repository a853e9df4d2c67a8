"""The algorithms of this package, as SGLang spells them, and environment variables that are no options."""

from __future__ import annotations

ALGORITHMS = ("TRUNC", "LOOPSPEC_SINGLE", "LOOPSPEC_DUAL")

CACHE_ENV = "SGLANG_TRUNC_CACHE_DIR"
COST_ENV = "SGLANG_TRUNC_COST_TABLE"
DECISIONS_ENV = "SGLANG_TRUNC_DECISIONS"
MEASURE_ENV = "SGLANG_TRUNC_MEASURE"
POISON_ENV = "SGLANG_TRUNC_POISON_KV"
TRACE_ENV = "SGLANG_TRUNC_TRACE"


def is_ours(algorithm) -> bool:
    """Whether a ``SpeculativeAlgorithm`` or registered algorithm is one of ours."""
    return getattr(algorithm, "name", None) in ALGORITHMS
