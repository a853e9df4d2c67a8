"""What the engine says of itself: counters in ``/server_info``, and in ``meta_info`` what an answer depended on.

``/server_info``: ``internal_states[0]["sglang_trunc"]``; ``lanes`` is of now, for pipelines: an idle server has no
lane, and all its branch slots. ``meta_info``: ``trunc``, what drafts were worth to this answer (``core.account``);
``sampling_seed`` of sampled requests, so that an answer can be had again, and ``relaxed_acceptance`` where the text
is not the model's own. They travel as SGLang's ``customized_info``.

A request's account hangs on the request, from its arrival on. The workers note runs at the end of a round, before
SGLang knows them; SGLang's streamer asks for what it sends, by number of tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from sglang_trunc.core.account import Account, chain_sources, draft_names
from sglang_trunc.core.counters import Counters
from sglang_trunc.core.lane_tree import LOOKUP
from sglang_trunc.core.pipeline_round import PipelineRun
from sglang_trunc.core.trunc import Run
from sglang_trunc.engine import seeds
from sglang_trunc.engine.names import is_ours

KEY = "sglang_trunc"
ACCOUNT = "trunc"  # in meta_info


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
            "live": live_lanes(pipeline),
            "branch_slots_free": pipeline.slots.free,
            "branch_slots": pipeline.slots.size,
        }


def live_lanes(pipeline) -> int:
    """Lanes of all requests, as of now."""
    return sum(len(tree.lanes) for tree in pipeline.trees.values())


class Answer:
    """What is said of one answer, in the place of a list over its tokens.

    SGLang's streamer slices such a list for every part that it sends, by the tokens before and behind the part. Each
    part gets the whole: its last token says how much has been handed out.
    """

    def __init__(self, said: dict[str, Any], account: Account):
        self.said = said
        self.account = account

    def __getitem__(self, part: slice) -> list[dict[str, Any]]:
        return [{**self.said, ACCOUNT: self.account.settle(part.stop)}]


def report_to_client(req, options: Any) -> None:
    """Note on a new request what its ``meta_info`` shall say. ``options``: the algorithm's, of ``core.options``."""
    said: dict[str, Any] = {}
    if not seeds.is_greedy(req):
        said["sampling_seed"] = seeds.seed_of(req)
    if options.relaxed:
        said["relaxed_acceptance"] = {"top": options.relax_top, "tau": options.relax_tau}
    names = draft_names(options.d1, getattr(options, "d2", None), options.lookup > 0)
    req.customized_info = {**(req.customized_info or {}), KEY: Answer(said, Account(names))}


def add_to_meta_info(
    original, manager, meta_info: dict, state, customized_info: dict, index: int, finish_reason: dict | None
) -> None:
    """Around ``TokenizerManager.update_request_meta_info``: ours are of the answer, not lists over its tokens."""
    rest = {key: values for key, values in customized_info.items() if key != KEY}
    original(manager, meta_info, state, rest, index, finish_reason)
    own = customized_info.get(KEY)
    for said in own[index] if own else ():
        meta_info.update(said or {})


# What the workers tell.


def note_prefill(reqs: Sequence[Any]) -> None:
    """These requests are about to be prefilled; after a retraction, what was under way for them is lost."""
    for req in reqs:
        if (account := account_of(req)) is not None:
            account.take_back(len(req.output_ids))


def note_runs(reqs: Sequence[Any], runs: Sequence[PipelineRun], recurrences: int) -> None:
    """A pipeline's round has given each request a run; one without sources did not take part."""
    for req, run in zip(reqs, runs, strict=True):
        if run.sources and (account := account_of(req)) is not None:
            account.add(run.begin - len(req.origin_input_ids), run.sources, run.ticks, recurrences)


def note_chains(
    batch, run: Run, lookups: Sequence[Sequence[int]], d1: int, recurrences: int, counters: Counters
) -> None:
    """A TRUNC round has given each request of the batch a run. ``lookups``: of each, what entered behind its root."""
    runs, counts = run.tokens.tolist(), run.lengths.tolist()
    for index, (req, length) in enumerate(zip(batch.reqs, batch.seq_lens.tolist(), strict=True)):
        sources = chain_sources(runs[index][: counts[index]], lookups[index] if lookups else (), d1)
        counters.looked_up_accepted += sources.count(LOOKUP)
        if (account := account_of(req)) is not None:
            before = length + 1 - len(req.origin_input_ids)
            account.add(before, sources, counters.round_ticks, recurrences)


def account_of(req) -> Account | None:
    """None for a request that did not come through admission."""
    answer = (getattr(req, "customized_info", None) or {}).get(KEY)
    return None if answer is None else answer.account
