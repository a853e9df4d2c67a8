"""The twins of SGLang's compiled sampling steps: its own functions, run without a compiler, give the same bits."""

from __future__ import annotations

import inspect
import types

import pytest
import torch
from sglang.srt.layers import sampler
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.sampling.penaltylib import repetition_penalty

from sglang_trunc import plugin, seams
from sglang_trunc.platform import cpu_platform, lane_backend, sampling
from sglang_trunc.platform.names import ATTENTION_BACKEND

MASK = 0xFFFFFFFF


def hash_of(seed: int, position: int, column: int) -> int:
    """MurmurHash3 x86_32, seed 0, of the key's 16 bytes: as its specification has it, in Python's integers."""
    state = 0
    for word in (seed & MASK, seed >> 32 & MASK, position & MASK, column):
        word = word * 0xCC9E2D51 & MASK
        word = (word << 15 | word >> 17) & MASK
        state ^= word * 0x1B873593 & MASK
        state = ((state << 13 | state >> 19) * 5 + 0xE6546B64) & MASK
        state &= MASK
    state ^= 16
    state = (state ^ state >> 16) * 0x85EBCA6B & MASK
    state = (state ^ state >> 13) * 0xC2B2AE35 & MASK
    return state ^ state >> 16


def hashes(seeds: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """In the place of the kernel that the wheel lacks; seeds come as uint64."""
    rows = zip(seeds.to(torch.int64).tolist(), positions.tolist(), strict=True)
    return torch.tensor([[hash_of(*row, column) for column in columns.tolist()] for row in rows])


@pytest.fixture
def stock_draw(monkeypatch):
    """SGLang's ``multinomial_with_seed`` as written: not compiled, not hooked, on the hashes above."""
    monkeypatch.setattr(sampler, "murmur_hash32", hashes)
    return inspect.unwrap(sampler.multinomial_with_seed)


SEEDS = torch.tensor([0, 42, -1, -(2**63), 2**63 - 1, 2**32 + 7])
POSITIONS = torch.tensor([0, 1, 511, 2**31, 65535, 7])


# The twin looks for the winner in another way from 4096 columns on.
@pytest.mark.parametrize("columns", [1, 300, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_are_sglangs(stock_draw, columns, dtype):
    generator = torch.Generator().manual_seed(columns)
    logprobs = (3 * torch.randn(len(SEEDS), columns, generator=generator)).to(dtype).log_softmax(-1)
    logprobs[1:3, columns // 3 :] = -torch.inf  # filtered
    logprobs[1:3, 0] = 0
    given = logprobs.clone()
    ours = sampling.multinomial_with_seed(logprobs, SEEDS, POSITIONS)
    assert torch.equal(logprobs, given)
    wanted = stock_draw(logprobs, SEEDS, POSITIONS)
    assert ours.dtype == wanted.dtype == torch.int64
    assert torch.equal(ours, wanted)


def test_draws_follow_seed_and_position_and_leave_other_rows_alone(stock_draw):
    logprobs = torch.zeros(1, 64).log_softmax(-1).expand(40, -1)
    seeds, positions = torch.arange(40) % 5, torch.arange(40) // 5
    ours = sampling.multinomial_with_seed(logprobs, seeds, positions)
    assert torch.equal(ours, stock_draw(logprobs, seeds, positions))
    assert len(set(ours[:, 0].tolist())) > 20
    for row in (0, 17, 39):
        alone = slice(row, row + 1)
        assert ours[row] == sampling.multinomial_with_seed(logprobs[alone], seeds[alone], positions[alone])[0]


def test_sglangs_filters_draw_with_the_twin(stock_draw, monkeypatch):
    """Top-k and top-p masked ranks never win, and the winner's id is what SGLang returns."""
    generator = torch.Generator().manual_seed(1)
    probs = torch.randn(len(SEEDS), 300, generator=generator).softmax(-1)
    top_ks, top_ps, min_ps = torch.tensor([1, 2, 5, 300, 50, 9]), torch.full((6,), 0.7), torch.zeros(6)

    def run():
        return sampler.top_k_top_p_min_p_sampling_from_probs_torch(
            probs.clone(), top_ks, top_ps, min_ps, False, SEEDS, POSITIONS
        )

    monkeypatch.setattr(sampler, "multinomial_with_seed", stock_draw)
    wanted = run()
    monkeypatch.setattr(sampler, "multinomial_with_seed", sampling.multinomial_with_seed)
    assert torch.equal(run(), wanted)
    assert wanted[0] == probs[0].argmax()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaling_penalties_are_sglangs(dtype):
    generator = torch.Generator().manual_seed(2)
    logits = (5 * torch.randn(4, 777, generator=generator)).to(dtype)
    logits[0, :6] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-38])
    penalties = torch.where(torch.rand(4, 777, generator=generator) < 0.5, 1.0, 1.3)
    penalties[2], penalties[3] = 0.7, 1.9
    given, wanted = logits.clone(), logits.clone()
    inspect.unwrap(repetition_penalty.apply_scaling_penalties)(wanted, penalties)
    sampling.apply_scaling_penalties(logits, penalties)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(logits.view(bits), wanted.view(bits))
    assert not torch.equal(logits[2:], given[2:])


def test_every_hook_is_listed():
    assert {target.removeprefix("sglang.srt.") for target, _, _ in sampling.HOOKS} <= {s.path for s in seams.TABLE}


@pytest.fixture
def hooked(monkeypatch) -> dict:
    """What is registered while the test runs, in a registry of its own."""
    registered: dict = {}
    monkeypatch.setattr(
        HookRegistry, "register", lambda target, function, kind: registered.setdefault(target, (function, kind))
    )
    monkeypatch.setattr("sglang_trunc.platform.defaults.install", lambda: None)
    return registered


@pytest.mark.parametrize("ours", [True, False], ids=["this-platform", "another"])
def test_hooks_are_registered_on_this_platform_only(monkeypatch, hooked, ours):
    platform = cpu_platform.CpuPlatform() if ours else types.SimpleNamespace()
    monkeypatch.setattr("sglang.srt.platforms.current_platform", platform)
    plugin._prepare_platform()
    assert hooked == ({target: (function, kind) for target, function, kind in sampling.HOOKS} if ours else {})


def test_names_that_modules_have_imported_are_replaced_too(monkeypatch):
    """SGLang's registry does that; the overlap path of penalties depends on it."""
    from sglang.srt.sampling import sampling_batch_info

    original = repetition_penalty.apply_scaling_penalties
    for module in (repetition_penalty, sampling_batch_info):  # restored after the test
        monkeypatch.setattr(module, "apply_scaling_penalties", original)
    monkeypatch.setattr(HookRegistry, "_hooks", {h[0]: [(h[2], h[1], None)] for h in sampling.HOOKS[1:2]})
    monkeypatch.setattr(HookRegistry, "_patched", set())
    HookRegistry.apply_hooks()
    assert sampling_batch_info.apply_scaling_penalties is repetition_penalty.apply_scaling_penalties is not original


def test_nothing_is_left_to_a_compiler():
    assert cpu_platform.CpuPlatform().get_compile_backend() == "eager"


@pytest.mark.parametrize("deterministic", [True, False])
def test_deterministic_mode_is_for_models_on_our_operations(monkeypatch, deterministic):
    mode = types.SimpleNamespace(deterministic=types.SimpleNamespace(enable_deterministic_inference=deterministic))
    monkeypatch.setattr(sampling, "get_exec", lambda: mode)
    monkeypatch.setitem(lane_backend.ATTENTION_BACKENDS, "torch_native", lambda runner: "torch's")
    runner = types.SimpleNamespace(model=torch.nn.Linear(1, 1))
    if deterministic:
        with pytest.raises(ValueError, match="--enable-deterministic-inference needs a looped model.*Linear"):
            lane_backend.create(runner)
    else:
        assert lane_backend.create(runner) == "torch's"


def test_our_backend_is_installed_as_deterministic(monkeypatch):
    from sglang_trunc.platform import defaults

    lists: dict[str, list[str]] = {"any": [], "radix": []}
    monkeypatch.setattr(defaults, "register_resolution_hook", lambda name: lambda function: None)
    monkeypatch.setattr(defaults, "add_deterministic_attention_backend_choices", lists["any"].extend)
    monkeypatch.setattr(defaults, "add_radix_supported_deterministic_attention_backend_choices", lists["radix"].extend)
    defaults.install()
    assert lists == {"any": [ATTENTION_BACKEND], "radix": [ATTENTION_BACKEND]}
