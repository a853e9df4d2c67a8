"""What all speculative workers of this package share: SGLang's V2 schema around a schedule.

The scheduler calls ``forward_batch_generation`` once a round. Prefill goes to the target worker unchanged (so
the first token, its logprobs and its options are the plain path's); a decode round is the subclass's. A worker
owns no KV of a request: the slots behind a request's committed length were reserved by SGLang, rejected ones are
written again in the next round, and the scheduler frees what is left.

``accept_lens`` counts only positions whose KV stands at all R depths, since the radix cache shares them.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from torch import Tensor

from sglang_trunc.core.counters import TickCounters
from sglang_trunc.core.cycle_cost import CostTable
from sglang_trunc.engine import cost, departures, lane_attention, metrics, reporting
from sglang_trunc.engine.choosing import BatchChooser, seeds_of
from sglang_trunc.engine.kv_pool import LoopedKVPool
from sglang_trunc.engine.lane_attention import LaneAttention
from sglang_trunc.engine.lookahead import lookups_for
from sglang_trunc.engine.names import MEASURE_ENV
from sglang_trunc.engine.options import described, resolve
from sglang_trunc.engine.outputs import Outputs
from sglang_trunc.engine.rows import RowRunner
from sglang_trunc.engine.sampler import SeededSampler
from sglang_trunc.engine.state import TruncState
from sglang_trunc.engine.stopwatch import Stopwatch, TimedRunner
from sglang_trunc.engine.transforms import abort_for_processor
from sglang_trunc.models.looped import LoopedCausalLM

logger = logging.getLogger(__name__)


def prompts_end(batch) -> list[bool]:
    """Which requests of a prefill batch are in it with the last chunk of all that they have."""
    lengths = batch.seq_lens.tolist()
    return [
        length == len(req.origin_input_ids) + len(req.output_ids)
        for req, length in zip(batch.reqs, lengths, strict=True)
    ]


class LoopedWorker(BaseSpecWorker):
    """One rank's worker; constructed by the scheduler with exactly these arguments.

    A subclass gives ``_build`` and ``_decode``.
    """

    counters: TickCounters
    options: Any  # the algorithm's class of ``core.options``
    _publisher: metrics.Publisher | None = None

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
        self.algorithm = get_spec().speculative_algorithm
        resolved = resolve(self.model_runner.model_config.hf_config, self.algorithm)
        self.options = resolved.options
        logger.info("%s options: %s", self.algorithm, described(resolved))
        if self.options.relaxed:
            logger.warning(
                "relaxed acceptance (relax_top %d, relax_tau %g) is for measurement: texts are not the model's own",
                self.options.relax_top,
                self.options.relax_tau,
            )
        self.speculative_num_draft_tokens = self.stride = get_spec().speculative_num_draft_tokens
        self.speculative_num_steps = get_spec().speculative_num_steps
        self.cost: CostTable | None = None
        self.outputs = Outputs(all_of_them=self.options.lookup > 0)
        self.lookups = lookups_for(self.options, target_worker.tokenizer)
        self.model_runner.sampler = SeededSampler()
        self.stopwatch = Stopwatch() if os.environ.get(MEASURE_ENV) else None

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
        runner = self._build(pool, req_to_token_pool, attention)
        self._publisher = metrics.publisher_for(self)
        departures.announce(req_to_token_pool, self._depart)
        if self.stopwatch:
            self.cost = cost.measure(runner, cost.context_from(os.environ[MEASURE_ENV]))
        logger.info("%s: R=%d, lane attention %s", self.algorithm, runner.recurrences, attention.name)

    def init_attention_backends(self) -> None:
        """Lanes attend through their own kernel; SGLang's backend serves prefill."""

    def init_cuda_graphs(self) -> None:
        """No graphs of its own yet."""

    @torch.no_grad()
    def forward_batch_generation(self, batch, on_publish=None, grammar_barrier=None, pp_proxy_tensors=None):
        """One round; see the module docstring and SGLang's ``Scheduler.run_batch``."""
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            reporting.note_prefill(batch.reqs)
            result = self._prefill(batch, on_publish)
        else:
            with self.stopwatch.running("rounds") if self.stopwatch else contextlib.nullcontext():
                result = self._decode(batch, on_publish)
        if self._publisher is not None:
            self._publisher.publish()
        return result

    def _depart(self, rid: str) -> None:
        """A request has given its row of the slot table back; with its lanes, totals change between rounds."""
        self._leave(rid)
        if self._publisher is not None:
            self._publisher.publish()

    # For subclasses.

    def _build(self, pool: LoopedKVPool, req_to_token_pool, attention: LaneAttention) -> RowRunner:
        """Make the lanes; returns what runs their rows."""
        raise NotImplementedError

    def _runner(self, pool: LoopedKVPool, req_to_token_pool, attention: LaneAttention, **sizes) -> RowRunner:
        """What runs rows, timed where a measurement was asked for."""
        kind = TimedRunner if self.stopwatch else RowRunner
        runner = kind(self.model, pool, req_to_token_pool.req_to_token, attention, **sizes)
        if isinstance(runner, TimedRunner):
            assert self.stopwatch is not None
            runner.stopwatch = self.stopwatch
        return runner

    def _decode(self, batch, on_publish) -> GenerationBatchResult:
        """One decode round."""
        raise NotImplementedError

    def _leave(self, rid: str) -> None:
        """A request has given its row of the slot table back."""
        self.outputs.forget(rid)
        self.lookups.forget(rid)

    def _batch_chooser(self, batch) -> BatchChooser:
        """For the readouts of a decode round: the newest token of each request is at its committed length."""
        return BatchChooser(batch, batch.seq_lens.to(torch.int64), self.outputs)

    def _know_text(self, req, emitted: int) -> None:
        """Have a request's text indexed, ``emitted`` tokens behind its prompt."""
        if self.options.lookup and self.lookups.length(req.rid) != len(req.origin_input_ids) + emitted:
            output = self.outputs.of(req.rid)
            self.lookups.begin(req.rid, [*req.origin_input_ids, *(output.tokens if output is not None else ())])

    def _prefill(self, batch, on_publish) -> GenerationBatchResult:
        """SGLang's own prefill; its sampler finds the seeds, and later rounds what has been emitted."""
        for req in batch.reqs:
            self.outputs.begin(req)
        info = batch.sampling_info
        info.sampling_seed = seeds_of(batch.reqs, batch.seq_lens.device)
        self.outputs.correct_penalties(batch.reqs, info)
        result = self.target_worker.forward_batch_generation(batch)
        if (problem := getattr(info, "failed_processor", None)) is not None:
            abort_for_processor(batch.reqs, problem)
        if self.outputs:
            for req, token, ends in zip(batch.reqs, result.next_token_ids.tolist(), prompts_end(batch), strict=True):
                if ends:
                    self.outputs.extend(req.rid, [token])
        result.new_seq_lens = batch.seq_lens
        result.next_draft_input = TruncState(result.next_token_ids.long(), batch.seq_lens)
        if on_publish is not None:
            on_publish(batch.seq_lens)
        return result

    def _result(
        self, batch, on_publish, tokens: Tensor, lengths: Tensor, logits: Tensor | None, hidden: Tensor | None = None
    ) -> GenerationBatchResult:
        """What SGLang takes from a decode round.

        ``tokens`` int64 ``[bs, w]``: runs, left-aligned. ``lengths`` int64 ``[bs]``, at least 1. ``logits`` float32
        ``[bs * stride, vocabulary]``: row ``b * stride + j`` emitted token j of request b; only for logprobs.
        ``hidden`` ``[bs * stride, d]``: what the head read for that token; only where asked for.
        """
        new_seq_lens = batch.seq_lens + lengths
        if on_publish is not None:
            on_publish(new_seq_lens)
        strided = self._strided(tokens)
        bonus = tokens.gather(1, (lengths - 1).unsqueeze(1)).squeeze(1)
        self._remember(batch, tokens, lengths)
        output = LogitsProcessorOutput(next_token_logits=None, hidden_states=hidden)
        if batch.return_logprob:
            output.next_token_logits = logits
            compute_spec_logprobs(batch, output, strided, chain_stride=self.stride)
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=strided,
            accept_lens=lengths.to(torch.int32),
            new_seq_lens=new_seq_lens,
            next_draft_input=TruncState(bonus, new_seq_lens),
            speculative_num_draft_tokens=self.stride,
            can_run_cuda_graph=False,
        )

    def _remember(self, batch, tokens: Tensor, lengths: Tensor) -> None:
        if self.outputs:
            for req, run, length in zip(batch.reqs, tokens.tolist(), lengths.tolist(), strict=True):
                self.outputs.extend(req.rid, run[:length])

    def _strided(self, tokens: Tensor) -> Tensor:
        """The runs as SGLang reads them: flat ``[bs * stride]``, request b's tokens from ``b * stride``."""
        padded = tokens.new_zeros(tokens.shape[0], self.stride)
        padded[:, : tokens.shape[1]] = tokens
        return padded.flatten()
