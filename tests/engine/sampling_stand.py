"""``SamplingBatchInfo`` and requests without a scheduler, for the parts that choose tokens."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL, SamplingParams


def request(rid: str, prompt: Sequence[int], most: int = 40, **sampling: Any) -> types.SimpleNamespace:
    """A request as the scheduler has it; greedy unless ``sampling`` says otherwise."""
    return types.SimpleNamespace(
        rid=rid,
        origin_input_ids=list(prompt),
        output_ids=[],
        sampling_params=SamplingParams(**{"temperature": 0.0, "max_new_tokens": most, **sampling}),
        kv=types.SimpleNamespace(kv_allocated_len=0),
        grammar=None,
        custom_logit_processor=None,
        tokenizer=None,
        eos_token_ids=None,
    )


def sampling_info(reqs: Sequence[Any], vocabulary: int) -> SamplingBatchInfo:
    """What SGLang makes of these requests' parameters, but for penalizers and processors."""
    params = [req.sampling_params for req in reqs]
    bias = None
    if any(one.logit_bias for one in params):
        bias = torch.zeros(len(reqs), vocabulary)
        for row, one in enumerate(params):
            for token, value in (one.logit_bias or {}).items():
                bias[row, int(token)] = value
    return SamplingBatchInfo(
        temperatures=torch.tensor([[one.temperature] for one in params]),
        top_ps=torch.tensor([one.top_p for one in params]),
        top_ks=torch.tensor([one.top_k for one in params], dtype=torch.int32),
        min_ps=torch.tensor([one.min_p for one in params]),
        is_all_greedy=all(one.top_k <= 1 for one in params),
        is_any_greedy=any(one.top_k <= 1 for one in params),
        need_top_p_sampling=any(one.top_p != 1.0 for one in params),
        need_top_k_sampling=any(one.top_k != TOP_K_ALL for one in params),
        need_min_p_sampling=any(one.min_p > 0 for one in params),
        vocab_size=vocabulary,
        device="cpu",
        logit_bias=bias,
    )
