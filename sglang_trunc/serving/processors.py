"""Custom logit processors, for servers started with ``--enable-custom-logit-processor``.

They travel by reference (a pickle that names the class), so a client needs no SGLang and a server only this package.
SGLang gives each row's parameters, the request among them as ``__req__``; under a speculative schedule its
``output_ids`` include the drafted tokens of the row's own path.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def serialized(processor: type) -> str:
    """What SGLang's ``CustomLogitProcessor.to_str`` gives for an importable class."""
    by_name = f"c{processor.__module__}\n{processor.__qualname__}\n.".encode()
    return json.dumps({"callable": by_name.hex()})


class ThinkingBudget:
    """Ends the thinking block of a reasoning model: after so many tokens of it, only its end token is left.

    ``custom_params``: ``thinking_budget`` (tokens, 0 or more), ``think_start_id``, ``think_end_id``. Ouro-Thinking's
    template opens the block in the prompt; tokens are counted from the newest start token of prompt or answer.
    """

    def __call__(
        self, logits: torch.Tensor, custom_param_list: Sequence[Mapping[str, Any]] | None = None
    ) -> torch.Tensor:
        for row, params in enumerate(custom_param_list or ()):
            req = params["__req__"]
            text = [*req.origin_input_ids, *req.output_ids]
            thought = _thinking_for(text, params["think_start_id"], params["think_end_id"])
            if thought is not None and thought >= params["thinking_budget"]:
                logits[row] = -float("inf")
                logits[row, params["think_end_id"]] = 0.0
        return logits


def _thinking_for(text: Sequence[int], start: int, end: int) -> int | None:
    """Tokens since the block began; None outside of one."""
    for thought, token in enumerate(reversed(text)):
        if token == end:
            return None
        if token == start:
            return thought
    return None
