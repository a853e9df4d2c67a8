"""What each request has emitted, where its logits depend on that: penalties, ``min_new_tokens``, logit processors.

SGLang's own record is not enough. Under overlap scheduling ``Req.output_ids`` lags one round, and its penalizers
count only the last token of a run. So the worker keeps its own: filled when a prompt has been prefilled (again, after
a retraction: then with all that was emitted before), extended by every run, dropped when the request leaves.
Requests without such options have no record.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties
from torch import Tensor

from sglang_trunc.core.penalties import Penalties, PenaltyRule, scale_in_place

logger = logging.getLogger(__name__)


def penalty_rule(req) -> PenaltyRule:
    """A request's penalties; ids that ``min_new_tokens`` holds back as in SGLang's ``BatchedMinNewTokensPenalizer``."""
    params = req.sampling_params
    return PenaltyRule(
        params.frequency_penalty,
        params.presence_penalty,
        params.repetition_penalty,
        params.min_new_tokens,
        _stop_ids(req) if params.min_new_tokens else (),
    )


def _stop_ids(req) -> tuple[int, ...]:
    tokenizer = req.tokenizer
    own = {tokenizer.eos_token_id, *(tokenizer.additional_stop_token_ids or ())} if tokenizer is not None else set()
    found = {*(req.sampling_params.stop_token_ids or ()), *(req.eos_token_ids or ()), *own}
    return tuple(sorted(token for token in found if token is not None))


def _scale(logits: Tensor, penalties: Tensor) -> None:
    """The repetition penalty as SGLang computes it on the device at hand; on a CPU that is torch's own arithmetic."""
    (scale_in_place if logits.device.type == "cpu" else apply_scaling_penalties)(logits, penalties)


class Output:
    """One request's emitted tokens and what follows from them."""

    def __init__(self, rule: PenaltyRule, tokens: Sequence[int]):
        self.tokens = list(tokens)
        self.penalties = Penalties(rule, self.tokens, _scale) if rule.active else None

    def extend(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        if self.penalties is not None:
            for token in tokens:
                self.penalties.advance(token)


class Outputs:
    """The records of all requests that need one, by request id."""

    def __init__(self, all_of_them: bool = False) -> None:
        """``all_of_them``: whether every request has a record."""
        self._all = all_of_them
        self._of: dict[str, Output] = {}

    def begin(self, req) -> None:
        """A request is about to be prefilled: what it has emitted so far is on the host in full."""
        rule = penalty_rule(req)
        if self._all or rule.active or req.custom_logit_processor:
            self._of[req.rid] = Output(rule, req.output_ids)

    def extend(self, rid: str, tokens: Sequence[int]) -> None:
        if rid in self._of:
            self._of[rid].extend(tokens)

    def of(self, rid: str) -> Output | None:
        return self._of.get(rid)

    def ready(self, req, emitted: int) -> Output | None:
        """A request's record before a round that finds it with so many tokens emitted; made anew if it does not fit,
        and made where there should be one: lanes of a prompt start before its prefill is over."""
        output = self._of.get(req.rid)
        if output is not None and len(output.tokens) != emitted:
            logger.error("%s has a record of %d tokens, but emitted %d", req.rid, len(output.tokens), emitted)
            output = None
        if output is None:
            self.begin(req)
        return self._of.get(req.rid)

    def forget(self, rid: str) -> None:
        self._of.pop(rid, None)

    def correct_penalties(self, reqs: Sequence[Any], info) -> None:
        """Before a prefill: what resumed requests emitted earlier, which SGLang's fresh penalizers do not know.

        ``info``: SGLang's ``SamplingBatchInfo`` of these requests; its accumulated penalties are per row.
        """
        for row, req in enumerate(reqs):
            output = self._of.get(req.rid)
            if output is not None and output.penalties is not None and output.tokens:
                additive, scaling = output.penalties.dense(info.vocab_size)
                if info.acc_additive_penalties is not None:
                    info.acc_additive_penalties[row] = additive
                if info.acc_scaling_penalties is not None:
                    info.acc_scaling_penalties[row] = scaling

    def __len__(self) -> int:
        return len(self._of)
