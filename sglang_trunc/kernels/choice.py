"""The choice of a token from every row of scores, in plain torch: the reference of ``choice_triton``.

A round chooses after each readout: at d1 and d2 to propose, at R to verify. Greedy rows take the best score; sampled
rows take the best score plus seeded noise, whose torch form is ``core.noise.perturbed_argmax`` (``kernels`` imports no
``core``). Either way the chosen token's logprob comes along, for drafts' thresholds and for the client.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Choice(NamedTuple):
    """What was chosen from ``n`` rows."""

    ids: Tensor  # int64 [n]
    logprobs: Tensor  # float32 [n]: log-softmax of the row's scores, without noise, at the chosen id


def argmax_rows(scores: Tensor) -> Choice:
    """The best column of each row, the lowest on ties; ``scores`` float32 or float64 [n, V]."""
    return with_logprobs(scores, scores.argmax(-1))


def with_logprobs(scores: Tensor, ids: Tensor) -> Choice:
    """``ids`` int64 [n] with their logprobs, computed in float32."""
    scores = scores.float()
    top = scores.amax(-1, keepdim=True)
    mass = (scores - top).exp().sum(-1)
    chosen = scores.gather(1, ids.unsqueeze(1)) - top
    return Choice(ids, chosen.squeeze(1) - mass.log())
