"""Lanes of a real served model over a small pool, without a scheduler: what a worker sees, driven by hand."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sglang_trunc.core.counters import Counters
from sglang_trunc.core.looped import Nodes
from sglang_trunc.core.options import TruncOptions
from sglang_trunc.core.trunc import Readout, trunc_round

BUCKETS = (4, 8, 16)  # so that most calls have padding rows


def small_pool(model, size: int, page: int, branches: int = 0):
    """The model's KV pool, of the model's dtype."""
    from sglang_trunc.engine.kv_pool import pool_class_for

    return pool_class_for(model.shape, branches)(
        size,
        page_size=page,
        dtype=model.lm_head.weight.dtype,
        head_num=model.config.num_key_value_heads,
        head_dim=model.config.head_dim,
        layer_num=model.shape.num_kv_layers,
        device="cpu",
        enable_memory_saver=False,
    )


def lane_attention(name: str):
    """The kernel that the GPU-less platform chooses ("cpu"), or the torch reference ("torch")."""
    from sglang_trunc.engine.lane_attention import LaneAttention, choose
    from sglang_trunc.kernels import lane_attention as reference

    return choose() if name == "cpu" else LaneAttention(name, reference.store_rows, reference.lane_attention)


def prefill(lanes, row: int, prompt: Sequence[int]) -> Tensor:
    """A prompt as lanes through all steps, in slices of the lanes' width; the logits behind it."""
    for begin in range(0, len(prompt), lanes.width):
        part = prompt[begin : begin + lanes.width]
        lanes.begin(torch.tensor([row]), torch.tensor([begin]))
        nodes = Nodes(torch.zeros(len(part), dtype=torch.int64), torch.arange(len(part)))
        lanes.start(nodes, torch.tensor(part))
        lanes.advance(nodes, 0, lanes.recurrences)
        logits = lanes.readout(nodes)
    return logits[-1]


class Stand:
    """``requests`` rows of ``context`` positions each; slots are handed out in an order of no meaning."""

    def __init__(self, model, width: int, requests: int, attention: str = "cpu", context: int = 64, page: int = 1):
        from sglang_trunc.engine.lanes import SGLangLanes
        from sglang_trunc.engine.rows import RowRunner

        size = -(-requests * context // page) * page
        self.model = model
        self.pool = small_pool(model, size, page)
        # Row 0 is SGLang's padding row; slots of page 0 are its padding sink.
        self.req_to_token = torch.zeros(requests + 1, context, dtype=torch.int32)
        order = torch.randperm(size, generator=torch.Generator().manual_seed(0)) + page
        self.req_to_token[1:] = order[: requests * context].view(requests, context)
        kernel = lane_attention(attention)
        runner = RowRunner(model, self.pool, self.req_to_token, kernel, width * requests, BUCKETS)
        self.lanes = SGLangLanes(runner, width)
        self.rows = torch.arange(1, requests + 1)
        self.counters = Counters()

    def prefill(self, prompts: list[list[int]]) -> list[int]:
        """Each prompt's best first token."""
        return [
            int(prefill(self.lanes, int(row), prompt).argmax()) for row, prompt in zip(self.rows, prompts, strict=False)
        ]

    def decode(
        self, prompts: list[list[int]], length: int, options: TruncOptions, budgets: list[int] | None = None
    ) -> list[list[int]]:
        """At least ``length`` tokens for every prompt, all requests in every round."""
        outputs = [[token] for token in self.prefill(prompts)]
        committed = torch.tensor([len(prompt) for prompt in prompts])
        rows = self.rows[: len(prompts)]
        while min(map(len, outputs)) < length:
            self.lanes.begin(rows, committed)
            roots = torch.tensor([output[-1] for output in outputs])
            room = budgets or [options.block_size] * len(prompts)
            run = trunc_round(self.lanes, roots, room, options, self.counters)
            committed = committed + run.lengths
            for output, tokens, count in zip(outputs, run.tokens.tolist(), run.lengths.tolist(), strict=True):
                output += tokens[:count]
        return outputs

    def answer(
        self, reqs: Sequence[Any], length: int, options: TruncOptions, forced: dict[int, list[int]] | None = None
    ) -> list[list[int]]:
        """So many tokens of requests (``sampling_stand``), by their own sampling. ``forced``: by request, what its
        drafts are made to be, by position in its answer."""
        from sglang_trunc.engine.choosing import BatchChooser, ChainChooser
        from sglang_trunc.engine.outputs import Outputs
        from tests.engine.sampling_stand import emit, sampling_info, stock_choice

        outputs = Outputs()
        for row, req in zip(self.rows.tolist(), reqs, strict=True):
            emit(req, [stock_choice(req, prefill(self.lanes, row, req.origin_input_ids))])
            outputs.begin(req)
        while min(len(req.output_ids) for req in reqs) < length:
            committed = torch.tensor([len(req.origin_input_ids) + len(req.output_ids) - 1 for req in reqs])
            self.lanes.begin(self.rows, committed)
            batch = types.SimpleNamespace(reqs=reqs, sampling_info=sampling_info(reqs, self.model.config.vocab_size))
            own = ChainChooser(BatchChooser(batch, committed, outputs), options, self.lanes.runner.spare)

            def choose(readout: Readout, own=own) -> Tensor:
                tokens = own(readout)
                if forced is not None and readout.drafts is None:
                    for row, (request, offset) in enumerate(zip(*map(Tensor.tolist, readout.nodes), strict=True)):
                        tokens[row] = forced[request][len(reqs[request].output_ids) + offset]
                return tokens

            roots = torch.tensor([req.output_ids[-1] for req in reqs])
            run = trunc_round(self.lanes, roots, [options.block_size] * len(reqs), options, self.counters, choose)
            for req, tokens, count in zip(reqs, run.tokens.tolist(), run.lengths.tolist(), strict=True):
                emit(req, tokens[:count])
                outputs.extend(req.rid, tokens[:count])
        return [req.output_ids[:length] for req in reqs]
