"""The speculative worker: SGLang's V2 schema around one schedule.

The scheduler calls ``forward_batch_generation`` once a round. Prefill goes to the target worker unchanged (so
the first token, its logprobs and its options are the plain path's); a decode round becomes one
``trunc_round`` over the lanes of all requests. The worker owns no KV: the slots behind a request's committed
length were reserved by SGLang, rejected ones are written again in the next round, and the scheduler frees
what is left.

``accept_lens`` counts only positions whose KV stands at all R depths, since the radix cache shares them.
"""

from __future__ import annotations

import logging
import os

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from torch import Tensor

from sglang_trunc.core.counters import Counters
from sglang_trunc.core.trunc import Run, trunc_round
from sglang_trunc.engine import cost, lane_attention, slots
from sglang_trunc.engine.kv_pool import LoopedKVPool
from sglang_trunc.engine.lanes import SGLangLanes
from sglang_trunc.engine.options import described, resolve
from sglang_trunc.engine.state import TruncState
from sglang_trunc.models.looped import LoopedCausalLM

logger = logging.getLogger(__name__)


class TruncWorker(BaseSpecWorker):
    """One rank's worker; constructed by the scheduler with exactly these arguments."""

    def __init__(self, server_args, gpu_id: int, nccl_port: int, target_worker):
        super().__init__()
        self._target_worker = target_worker
        self._draft_worker = None
        self.model_runner = target_worker.model_runner
        model = self.model_runner.model
        if not isinstance(model, LoopedCausalLM):
            raise TypeError(
                f"--speculative-algorithm {server_args.speculative_algorithm} needs a looped model (Ouro, Raven); "
                f"{type(model).__name__} is not one."
            )
        self.model = model
        resolved = resolve(self.model_runner.model_config.hf_config)
        self.options = resolved.options
        logger.info("TRUNC options: %s", described(resolved))
        self.speculative_num_draft_tokens = self.stride = get_spec().speculative_num_draft_tokens
        self.speculative_num_steps = get_spec().speculative_num_steps
        self.counters = Counters()
        self.lanes: SGLangLanes | None = None
        self.cost: cost.CostTable | None = None

    def alloc_memory_pool(self, **_) -> None:
        """Called once SGLang's pools exist."""
        req_to_token_pool, _allocator = self.target_worker.get_memory_pool()
        pool = self.model_runner.token_to_kv_pool
        if not isinstance(pool, LoopedKVPool):
            raise RuntimeError(
                f"the KV pool is {type(pool).__name__}, not LoopedKVPool: the hook on "
                "KVCacheConfigurator._resolve_kv_pool_class did not take effect; run `sglang-trunc doctor`."
            )
        attention = lane_attention.choose()
        self.lanes = SGLangLanes(
            self.model,
            pool,
            req_to_token_pool.req_to_token,
            attention,
            width=self.options.block_size,
            max_requests=self.model_runner.max_running_requests,
        )
        if text := os.environ.get(cost.MEASURE_ENV):
            self.cost = cost.measure(self.lanes, cost.context_from(text))
        logger.info("TRUNC: R=%d, lane attention %s", self.lanes.recurrences, attention.name)

    def init_attention_backends(self) -> None:
        """Lanes attend through their own kernel; SGLang's backend serves prefill."""

    def init_cuda_graphs(self) -> None:
        """No graphs of its own yet."""

    @torch.no_grad()
    def forward_batch_generation(self, batch, on_publish=None, grammar_barrier=None, pp_proxy_tensors=None):
        """One round; see the module docstring and SGLang's ``Scheduler.run_batch``."""
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            return self._prefill(batch, on_publish)
        return self._decode(batch, on_publish)

    def _prefill(self, batch, on_publish) -> GenerationBatchResult:
        result = self.target_worker.forward_batch_generation(batch)
        result.new_seq_lens = batch.seq_lens
        result.next_draft_input = TruncState(result.next_token_ids.long(), batch.seq_lens)
        if on_publish is not None:
            on_publish(batch.seq_lens)
        return result

    def _decode(self, batch, on_publish) -> GenerationBatchResult:
        assert self.lanes is not None
        roots = batch.spec_info.bonus_tokens.to(torch.int64)
        self.lanes.begin(batch.req_pool_indices, batch.seq_lens)
        run = trunc_round(self.lanes, roots, self._budgets(batch), self.options, self.counters)
        new_seq_lens = batch.seq_lens + run.lengths
        if on_publish is not None:
            on_publish(new_seq_lens)
        tokens = self._strided(run.tokens)
        bonus = run.tokens.gather(1, (run.lengths - 1).unsqueeze(1)).squeeze(1)
        logits_output = LogitsProcessorOutput(next_token_logits=None)
        if batch.return_logprob:
            logits_output.next_token_logits = self._strided_logits(run, len(roots))
            compute_spec_logprobs(batch, logits_output, tokens, chain_stride=self.stride)
        return GenerationBatchResult(
            logits_output=logits_output,
            next_token_ids=tokens,
            accept_lens=run.lengths.to(torch.int32),
            new_seq_lens=new_seq_lens,
            next_draft_input=TruncState(bonus, new_seq_lens),
            speculative_num_draft_tokens=self.stride,
            can_run_cuda_graph=False,
        )

    def _budgets(self, batch) -> list[int]:
        """Nodes each request may use: never more than the tokens still wanted or the slots reserved.

        Counted from the committed lengths: ``output_ids`` lags one round under overlap scheduling. A request that has
        ended is seen once more there, and gets the one node that a round cannot do without.
        """
        budgets = []
        for req, length in zip(batch.reqs, batch.seq_lens.tolist(), strict=True):
            wanted = slots.last_position(req) - length
            reserved = req.kv.kv_allocated_len - length
            budgets.append(max(1, min(self.options.block_size, wanted, reserved)))
        return budgets

    def _strided(self, tokens: Tensor) -> Tensor:
        """The runs as SGLang reads them: flat ``[bs * stride]``, request b's tokens from ``b * stride``."""
        padded = tokens.new_zeros(tokens.shape[0], self.stride)
        padded[:, : tokens.shape[1]] = tokens
        return padded.flatten()

    def _strided_logits(self, run: Run, batch_size: int) -> Tensor:
        """Row ``b * stride + j``: the full-depth distribution that emitted token j of request b."""
        logits = run.logits.new_zeros(batch_size * self.stride, run.logits.shape[1])
        logits[run.kept.request * self.stride + run.kept.offset] = run.logits
        return logits
