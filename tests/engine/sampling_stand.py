"""Requests and ``SamplingBatchInfo`` without a scheduler, and SGLang's own choice of a token to compare with."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import xgrammar
from sglang.srt.constrained.xgrammar_backend import MAX_ROLLBACK_TOKENS, XGrammarGrammar
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import Sampler, apply_custom_logit_processor
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from sglang.srt.sampling.sampling_batch_info import ProcessorEntry, SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from torch import Tensor


class Mirror(CustomLogitProcessor):
    """Depends on all that the request has emitted: favours one token and forbids another."""

    def __call__(self, logits: Tensor, params: list[dict[str, Any]]) -> Tensor:
        assert len(logits) == len(params)
        for row, param in zip(logits, params, strict=True):
            ids = [*param["__req__"].origin_input_ids, *param["__req__"].output_ids]
            name = sum(token * (place + 1) for place, token in enumerate(ids))
            row[name % len(row)] += param["boost"]
            row[(7 * name + 3) % len(row)] = -torch.inf
        return logits


class Picky(CustomLogitProcessor):
    """Adds what its request asks for, and fails where that is not a number."""

    def __call__(self, logits: Tensor, params: list[dict[str, Any]]) -> Tensor:
        return logits + torch.tensor([[param["add"]] for param in params]) * torch.arange(logits.shape[1])


def grammar_of(words: Sequence[str], regex: str) -> Callable[..., XGrammarGrammar]:
    """``made(tokens)``: SGLang's object behind these tokens. A token a word; the first ends the text."""
    info = xgrammar.TokenizerInfo(list(words), vocab_size=len(words), stop_token_ids=[0])
    compiled = xgrammar.GrammarCompiler(info).compile_regex(regex)

    def made(tokens: Sequence[int] = ()) -> XGrammarGrammar:
        matcher = xgrammar.GrammarMatcher(compiled, max_rollback_tokens=MAX_ROLLBACK_TOKENS)
        grammar = XGrammarGrammar(matcher, len(words), compiled, None, regex)
        accept(grammar, tokens)
        return grammar

    return made


def accept(grammar: Any, tokens: Sequence[int]) -> None:
    """As the scheduler does with what has been committed: behind its end a grammar takes nothing."""
    for token in tokens:
        if not grammar.is_terminated():
            grammar.accept_token(token)


class Batch:
    """A ``ScheduleBatch`` as far as SGLang's penalizers look at it, by a weak reference."""

    device = "cpu"

    def __init__(self, reqs: Sequence[Any]):
        self.reqs = list(reqs)


def request(
    rid: str,
    prompt: Sequence[int],
    most: int = 40,
    processor: type[CustomLogitProcessor] | None = None,
    **sampling: Any,
) -> types.SimpleNamespace:
    """A request as the scheduler has it; greedy unless ``sampling`` says otherwise."""
    req = types.SimpleNamespace(
        rid=rid,
        origin_input_ids=list(prompt),
        output_ids=[],
        sampling_params=SamplingParams(**{"temperature": 0.0, "max_new_tokens": most, **sampling}),
        kv=types.SimpleNamespace(kv_allocated_len=0),
        grammar=None,
        custom_logit_processor=processor.__name__ if processor else None,
        processor=processor,
        tokenizer=types.SimpleNamespace(eos_token_id=None, additional_stop_token_ids=None),
        eos_token_ids=None,
        return_sampling_mask=False,
        sampling_logprobs_mode=None,
        to_finish=None,
        finished=lambda: False,
    )
    if processor and req.sampling_params.custom_params is not None:
        req.sampling_params.custom_params = {**req.sampling_params.custom_params, "__req__": req}
    return req


def emit(req: Any, tokens: Sequence[int]) -> None:
    """What the scheduler does with committed tokens."""
    req.output_ids = [*req.output_ids, *tokens]
    if req.grammar is not None:
        accept(req.grammar, tokens)


def with_output(req: Any, output: Sequence[int], grammar: Any = None) -> types.SimpleNamespace:
    """The same request after it has emitted other tokens."""
    twin = types.SimpleNamespace(**{**vars(req), "output_ids": list(output), "grammar": grammar})
    params = req.sampling_params.custom_params
    if params is not None and "__req__" in params:
        values = {name: getattr(req.sampling_params, name) for name in req.sampling_params.__struct_fields__}
        twin.sampling_params = SamplingParams(**{**values, "custom_params": {**params, "__req__": twin}})
    return twin


def sampling_info(reqs: Sequence[Any], vocabulary: int, outputs: Sequence[Sequence[int]] = ()) -> SamplingBatchInfo:
    """SGLang's own of these requests, as a worker gets it.

    ``outputs``: tokens that its penalizers have counted, equally many of each request.
    """
    batch = Batch(reqs)
    info = SamplingBatchInfo.from_schedule_batch(batch, vocabulary)
    for tokens in zip(*outputs, strict=True):
        info.penalizer_orchestrator.cumulate_output_tokens(torch.tensor(tokens))
    kinds = {req.processor for req in reqs if req.processor is not None}
    if kinds:
        # SGLang makes these where the server's flag is set.
        rows = {kind: [row for row, req in enumerate(reqs) if req.processor is kind] for kind in kinds}
        info.has_custom_logit_processor = True
        info.custom_params = [req.sampling_params.custom_params for req in reqs]
        info.custom_logit_processor = {
            hash(kind): ProcessorEntry(kind(), of_kind, torch.tensor(of_kind)) for kind, of_kind in rows.items()
        }
    info = info.copy_for_forward()
    if any(req.grammar is not None for req in reqs):
        info.grammars = [req.grammar for req in reqs]
    return info


def stock_info(req: Any, vocabulary: int) -> SamplingBatchInfo:
    """For a request alone that has emitted its ``output_ids``."""
    return sampling_info([req], vocabulary, [list(req.output_ids)] if req.output_ids else ())


def stock_logits(req: Any, logits: Tensor) -> Tensor:
    """What SGLang's plain decoding makes of a request's logits, float32 ``[vocabulary]``, after its ``output_ids``."""
    row = logits.clone().unsqueeze(0)
    info = stock_info(req, len(logits))
    info.update_regex_vocab_mask()
    info.apply_logits_bias(row)
    if info.has_custom_logit_processor:
        apply_custom_logit_processor(row, info)
    return row[0]


def stock_sample(logits: Tensor, info: SamplingBatchInfo, seeds: Tensor, positions: Tensor, **logprobs: Any):
    """``Sampler.forward`` as under deterministic inference: tokens and the output whose fields it fills."""
    sampler, output = Sampler(), LogitsProcessorOutput(next_token_logits=logits.clone())
    sampler.enable_deterministic = True
    info.sampling_seed = seeds
    asked = {"return_logprob": False, "top_logprobs_nums": [], "token_ids_logprobs": [], **logprobs}
    return sampler(output, info, positions=positions, **asked), output


def stock_choice(req: Any, logits: Tensor) -> int:
    """Plain decoding's next token of a request that has emitted its ``output_ids``, by SGLang's own code alone."""
    position = len(req.origin_input_ids) + len(req.output_ids) - 1
    info = stock_info(req, len(logits))
    info.has_custom_logit_processor = False  # `stock_logits` has applied it
    seeds = torch.tensor([req.sampling_params.sampling_seed or 0])
    tokens, _ = stock_sample(stock_logits(req, logits).unsqueeze(0), info, seeds, torch.tensor([position]))
    return int(tokens)
