"""SGLang's rules of choosing a token, once more on one row, with ``test_plain_sampling``'s noise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sglang_trunc.reference.decode import output_logits
from tests.server.oracle import Oracle
from tests.server.test_plain_sampling import noise


def chosen(row: Tensor, emitted: Sequence[int], position: int, sampling: Mapping[str, Any]) -> int:
    """The token of a request with these sampling parameters.

    ``row`` float64 ``[vocabulary]``; ``position``: of the token before. Additive penalties come before the
    multiplicative one, filters work on sorted probabilities, and there noise goes by rank.
    """
    row = row.clone()
    for token, times in Counter(emitted).items():
        row[token] -= sampling.get("frequency_penalty", 0.0) * times + sampling.get("presence_penalty", 0.0)
        factor = sampling.get("repetition_penalty", 1.0)
        row[token] *= factor if row[token] < 0 else 1 / factor
    if not sampling.get("temperature"):
        return int(row.argmax())
    shares, ids = (row / sampling["temperature"]).softmax(-1).sort(descending=True, stable=True)
    kept = shares.cumsum(-1) - shares <= sampling.get("top_p", 1.0)
    kept &= shares >= sampling.get("min_p", 0.0) * shares[0]
    kept &= torch.arange(len(shares)) < sampling.get("top_k", len(shares))
    perturbed = torch.where(kept, shares, 0.0).log() + torch.from_numpy(noise(sampling["sampling_seed"], position))
    return int(ids[perturbed.argmax()])


def departure(
    oracle: Oracle, prompt: Sequence[int], output: Sequence[int], sampling: Mapping[str, Any]
) -> tuple[int, int, int] | None:
    """(index, expected, got) of the first token that is not what the rules give; None if there is none.

    For requests that draw by rank (a filter, or temperature 0): noise by token id is not written down here.
    """
    rows = output_logits(oracle.model, prompt, output, oracle.depth).double()
    for index, (row, token) in enumerate(zip(rows, output, strict=True)):
        expected = chosen(row, output[:index], len(prompt) - 1 + index, sampling)
        if expected != token:
            return index, expected, token
    return None
