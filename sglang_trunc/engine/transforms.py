"""What requests do to their logits before a token is chosen: one function for every readout of every depth.

Order and arithmetic are stock plain decoding's (``ModelRunner._preprocess_logits``, then ``Sampler``): penalties,
grammar mask, ``logit_bias``, custom logit processors. A row belongs to a request and has a path: the tokens that the
request would have emitted since the round began, drafted ones included. Penalties, grammar and processors see
the request's committed output and that path, so siblings of one request may be masked differently.

The grammars of a round stand, outside ``apply``, at the committed output: the scheduler advances them by what was
committed once the round is over (``supports_grammar_overlap`` is false, so it does before the next one starts).
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Mapping, Sequence, Set
from http import HTTPStatus
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.sampling.sampling_batch_info import GrammarMask
from sglang.srt.utils.async_probe import sanitize_nan_logits
from torch import Tensor

from sglang_trunc.core.grammar_walk import GrammarWalk
from sglang_trunc.engine.outputs import Output

Path = list[int]

logger = logging.getLogger(__name__)


class Transforms:
    """The transforms of one batch, for the readouts of one round."""

    def __init__(self, reqs: Sequence[Any], sampling_info, outputs: Sequence[Output | None]):
        """``sampling_info``: SGLang's, of these requests. ``outputs``: their records, where they need one."""
        self._reqs = reqs
        self._info = sampling_info
        self._outputs = outputs
        self._grammars = {
            index: req.grammar
            for index, req in enumerate(reqs)
            if req.grammar is not None and not req.grammar.finished and not req.grammar.is_terminated()
        }
        self._penalised = {i for i, output in enumerate(outputs) if output is not None and output.penalties is not None}

    @property
    def active(self) -> bool:
        """Whether any request's logits are changed at all."""
        info = self._info
        return bool(self._grammars or self._penalised or info.logit_bias is not None or info.has_custom_logit_processor)

    def apply(self, logits: Tensor, requests: Sequence[int], paths: Sequence[Path]) -> None:
        """In place. ``logits`` float32 ``[n, vocabulary]``; row i is request ``requests[i]`` after ``paths[i]``."""
        if self._penalised:
            self._penalise(logits, requests, paths)
        if self._grammars:
            self._mask(logits, requests, paths)
        if self._info.logit_bias is not None:
            logits += self._info.logit_bias[torch.tensor(requests, device=logits.device)]
        if self._info.has_custom_logit_processor:
            self._process(logits, requests, paths)
        sanitize_nan_logits(logits, "speculative readout")

    def _penalise(self, logits: Tensor, requests: Sequence[int], paths: Sequence[Path]) -> None:
        for index in self._penalised.intersection(requests):
            rows = _rows_of({index}, requests)
            output = self._outputs[index]
            assert output is not None
            assert output.penalties is not None
            output.penalties.apply(logits, rows, [paths[row] for row in rows])

    def _mask(self, logits: Tensor, requests: Sequence[int], paths: Sequence[Path]) -> None:
        constrained = set(requests) & self._grammars.keys()
        if not constrained:
            return
        first = next(iter(self._grammars.values()))
        mask = first.allocate_vocab_mask(
            vocab_size=self._info.vocab_size, batch_size=len(requests), device=logits.device
        )
        for index in constrained:
            with GrammarWalk(self._grammars[index]) as walk:
                # Neighbours in path order share most of their way.
                for row in sorted(_rows_of({index}, requests), key=lambda row: paths[row]):
                    walk.fill(mask, row, paths[row])
        GrammarMask(first, first.move_vocab_mask(mask, logits.device)).apply(logits)

    def _process(self, logits: Tensor, requests: Sequence[int], paths: Sequence[Path]) -> None:
        """Custom processors, with the parameters and the request of each row."""
        for entry in self._info.custom_logit_processor.values():
            rows = _rows_of(set(entry.rows), requests)
            params = [self._parameters(requests[row], paths[row]) for row in rows]
            problems = run_processor(entry.processor, logits, rows, [requests[row] for row in rows], params)
            abort_for_processor(self._reqs, problems)

    def _parameters(self, index: int, path: Path) -> Any:
        """A processor's parameters; the request in them has emitted the path, too."""
        params = self._info.custom_params[index]
        if not isinstance(params, Mapping) or "__req__" not in params:
            return params
        output = self._outputs[index]
        emitted = self._reqs[index].output_ids if output is None else output.tokens
        return {**params, "__req__": RequestView(self._reqs[index], [*emitted, *path])}


def _rows_of(indices: Set[int], requests: Sequence[int]) -> list[int]:
    """Rows of these requests."""
    return [row for row, request in enumerate(requests) if request in indices]


def run_processor(
    processor, logits: Tensor, rows: Sequence[int], owners: Sequence[int], params: Sequence[Any]
) -> dict[int, Exception]:
    """A custom logit processor over its rows, in place; as SGLang's ``apply_custom_logit_processor``.

    ``logits`` float32 ``[n, vocabulary]``. ``owners``, ``params``: of each of ``rows``. Returns what went wrong, by
    owner, whose rows stay as they were. Requests with one processor share a call; where it fails, each gets its own.
    """
    if not rows:
        return {}
    at = torch.tensor(rows, device=logits.device)
    try:
        logits.index_copy_(0, at, processor(logits.index_select(0, at), list(params)).to(logits.dtype))
        return {}
    except Exception as problem:  # it runs the client's own code
        if len(set(owners)) == 1:
            return {owners[0]: problem}
    problems: dict[int, Exception] = {}
    for owner in dict.fromkeys(owners):
        own = [i for i, other in enumerate(owners) if other == owner]
        problems |= run_processor(
            processor, logits, [rows[i] for i in own], [owner] * len(own), [params[i] for i in own]
        )
    return problems


def abort_for_processor(reqs: Sequence[Any], problems: Mapping[int, Exception]) -> None:
    """End the requests, by index, whose logit processor failed; their answers say why, and nobody else notices."""
    for index, problem in problems.items():
        req = reqs[index]
        if req.finished() or req.to_finish is not None:  # it is ending already
            continue
        logger.error("the custom logit processor of %s failed", req.rid, exc_info=problem)
        message = f"custom_logit_processor failed with {type(problem).__name__}: {problem}"
        req.to_finish = FINISH_ABORT(message, HTTPStatus.BAD_REQUEST, "BadRequestError")


class RequestView:
    """A request as it would be with other ``output_ids``; everything else is its own."""

    def __init__(self, req, output_ids: Sequence[int]):
        self._req = req
        # The type that it has there: processors add it to ``origin_input_ids``.
        self.output_ids = array("q", output_ids) if isinstance(req.output_ids, array) else list(output_ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._req, name)
