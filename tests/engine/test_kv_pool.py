"""The pool's tensors: per-step views of one flat tensor, sized as plain decoding's, for looped models only."""

from __future__ import annotations

import types

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sglang_trunc.engine import options
from sglang_trunc.engine.kv_pool import POISON_ENV, LoopedKVPool, pool_class_for, resolve_pool_class
from sglang_trunc.models.layer_ids import LoopShape

pytestmark = pytest.mark.usefixtures("sglang_context")
SHAPE = LoopShape(prelude=2, core=3, coda=1, recurrences=4)
HEADS, HEAD_DIM = 2, 8


def make(
    shape: LoopShape = SHAPE, size: int = 40, page: int = 1, dtype=torch.float32, branches: int = 0, **changes
) -> LoopedKVPool:
    options = {
        "page_size": page,
        "dtype": dtype,
        "head_num": HEADS,
        "head_dim": HEAD_DIM,
        "layer_num": shape.num_kv_layers,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    return pool_class_for(shape, branches)(size, **{**options, **changes})


@pytest.mark.parametrize(("size", "page"), [(40, 1), (48, 16)])
def test_each_kv_layer_is_a_view_of_its_layers_flat_rows(size, page):
    pool = make(size=size, page=page)
    rows = size + page
    assert pool.rows_per_step == rows
    for part in ("prelude", "core", "coda"):
        for index in range(getattr(SHAPE, part)):
            flat = pool.flat_rows(part, index)
            ids = SHAPE.layer_ids(part, index)
            for buffers, whole in zip((pool.k_buffer, pool.v_buffer), flat, strict=True):
                assert whole.shape == (len(ids) * rows, HEADS * HEAD_DIM)
                for step, layer_id in enumerate(ids):
                    view = buffers[layer_id]
                    assert view.is_contiguous()
                    assert view.shape == (rows, HEADS, HEAD_DIM)
                    assert view.data_ptr() == whole[step * rows :].data_ptr()


def test_rows_address_one_step_and_flat_rows_all():
    pool = make()
    step, layer, slot = 2, 1, 17
    pool.k_buffer[SHAPE.core_id(step, layer)][slot] = 7.0
    keys, values = pool.flat_rows("core", layer)
    assert keys[step * pool.rows_per_step + slot].eq(7.0).all()
    assert int(keys.eq(7.0).sum()) == HEADS * HEAD_DIM
    assert not values.any()
    assert pool.rows(SHAPE.core_id(step, layer))[0][slot].eq(7.0).all()


def test_every_layer_has_memory_of_its_own():
    pool = make()
    for number, buffer in enumerate((*pool.k_buffer, *pool.v_buffer), start=1):
        buffer.fill_(number)
    for number, buffer in enumerate((*pool.k_buffer, *pool.v_buffer), start=1):
        assert buffer.eq(number).all()


def test_bytes_are_those_of_sglangs_pool():
    ours, theirs = (
        make(),
        MHATokenToKVPool(
            40,
            page_size=1,
            dtype=torch.float32,
            head_num=HEADS,
            head_dim=HEAD_DIM,
            layer_num=SHAPE.num_kv_layers,
            device="cpu",
            enable_memory_saver=False,
        ),
    )
    assert sum(ours.get_kv_size_bytes()) == sum(theirs.get_kv_size_bytes())


def test_poison_leaves_only_the_padding_page_readable(monkeypatch):
    monkeypatch.setenv(POISON_ENV, "1")
    pool = make(size=48, page=16)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        assert not buffer[:16].isnan().any()
        assert buffer[16:].isnan().all()


def test_without_poison_it_starts_at_zero():
    assert not any(buffer.any() for buffer in make().k_buffer)


def test_wrong_number_of_layers_is_refused():
    with pytest.raises(ValueError, match=r"asked for 5 layers, the looped model has 15 \(prelude 2 \+ 4 x core 3"):
        make(layer_num=5)


def test_other_layouts_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="'vectorized_5d' is not supported for looped models; accepted: nhd"):
        make(kv_cache_layout="vectorized_5d")


# --- slots of the worker's own ---


@pytest.mark.parametrize(
    ("size", "page", "branches", "rows"),
    [(40, 1, 0, 41), (40, 1, 7, 48), (48, 16, 7, 80), (48, 16, 16, 80), (48, 16, 17, 96)],
)
def test_branch_slots_lie_behind_those_that_sglang_hands_out(size, page, branches, rows):
    """SGLang hands out slots ``page .. page + size - 1``; page 0 is its padding sink."""
    pool = make(size=size, page=page, branches=branches)
    assert list(pool.branch_slots) == list(range(page + size, page + size + branches))
    assert pool.rows_per_step == rows
    assert pool.size % page == 0
    assert all(len(buffer) == rows for buffer in (*pool.k_buffer, *pool.v_buffer))
    assert pool.handed_out == size


