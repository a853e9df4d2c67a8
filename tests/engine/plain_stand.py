"""Plain decoding of a real served model, one token at a time: what every schedule has to be equal to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sglang_trunc.core.looped import Nodes
from sglang_trunc.engine.lanes import SGLangLanes
from sglang_trunc.engine.rows import RowRunner
from tests.engine.sampling_stand import emit, stock_choice
from tests.engine.stand import lane_attention, small_pool


def plain_decoding(model, prompt: Sequence[int], wanted: int, req: Any = None) -> tuple[list[int], list[Tensor]]:
    """Every token alone through all recurrences: the answer, and K and V of all positions but the last, by KV layer.

    ``req`` (``sampling_stand``): chooses by SGLang's own code; without one the best token is taken.
    """
    tokens, most = list(prompt), len(prompt) + wanted
    pool = small_pool(model, most, page=1)
    table = torch.stack((torch.zeros(most, dtype=torch.int32), torch.arange(1, most + 1, dtype=torch.int32)))
    lanes = SGLangLanes(RowRunner(model, pool, table, lane_attention("cpu"), capacity=1), width=1)
    node = Nodes(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    for position in range(most - 1):
        lanes.begin(torch.tensor([1]), torch.tensor([position]))
        lanes.start(node, torch.tensor(tokens[position : position + 1]))
        lanes.advance(node, 0, lanes.recurrences)
        if position == len(tokens) - 1:
            logits = lanes.readout(node)[0]
            tokens.append(int(logits.argmax()) if req is None else stock_choice(req, logits))
            if req is not None:
                emit(req, tokens[-1:])
        elif model.shape.coda:
            lanes.readout(node)  # it writes K/V, too
    return tokens[len(prompt) :], [buffer[1:most] for buffer in (*pool.k_buffer, *pool.v_buffer)]
