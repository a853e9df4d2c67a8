"""Relaxed acceptance, for measurement only: how much faster a schedule would be if near misses counted as hits.

At full depth, after every row has made its choice, ``relax`` lets a draft take the place of a choice that it almost
equals. What comes out is *not* the model's own text, which is why no preset sets it and every answer says so
(``core.options``: ``relax_top``, ``relax_tau``, ``Options.relaxed``). Whoever accepts drafts then compares tokens as
always. Meant for greedy rows: a sampled choice may differ from the best token, and any rule here replaces it.

Source: typical acceptance of Medusa (arXiv 2401.10774, section 2.3.1) for the idea; the rule is this package's.
"""

from __future__ import annotations

import torch
from torch import Tensor


def relax(logits: Tensor, choices: Tensor, drafts: Tensor, top: int, tau: float) -> Tensor:
    """``choices``, with those drafts in their place that are good enough: int64 [n].

    ``logits`` float32 [n, vocabulary] at full depth, not changed. ``choices`` int64 [n]: full depth's. ``drafts`` int64
    [n], -1 for none. A draft is kept where it is among the ``top`` best logits of its row, the lower id first where
    they are equal, and has at least ``tau`` times the softmax probability of the best one. A token with probability 0
    (a masked one) is never kept, nor anything in a row with NaN.

    ``top`` 1 with greedy choices changes nothing; ``tau`` 1 keeps the equals of the best logit alone. ValueError where
    ``top`` is below 1 or ``tau`` outside [0, 1].
    """
    if top < 1 or not 0 <= tau <= 1:
        raise ValueError(f"relaxed acceptance needs top >= 1 and tau from 0 to 1, got {top} and {tau}")
    ids = drafts.clamp(min=0).unsqueeze(1)
    picked = logits.gather(1, ids)
    ahead = logits > picked
    ahead |= (logits == picked) & (torch.arange(logits.shape[1], device=logits.device) < ids)
    # float64: tau is not rounded, and no softmax is needed for a ratio of two of its values
    share = (picked.to(torch.float64) - logits.amax(1, keepdim=True)).exp().squeeze(1)
    kept = (drafts >= 0) & (ahead.sum(1) < top) & (share >= tau) & (share > 0)
    return torch.where(kept, drafts, choices)
