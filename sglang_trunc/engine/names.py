"""The algorithms of this package, as SGLang spells them."""

from __future__ import annotations

ALGORITHMS = ("TRUNC",)


def is_ours(algorithm) -> bool:
    """Whether a ``SpeculativeAlgorithm`` or registered algorithm is one of ours."""
    return getattr(algorithm, "name", None) in ALGORITHMS
