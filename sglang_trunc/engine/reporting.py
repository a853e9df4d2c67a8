"""What the engine says of itself: counters in ``/server_info``, and in ``meta_info`` what an answer depended on.

``/server_info``: ``internal_states[0]["sglang_trunc"]``; ``lanes`` is of now, for pipelines: an idle server has no
lane, and all its branch slots. ``meta_info``: ``sampling_seed`` of sampled requests, so that an answer can be had
again, and ``relaxed_acceptance`` where the text is not the model's own. It travels as SGLang's ``customized_info``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from sglang_trunc.core.options import Options
from sglang_trunc.engine import seeds
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


class EveryChunk(list):
    """One value of a request in the place of one per token: each part of an answer gets it whole."""

    def __getitem__(self, index):
        return list(self) if isinstance(index, slice) else super().__getitem__(index)


def report_to_client(req, options: Options) -> None:
    """Note on a new request what its ``meta_info`` shall say."""
    said: dict[str, Any] = {}
    if not seeds.is_greedy(req):
        said["sampling_seed"] = seeds.seed_of(req)
    if options.relaxed:
        said["relaxed_acceptance"] = {"top": options.relax_top, "tau": options.relax_tau}
    if said:
        req.customized_info = {**(req.customized_info or {}), KEY: EveryChunk([said])}


def add_to_meta_info(
    original, manager, meta_info: dict, state, customized_info: dict, index: int, finish_reason: dict | None
) -> None:
    """Around ``TokenizerManager.update_request_meta_info``: ours are of the answer, not lists over its tokens."""
    rest = {key: values for key, values in customized_info.items() if key != KEY}
    original(manager, meta_info, state, rest, index, finish_reason)
    own = customized_info.get(KEY)
    for said in own[index] if own else ():
        meta_info.update(said or {})
