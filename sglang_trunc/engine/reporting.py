"""The engine's counters in ``/server_info``: ``internal_states[0]["sglang_trunc"]``."""

from __future__ import annotations

from sglang_trunc.engine.names import is_ours

KEY = "sglang_trunc"


def add_counters(_result, controller, state: dict) -> None:
    """After ``SchedulerInternalStateController._add_speculative``."""
    scheduler = controller.scheduler
    if not is_ours(scheduler.spec_algorithm):
        return
    worker = scheduler.draft_worker
    options = worker.options
    state[KEY] = {
        "options": {"d1": options.d1, "block_size": options.block_size, "draft_threshold": options.draft_threshold},
        "recurrences": worker.model.shape.recurrences,
        "counters": worker.counters.report(),
        "cost": worker.cost and worker.cost._asdict(),
    }
