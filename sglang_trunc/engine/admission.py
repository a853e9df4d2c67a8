"""What a request may ask for under a speculative schedule: exact, or refused by name with HTTP 400.

Called for every new request before it is queued. A refused request ends there; nothing else is disturbed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang_trunc.engine.names import is_ours

_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
# Sampling parameter -> value that means "off". temperature 0 arrives as top_k 1.
_OFF: dict[str, Any] = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "logit_bias": None,
}


def refusal(req) -> str | None:
    """Why this request cannot be served exactly yet, in one sentence; None if it can."""
    reasons = list(_unsupported(req))
    if not reasons:
        return None
    return (
        f"{'; '.join(reasons)}: not supported with this speculative algorithm yet. Send greedy requests "
        "(temperature 0) without these options, or start the server without --speculative-algorithm."
    )


def _unsupported(req) -> Iterator[str]:
    params = req.sampling_params
    if params.top_k != 1:
        yield f"temperature {params.temperature:g}"
    for name, off in _OFF.items():
        value = getattr(params, name, off)
        if value != off and not (off is None and not value):
            yield f"{name} {value!r}"
    for name in _GRAMMARS:
        if getattr(params, name, None) is not None:
            yield f"{name}"
    for name in ("custom_logit_processor", "return_hidden_states", "return_sampling_mask", "lora_id"):
        if getattr(req, name, None):
            yield name
    if getattr(req, "input_embeds", None) is not None:
        yield "input_embeds"


def check_before_queue(original, scheduler, req, is_retracted: bool = False):
    """Hook around ``Scheduler._add_request_to_queue``."""
    if is_ours(scheduler.spec_algorithm) and not is_retracted and req.to_finish is None:
        message = refusal(req)
        if message is not None:
            req.set_finish_with_abort(message)
    return original(scheduler, req, is_retracted)
