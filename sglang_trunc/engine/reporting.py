"""The engine's counters in ``/server_info``: ``internal_states[0]["sglang_trunc"]``.

``lanes`` is of now, for pipelines: an idle server has no lane, and all its branch slots.
"""

from __future__ import annotations

import dataclasses

from sglang_trunc.engine.names import is_ours

KEY = "sglang_trunc"


def add_counters(_result, controller, state: dict) -> None:
    """After ``SchedulerInternalStateController._add_speculative``."""
    scheduler = controller.scheduler
    if not is_ours(scheduler.spec_algorithm):
        return
    worker = scheduler.draft_worker
    state[KEY] = {
        "options": dataclasses.asdict(worker.options),
        "recurrences": worker.model.shape.recurrences,
        "counters": worker.counters.report(),
        "cost": worker.cost and worker.cost._asdict(),
        "seconds": worker.stopwatch and dict(worker.stopwatch.seconds),
    }
    pipeline = getattr(worker, "pipeline", None)
    if pipeline is not None:
        state[KEY]["lanes"] = {
            "live": sum(len(tree.lanes) for tree in pipeline.trees.values()),
            "branch_slots_free": pipeline.slots.free,
            "branch_slots": pipeline.slots.size,
        }
