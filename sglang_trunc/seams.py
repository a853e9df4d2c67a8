"""The table of every SGLang name this package relies on, and its check.

SGLang 0.5.23 has no stable plugin interface for most of what a looped model needs. So each name that is
imported, overridden, called or hooked stands here once, with the parameters we pass or receive.
``require_all`` runs when the plugin is loaded: one mismatch and nothing is installed but stubs that say which
name and what to do. ``sglang-trunc doctor`` prints the same table.

A class of tests reads the package's own imports and asserts that each is listed.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import pkgutil
from dataclasses import dataclass

SGLANG_VERSION = "0.5.23"
REMEDY = f"install the supported release: pip install 'sglang=={SGLANG_VERSION}'"

_SRT = "sglang.srt."


@dataclass(frozen=True)
class Seam:
    """One name; ``parameters`` are names its signature must accept (a ``**kwargs`` accepts any)."""

    path: str  # below sglang.srt
    use: str  # import, call, subclass, override or hook
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class SeamReport:
    """Whether a seam holds; ``problem`` and ``remedy`` are empty when it does."""

    path: str
    ok: bool
    problem: str = ""
    remedy: str = ""


_SPEC = "speculative.spec_registry.CustomSpecAlgo"
_POOL = "mem_cache.memory_pool.MHATokenToKVPool"
_WORKER = "speculative.base_spec_worker.BaseSpecWorker"

TABLE: tuple[Seam, ...] = (
    # registration
    Seam("plugins.load_plugins", "call"),
    Seam("plugins.hook_registry.HookRegistry.register", "call", ("target", "hook", "hook_type")),
    Seam("plugins.hook_registry.HookType", "import"),
    Seam(
        "speculative.spec_info.SpeculativeAlgorithm.register",
        "call",
        ("supports_overlap", "validate_server_args", "spec_class"),
    ),
    Seam("speculative.spec_info.SpeculativeAlgorithm.from_string", "call"),
    Seam("speculative.spec_info.SpecInput", "subclass"),
    Seam("speculative.spec_info.SpecInputType.UNO_STATE", "import"),
    Seam("speculative.spec_registry.get_spec", "call", ("name",)),
    Seam(_SPEC, "subclass"),
    Seam(_SPEC + ".has_draft_kv", "override", ("self",)),
    Seam("managers.overlap_utils.FutureMap", "call", ("device", "spec_algo", "req_to_token_pool")),
    Seam("utils.hf_transformers_utils.get_config", "call", ("trust_remote_code", "model_override_args")),
    Seam("models.registry.ModelRegistry.register", "call", ("package_name",)),
    # worker
    Seam(_WORKER, "subclass"),
    Seam("managers.utils.GenerationBatchResult", "call", ("accept_lens", "new_seq_lens", "next_draft_input")),
    Seam("layers.logits_processor.LogitsProcessorOutput", "call", ("next_token_logits",)),
    Seam("layers.logprob_processor.compute_spec_logprobs", "call", ("batch", "predict", "chain_stride")),
    Seam("runtime_context.get_spec", "call"),
    Seam("runtime_context.get_exec", "call"),
    Seam("runtime_context.get_model", "call"),
    Seam("runtime_context.get_parallel", "call"),
    # KV pool and slots
    Seam(_POOL, "subclass", ("size", "page_size", "dtype")),
    Seam(_POOL + "._create_buffers_normal", "override", ("self",)),
    Seam(_POOL + "._init_kv_copy_and_warmup", "override", ("self",)),
    Seam("mem_cache.kv_cache_configurator.KVCacheConfigurator._resolve_kv_pool_class", "hook", ("kind", "default")),
    Seam("mem_cache.allocation_sizing.get_req_to_token_extra_context_len", "hook"),
    Seam("mem_cache.allocation_sizing.page_aligned_decode_alloc_lens", "hook", ("reqs", "reserve", "page_size")),
    Seam(
        "managers.schedule_batch.ScheduleBatch._new_tokens_required_next_decode_spec_v2",
        "hook",
        ("requests", "page_size"),
    ),
    Seam("mem_cache.memory_pool.ReqToTokenPool.free", "hook", ("req",)),
    Seam(_WORKER + ".clear_cache_pool", "override", ("self",)),
    Seam("mem_cache.allocation_sizing.get_alloc_reserve_per_decode", "call"),
    Seam("mem_cache.allocation_sizing.get_alloc_page_size", "call"),
    Seam(
        "mem_cache.allocation.get_last_loc",
        "hook",
        ("req_to_token", "req_pool_indices_tensor", "prefix_lens_tensor"),
    ),
    Seam(
        "mem_cache.allocation.assign_req_to_token_pool_func",
        "hook",
        ("req_pool_indices", "req_to_token", "start_offset", "end_offset", "out_cache_loc", "batch_size"),
    ),
    Seam("model_executor.cuda_graph_config.with_phase", "call", ("config", "phase")),
    Seam("model_executor.cuda_graph_config.Phase.DECODE", "import"),
    Seam("model_executor.cuda_graph_config.Backend.DISABLED", "import"),
    # requests and reporting
    Seam("managers.scheduler.Scheduler._add_request_to_queue", "hook", ("req", "is_retracted")),
    Seam("managers.schedule_batch.Req.set_finish_with_abort", "call", ("error_msg",)),
    Seam("managers.schedule_batch.Req.update_finish_state", "hook", ("new_accepted_len",)),
    Seam(
        "managers.scheduler_components.internal_state.SchedulerInternalStateController._add_speculative",
        "hook",
        ("state",),
    ),
    Seam(
        "managers.tokenizer_manager.TokenizerManager.update_request_meta_info",
        "hook",
        ("meta_info", "state", "customized_info", "index", "finish_reason"),
    ),
    # metrics
    Seam("runtime_context.get_observability", "call"),
    Seam("runtime_context.get_serving", "call"),
    Seam("runtime_context.get_disagg", "call"),
    Seam("arg_groups.fields.observability.Observability.enable_metrics", "import"),
    Seam("arg_groups.fields.observability.Observability.extra_metric_labels", "import"),
    Seam("arg_groups.fields.serving.Serving.served_model_name", "import"),
    Seam("arg_groups.fields.disagg.Disagg.disaggregation_mode", "import"),
    Seam("disaggregation.utils.DisaggregationMode.to_engine_type", "call", ("mode",)),
    # sampling
    Seam(
        "layers.sampler.Sampler.forward",
        "override",
        ("logits_output", "sampling_info", "return_logprob", "top_logprobs_nums", "token_ids_logprobs", "positions"),
    ),
    Seam("layers.sampler.Sampler._preprocess_logits", "call", ("logits", "sampling_info")),
    Seam("layers.sampler.Sampler._sync_token_ids_across_tp", "call", ("batch_next_token_ids", "sampling_info")),
    Seam("sampling.sampling_params.TOP_K_ALL", "import"),
    Seam("sampling.sampling_batch_info.SamplingBatchInfo", "call", ("temperatures", "top_ks", "logit_bias")),
    Seam("sampling.sampling_batch_info.GrammarMask", "call"),
    Seam("managers.schedule_batch.FINISH_ABORT", "call", ("message", "status_code", "err_type")),
    Seam("sampling.custom_logit_processor.CustomLogitProcessor.from_str", "call", ("json_str",)),
    Seam("sampling.penaltylib.repetition_penalty.apply_scaling_penalties", "call", ("logits", "scaling_penalties")),
    Seam("utils.async_probe.sanitize_nan_logits", "call", ("logits", "msg")),
    Seam("environ.envs", "import"),
    # models
    Seam("layers.linear.LinearBase", "import"),
    Seam("layers.linear.QKVParallelLinear", "call", ("hidden_size", "head_size", "total_num_heads")),
    Seam("layers.linear.MergedColumnParallelLinear", "call", ("input_size", "output_sizes", "bias")),
    Seam("layers.linear.RowParallelLinear", "call", ("input_size", "output_size", "bias")),
    Seam("layers.linear.ReplicatedLinear", "call", ("input_size", "output_size", "bias")),
    Seam("layers.radix_attention.RadixAttention", "call", ("num_heads", "scaling", "num_kv_heads", "layer_id")),
    Seam("layers.radix_attention.AttentionType", "import"),
    Seam("layers.logits_processor.LogitsProcessor", "call"),
    Seam("layers.vocab_parallel_embedding.ParallelLMHead", "call", ("num_embeddings", "embedding_dim")),
    Seam("layers.vocab_parallel_embedding.VocabParallelEmbedding", "call", ("num_embeddings", "embedding_dim")),
    Seam("distributed.tensor_model_parallel_all_gather", "call"),
    Seam("configs.model_config.ModelConfig._get_hf_eos_token_id", "hook", ("self",)),
    Seam("utils.hf_transformers.tokenizer._apply_post_load_fixes", "hook", ("tokenizer",)),
    # GPU-less platform
    Seam("arg_groups.resolution_hooks.register_resolution_hook", "call", ("name",)),
    Seam("arg_groups.overrides.declare_resolution", "call", ("server_args", "source")),
    Seam("arg_groups.overrides.resolving_view", "call", ("server_args",)),
    Seam("platforms.current_platform", "import"),
    Seam("platforms.cpu.CpuDeviceMixin", "subclass"),
    Seam("platforms.interface.SRTPlatform", "subclass"),
    Seam("platforms.interface.SRTPlatform.post_load_model", "override", ("model",)),
    Seam("platforms.interface.SRTPlatform.apply_server_args_defaults", "override", ("server_args",)),
    Seam("platforms.interface.PlatformCapabilities", "call", ("supports_triton",)),
    Seam("platforms.device_mixin.PlatformEnum.OOT", "import"),
    Seam("platforms.interface.SRTPlatform.get_compile_backend", "override", ("mode",)),
    Seam("arg_groups.choices.add_deterministic_attention_backend_choices", "call"),
    Seam("arg_groups.choices.add_radix_supported_deterministic_attention_backend_choices", "call"),
    Seam("layers.sampler.multinomial_with_seed", "hook", ("logprobs", "seed", "positions")),
    Seam("sampling.penaltylib.repetition_penalty.apply_scaling_penalties", "hook", ("logits", "scaling_penalties")),
    Seam("model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode", "hook", ("self",)),
    Seam("layers.attention.attention_registry.ATTENTION_BACKENDS", "import"),
    Seam("layers.attention.attention_registry.register_attention_backend", "call", ("name",)),
    Seam("layers.attention.base_attn_backend.AttentionBackend", "subclass"),
)


class SeamError(RuntimeError):
    """SGLang is not the one this package was written for; the text names every difference."""


def check_all() -> list[SeamReport]:
    """One report per row of the table, version first."""
    return [_check_version(), *(_check(seam) for seam in TABLE)]


def require_all() -> None:
    """Raise ``SeamError`` naming each seam that does not hold."""
    broken = [report for report in check_all() if not report.ok]
    if broken:
        problems = "; ".join(f"{report.path}: {report.problem}" for report in broken)
        raise SeamError(f"{problems}. To repair: {REMEDY}.")


def _check_version() -> SeamReport:
    try:
        found = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return SeamReport("sglang", False, "is not installed", REMEDY)
    if found != SGLANG_VERSION:
        return SeamReport("sglang", False, f"version {found} is installed, {SGLANG_VERSION} is needed", REMEDY)
    return SeamReport("sglang", True)


def _check(seam: Seam) -> SeamReport:
    path = _SRT + seam.path
    try:
        target = pkgutil.resolve_name(path)
    except (AttributeError, ImportError) as error:
        return SeamReport(path, False, f"not found ({error})", REMEDY)
    missing = [name for name in seam.parameters if not _accepts(target, name)]
    if missing:
        return SeamReport(path, False, f"no longer takes {', '.join(missing)}", REMEDY)
    return SeamReport(path, True)


def _accepts(target, name: str) -> bool:
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return True  # not introspectable: nothing is known to be wrong
    return any(p.name == name or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
