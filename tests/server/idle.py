"""What an idle server must not have kept."""

from __future__ import annotations

from sglang_trunc.serving.counters import STATE_KEY
from sglang_trunc.serving.server import Server


def idle_problem(server: Server) -> str | None:
    """Why the server is not as it was before its first request: slots in use, lanes; None if it is."""
    return server.pool_problem() or _lanes_problem(server.internal_state().get(STATE_KEY, {}).get("lanes"))


def _lanes_problem(lanes: dict[str, int] | None) -> str | None:
    """``lanes``: as the engine reports them; None for an algorithm whose lanes do not outlive a round."""
    if lanes is None or (lanes["live"] == 0 and lanes["branch_slots_free"] == lanes["branch_slots"]):
        return None
    return f"lanes or their slots are left: {lanes}"
