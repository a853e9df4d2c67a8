"""The schedules as SGLang sees them: registered algorithms, launch checks and the arguments they fill in.

``validate`` runs in the launching process only, on a stand-in for ``ServerArgs`` that records assignments to
known fields. Whatever the engine cannot do exactly is refused here, by the flag's name, in one sentence; what a
request asks for is checked in ``admission``.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo
from sglang.srt.utils.hf_transformers_utils import get_config

from sglang_trunc.core.options import TruncOptions
from sglang_trunc.engine import slots
from sglang_trunc.engine.names import ALGORITHMS
from sglang_trunc.engine.options import override_args, resolve
from sglang_trunc.platform.names import ATTENTION_BACKEND

# (field, values it may have, flag). A field that this SGLang does not have counts as not set.
_REFUSED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("tp_size", (1,), "--tp-size"),
    ("pp_size", (1,), "--pp-size"),
    ("dp_size", (1,), "--dp-size"),
    ("enable_dp_attention", (False,), "--enable-dp-attention"),
    ("attn_cp_size", (1, None), "--attn-cp-size"),
    ("dcp_size", (1, None), "--dcp-size"),
    ("disaggregation_mode", ("null",), "--disaggregation-mode"),
    ("enable_lora", (False, None), "--enable-lora"),
    ("lora_paths", (None, [], {}), "--lora-paths"),
    ("enable_two_batch_overlap", (False,), "--enable-two-batch-overlap"),
    ("enable_pdmux", (False,), "--enable-pdmux"),
    ("enable_hisparse", (False,), "--enable-hisparse"),
    ("enable_unified_memory", (False,), "--enable-unified-memory"),
    ("enable_kv_cache_sharding", (False,), "--enable-kv-cache-sharding"),
    ("enable_page_major_kv_layout", (False,), "--enable-page-major-kv-layout"),
    ("enable_hierarchical_cache", (False,), "--enable-hierarchical-cache"),
    ("speculative_adaptive", (False,), "--speculative-adaptive"),
    ("speculative_draft_model_path", (None,), "--speculative-draft-model-path"),
    ("speculative_num_steps", (None,), "--speculative-num-steps"),
    ("speculative_eagle_topk", (None,), "--speculative-eagle-topk"),
    ("speculative_num_draft_tokens", (None,), "--speculative-num-draft-tokens"),
    ("kv_cache_dtype", ("auto", "bf16", "bfloat16"), "--kv-cache-dtype"),
    # Drafts need a grammar whose state can be rolled back; outlines' cannot.
    ("grammar_backend", ("xgrammar", "llguidance", "none", None), "--grammar-backend"),
)
_BACKENDS = (ATTENTION_BACKEND, "triton", "torch_native", "flashinfer")
# Where to set what SGLang's own flags cannot say.
_SET_BY_OPTIONS = {"speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"}


class LoopedAlgorithm(CustomSpecAlgo):
    """``--speculative-algorithm trunc``, ``loopspec_single`` or ``loopspec_dual``.

    Adds the methods that ``CustomSpecAlgo`` lacks in 0.5.23 although the scheduler calls them.
    """

    def has_draft_kv(self) -> bool:
        return False

    def carries_draft_hidden_states(self) -> bool:
        return False

    def need_topk(self) -> bool:
        return False

    def get_platform_worker_cls(self, *_args, **_kwargs) -> None:
        return None

    def create_future_map(
        self, device, req_to_token_pool, needs_cpu_seq_lens: bool = True, needs_confidence_relay: bool = False
    ) -> FutureMap:
        return FutureMap(device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)


def register() -> None:
    """Register the algorithms with SGLang."""
    for name in ALGORITHMS:
        SpeculativeAlgorithm.register(
            name, supports_overlap=True, validate_server_args=validate, spec_class=LoopedAlgorithm
        )(_worker_class)


def _worker_class(server_args) -> type:
    options = resolve(_looped_config(server_args), server_args.speculative_algorithm).options
    if isinstance(options, TruncOptions):
        from sglang_trunc.engine.trunc_worker import TruncWorker

        return TruncWorker
    from sglang_trunc.engine.pipeline_worker import PipelineWorker

    return PipelineWorker


def validate(server_args) -> None:
    """Refuse what is not supported, then fill in what SGLang needs to size its pools."""
    for field, accepted, flag in _REFUSED:
        value = getattr(server_args, field, accepted[0])
        if value not in accepted:
            raise ValueError(_refusal(server_args.speculative_algorithm, field, flag, value, accepted))
    for field in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        backend = getattr(server_args, field, None)
        if backend is not None and backend not in _BACKENDS:
            raise ValueError(
                f"--{field.replace('_', '-')} {backend} is not supported by --speculative-algorithm "
                f"{server_args.speculative_algorithm}; accepted: {', '.join(_BACKENDS)}."
            )
    config = _looped_config(server_args)
    options = resolve(config, server_args.speculative_algorithm).options
    tokens = slots.tokens_per_round(options, config.loop_shape.recurrences)
    server_args.speculative_num_draft_tokens = tokens
    server_args.speculative_num_steps = max(1, tokens - 1)
    server_args.speculative_eagle_topk = 1
    server_args.enable_mixed_chunk = False
    # SGLang would capture its own verify width, which no round of ours runs.
    graphs = server_args.cuda_graph_config
    if graphs is not None:
        graphs = with_phase(graphs, Phase.DECODE, backend=Backend.DISABLED)
        server_args.cuda_graph_config = with_phase(graphs, Phase.PREFILL, backend=Backend.DISABLED)


def _refusal(algorithm: str, field: str, flag: str, value, accepted: tuple) -> str:
    names = ", ".join(dict.fromkeys("unset" if item in (None, False, [], {}) else str(item) for item in accepted))
    hint = "; set the algorithm's own options instead (see README, options)" if field in _SET_BY_OPTIONS else ""
    return f"{flag} {value} is not supported by --speculative-algorithm {algorithm}; accepted: {names}{hint}."


def _looped_config(server_args):
    """The model's config; an error where the model is not looped."""
    config = get_config(
        server_args.model_path,
        trust_remote_code=server_args.trust_remote_code,
        revision=server_args.revision,
        model_override_args=override_args(server_args),
    )
    if getattr(config, "loop_shape", None) is None:
        names = ", ".join(getattr(config, "architectures", None) or [type(config).__name__])
        raise ValueError(
            f"--speculative-algorithm {server_args.speculative_algorithm} needs a looped model "
            f"(OuroForCausalLM, RavenForCausalLM); --model-path {server_args.model_path} is {names}."
        )
    return config
