"""The size of a logit, learned from a stock server.

A near tie is measured in BF16 ulps at the magnitude of the best logit, but every figure SGLang returns
comes from a softmax, which does not change when a constant is added to all logits. A custom logit
processor breaks that symmetry: it sets one other token's logit to exactly 0, and then

    best logit = logprob(best) - logprob(that token).

The server must run with ``--enable-custom-logit-processor``; only the probing request carries the
processor, so ordinary requests are untouched.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sglang_trunc.serving.client import Client
from sglang_trunc.serving.processors import serialized

if TYPE_CHECKING:
    import torch

SERVER_FLAG = "--enable-custom-logit-processor"


class ZeroLogit:
    """Sets the logit of ``custom_params["token_id"]`` to 0 in each of the request's rows."""

    def __call__(
        self, logits: torch.Tensor, custom_param_list: Sequence[Mapping[str, Any]] | None = None
    ) -> torch.Tensor:
        for row, params in enumerate(custom_param_list or ()):
            logits[row, params["token_id"]] = 0.0
        return logits


def spare_token(used: Collection[int]) -> int:
    """Lowest token id that is none of ``used``."""
    return next(token for token in range(len(used) + 1) if token not in used)


def logits(client: Client, prefix: Sequence[int], tokens: Collection[int]) -> dict[int, float]:
    """Logits of ``tokens`` after ``prefix``."""
    wanted = sorted(set(tokens))
    zero = spare_token(set(tokens))
    answer = client.generate(
        prefix,
        max_new_tokens=1,
        ignore_eos=True,
        return_logprob=True,
        token_ids_logprob=[*wanted, zero],
        sampling={"custom_params": {"token_id": zero}},
        extra={"custom_logit_processor": serialized(ZeroLogit)},
    )
    found = {int(t): float(value) for value, t, *_ in answer.meta_info["output_token_ids_logprobs"][0]}
    return {token: found[token] - found[zero] for token in wanted}
