"""Requests that give their row of the slot table back: finished, aborted or retracted.

SGLang tells its workers nothing of that. The row's release is the one place that all three pass, so a hook there
passes it on to whoever announced itself on that table.
"""

from __future__ import annotations

from collections.abc import Callable

_LISTENER = "_sglang_trunc_departures"


def announce(req_to_token_pool, listener: Callable[[str], object]) -> None:
    """Have ``listener(request id)`` called whenever a request leaves its row of this table."""
    setattr(req_to_token_pool, _LISTENER, listener)


def on_free(_result, req_to_token_pool, req) -> None:
    """After ``ReqToTokenPool.free``."""
    listener = getattr(req_to_token_pool, _LISTENER, None)
    rid = getattr(req, "rid", None)  # a streaming session's slot has none
    if listener is not None and rid is not None:
        listener(rid)