@pytest.mark.parametrize("page", [1, 16])
def test_sglangs_allocators_never_hand_out_a_branch_slot(page):
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator

    pool = make(size=48, page=page, branches=20)
    if page == 1:
        allocator = TokenToKVPoolAllocator(48, torch.float32, "cpu", pool, need_sort=False)
    else:
        allocator = PagedTokenToKVPoolAllocator(48, page, torch.float32, "cpu", pool, need_sort=False)
    for _ in range(2):
        taken = allocator.alloc(48)
        assert sorted(taken.tolist()) == list(range(page, page + 48))
        assert set(taken.tolist()).isdisjoint(pool.branch_slots)
        assert allocator.alloc(page) is None
        allocator.clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_slots_are_copied_at_every_step_and_in_every_part(dtype):
    pool = make(branches=6, dtype=dtype)
    for number, buffer in enumerate((*pool.k_buffer, *pool.v_buffer)):
        buffer.copy_(torch.arange(len(buffer)).view(-1, 1, 1) + 100.0 * (number % 2))
    before = [buffer.clone() for buffer in (*pool.k_buffer, *pool.v_buffer)]
    sources, targets = torch.tensor([44, 41, 46]), torch.tensor([3, 40, 7])
    pool.copy_rows(sources, targets)
    others = [slot for slot in range(pool.rows_per_step) if slot not in targets]
    assert len(before) == 2 * SHAPE.num_kv_layers
    for buffer, old in zip((*pool.k_buffer, *pool.v_buffer), before, strict=True):
        assert torch.equal(buffer[targets], old[sources])
        assert torch.equal(buffer[others], old[others])


def test_branch_slots_are_poisoned_too(monkeypatch):
    monkeypatch.setenv(POISON_ENV, "1")
    pool = make(branches=5)
    assert all(buffer[list(pool.branch_slots)].isnan().all() for buffer in (*pool.k_buffer, *pool.v_buffer))


@pytest.mark.parametrize(
    ("algorithm", "branches"),
    [(None, 0), ("EAGLE", 0), ("trunc", 5), ("loopspec_single", 5), ("LOOPSPEC_DUAL", 5)],
)
def test_the_running_algorithm_says_how_many(monkeypatch, tiny_checkpoint, algorithm, branches):
    from transformers import AutoConfig

    monkeypatch.setattr(options, "get_spec", lambda: types.SimpleNamespace(speculative_algorithm=algorithm))
    if branches:
        monkeypatch.setenv("SGLANG_TRUNC_MAX_WIDTH", str(branches))
    config = AutoConfig.from_pretrained(tiny_checkpoint("ouro"))
    assert resolve(SHAPE, hf_config=config).branches == branches


def test_blocks_have_no_branches(monkeypatch, tiny_checkpoint):
    from transformers import AutoConfig

    monkeypatch.setattr(options, "get_spec", lambda: types.SimpleNamespace(speculative_algorithm="TRUNC"))
    monkeypatch.setenv("SGLANG_TRUNC_BLOCK_SIZE", "4")
    config = AutoConfig.from_pretrained(tiny_checkpoint("ouro"))
    assert resolve(SHAPE, hf_config=config).branches == 0


# --- which models get it ---


def configurator(shape: LoopShape | None, hf_config=None) -> types.SimpleNamespace:
    if hf_config is None:
        hf_config = types.SimpleNamespace() if shape is None else types.SimpleNamespace(loop_shape=shape)
    model_config = types.SimpleNamespace(hf_config=hf_config)
    return types.SimpleNamespace(model_config=model_config, kv_cache_dtype=torch.bfloat16)


def resolve(shape, kind="mha", chosen=MHATokenToKVPool, hf_config=None):
    found = configurator(shape, hf_config)
    return resolve_pool_class(lambda self, *, kind, default: chosen, found, kind=kind, default=chosen)


def test_looped_models_get_the_pool_and_others_sglangs_choice():
    pool = resolve(SHAPE)
    assert issubclass(pool, LoopedKVPool)
    assert pool.shape == SHAPE
    assert resolve(None) is MHATokenToKVPool
    assert resolve(SHAPE, kind="mla") is MHATokenToKVPool


def test_a_pool_chosen_by_another_option_is_refused_by_name():
    class PagedPool(MHATokenToKVPool):
        pass

    with pytest.raises(ValueError, match="KV pool PagedPool is not supported for looped models"):
        resolve(SHAPE, chosen=PagedPool)
