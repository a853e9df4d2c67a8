"""Everything this package hangs into SGLang, in one place: the algorithm and the hooks.

Each target stands in ``seams.TABLE`` too, which is checked before this runs. Hooks leave models that are not
looped, and servers without one of our algorithms, as they are.
"""

from __future__ import annotations

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_trunc.engine import admission, algorithm, departures, finish, kv_pool, reporting, slots

_SRT = "sglang.srt."
HOOKS = (
    (
        _SRT + "mem_cache.kv_cache_configurator.KVCacheConfigurator._resolve_kv_pool_class",
        kv_pool.resolve_pool_class,
        HookType.AROUND,
    ),
    (
        _SRT + "mem_cache.allocation_sizing.get_req_to_token_extra_context_len",
        slots.extra_context_len,
        HookType.AFTER,
    ),
    (
        _SRT + "mem_cache.allocation_sizing.page_aligned_decode_alloc_lens",
        slots.decode_alloc_lens,
        HookType.AROUND,
    ),
    (
        _SRT + "managers.schedule_batch.ScheduleBatch._new_tokens_required_next_decode_spec_v2",
        slots.decode_tokens_required,
        HookType.AROUND,
    ),
    (_SRT + "mem_cache.allocation.get_last_loc", slots.last_loc, HookType.AROUND),
    (_SRT + "mem_cache.allocation.assign_req_to_token_pool_func", slots.assign_rows, HookType.AROUND),
    (_SRT + "mem_cache.memory_pool.ReqToTokenPool.free", departures.on_free, HookType.AFTER),
    (_SRT + "managers.scheduler.Scheduler._add_request_to_queue", admission.check_before_queue, HookType.AROUND),
    (_SRT + "managers.schedule_batch.Req.update_finish_state", finish.update_token_by_token, HookType.AROUND),
    (
        _SRT + "managers.scheduler_components.internal_state.SchedulerInternalStateController._add_speculative",
        reporting.add_counters,
        HookType.AFTER,
    ),
    (
        _SRT + "managers.tokenizer_manager.TokenizerManager.update_request_meta_info",
        reporting.add_to_meta_info,
        HookType.AROUND,
    ),
)


def install() -> None:
    """Register the algorithm and the hooks; SGLang applies the hooks after all plugins have run."""
    algorithm.register()
    for target, function, kind in HOOKS:
        HookRegistry.register(target, function, kind)
