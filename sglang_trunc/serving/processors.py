"""Custom logit processors, for servers started with ``--enable-custom-logit-processor``.

They travel by reference (a pickle that names the class), so a client needs no SGLang and a server only this package.
SGLang gives each row's parameters, the request among them as ``__req__``; under a speculative schedule its
``output_ids`` include the drafted tokens of the row's own path.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def serialized(processor: type) -> str:
    """The ``custom_logit_processor`` of a request, as SGLang's ``CustomLogitProcessor.to_str`` writes it.

    ``processor``: a class at the top of an importable module; ValueError for any other, which no server could find.
    """
    if "." in processor.__qualname__:
        raise ValueError(f"{processor.__qualname__} is not at the top of its module, so it cannot be named")
    by_name = f"c{processor.__module__}\n{processor.__qualname__}\n.".encode()
    return json.dumps({"callable": by_name.hex()})


class ThinkingBudget:
    """Ends the thinking block of a reasoning model: after so many tokens of it, only its end token is left.

    ``custom_params``: ``thinking_budget`` (tokens, 0 or more), ``think_start_id``, ``think_end_id``. Ouro-Thinking's
    template opens the block in the prompt; tokens are counted from the newest start token of prompt or answer. A
    request without one of the three fails with HTTP 400.
    """

    def __call__(
        self, logits: torch.Tensor, custom_param_list: Sequence[Mapping[str, Any] | None] | None = None
    ) -> torch.Tensor:
        """``logits`` float32 ``[n, vocabulary]``, changed in place; one entry of the list a row."""
        for row, given in enumerate(custom_param_list or ()):
            params = given or {}  # SGLang passes None on where a request has none
            start, end, budget = (params[name] for name in ("think_start_id", "think_end_id", "thinking_budget"))
            request = params["__req__"]
            newest_first = chain(reversed(request.output_ids), reversed(request.origin_input_ids))
            thought = _thinking_for(newest_first, start, end)
            if thought is not None and thought >= budget:
                logits[row] = -float("inf")
                logits[row, end] = 0.0
        return logits


def _thinking_for(newest_first: Iterable[int], start: int, end: int) -> int | None:
    """Tokens since the block began; None outside of one."""
    for thought, token in enumerate(newest_first):
        if token == end:
            return None
        if token == start:
            return thought
    return None
