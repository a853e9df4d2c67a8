"""What a request may ask for under a speculative schedule: exact, or refused by name with HTTP 400.

Called for every new request before it is queued. A refused request ends there; nothing else is disturbed. A sampled
one gets its seed here.
"""

from __future__ import annotations

from collections.abc import Iterator

from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from sglang_trunc.engine import seeds
from sglang_trunc.engine.names import is_ours
from sglang_trunc.engine.reporting import report_to_client


def refusal(req) -> str | None:
    """Why this request cannot be served exactly, in one sentence; None if it can."""
    reasons = list(_unsupported(req))
    if not reasons:
        return None
    return (
        f"{'; '.join(reasons)}: not supported with this speculative algorithm. "
        "Leave it out, or start the server without --speculative-algorithm."
    )


def _unsupported(req) -> Iterator[str]:
    for name in ("return_sampling_mask", "lora_id"):
        if getattr(req, name, None):
            yield name
    if getattr(req, "input_embeds", None) is not None:
        yield "input_embeds"
    if req.custom_logit_processor and (problem := _unloadable(req.custom_logit_processor)):
        yield f"custom_logit_processor that does not load ({problem})"


def _unloadable(serialized: str) -> str | None:
    """Why a processor cannot be loaded. SGLang loads it when it makes a batch, where an error ends the scheduler."""
    try:
        CustomLogitProcessor.from_str(serialized)
    except Exception as problem:  # it runs the client's own code
        return f"{type(problem).__name__}: {problem}"
    return None


def check_before_queue(original, scheduler, req, is_retracted: bool = False):
    """Hook around ``Scheduler._add_request_to_queue``."""
    if is_ours(scheduler.spec_algorithm) and not is_retracted:
        ended = req.to_finish is not None
        if not ended and (message := refusal(req)) is not None:
            req.set_finish_with_abort(message)
            ended = True
        if ended:
            # It still passes through a batch, for which SGLang would load the processor.
            req.custom_logit_processor = None
        else:
            seeds.assign(scheduler, req)
            report_to_client(req, scheduler.draft_worker.options)
    return original(scheduler, req, is_retracted)
