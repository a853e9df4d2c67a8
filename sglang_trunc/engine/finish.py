"""Where a run of accepted tokens ends: exactly where plain decoding, which looks after every token, would end.

SGLang 0.5.23 looks at a whole run at once: stop strings first, in the order the client listed them, then stop tokens.
So a stop string in a run hides a stop token before it, and the first string of the list hides an earlier one of
another. For requests with stop strings or patterns the run is therefore shown to SGLang's own rules token by token;
without them the order of its rules cannot matter.
"""

from __future__ import annotations

from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_trunc.engine.names import is_ours


def update_token_by_token(original, req, new_accepted_len: int = 1) -> None:
    """Around ``Req.update_finish_state``; ``output_ids`` holds the whole run already."""
    if not _order_matters(req, new_accepted_len):
        return original(req, new_accepted_len)
    outputs = req.output_ids
    run = outputs[-new_accepted_len:]
    del outputs[-new_accepted_len:]
    for used, token in enumerate(run, start=1):
        outputs.append(token)
        original(req, 1)
        if req.finished():
            if req.finished_len is None:
                req.finished_len = len(outputs)
            outputs.extend(run[used:])  # SGLang keeps overshoot behind finished_len
            break
    return None


def _order_matters(req, new_accepted_len: int) -> bool:
    params = req.sampling_params
    return (
        new_accepted_len > 1
        and bool(params.stop_strs or params.stop_regex_strs)
        and req.to_finish is None
        and not req.finished()
        and req.grammar is None  # its state is that of the run's end
        and is_ours(SpeculativeAlgorithm.from_string(get_spec().speculative_algorithm))
    )
