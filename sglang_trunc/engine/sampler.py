"""The sampler of prefills under our schedules: SGLang's steps, with a choice that looks at one row at a time.

Prefill goes through the target worker, so the first token is chosen here; decode rounds choose in ``choosing``. Both
use ``core.sampling``. Stock SGLang decides batch-wide whether rows are filtered, so that a request's seeded text may
depend on its neighbours there, and it asserts that min-p comes without seeds. Logprobs are stock's under deterministic
inference: ``log_softmax`` of the transformed logits at temperature.
"""

from __future__ import annotations

from sglang.srt.environ import envs
from sglang.srt.layers.sampler import Sampler
from sglang.srt.utils.async_probe import sanitize_nan_logits
from torch import Tensor

from sglang_trunc.core import sampling
from sglang_trunc.engine.choosing import sampling_rows
from sglang_trunc.engine.transforms import run_processor


class SeededSampler(Sampler):
    """In the place of the model runner's own sampler; the worker has set ``SamplingBatchInfo.sampling_seed``."""

    def _preprocess_logits(self, logits: Tensor, sampling_info) -> Tensor:
        """As ``Sampler``'s, but errors in clients' processors are kept for the worker, by row: in SGLang the first
        one ends the scheduler."""
        if sampling_info.has_custom_logit_processor:
            problems: dict[int, Exception] = {}
            for entry in sampling_info.custom_logit_processor.values():
                params = [sampling_info.custom_params[row] for row in entry.rows]
                problems |= run_processor(entry.processor, logits, entry.rows, entry.rows, params)
            sampling_info.failed_processor = problems
        sanitize_nan_logits(logits, "prefill readout")
        return logits

    def forward(
        self,
        logits_output,
        sampling_info,
        return_logprob: bool,
        top_logprobs_nums,
        token_ids_logprobs,
        positions: Tensor,
        *,
        logprob_logits: Tensor | None = None,
    ) -> Tensor:
        """Arguments and effects of ``Sampler.forward``: the tokens, int64 ``[bs]``, and logprobs in their fields."""
        logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
        rows = sampling_rows(sampling_info, sampling_info.sampling_seed, positions.to(sampling_info.top_ks.device))
        tokens = sampling.choose(logits, rows).tokens
        if return_logprob:
            original = sampling_info.is_all_greedy or envs.SGLANG_RETURN_ORIGINAL_LOGPROB.get()
            logprobs = (logits if original else logits / sampling_info.temperatures).log_softmax(-1)
            result = self.output_logprob_processor.compute_logprobs(
                logprobs, top_logprobs_nums, token_ids_logprobs, tokens
            )
            result.write_output_to(logits_output)
        self._sync_token_ids_across_tp(tokens, sampling_info)
        return tokens
