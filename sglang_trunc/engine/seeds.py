"""Every sampled request has a seed: its own, or one that it gets on arrival and that its answer reports.

Stock SGLang seeds requests only under ``--enable-deterministic-inference`` (42 where none is given). Here noise is
always keyed by (seed, position), so that a draft and its verification draw alike; a request without a seed gets one
of the server's random seed, its own id and its place in the order of arrival, which all ranks agree on.
"""

from __future__ import annotations

import hashlib

from sglang.srt.runtime_context import get_exec

SEED_BITS = 53  # exact in every JSON reader
STOCK_SEED = 42  # SGLang's, under --enable-deterministic-inference
_ARRIVALS = "_sglang_trunc_arrivals"


def is_greedy(req) -> bool:
    """Temperature 0 arrives as top_k 1."""
    return req.sampling_params.top_k <= 1


def assign(scheduler, req) -> None:
    """Give a sampled request that brought no seed one of its own."""
    if is_greedy(req) or req.sampling_params.sampling_seed is not None:
        return
    if get_exec().deterministic.enable_deterministic_inference:
        req.sampling_params.sampling_seed = STOCK_SEED
        return
    arrivals = getattr(scheduler, _ARRIVALS, 0) + 1
    setattr(scheduler, _ARRIVALS, arrivals)
    text = f"{scheduler.random_seed}/{req.rid}/{arrivals}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    req.sampling_params.sampling_seed = int.from_bytes(digest, "big") >> (64 - SEED_BITS)


def seed_of(req) -> int:
    """A request's seed; of no use to a greedy one."""
    return req.sampling_params.sampling_seed or 0
